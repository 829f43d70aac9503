"""Rings: fixed slots in shared memory, each a payload under a generation that a reference must match.

A recycled slot is always detected: reading it raises StaleReference, never a torn payload. One writer per ring.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from superfluid._native import ffi, lib
from superfluid.link.linkw import RING_IN, RING_LOGITS, RING_OUT, RingKind, RingRef, RingSpec, TokenRef
from superfluid.shm.segment import Segment, SegmentError, ShmError

MAGIC = 0x42525452494E4731
HEADER_BYTES = 64
SLOT_HEADER_BYTES = 16
_HEADER = struct.Struct("<QIII")

Payload: TypeAlias = "bytes | bytearray | memoryview | array[int] | npt.NDArray[Any]"

MIN_WINDOW = 512  # ids an inbound slot holds at the least, however small the context window
OUT_SLOT_TOKENS = 1024  # a grant with its overshoot fits many times
IN_SLOTS = 64
OUT_SLOTS, OUT_SLOTS_WIDE = 64, 256  # a tick writes one slot per decoding lane
LOGITS_SLOTS = 8


class RingError(ShmError):
    """Base of what a ring refuses."""


class StaleReference(RingError):
    """The slot was recycled, is being written, or the reference has generation 0."""


class OutOfBounds(RingError):
    """An index past the ring, another ring's id, or a length that is not what the reference says."""


class PayloadTooLong(RingError):
    """The payload does not fit a slot."""


class LayoutError(RingError):
    """A segment that does not hold the announced ring."""


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of a slot with room for `payload_bytes`: the slot header included, a multiple of 8."""
    return (SLOT_HEADER_BYTES + payload_bytes + 7) // 8 * 8


def ring_specs(window: int, vocab: int, max_batch: int) -> list[RingSpec]:
    """The three rings of a worker, as it announces them: inbound tokens, outbound tokens, logits."""
    out_slots = OUT_SLOTS if max_batch <= OUT_SLOTS else OUT_SLOTS_WIDE
    return [
        RingSpec(RING_IN, RingKind.Tokens, slot_bytes(4 * max(window, MIN_WINDOW)), IN_SLOTS),
        RingSpec(RING_OUT, RingKind.Tokens, slot_bytes(4 * OUT_SLOT_TOKENS), out_slots),
        RingSpec(RING_LOGITS, RingKind.Logits, slot_bytes(4 * vocab), LOGITS_SLOTS),
    ]


class Ring:
    """One ring over its segment. Made by `create` (a new segment) or `attach`; `close` frees the segment."""

    __slots__ = ("_base", "_last", "_room", "_slot_bytes", "_slots", "generation", "segment", "spec")

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        self.segment = segment
        self.spec = spec
        self.generation = 0  # of the last push
        self._base: Any = ffi.from_buffer("uint8_t[]", segment.map, require_writable=True)
        self._slots = spec.slots
        self._slot_bytes = spec.slot_bytes
        self._room = spec.slot_bytes - SLOT_HEADER_BYTES
        self._last = -1

    @classmethod
    def create(cls, spec: RingSpec) -> "Ring":
        """Allocate a ring of the announced shape. Raises LayoutError when the shape is none."""
        _check_shape(spec)
        segment = Segment.create(f"ring-{spec.ring_id}", _segment_bytes(spec))
        _HEADER.pack_into(segment.buf, 0, MAGIC, spec.ring_id, spec.slot_bytes, spec.slots)
        return cls(segment, spec)

    @classmethod
    def attach(cls, fd: int, spec: RingSpec) -> "Ring":
        """Map a received ring; `fd` is owned from here on, and closed when it is refused.

        Raises LayoutError for a segment that is too short or whose header is not that of `spec`.
        """
        try:
            segment = Segment.attach(fd, _segment_bytes(spec))
        except SegmentError as error:
            raise LayoutError(f"ring {spec.ring_id}: {error}") from error
        found = _HEADER.unpack_from(segment.buf, 0)
        wanted = (MAGIC, spec.ring_id, spec.slot_bytes, spec.slots)
        try:
            _check_shape(spec)
            if found != wanted:
                raise LayoutError(
                    f"ring {spec.ring_id}: header says magic {found[0]:#x}, id {found[1]}, {found[2]}-byte slots, "
                    f"{found[3]} of them; announced were {MAGIC:#x}, {spec.ring_id}, {spec.slot_bytes}, {spec.slots}"
                )
        except LayoutError:
            segment.close()
            raise
        return cls(segment, spec)

    @property
    def fd(self) -> int:
        return self.segment.fd

    @property
    def room(self) -> int:
        """Payload bytes of a slot."""
        return self._room

    def push(self, payload: Payload) -> RingRef:
        """Write the next slot. Raises PayloadTooLong."""
        index = self._write(payload)
        return RingRef(self.spec.ring_id, index, self.generation)

    def push_tokens(self, ids: Sequence[int] | npt.NDArray[np.uint32]) -> TokenRef:
        """Write token ids (u32 each) into the next slot. Raises PayloadTooLong."""
        words: Any = ids if isinstance(ids, np.ndarray) and ids.dtype == np.uint32 else array("I", ids)
        index = self._write(words)
        return TokenRef(self.spec.ring_id, index, len(words), self.generation)

    def push_row(self, row: npt.NDArray[np.float32]) -> RingRef:
        """Write one row of f32 logits into the next slot. Raises PayloadTooLong."""
        return self.push(np.ascontiguousarray(row, dtype=np.float32))

    def read(self, index: int, generation: int) -> bytes:
        """The payload of a slot. Raises StaleReference, OutOfBounds."""
        out = bytearray(self._read(index, generation, ffi.NULL, 0))
        self._read(index, generation, ffi.from_buffer(out), len(out))
        return bytes(out)

    def read_tokens(self, ref: TokenRef) -> npt.NDArray[np.uint32]:
        """A copy of the span that `ref` names. Raises StaleReference, OutOfBounds."""
        self._check_id(ref.ring_id)
        if 4 * ref.count > self._room:
            raise OutOfBounds(f"ring {self.spec.ring_id}: a span of {ref.count} ids, slots hold {self._room // 4}")
        ids = np.empty(ref.count, np.uint32)
        length = self._read(ref.index, ref.generation, ffi.from_buffer("uint8_t[]", ids), ids.nbytes)
        if length != ids.nbytes:
            raise OutOfBounds(
                f"ring {self.spec.ring_id} slot {ref.index}: {length} bytes where {ref.count} ids were named"
            )
        return ids

    def read_row(self, ref: RingRef) -> npt.NDArray[np.float32]:
        """A copy of the row that `ref` names. Raises StaleReference, OutOfBounds."""
        self._check_id(ref.ring_id)
        row = np.empty(self._room // 4, np.float32)
        length = self._read(ref.index, ref.generation, ffi.from_buffer("uint8_t[]", row), row.nbytes)
        if length % 4:
            raise OutOfBounds(f"ring {self.spec.ring_id} slot {ref.index}: {length} bytes are no row of f32")
        return row[: length // 4]

    def close(self) -> None:
        """Unmap the ring; a second call does nothing."""
        if self._base is not None:
            ffi.release(self._base)
            self._base = None
            self.segment.close()

    def _write(self, payload: Payload) -> int:
        data = ffi.from_buffer(payload)
        length = len(data)
        if length > self._room:
            raise PayloadTooLong(f"ring {self.spec.ring_id}: a payload of {length} bytes, slots hold {self._room}")
        self._last = index = (self._last + 1) % self._slots
        self.generation += 1
        lib.sf_ring_write(self._base, HEADER_BYTES + index * self._slot_bytes, self.generation, data, length)
        return index

    def _read(self, index: int, generation: int, out: Any, capacity: int) -> int:
        """Length of the payload, copied to `out` when it fits."""
        if not 0 <= index < self._slots:
            raise OutOfBounds(f"ring {self.spec.ring_id}: slot {index} of {self._slots}")
        offset = HEADER_BYTES + index * self._slot_bytes
        length: int = lib.sf_ring_read(self._base, offset, generation, self._room, out, capacity)
        if length >= 0:
            return length
        if length == -1:
            raise StaleReference(f"ring {self.spec.ring_id} slot {index}: generation {generation} is gone")
        raise OutOfBounds(f"ring {self.spec.ring_id} slot {index}: its length is over the slot's {self._room} bytes")

    def _check_id(self, ring_id: int) -> None:
        if ring_id != self.spec.ring_id:
            raise OutOfBounds(f"a reference into ring {ring_id} was read from ring {self.spec.ring_id}")


def _segment_bytes(spec: RingSpec) -> int:
    return HEADER_BYTES + spec.slots * spec.slot_bytes


def _check_shape(spec: RingSpec) -> None:
    if spec.slot_bytes % 8 or spec.slot_bytes <= SLOT_HEADER_BYTES or spec.slots <= 0:
        raise LayoutError(
            f"ring {spec.ring_id}: {spec.slots} slots of {spec.slot_bytes} bytes; a slot is a multiple of 8 over 16"
        )
