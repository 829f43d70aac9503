"""Postcard 1.x payloads of message classes, and their JSON forms.

A message is declared once, with `message`; a variant of a tagged union with `variant`, in declaration order, as a
subclass of its `Choice`. The annotations give each field its wire type (the public postcard 1.x wire specification).
"""

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from superfluid.link.codegen import DECODERS, ENCODERS, ENDS_EARLY, get_span, put_span
from superfluid.link.errors import PostcardError
from superfluid.link.faults import fault
from superfluid.link.jsonform import reader_of, writer_of
from superfluid.link.schema import (
    F32,
    F64,
    I16,
    I32,
    I64,
    MAY_BE_MISSING,
    U8,
    U16,
    U32,
    U64,
    Bytes16,
    Bytes32,
    Choice,
    Tokens,
    message,
    union_of,
    variant,
)

__all__ = [
    "F32",
    "F64",
    "I16",
    "I32",
    "I64",
    "MAY_BE_MISSING",
    "U8",
    "U16",
    "U32",
    "U64",
    "Bytes16",
    "Bytes32",
    "Choice",
    "PostcardError",
    "Tokens",
    "decode",
    "decode_prefix",
    "decode_tokens",
    "encode",
    "encode_into",
    "encode_tokens",
    "from_json",
    "message",
    "to_json",
    "variant",
]

M = TypeVar("M")


def encode(value: Any) -> bytes:
    """The payload of a message; a variant begins with its index. Raises PostcardError for a value out of its type."""
    out = bytearray()
    encode_into(value, out)
    return bytes(out)


def encode_into(value: Any, out: bytearray) -> None:
    """Append the payload of a message to `out` (which keeps a part of it when PostcardError is raised)."""
    try:
        ENCODERS[type(value)](value, out)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise PostcardError(fault(value) or f"{type(value).__name__} does not encode: {error}") from error


def decode(cls: type[M], data: bytes | bytearray | memoryview, offset: int = 0) -> M:
    """The message (of a class, or of one of a union's variants) at `offset`; what follows it is ignored.

    Raises PostcardError.
    """
    return decode_prefix(cls, data, offset)[0]


def decode_prefix(cls: type[M], data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[M, int]:
    """`decode`, and the offset after the message."""
    travels = union_of(cls)
    try:
        value, end = DECODERS[travels](data if type(data) is bytes else bytes(data), offset)
    except IndexError:
        raise PostcardError(f"{travels.__name__}: {ENDS_EARLY} ({len(data) - offset} bytes)") from None
    except RecursionError:
        raise PostcardError(f"{travels.__name__}: it is nested too deeply") from None
    except ValueError as error:
        raise PostcardError(f"{travels.__name__}: {error}") from error
    if travels is not cls and not isinstance(value, cls):
        raise PostcardError(f"{travels.__name__}: {type(value).__name__} instead of {cls.__name__}")
    return value, end


def encode_tokens(ids: Sequence[int]) -> bytes:
    """A vector of u32 alone. Raises PostcardError."""
    out = bytearray()
    try:
        put_span(out, ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise PostcardError(f"token ids do not encode: {error}") from error
    return bytes(out)


def decode_tokens(data: bytes, offset: int = 0) -> tuple[list[int], int]:
    """A vector of u32 at `offset`, and the offset after it. Raises PostcardError."""
    return get_span(data, offset)


def to_json(value: Any) -> Any:
    """The JSON value of a message."""
    return writer_of(type(value))(value)


def from_json(cls: type[M], value: Any) -> M:
    """The message of a JSON value. Raises PostcardError, which names the field."""
    try:
        read: M = reader_of(union_of(cls))(value)
    except RecursionError:
        raise PostcardError(f"{cls.__name__}: it is nested too deeply") from None
    if not isinstance(read, cls):
        raise PostcardError(f"{type(read).__name__} instead of {cls.__name__}")
    return read
