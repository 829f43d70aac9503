"""State operations: sequences out to buffers and back in, sealed. All of them end when they are submitted."""

import attrs

from superfluid.engines.engine import EngineError, OpState, OpStatus, SpaceKind, Status
from superfluid.engines.executor.cache import content_digest
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.envelope import BYTES, Opened, Space, body, seal_in_place, unseal
from superfluid.engines.executor.sequences import NO_TOKENS, Sequence, refusing
from superfluid.engines.primitives import PrimitiveError
from superfluid.link import linkw
from superfluid.link.digests import compat_identity

SPACE_ID = 1
VERSION_TAG = 1
LOSSLESS = 0
TAINT_LOSSY = 1  # taint bit 0
REMEMBERED_OPS = 4096  # a poll of an older operation finds it unknown


@attrs.define(eq=False)
class Sizing:
    """Exports of a sequence as it stood: one generation.

    `payloads`, by (length, encoding), are those whose size was only known once they were made.
    """

    generation: int
    epoch: int
    length: int
    payloads: dict[tuple[int, int], bytes | memoryview] = attrs.field(factory=dict, repr=False)


class StateOps:
    """The executor's one space, `kv.full`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        of = core.description
        identity = compat_identity(SpaceKind.PAGED_KV, VERSION_TAG, of.id, of.version, of.weights_identity)
        self.space = Space(SpaceKind.PAGED_KV, identity, VERSION_TAG)
        self._sizings: dict[int, Sizing] = {}
        self._generation = 0
        self._ops: dict[int, OpStatus] = {}
        self._last_op = 0

    def spaces(self) -> list[linkw.StateSpaceDesc]:
        return [
            linkw.StateSpaceDesc(
                SPACE_ID,
                SpaceKind.PAGED_KV,
                VERSION_TAG,
                page_size_tokens=self._core.cache.page,
                name="kv.full",
            )
        ]

    # ---- out

    def export_size(self, handle: int, space_id: int, start: int, end: int, encoding: int) -> tuple[int, int]:
        """Bytes of the sealed export of the first `end` tokens, and the generation it is good for."""
        sequence = self._find(handle, space_id)
        length = self._length(sequence)
        if start:
            raise EngineError(Status.Unsupported, f"an export from {start}; state is exported from 0")
        if not 0 < end <= length:
            raise EngineError(Status.RejectBounds, f"an export of {end} tokens of {length}")
        if encoding not in self._core.description.export_encodings:
            raise EngineError(Status.Unsupported, f"encoding {encoding}")
        sizing = self._sizings.get(handle)
        if sizing is None or not self._fresh(sizing, sequence):
            self._generation += 1
            sizing = self._sizings[handle] = Sizing(self._generation, sequence.epoch, length)
        return BYTES + self._size(sizing, sequence, end, encoding), sizing.generation

    def snapshot(self, handle: int, space_id: int, boundary: int, out: memoryview, sizing_gen: int) -> int:
        return self._seal(handle, space_id, 0, boundary, LOSSLESS, out, sizing_gen)

    def demote(
        self, handle: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int:
        """Export in any declared encoding; the whole of a bare sequence leaves memory by it."""
        sequence = self._find(handle, space_id)
        op = self._seal(handle, space_id, start, end, encoding, out, sizing_gen)
        if sequence.bare and sequence.lease is None and end == self._length(sequence):
            with refusing("demote"):
                self._core.primitives.seq_truncate(sequence.seq, 0)
            self._emptied(sequence)
        return op

    def boundary(self, handle: int, space_id: int, cap: int) -> int:
        """The longest length at most `cap` that can be exported, in whole pages; 0 for none."""
        sequence = self._find(handle, space_id)
        with refusing("snapshot boundary"):
            found = self._core.primitives.seq_boundary(sequence.seq, cap)
        return found if self._core.head_only else self._core.cache.round(found)

    # ---- in

    def restore(self, handle: int, space_id: int, sealed: memoryview) -> int:
        """Fill an empty bare sequence."""
        self._find(handle, space_id)
        sequence = self._core.sequences.free_to_change(handle, foreign=Status.Busy)
        if self._length(sequence):
            raise EngineError(Status.Busy, f"sequence {handle} is not empty")
        opened = unseal(sealed, self.space)
        error = self._import(sequence, opened)
        if error:
            with refusing("restore"):
                self._core.primitives.seq_truncate(sequence.seq, 0)
            self._emptied(sequence)
            return self._done(OpStatus(OpState.FAILED, error, 0))
        return self._done(OpStatus(OpState.DONE, 0, len(opened.payload)))

    def trim(self, handle: int, space_id: int, new_len: int) -> None:
        self._find(handle, space_id)
        sequence = self._core.sequences.free_to_change(handle, foreign=Status.Busy)
        length = self._length(sequence)
        if new_len > length:
            raise EngineError(Status.RejectBounds, f"trim to {new_len} of {length} tokens")
        with refusing("trim"):
            self._core.primitives.seq_truncate(sequence.seq, new_len)
        if not new_len:
            self._emptied(sequence)
        elif new_len < length:
            sequence.epoch += 1
            sequence.tokens = None if sequence.tokens is None else sequence.tokens[:new_len]

    # ---- operations

    def poll(self, op: int) -> OpStatus:
        """Raises EngineError -129 for an unknown operation."""
        status = self._ops.get(op)
        if status is None:
            raise EngineError(Status.UnknownHandle, f"no operation {op}")
        return status

    def forget(self, handle: int) -> None:
        """A sequence is gone, or a lane's: its sizings with it."""
        self._sizings.pop(handle, None)

    # ---- within

    def _find(self, handle: int, space_id: int) -> Sequence:
        sequence = self._core.sequences.find(handle)
        if space_id != SPACE_ID:
            raise EngineError(Status.UnknownHandle, f"no state space {space_id}")
        return sequence

    def _length(self, sequence: Sequence) -> int:
        with refusing("length"):
            return self._core.primitives.seq_len(sequence.seq)

    def _fresh(self, sizing: Sizing, sequence: Sequence) -> bool:
        return sizing.epoch == sequence.epoch and sizing.length == self._length(sequence)

    def _size(self, sizing: Sizing, sequence: Sequence, end: int, encoding: int) -> int:
        """Bytes of a payload, which is made and kept where they are not known before."""
        payload = sizing.payloads.get((end, encoding))
        if payload is None:
            with refusing("export"):
                size = self._core.primitives.seq_export_size(sequence.seq, end, encoding)
                if size is not None:
                    return size
                payload = self._core.primitives.seq_export(sequence.seq, end, encoding)
            sizing.payloads[end, encoding] = payload
        return len(payload)

    def _seal(
        self, handle: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int:
        sequence = self._find(handle, space_id)
        length = self._length(sequence)
        if start:
            raise EngineError(Status.Unsupported, f"an export from {start}; state is exported from 0")
        if not 0 < end <= length:
            raise EngineError(Status.RejectBounds, f"an export of {end} tokens of {length}")
        if encoding not in self._core.description.export_encodings:
            raise EngineError(Status.Unsupported, f"encoding {encoding}")
        sizing = self._sizings.get(handle)
        if sizing is None or sizing.generation != sizing_gen or not self._fresh(sizing, sequence):
            raise EngineError(Status.StaleSizing, f"sequence {handle} is not as it was sized (generation {sizing_gen})")
        with refusing("snapshot"):
            if self._core.primitives.seq_boundary(sequence.seq, end) != end:
                raise EngineError(Status.OutOfBoundary, f"state cannot be exported at {end} of {length}")
        size = self._size(sizing, sequence, end, encoding)
        payload, room = sizing.payloads.get((end, encoding)), body(out, size)
        if payload is not None:
            room[:] = payload
        else:
            with refusing("export"):
                self._core.primitives.seq_export_into(sequence.seq, end, encoding, room)
        tokens = sequence.tokens
        if sequence.lane_tag is not None:
            tokens = self._core.lanes[sequence.lane_tag].stream[:length]
        size = seal_in_place(
            out,
            size,
            self.space,
            end=end,
            encoding=encoding,
            taint=sequence.taint | (TAINT_LOSSY if encoding != LOSSLESS else 0),
            provenance=bytes(32) if tokens is None else content_digest(tokens[:end]),
        )
        sizing.payloads.pop((end, encoding), None)
        return self._done(OpStatus(OpState.DONE, 0, size))

    def _import(self, sequence: Sequence, opened: Opened) -> int:
        """The status a restore fails with; 0 for none."""
        if opened.start or not opened.start < opened.end <= self._core.max_seq_len:
            return Status.RejectBounds
        try:
            length = self._core.primitives.seq_import(sequence.seq, opened.payload)
        except PrimitiveError as error:
            return error.status
        if length != opened.end:
            return Status.EnvelopeMismatch
        sequence.epoch += 1
        sequence.taint = opened.taint
        sequence.tokens = None
        return 0

    def _emptied(self, sequence: Sequence) -> None:
        sequence.epoch += 1
        sequence.taint = 0
        sequence.tokens = NO_TOKENS

    def _done(self, status: OpStatus) -> int:
        self._last_op += 1
        op = self._last_op
        self._ops[op] = status
        self._ops.pop(op - REMEMBERED_OPS, None)
        self._core.op_ended(linkw.OpComplete(op, status.state, status.error & 0xFFFFFFFF, status.bytes_moved))
        return op
