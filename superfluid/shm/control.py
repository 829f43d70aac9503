"""Control words: what the daemon can say to a worker whose tick is running."""

import struct
from typing import Any

from superfluid._native import ffi, lib
from superfluid.shm.segment import Segment, ShmError

MAGIC = 0x31304C5254434653
BYTES = 64
TAG = 0xC0  # of the segment's descriptor on the descriptor channel
_YIELD, _LATENCY = 8, 16


class ControlError(ShmError):
    """A segment that holds no control words."""


class Control:
    """Two words beside the rings: the daemon stores, the worker loads. Made by `create` or `attach`."""

    __slots__ = ("_base", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._base: Any = ffi.from_buffer("uint8_t[]", segment.map, require_writable=True)

    @classmethod
    def create(cls) -> "Control":
        """New words, both lowered."""
        segment = Segment.create("control", BYTES)
        struct.pack_into("<Q", segment.buf, 0, MAGIC)
        return cls(segment)

    @classmethod
    def attach(cls, fd: int) -> "Control":
        """Map received words; `fd` is owned from here on, and closed when it is refused.

        Raises SegmentError for a segment shorter than 64 bytes, ControlError for another magic.
        """
        segment = Segment.attach(fd, BYTES)
        (magic,) = struct.unpack_from("<Q", segment.buf, 0)
        if magic != MAGIC:
            segment.close()
            raise ControlError(f"control segment begins with {magic:#x} instead of {MAGIC:#x}")
        return cls(segment)

    @property
    def fd(self) -> int:
        return self.segment.fd

    @property
    def yield_requested(self) -> bool:
        """The engine ends the tick at its next step boundary."""
        return bool(lib.sf_word_load(self._base, _YIELD))

    @yield_requested.setter
    def yield_requested(self, raised: bool) -> None:
        lib.sf_word_store(self._base, _YIELD, raised)

    @property
    def latency(self) -> bool:
        """The engine runs prefill in short steps."""
        return bool(lib.sf_word_load(self._base, _LATENCY))

    @latency.setter
    def latency(self, raised: bool) -> None:
        lib.sf_word_store(self._base, _LATENCY, raised)

    def close(self) -> None:
        """Unmap the words; a second call does nothing."""
        if self._base is not None:
            ffi.release(self._base)
            self._base = None
            self.segment.close()
