"""JSON forms of message classes: closures composed once per class.

A variant is `{"Name": fields}`, one without fields `"Name"`; byte vectors and spans are arrays of numbers; none is
null. Reading ignores unknown fields and takes an absent optional one as none.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from superfluid.link.errors import PostcardError
from superfluid.link.ids import Ids
from superfluid.link.schema import (
    Blob,
    Bool,
    Field,
    Float,
    Int,
    Many,
    Named,
    Option,
    Pair,
    Span,
    Struct,
    Text,
    Union,
    Wire,
    fields_of,
    is_union,
    once_per_class,
)

_F32_END = 2.0**128 - 2.0**103  # from here on, rounding to f32 gives infinity

Writer = Callable[[Any], Any]
Reader = Callable[[Any], Any]


@once_per_class
def writer_of(cls: type[Any]) -> Writer:
    """The function from an instance of a message, variant or union to its JSON value."""
    if is_union(cls):
        return lambda value: writer_of(type(value))(value)
    name: str | None = getattr(cls, "variant_name", None)
    fields = fields_of(cls)
    if not fields:
        return lambda value: name
    if name is not None and cls.newtype:
        inner, attribute = _writer(fields[0].wire), fields[0].name
        return lambda value: {name: inner(getattr(value, attribute))}
    members = [(f.key, f.name, _writer(f.wire)) for f in fields]

    def write(value: Any) -> Any:
        body = {key: to(getattr(value, attribute)) for key, attribute, to in members}
        return body if name is None else {name: body}

    return write


def _writer(wire: Wire) -> Writer:
    match wire:
        case Int():
            return int
        case Bool():
            return bool
        case Float(32):
            return shortest_f32
        case Float():
            return lambda value: value if math.isfinite(value) else None
        case Text():
            return str
        case Blob():
            return list
        case Span():
            return _ids
        case Many(item):
            to = _writer(item)
            return lambda value: [to(v) for v in value]
        case Option(item):
            some = _writer(item)
            return lambda value: None if value is None else some(value)
        case Pair(items):
            each = [_writer(item) for item in items]
            return lambda value: [to(v) for to, v in zip(each, value, strict=True)]
        case Named(members):
            return lambda value: members(value).name
        case Struct(cls) | Union(cls):
            return lambda value: writer_of(cls)(value)


def _ids(value: Any) -> Any:
    """A list, or an Ids, for which `orjson.dumps` is given `ids.json_of`."""
    if isinstance(value, Ids):
        return value
    return value.tolist() if hasattr(value, "tolist") else list(value)


def shortest_f32(value: float) -> float | None:
    """The shortest decimal that reads back as the same f32 (0.7, not 0.699999988); null when not finite."""
    if abs(value) < _F32_END:
        return float(str(np.float32(value)))
    return value if math.isfinite(value) else None


@once_per_class
def reader_of(cls: type[Any]) -> Reader:
    """The function from a JSON value to a message or union; it raises PostcardError."""
    if is_union(cls):
        return _union_reader(cls)
    fields = fields_of(cls)
    if not fields:
        return functools.partial(_read_empty, cls)
    return _struct_reader(cls, fields)


def _read_empty(cls: type[Any], value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise PostcardError(f"{cls.__name__} has no fields: null is wanted, not {shown(value)}")
    return cls()


def _struct_reader(cls: type[Any], fields: tuple[Field, ...]) -> Reader:
    members = [(f.key, _reader(f.wire), isinstance(f.wire, Option)) for f in fields]
    title = getattr(cls, "variant_name", cls.__name__)

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PostcardError(f"{title} is an object, not {shown(value)}")
        arguments = []
        for key, of, optional in members:
            if key not in value and not optional:
                raise PostcardError(f"{title}.{key} is missing")
            try:
                arguments.append(of(value.get(key)))
            except PostcardError as error:
                raise PostcardError(f"{title}.{key}: {error}") from None
        return cls(*arguments)

    return read


def _union_reader(cls: type[Any]) -> Reader:
    bare = {v.variant_name: v for v in cls.variants if not fields_of(v)}
    full: dict[str, Reader] = {}
    for v in cls.variants:
        if fields_of(v):
            full[v.variant_name] = _newtype_reader(v) if v.newtype else reader_of(v)

    def read(value: Any) -> Any:
        if isinstance(value, str) and value in bare:
            return bare[value]()
        if isinstance(value, dict) and len(value) == 1:
            ((name, fields),) = value.items()
            if name in full:
                return full[name](fields)
            if name in bare and fields is None:
                return bare[name]()
        raise PostcardError(f"{shown(value)} is no {cls.__name__}")

    return read


def _newtype_reader(cls: type[Any]) -> Reader:
    of = _reader(fields_of(cls)[0].wire)
    return lambda value: cls(of(value))


def _reader(wire: Wire) -> Reader:
    match wire:
        case Int(values=values):
            low, high = wire.bounds
            return lambda value: read_integer(value, low, high, values)
        case Bool():
            return lambda value: _typed(value, bool, "a boolean")
        case Float(bits):
            return lambda value: read_number(value, bits)
        case Text():
            return read_text
        case Blob(size):
            return lambda value: _bytes(value, size)
        case Span():
            return _span
        case Many(item):
            of = _reader(item)
            return lambda value: [of(v) for v in _typed(value, list, "an array")]
        case Option(item):
            some = _reader(item)
            return lambda value: None if value is None else some(value)
        case Pair(items):
            each = [_reader(item) for item in items]
            return lambda value: _pair(value, each)
        case Named(members):
            return lambda value: _member(value, members)
        case Struct(cls) | Union(cls):
            return lambda value: reader_of(cls)(value)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _typed(value: Any, kind: type[Any], what: str) -> Any:
    if not isinstance(value, kind):
        raise PostcardError(f"{what} is wanted, not {shown(value)}")
    return value


def read_integer(value: Any, low: int, high: int, values: str = "") -> int:
    if type(value) is not int or not low <= value <= high:
        wanted = f"({values})" if values else f"from {low} to {high}"
        raise PostcardError(f"an integer {wanted} is wanted, not {shown(value)}")
    return value


def read_number(value: Any, bits: int) -> float:
    if type(value) not in (int, float):
        raise PostcardError(f"a number is wanted, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise PostcardError(f"{shown(value)} does not fit f{bits}") from None
    if bits == 64:
        return number
    with np.errstate(over="ignore"):
        narrow = float(np.float32(number))
    if math.isinf(narrow) and not math.isinf(number):
        raise PostcardError(f"{shown(value)} does not fit f32")
    return narrow


def read_text(value: Any) -> str:
    text: str = _typed(value, str, "a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PostcardError(f"{shown(value)} is no Unicode text") from None
    return text


def _bytes(value: Any, size: int | None) -> bytes:
    try:
        data = bytes(_typed(value, list, "an array of bytes"))
    except (TypeError, ValueError):
        raise PostcardError(f"an array of numbers from 0 to 255 is wanted, not {shown(value)}") from None
    if size is not None and len(data) != size:
        raise PostcardError(f"an array of {size} bytes is wanted, not of {len(data)}")
    return data


def _span(value: Any) -> list[int]:
    ids: list[int] = _typed(value, list, "an array of token ids")
    for token in ids:
        read_integer(token, 0, 0xFFFFFFFF)
    return ids


def _pair(value: Any, each: list[Reader]) -> tuple[Any, ...]:
    if len(_typed(value, list, "an array")) != len(each):
        raise PostcardError(f"an array of {len(each)} is wanted, not {shown(value)}")
    return tuple(of(v) for of, v in zip(each, value, strict=True))


def _member(value: Any, members: Any) -> Any:
    if not isinstance(value, str) or value not in members.__members__:
        raise PostcardError(f"one of {', '.join(members.__members__)} is wanted, not {shown(value)}")
    return members[value]
