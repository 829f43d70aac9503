"""An engine's state of a stream outside the engine: out of a lane into shared memory, and back into a sequence."""

import contextlib
import os
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import trio

from superfluid.link import linkw
from superfluid.link.codes import Encoding, Status
from superfluid.link.digests import prefix_digest
from superfluid.scheduler.admission import Worker
from superfluid.scheduler.lanes import Lane
from superfluid.scheduler.link import EngineRefused, LinkFault
from superfluid.scheduler.seeds import PAGED
from superfluid.sessions.files import open_regular
from superfluid.shm.segment import Segment
from superfluid.shm.spares import Spares

UNREADABLE = (Status.EnvelopeMismatch, Status.Checksum, Status.IdentityMismatch)
"""What an engine says of a state that is damaged or was never its own."""

EVICTIONS = (1, 2, 4, 8)
"""Room that is asked for, as multiples of a state that does not fit."""

BYTES, PAYLOAD_LEN, PAYLOAD_LEN_AT = 136, struct.Struct("<Q"), 120
"""An envelope's size, and where it says its payload's."""

Ids = npt.NDArray[np.uint32]


@attrs.frozen(eq=False)
class SpaceState:
    """One state space's sealed state: the first `size` bytes of `segment`, which goes back to `spares` if it can."""

    space_id: int
    kind: int
    encoding: int
    segment: Segment
    size: int
    spares: Spares | None = None

    @property
    def sealed(self) -> memoryview:
        return self.segment.buf[: self.size]

    def close(self) -> None:
        """Nobody may use it any more."""
        if self.spares is not None:
            self.spares.give(self.segment, trio.current_time())
            return
        with contextlib.suppress(BufferError):  # someone still looks: it goes with the last view
            self.segment.close()


@attrs.define(eq=False)
class SavedState:
    """The state of the stream `ids`, in shared memory until `discard` and until nobody is `using` it any more."""

    ids: Ids
    spaces: tuple[SpaceState, ...]
    _users: int = 0
    _discarded: bool = False
    _closed: bool = False

    @property
    def covered(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Sealed bytes of all spaces."""
        return sum(space.size for space in self.spaces)

    @property
    def digest(self) -> int:
        return prefix_digest(self.ids)

    @property
    def encoding(self) -> int:
        """That of the paged space, 0 lossless."""
        return next((space.encoding for space in self.spaces if space.kind in PAGED), Encoding.LOSSLESS)

    def discard(self) -> None:
        self._discarded = True
        self._close_unused()

    def __enter__(self) -> "SavedState":
        """Keep the memory mapped until the end of the block."""
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        self._close_unused()

    def _close_unused(self) -> None:
        if self._discarded and not self._users and not self._closed:
            self._closed = True
            for space in self.spaces:
                space.close()


async def export(worker: Worker, lane: Lane, ids: Ids, spares: Spares, *, lossy: bool) -> SavedState | None:
    """A copy of a lane's state, `ids` being its stream; none when it cannot be had under a page or more of them.

    Its memory is from `spares`. The engine's spaces all have state operations. Raises EngineRefused, LinkFault,
    WorkerGone; nothing is left then.
    """
    link = worker.link
    made: list[SpaceState] = []
    try:
        found = await link.sync(linkw.LaneSequenceReq(lane.tag))
        assert isinstance(found, linkw.LaneSequenceOk)
        covered = await _covered(worker, found.sequence, len(ids) - 1)
        if covered < worker.spaces.page:
            return None
        for space in worker.spaces.streams:
            encoding = Encoding.Q8 if lossy and space.kind in PAGED else Encoding.LOSSLESS
            made.append(await _export_space(worker, found.sequence, space, covered, encoding, spares))
    except BaseException:
        for state in made:
            state.close()
        raise
    return SavedState(ids[:covered], tuple(made))


async def _covered(worker: Worker, sequence: int, cap: int) -> int:
    """How much of a state is exported: at most `cap` tokens, where every space can stop."""
    spaces = worker.spaces.streams
    if len(spaces) == 1:
        cap -= cap % worker.spaces.page
    for space in spaces:
        if cap <= 0:
            return 0
        try:
            found = await worker.link.sync(linkw.SnapshotBoundaryReq(sequence, space.space_id, cap))
        except EngineRefused as refusal:
            if refusal.status != Status.Unsupported:
                raise
        else:
            assert isinstance(found, linkw.SnapshotBoundaryOk)
            cap = min(cap, found.boundary)
    return cap


async def _export_space(
    worker: Worker, sequence: int, space: linkw.StateSpaceDesc, covered: int, encoding: Encoding, spares: Spares
) -> SpaceState:
    start = 0 if space.kind in PAGED else covered
    span = linkw.TokenRange(start, covered)
    sized = await worker.link.sync(linkw.ExportSizeReq(sequence, space.space_id, span, encoding))
    assert isinstance(sized, linkw.ExportSizeOk)
    segment = spares.take("state", sized.required_bytes)

    def operation(buf_id: int) -> linkw.StateOp:
        if encoding == Encoding.LOSSLESS:
            return linkw.Snapshot(sequence, space.space_id, covered, buf_id, sized.sizing_gen)
        return linkw.Demote(sequence, space.space_id, span, encoding, buf_id, sized.sizing_gen)

    try:
        await worker.link.state_op(segment, operation)
    except BaseException:
        segment.close()  # an operation that was not waited for may still write to it
        raise
    return SpaceState(space.space_id, space.kind, encoding, segment, sized.required_bytes, spares)


async def restore(worker: Worker, spaces: Sequence[SpaceState]) -> int:
    """A new sequence that holds a saved state. Raises EngineRefused, LinkFault, WorkerGone; no sequence is left then.

    An engine without room for it is asked to make some.
    """
    try:
        return await _restore(worker, spaces)
    except EngineRefused as refusal:
        if refusal.status != Status.NeedsReplan:
            raise
    await _make_room(worker, sum(space.size for space in spaces))
    return await _restore(worker, spaces)


async def _make_room(worker: Worker, size: int) -> None:
    """Have the engine evict `size` bytes of its cache, or a few times as much: it frees whole entries, none of which
    may be larger than what is asked for."""
    for times in EVICTIONS:
        evicted = await worker.link.sync(linkw.CacheEvictReq(times * size, linkw.ShedPolicy()))
        assert isinstance(evicted, linkw.CacheEvictOk)
        if evicted.bytes_freed >= size:
            return


async def _restore(worker: Worker, spaces: Sequence[SpaceState]) -> int:
    link = worker.link
    created = await link.sync(linkw.CreateSequenceReq())
    assert isinstance(created, linkw.CreateSequenceOk)
    sequence = created.sequence
    try:
        for space in restore_order(spaces):
            await link.state_op(space.segment, partial(linkw.Restore, sequence, space.space_id))
    except (EngineRefused, LinkFault):
        await free(worker, sequence)
        raise
    return sequence


def restore_order(spaces: Sequence[SpaceState]) -> list[SpaceState]:
    """Paged spaces first, then by id."""
    return sorted(spaces, key=lambda space: (space.kind not in PAGED, space.space_id))


async def publish(worker: Worker, sequence: int, ids: Ids) -> None:
    """Give a sequence to the prefix cache under `ids`. Raises EngineRefused, LinkFault (it is freed), WorkerGone."""
    try:
        await worker.link.sync(linkw.PublishSequenceReq(sequence, worker.stage(ids)))
    except (EngineRefused, LinkFault):
        await free(worker, sequence)
        raise


async def adopt(worker: Worker, sequence: int, ids: Ids) -> int:
    """Make a seed of a sequence that holds exactly `ids`; its handle. Raises as `publish` does."""
    try:
        adopted = await worker.link.sync(linkw.AdoptSequenceReq(sequence, worker.stage(ids)))
    except (EngineRefused, LinkFault):
        await free(worker, sequence)
        raise
    assert isinstance(adopted, linkw.AdoptSequenceOk)
    return adopted.seed_handle


async def free(worker: Worker, sequence: int) -> None:
    with contextlib.suppress(EngineRefused, LinkFault):  # gone already
        await worker.link.sync(linkw.FreeSequenceReq(sequence))


def read_segment(path: Path, offset: int, length: int) -> Segment:
    """A sealed state in a file, in a segment of its own. Raises OSError, EOFError when it is not `length` bytes."""
    segment = Segment.create("state", length)
    try:
        with open(open_regular(path), "rb", buffering=0) as file, memoryview(segment.buf) as view:
            done = 0
            while done < length:
                n_bytes = os.preadv(file.fileno(), [view[done:]], offset + done)
                if not n_bytes:
                    raise EOFError(f"{path} ends after {offset + done} bytes")
                done += n_bytes
            sealed = BYTES + PAYLOAD_LEN.unpack_from(view, PAYLOAD_LEN_AT)[0] if length >= BYTES else BYTES
            if sealed != length:  # the engine reads no further than that
                raise EOFError(f"{path} has {length} bytes where its state has {sealed}")
    except BaseException:
        segment.close()
        raise
    return segment
