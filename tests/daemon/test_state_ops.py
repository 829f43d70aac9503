"""State operations from the daemon's end of a link to a worker on a thread."""

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from superfluid.daemon.client import WorkerLink
from superfluid.engines.mock import RINGS, MockEngine
from superfluid.engines.mock.config import MockConfig, default_spaces
from superfluid.link import linkw
from superfluid.link.codes import Status
from superfluid.scheduler.link import EngineRefused, WorkerGone
from superfluid.shm.segment import Segment
from superfluid.worker.buffers import Buffers
from superfluid.worker.server import serve

KV = 1


class SlowEngine(MockEngine):
    """State operations run until `go_on` is set."""

    go_on = False

    def pump(self) -> list[linkw.OpComplete]:
        return super().pump() if self.go_on else []


@asynccontextmanager
async def linked(engine: MockEngine) -> AsyncIterator[WorkerLink]:
    frames, their_frames = socket.socketpair()
    descriptors, their_descriptors = socket.socketpair()
    thread = threading.Thread(target=serve, args=(engine, RINGS, their_frames, their_descriptors), daemon=True)
    thread.start()
    link = await WorkerLink.open(trio.SocketStream(trio.socket.from_stdlib_socket(frames)), descriptors)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            yield link
            nursery.cancel_scope.cancel()
    finally:
        frames.close()
        descriptors.close()
        thread.join(10)
        link.close()
        their_frames.close()
        their_descriptors.close()


async def state(link: WorkerLink, length: int = 64) -> int:
    """A lane's sequence of `length` tokens."""
    prompt = link.stage_prompt(list(range(length)))
    plan = linkw.TickPlan(1, 0, 4096, 8, [linkw.LaneAdmit(7, prompt)], [], [linkw.LanePrefill(7, 0, length)])
    await link.tick(plan)
    found = await link.sync(linkw.LaneSequenceReq(7))
    assert isinstance(found, linkw.LaneSequenceOk)
    return found.sequence


async def sized(link: WorkerLink, sequence: int, end: int = 64) -> linkw.ExportSizeOk:
    size = await link.sync(linkw.ExportSizeReq(sequence, KV, linkw.TokenRange(0, end), 0))
    assert isinstance(size, linkw.ExportSizeOk)
    return size


def engine(kind: type[MockEngine] = MockEngine, **more: int) -> MockEngine:
    return kind(MockConfig(spaces=[default_spaces()[0]], **more))  # type: ignore[arg-type]


async def test_a_state_goes_out_and_comes_back() -> None:
    async with linked(engine()) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        with Segment.create("test", size.required_bytes) as segment:
            moved = await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
            assert moved == size.required_bytes == 136 + 64 * 64
            created = await link.sync(linkw.CreateSequenceReq())
            assert isinstance(created, linkw.CreateSequenceOk)
            assert await link.state_op(segment, lambda buf: linkw.Restore(created.sequence, KV, buf)) == 64 * 64
        boundary = await link.sync(linkw.SnapshotBoundaryReq(created.sequence, KV, 1000))
        assert boundary == linkw.SnapshotBoundaryOk(64)


async def test_a_segment_is_lent_once_and_taken_back_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    attached: list[int] = []
    attach, release = Buffers.attach, Buffers.release

    def note_attach(self: Buffers, buf_id: int, segment: Segment) -> None:
        attached.append(buf_id)
        attach(self, buf_id, segment)

    def note_release(self: Buffers, buf_id: int) -> None:
        released.append(buf_id)
        release(self, buf_id)

    async with linked(engine()) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        with Segment.create("test", size.required_bytes + 4096) as segment:
            monkeypatch.setattr(Buffers, "attach", note_attach)
            for _ in range(2):
                await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
            created = await link.sync(linkw.CreateSequenceReq())
            assert isinstance(created, linkw.CreateSequenceOk)
            assert await link.state_op(segment, lambda buf: linkw.Restore(created.sequence, KV, buf)) == 64 * 64
            monkeypatch.setattr(Buffers, "release", note_release)
        assert attached == [1]
        assert released == []
        await sized(link, sequence)  # brings BUF_RELEASE to the worker first
        assert released == [1]
        with Segment.create("test", size.required_bytes) as segment:
            await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
        assert attached == [1, 2]  # ids are never used again


async def test_refusals_carry_the_engines_status() -> None:
    async with linked(engine()) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        with Segment.create("test", size.required_bytes - 1) as segment:
            with pytest.raises(EngineRefused) as small:
                await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
            assert small.value.status == Status.BufferTooSmall
            with pytest.raises(EngineRefused) as unknown:
                await link.state_op(segment, lambda buf: linkw.Restore(99, KV, buf))
            assert unknown.value.status in (Status.UnknownHandle, Status.EnvelopeMismatch)
        with Segment.create("test", 4) as tiny, pytest.raises(EngineRefused) as short:
            await link.state_op(tiny, lambda buf: linkw.Restore(sequence, KV, buf))
        assert short.value.status == Status.EnvelopeMismatch
        with Segment.create("test", 200) as segment, pytest.raises(EngineRefused) as buffer:
            await link.state_op(segment, lambda buf: linkw.Restore(sequence, KV, buf + 1))
        assert buffer.value.status == Status.UnknownHandle
        assert (await sized(link, sequence)).required_bytes == size.required_bytes  # the link goes on


async def test_other_requests_go_on_while_an_operation_runs() -> None:
    worker = engine(SlowEngine)
    assert isinstance(worker, SlowEngine)
    async with linked(worker) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        done = trio.Event()

        async def snapshot() -> None:
            await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
            done.set()

        with Segment.create("test", size.required_bytes) as segment:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(snapshot)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(EngineRefused):  # -120: the space is locked
                    await link.sync(linkw.ForkReq(sequence, 0))
                assert not done.is_set()
                worker.go_on = True
                await done.wait()


async def test_a_cancelled_wait_cancels_the_operation() -> None:
    worker = engine(SlowEngine)
    assert isinstance(worker, SlowEngine)
    async with linked(worker) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        with Segment.create("test", size.required_bytes) as segment:
            with trio.move_on_after(0.05) as scope:
                await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))
            assert scope.cancelled_caught
            again = await sized(link, sequence)  # brings OP_CANCEL and BUF_RELEASE to the worker first
            worker.go_on = True
            assert not worker.open_ops()
            moved = await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, again.sizing_gen))
            assert moved == size.required_bytes


async def test_a_worker_that_dies_in_an_operation() -> None:
    worker = engine(SlowEngine)
    async with linked(worker) as link:
        sequence = await state(link)
        size = await sized(link, sequence)
        with Segment.create("test", size.required_bytes) as segment:
            async with trio.open_nursery() as nursery:

                async def snapshot() -> None:
                    with pytest.raises(WorkerGone):
                        await link.state_op(segment, lambda buf: linkw.Snapshot(sequence, KV, 64, buf, size.sizing_gen))

                nursery.start_soon(snapshot)
                await trio.testing.wait_all_tasks_blocked()
                link._state_ops.worker_gone("it died")
            with pytest.raises(WorkerGone):
                await link._state_ops.wait(1234)
