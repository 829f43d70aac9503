"""Every message class of the wire, and strategies that make instances of them from their wire types."""

import functools
from typing import Any

from hypothesis import strategies as st

from superfluid.link import events, linkf, linkw, session_api
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
    is_union,
)

CLASSES: list[type[Any]] = list(
    dict.fromkeys(
        [
            *linkw.MESSAGES.values(),
            *linkf.MESSAGES.values(),
            events.GenParams,
            events.Event,
            events.Body,
            session_api.Request,
            session_api.Response,
        ]
    )
)

_EDGES = (0, 1, 127, 128, 16_383, 16_384)


@functools.cache
def messages(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a message class, or of any variant of a union; floats are finite."""
    if is_union(cls):
        return st.deferred(lambda: st.one_of([_instances(v) for v in cls.variants]))
    return _instances(cls)


def _instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    return st.deferred(lambda: st.builds(cls, *[_values(f.wire) for f in fields_of(cls)]))


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([v for v in (*_EDGES, low, high) if low <= v <= high]) | st.integers(low, high)


def _values(wire: Wire) -> st.SearchStrategy[Any]:
    match wire:
        case Int(bits, signed):
            return _integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else _integers(0, (1 << bits) - 1)
        case Float(bits):
            return st.floats(width=bits, allow_nan=False, allow_infinity=False)  # type: ignore[call-overload]
        case Bool():
            return st.booleans()
        case Text():
            return st.text(max_size=20)
        case Blob(None):
            return st.binary(max_size=200)
        case Blob(size):
            return st.binary(min_size=size, max_size=size)
        case Span():
            return st.lists(_integers(0, 0xFFFFFFFF), max_size=20)
        case Many(item):
            return st.lists(_values(item), max_size=3)
        case Option(item):
            return st.none() | _values(item)
        case Pair(items):
            return st.tuples(*[_values(item) for item in items])
        case Named(members):
            return st.sampled_from(members)
        case Struct(cls) | Union(cls):
            return messages(cls)
