"""Segments that are used again: the pages of a new one cost more time than the state that is copied into them."""

import contextlib
from typing import NamedTuple

from superfluid.shm.segment import Segment

MOST_SPARE = 128 << 20
"""Bytes that may lie about unused."""

PAGE = 4096


class _Spare(NamedTuple):
    segment: Segment
    since: float


class Spares:
    """Unused segments, oldest first. Times are whatever clock the caller has."""

    def __init__(self, most: int = MOST_SPARE) -> None:
        self._most = most
        self._spares: list[_Spare] = []
        self._over = False

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(spare.segment.size for spare in self._spares)

    def take(self, name: str, size: int) -> Segment:
        """A segment of at least `size` bytes, which hold anything. A new one has room for what grows a little.

        Raises SegmentError.
        """
        fitting = [spare for spare in self._spares if size <= spare.segment.size <= _most_for(size)]
        if not fitting:
            return Segment.create(name, _room_for(size) if size > 0 else size)
        spare = min(fitting, key=lambda spare: spare.segment.size)
        self._spares.remove(spare)
        return spare.segment

    def give(self, segment: Segment, now: float) -> None:
        """Take a segment back that nobody uses any more; the oldest are closed when it is too much."""
        self._spares.append(_Spare(segment, now))
        while self._spares and (self._over or self.size > self._most):
            _close(self._spares.pop(0).segment)

    def expire(self, before: float) -> None:
        """Close what has been unused since before that time."""
        while self._spares and self._spares[0].since < before:
            _close(self._spares.pop(0).segment)

    def close(self) -> None:
        """Close all, and from now on what comes."""
        self._over = True
        while self._spares:
            _close(self._spares.pop().segment)


def _room_for(size: int) -> int:
    return -(-(size + size // 8) // PAGE) * PAGE


def _most_for(size: int) -> int:
    """The largest segment that is taken for `size` bytes: the rest of it is wasted meanwhile."""
    return size + size // 2 + PAGE


def _close(segment: Segment) -> None:
    with contextlib.suppress(BufferError):  # someone still looks: it goes with the last view
        segment.close()
