"""State buffers the daemon lends: plain segments, each loaned to operations while they run."""

import struct

import attrs

from superfluid.engines.engine import EngineError
from superfluid.link.codes import Status
from superfluid.shm.segment import Segment

ENVELOPE_BYTES = 136
_PAYLOAD_LEN = struct.Struct("<Q")
_PAYLOAD_LEN_AT = 120


@attrs.define(eq=False)
class _Buffer:
    segment: Segment
    loans: int = 0
    released: bool = False  # by the daemon, while an operation still uses it


class Buffers:
    """Attached segments by id."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}

    def attach(self, buf_id: int, segment: Segment) -> None:
        self.release(buf_id)
        self._buffers[buf_id] = _Buffer(segment)

    def borrow(self, buf_id: int) -> memoryview:
        """All of a buffer; give it back with `give_back`. Raises EngineError -129."""
        return memoryview(self._get(buf_id).segment.buf)

    def borrow_empty(self, buf_id: int) -> memoryview:
        """All of a buffer that is about to be written. Raises EngineError -129."""
        self._get(buf_id).segment.populate()
        return self.borrow(buf_id)

    def borrow_sealed(self, buf_id: int) -> memoryview:
        """The sealed state at its start: envelope and payload. Raises EngineError -129, -124."""
        view = self.borrow(buf_id)
        if len(view) < ENVELOPE_BYTES:
            raise EngineError(Status.EnvelopeMismatch, f"buffer {buf_id} has {len(view)} bytes")
        size = ENVELOPE_BYTES + _PAYLOAD_LEN.unpack_from(view, _PAYLOAD_LEN_AT)[0]
        if size > len(view):
            raise EngineError(Status.EnvelopeMismatch, f"a state of {size} bytes in buffer {buf_id} of {len(view)}")
        return view[:size]

    def lend(self, buf_id: int) -> None:
        """An operation on the buffer is under way."""
        self._buffers[buf_id].loans += 1

    def give_back(self, buf_id: int) -> None:
        """The operation has ended; a release that waited for it takes effect."""
        buffer = self._buffers[buf_id]
        buffer.loans -= 1
        if buffer.released and not buffer.loans:
            del self._buffers[buf_id]
            buffer.segment.close()

    def release(self, buf_id: int) -> None:
        """Unmap the buffer, once nothing runs on it. An unknown id is ignored."""
        buffer = self._buffers.get(buf_id)
        if buffer is None:
            return
        if buffer.loans:
            buffer.released = True
            return
        del self._buffers[buf_id]
        buffer.segment.close()

    def _get(self, buf_id: int) -> _Buffer:
        buffer = self._buffers.get(buf_id)
        if buffer is None or buffer.released:
            raise EngineError(Status.UnknownHandle, f"no buffer {buf_id}")
        return buffer
