"""Very many token ids in little memory."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import orjson

AT_ONCE = 1 << 16
"""Ids that are handled in one step: threads take turns between steps, and a document may have millions. More ids than
this are kept in an `Ids`, not in a list, of which each id would be an object to make and to free."""

if TYPE_CHECKING:
    _Array = array[int]
else:
    _Array = array


class Ids(_Array):
    """Very many ids, in four bytes each; they compare and join as a list's do. Made as `Ids("I", ids)`."""

    __slots__ = ()
    __hash__ = None

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Ids("I", found) if isinstance(at, slice) else found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return len(self) == len(other) and self.tolist() == other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: Any) -> "Ids":
        out = Ids("I", self)
        out.extend(other)
        return out

    def __iadd__(self, other: Any) -> "Ids":
        self.extend(other)
        return self

    def __radd__(self, other: Any) -> "Ids":
        out = Ids("I", other)
        out.extend(self)
        return out


def packed(ids: Sequence[int]) -> Ids:
    """Ids in an array, in steps that let other threads run."""
    if isinstance(ids, Ids):
        return ids
    out = Ids("I")
    for at in range(0, len(ids), AT_ONCE):
        out.extend(array("I", ids[at : at + AT_ONCE]))
    return out


def listed(ids: Ids) -> list[int]:
    """Ids as callers take them: a list, unless there are more than AT_ONCE."""
    return ids.tolist() if len(ids) <= AT_ONCE else cast("list[int]", ids)


def json_of(value: Any) -> orjson.Fragment:
    """The `default` of `orjson.dumps` for messages with very many ids; in steps that let other threads run.

    Raises TypeError for anything else.
    """
    if not isinstance(value, Ids):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    pieces = [orjson.dumps(value[at : at + AT_ONCE].tolist())[1:-1] for at in range(0, len(value), AT_ONCE)]
    return orjson.Fragment(b"[%b]" % b",".join(pieces))
