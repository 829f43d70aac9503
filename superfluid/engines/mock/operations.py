"""State operations of the mock: each runs until the next pump."""

from collections.abc import Callable

import attrs

from superfluid.engines.engine import EngineError, OpStatus
from superfluid.engines.executor.envelope import Opened
from superfluid.engines.mock import states
from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.state import PROMOTE, Sequence, SequenceTable, advance, boundary
from superfluid.link import linkw
from superfluid.link.codes import Encoding, OpState, SpaceKind, Status


@attrs.define(eq=False)
class Operation:
    handle: int
    sequence: Sequence
    space_id: int
    finish: Callable[[], int]  # does the work; the bytes moved
    status: OpStatus = attrs.Factory(lambda: OpStatus(OpState.RUNNING))


class Operations:
    """Exports and imports under way, and what became of each."""

    def __init__(self, config: MockConfig, sequences: SequenceTable) -> None:
        self._config = config
        self._sequences = sequences
        self._all: dict[int, Operation] = {}
        self._running: list[Operation] = []
        self._to_pump: list[linkw.OpComplete] = []
        self._to_tick: list[linkw.OpComplete] = []
        self.room: Callable[[int], None] = lambda n_bytes: None  # raises -113 when the pool has not that many

    # ---- submitting

    def export_size(self, handle: int, space_id: int, start: int, end: int, encoding: int) -> tuple[int, int]:
        sequence = self._sequences.get(handle)
        space = self._sequences.space(space_id)
        self._check_range(sequence, space, start, end, encoding)
        return states.ENVELOPE_BYTES + states.payload_bytes(space, start, end, encoding), sequence.generation

    def snapshot(self, handle: int, space_id: int, position: int, out: memoryview, sizing_gen: int) -> int:
        sequence, space = self._target(handle, space_id)
        start = position if space.kind == SpaceKind.BLOB else 0
        self._check_export(sequence, space, start, position, Encoding.LOSSLESS, out, sizing_gen)
        return self._start(sequence, space_id, lambda: self._seal(sequence, space, start, position, 0, out))

    def demote(
        self, handle: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int:
        sequence, space = self._target(handle, space_id)
        self._check_export(sequence, space, start, end, encoding, out, sizing_gen)

        def finish() -> int:
            moved = self._seal(sequence, space, start, end, encoding, out)
            sequence.demoted.append((space_id, start, end))
            sequence.generation += 1
            return moved

        return self._start(sequence, space_id, finish)

    def promote(self, handle: int, space_id: int, start: int, end: int, sealed: memoryview) -> int:
        sequence, space = self._target(handle, space_id)
        opened = states.unseal(sealed, self._config, space)
        if (space_id, start, end) not in sequence.demoted or (opened.start, opened.end) != (start, end):
            raise EngineError(
                Status.RejectBounds,
                f"range {start}..{end} (the state holds {opened.start}..{opened.end}); demoted are {sequence.demoted}",
            )
        self._check_payload(space, opened, sealed)
        self.room((end - start) * space.bytes_per_token)

        def finish() -> int:
            sequence.demoted.remove((space_id, start, end))
            sequence.generation += 1
            if opened.taint:
                sequence.taint |= opened.taint
                sequence.provenance = advance(sequence.provenance, PROMOTE, end - start)
            return len(sealed) - states.ENVELOPE_BYTES

        return self._start(sequence, space_id, finish)

    def restore(self, handle: int, space_id: int, sealed: memoryview) -> int:
        sequence, space = self._target(handle, space_id)
        if sequence.lane is not None or sequence.seed is not None or sequence.lengths[space_id]:
            raise EngineError(Status.Busy, f"sequence {handle} is not an empty bare one")
        opened = states.unseal(sealed, self._config, space)
        from_start = opened.start == (opened.end if space.kind == SpaceKind.BLOB else 0)
        if not from_start or not opened.end:
            raise EngineError(Status.RejectBounds, f"a state of {opened.start}..{opened.end} begins no sequence")
        self._check_payload(space, opened, sealed)
        self.room(opened.end * space.bytes_per_token)

        def finish() -> int:
            sequence.lengths[space_id] = opened.end
            sequence.known = False
            sequence.taint |= opened.taint
            sequence.provenance = opened.provenance
            sequence.generation += 1
            return len(sealed) - states.ENVELOPE_BYTES

        return self._start(sequence, space_id, finish)

    def trim(self, handle: int, space_id: int, length: int) -> None:
        sequence = self._sequences.get(handle)
        space = self._sequences.space(space_id)
        if sequence.locks or sequence.lane is not None or sequence.seed is not None:
            raise EngineError(Status.Busy, f"sequence {handle} is in use")
        whole = sequence.lengths[space_id]
        if length > whole:
            raise EngineError(Status.RejectBounds, f"trim to {length} of {whole} tokens")
        if space.kind == SpaceKind.BLOB and length != whole and boundary(space, length) != length:
            raise EngineError(Status.OutOfBoundary, f"{length} is no boundary of space {space_id}")
        sequence.lengths[space_id] = length
        del sequence.tokens[sequence.length :]
        sequence.demoted = [d for d in sequence.demoted if d[0] != space_id or d[2] <= length]
        sequence.generation += 1

    def boundary(self, handle: int, space_id: int, cap: int) -> int:
        sequence = self._sequences.get(handle)
        space = self._sequences.space(space_id)
        return boundary(space, min(cap, sequence.lengths[space_id]))

    # ---- running

    @property
    def running(self) -> int:
        return len(self._running)

    def pump(self) -> list[linkw.OpComplete]:
        """Finish what runs; every operation that ended since the last pump, once."""
        for operation in self._running:
            moved = operation.finish()
            self._end(operation, OpStatus(OpState.DONE, 0, moved))
        self._running.clear()
        ended, self._to_pump = self._to_pump, []
        return ended

    def take_completions(self) -> list[linkw.OpComplete]:
        """What the next tick's events report, once."""
        ended, self._to_tick = self._to_tick, []
        return ended

    def poll(self, handle: int) -> OpStatus:
        return self._get(handle).status

    def cancel(self, handle: int) -> None:
        operation = self._get(handle)
        if operation in self._running:
            self._running.remove(operation)
            self._end(operation, OpStatus(OpState.CANCELLED))

    def _get(self, handle: int) -> Operation:
        try:
            return self._all[handle]
        except KeyError:
            raise EngineError(Status.UnknownHandle, f"no operation {handle}") from None

    def _start(self, sequence: Sequence, space_id: int, finish: Callable[[], int]) -> int:
        operation = Operation(len(self._all) + 1, sequence, space_id, finish)
        self._all[operation.handle] = operation
        self._running.append(operation)
        sequence.locks.add(space_id)
        return operation.handle

    def _end(self, operation: Operation, status: OpStatus) -> None:
        operation.status = status
        operation.finish = lambda: 0  # gives the buffer back
        operation.sequence.locks.discard(operation.space_id)
        done = linkw.OpComplete(operation.handle, status.state, status.error, status.bytes_moved)
        self._to_pump.append(done)
        self._to_tick.append(done)

    def _target(self, handle: int, space_id: int) -> tuple[Sequence, linkw.StateSpaceDesc]:
        sequence = self._sequences.get(handle)
        space = self._sequences.space(space_id)
        if space_id in sequence.locks:
            raise EngineError(Status.Busy, f"an operation runs on space {space_id} of sequence {handle}")
        return sequence, space

    def _seal(
        self, sequence: Sequence, space: linkw.StateSpaceDesc, start: int, end: int, encoding: int, out: memoryview
    ) -> int:
        return states.seal_into(out, self._config, space, sequence, start, end, encoding)

    def _check_range(
        self, sequence: Sequence, space: linkw.StateSpaceDesc, start: int, end: int, encoding: int
    ) -> None:
        if encoding not in (Encoding.LOSSLESS, Encoding.Q8, Encoding.Q4):
            raise EngineError(Status.Unsupported, f"encoding {encoding}")
        length = sequence.lengths[space.space_id]
        if space.kind == SpaceKind.BLOB:
            if encoding != Encoding.LOSSLESS:
                raise EngineError(Status.Unsupported, f"space {space.space_id} exports losslessly only")
            if start > end or not 0 < end <= length:
                raise EngineError(Status.RejectBounds, f"range {start}..{end} of a state of {length} tokens")
            if boundary(space, end) != end:
                raise EngineError(Status.OutOfBoundary, f"{end} is no boundary of space {space.space_id}")
            start = 0
        elif not 0 <= start < end <= length:
            raise EngineError(Status.RejectBounds, f"range {start}..{end} of a state of {length} tokens")
        for demoted_space, demoted_start, demoted_end in sequence.demoted:
            overlaps = space.kind == SpaceKind.BLOB or (start < demoted_end and demoted_start < end)
            if demoted_space == space.space_id and overlaps:
                raise EngineError(Status.RejectBounds, f"{demoted_start}..{demoted_end} is demoted")

    def _check_export(
        self,
        sequence: Sequence,
        space: linkw.StateSpaceDesc,
        start: int,
        end: int,
        encoding: int,
        out: memoryview,
        sizing_gen: int,
    ) -> None:
        if sizing_gen != sequence.generation:
            raise EngineError(
                Status.StaleSizing, f"sized at generation {sizing_gen}, the state is at {sequence.generation}"
            )
        self._check_range(sequence, space, start, end, encoding)
        size = states.ENVELOPE_BYTES + states.payload_bytes(space, start, end, encoding)
        if len(out) < size:
            raise EngineError(Status.BufferTooSmall, f"a buffer of {len(out)} bytes; the state has {size}")

    def _check_payload(self, space: linkw.StateSpaceDesc, opened: Opened, sealed: memoryview) -> None:
        if opened.encoding not in (Encoding.LOSSLESS, Encoding.Q8, Encoding.Q4):
            raise EngineError(Status.EnvelopeMismatch, f"encoding {opened.encoding}")
        size = states.payload_bytes(space, opened.start, opened.end, opened.encoding)
        if len(sealed) - states.ENVELOPE_BYTES != size:
            raise EngineError(
                Status.EnvelopeMismatch, f"{len(sealed) - states.ENVELOPE_BYTES} payload bytes; this range has {size}"
            )
