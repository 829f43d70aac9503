"""The daemon's end of Link W in a few blocking words, and a worker on a thread behind it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from superfluid.engines.engine import Engine
from superfluid.engines.mock import RINGS, MockEngine
from superfluid.link import linkw
from superfluid.link.channel import BlockingChannel
from superfluid.shm.control import TAG, Control
from superfluid.shm.descriptors import send_descriptor
from superfluid.shm.ring import Ring
from superfluid.shm.segment import Segment
from superfluid.worker.server import serve


class Daemon:
    """Sends requests and takes replies; what comes unsolicited is kept in `unsolicited`."""

    def __init__(self, frames: socket.socket, descriptors: socket.socket) -> None:
        self.frames = frames
        self.descriptors = descriptors
        self.channel = BlockingChannel(frames, linkw.VERSION)
        self.rings: dict[int, Ring] = {}
        self.segments: list[Segment] = []
        self.control: Control | None = None
        self.unsolicited: list[Any] = []
        self.plan_seq = 0

    def shake_hands(self) -> linkw.HelloAckW:
        return self.ask(linkw.Hello((8, 8), linkw.LinkRole.NodeAgent))

    def attach(self) -> linkw.HelloAckW:
        """Handshake, rings and control words."""
        hello = self.shake_hands()
        for spec in hello.limits.ring_specs:
            self.attach_ring(spec)
        control = self.control = Control.create()
        seq = self.channel.send(linkw.ControlAttach(64))
        send_descriptor(self.descriptors, TAG, control.fd)
        assert self.reply(seq) == linkw.ControlAck(64)
        return hello

    def attach_ring(self, spec: linkw.RingSpec) -> None:
        ring = self.rings[spec.ring_id] = Ring.create(spec)
        seq = self.channel.send(linkw.RingAttach(spec.ring_id, spec))
        send_descriptor(self.descriptors, spec.ring_id, ring.fd)
        assert self.reply(seq) == linkw.RingAck(spec.ring_id, 1)

    def buffer(self, buf_id: int, size: int) -> Segment:
        segment = Segment.create("buffer", size)
        self.segments.append(segment)
        self.channel.send(linkw.BufAlloc(buf_id, size))
        self.channel.send(linkw.BufAttach(buf_id, size))
        send_descriptor(self.descriptors, buf_id, segment.fd)
        return segment

    def ask(self, request: object) -> Any:
        return self.reply(self.channel.send(request))

    def reply(self, seq: int) -> Any:
        while True:
            received = self.channel.recv()
            assert received is not None, "the worker closed the link"
            _, correlation, message = received
            if correlation == seq:
                return message
            assert correlation == 0
            self.unsolicited.append(message)

    def next(self) -> Any:
        """The next unsolicited message, waited for."""
        if not self.unsolicited:
            received = self.channel.recv()
            assert received is not None
            assert received[1] == 0
            self.unsolicited.append(received[2])
        return self.unsolicited.pop(0)

    def sync(self, request: linkw.StateSyncReq) -> Any:
        """The `Ok` value, or the status of a refusal."""
        answer = self.ask(request)
        return answer.ok if isinstance(answer, linkw.StateSyncDone) else answer.status

    def stage(self, tokens: list[int]) -> linkw.TokenRef:
        return self.rings[linkw.RING_IN].push_tokens(tokens)

    def plan(self, **fields: Any) -> linkw.TickPlan:
        self.plan_seq += 1
        return linkw.TickPlan(self.plan_seq, prefill_token_budget=4096, max_decode_lanes=8, **fields)

    def tick(self, **fields: Any) -> linkw.TickEvents:
        answer = self.ask(linkw.TickSubmit(self.plan(**fields)))
        assert isinstance(answer, linkw.TickAccepted), answer
        return answer.events

    def start(self, tag: int, tokens: list[int], decode: int = 0, flags: int = 0) -> linkw.TickEvents:
        return self.tick(
            flags=flags,
            admits=[linkw.LaneAdmit(tag, self.stage(tokens))],
            prefills=[linkw.LanePrefill(tag, 0, len(tokens))],
            decodes=[linkw.LaneDecode(tag, decode)] if decode else [],
        )

    def tokens(self, events: linkw.TickEvents, tag: int) -> list[int]:
        emit = next(emit for emit in events.emits if emit.lane_tag == tag)
        return self.rings[linkw.RING_OUT].read_tokens(emit.token_ref).tolist()

    def close(self) -> None:
        self.frames.close()
        self.descriptors.close()
        for part in (*self.rings.values(), *self.segments, self.control):
            if part is not None:
                part.close()


class WorkerThread:
    """`serve` on a thread; `end` waits for it and gives its exit code or what it raised."""

    def __init__(self, engine: Engine, frames: socket.socket, descriptors: socket.socket, **options: Any) -> None:
        self._result: int | BaseException | None = None

        def run() -> None:
            try:
                self._result = serve(engine, RINGS, frames, descriptors, **options)
            except BaseException as error:
                self._result = error
            finally:
                frames.close()
                descriptors.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> int | BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the worker serves on"
        return self._result


@contextmanager
def worker(engine: Engine | None = None, **options: Any) -> Iterator[tuple[Daemon, WorkerThread]]:
    """A daemon's end and the worker behind it; both are gone after the block."""
    ours, theirs = socket.socketpair()
    our_fds, their_fds = socket.socketpair()
    thread = WorkerThread(engine or MockEngine(), theirs, their_fds, **options)
    daemon = Daemon(ours, our_fds)
    try:
        yield daemon, thread
    finally:
        daemon.close()
        thread.end()
