"""What is wrong with a message that does not encode: the field and its value, which an encoder does not know."""

import operator
from collections.abc import Callable
from typing import Any

import attrs

from superfluid.link.errors import PostcardError
from superfluid.link.jsonform import read_integer, read_number, read_text, shown
from superfluid.link.schema import (
    Blob,
    Bool,
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
)

FEW = 6  # variants that are listed where another value stands


def fault(message: Any) -> str | None:
    """The first field that is not of its type, such as `Generate.max_tokens: an integer from ... is wanted, not -1`.

    None when it cannot be told.
    """
    if not attrs.has(type(message)):
        return None
    try:
        _check_fields(message, getattr(type(message), "variant_name", type(message).__name__))
    except PostcardError as found:
        return str(found)
    return None


def _check_fields(message: Any, place: str) -> None:
    for field in fields_of(type(message)):
        _check(field.wire, getattr(message, field.name), f"{place}.{field.key}")


def _check(wire: Wire, value: Any, place: str) -> None:
    """Raises PostcardError, which begins with the place, for a value that is not of a wire type."""
    match wire:
        case Int(values=values):
            _at(place, lambda: read_integer(_plain(value), *wire.bounds, values))
        case Bool():
            _wanted(isinstance(value, bool) or _plain(value) in (0, 1), place, "True or False", value)
        case Float(bits):
            _at(place, lambda: read_number(value, bits))
        case Text():
            _at(place, lambda: read_text(value))
        case Blob(size):
            what = "bytes" if size is None else f"{size} bytes"
            fits = isinstance(value, bytes | bytearray | memoryview) and size in (None, len(value))
            _wanted(fits, place, what, value)
        case Span():
            _check_each(Int(32), value, place, "a list of token ids")
        case Many(item):
            _check_each(item, value, place, "a list")
        case Option(item):
            if value is not None:
                _check(item, value, place)
        case Pair(items):
            fits = isinstance(value, tuple | list) and len(value) == len(items)
            _wanted(fits, place, f"a tuple of {len(items)}", value)
            for index, (item, part) in enumerate(zip(items, value, strict=True)):
                _check(item, part, f"{place}[{index}]")
        case Named(members):
            fits = _plain(value) in set(members)
            _wanted(fits, place, " or ".join(f"{members.__name__}.{name}" for name in members.__members__), value)
        case Struct(cls):
            names = ", ".join(field.key for field in fields_of(cls))
            _wanted(isinstance(value, cls), place, f"a {cls.__name__} ({names})", value)
            _check_fields(value, place)
        case Union(cls):
            few = len(cls.variants) <= FEW
            what = " or ".join(variant.__name__ for variant in cls.variants) if few else f"a {cls.__name__}"
            _wanted(isinstance(value, cls), place, what, value)
            _check_fields(value, place)


def _check_each(item: Wire, value: Any, place: str, what: str) -> None:
    fits = not isinstance(value, str | bytes) and hasattr(value, "__len__") and hasattr(value, "__iter__")
    _wanted(fits, place, what, value)
    for index, each in enumerate(value):
        _check(item, each, f"{place}[{index}]")


def _plain(value: Any) -> Any:
    """An integer of any kind (numpy's, an enumeration's) as Python's; anything else as it is."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def _wanted(fits: bool, place: str, what: str, value: Any) -> None:
    if not fits:
        raise PostcardError(f"{place}: {what} is wanted, not {shown(value)}")


def _at(place: str, read: Callable[[], object]) -> None:
    try:
        read()
    except PostcardError as error:
        raise PostcardError(f"{place}: {error}") from None
