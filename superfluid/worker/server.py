"""Link W, the worker's end: one loop on one thread that reads a request, asks the engine and replies."""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import attrs

from superfluid.engines.engine import Engine, EngineError, EngineFatal, TokenArray
from superfluid.link import linkw
from superfluid.link.channel import BlockingChannel
from superfluid.link.codes import Status
from superfluid.link.errors import LinkError, ProtocolError
from superfluid.link.handshake import negotiate
from superfluid.shm.control import BYTES as CONTROL_BYTES, TAG as CONTROL_TAG, Control
from superfluid.shm.descriptors import recv_descriptor
from superfluid.shm.ring import Ring, RingError
from superfluid.shm.segment import Segment
from superfluid.worker.buffers import Buffers
from superfluid.worker.sync import Desk

PUMP_SECONDS = 0.005  # the longest between two pumps while something may be under way
DRAIN_PAUSE = 0.001  # between two pumps of a drain
DRAFT_SECONDS = 0.005  # how long a grammar may take that is waited for; longer ones are answered behind other requests
SEED_TTL_MS = 1000  # means nothing; seeds live for ticks

CLEAN = 0  # exit code of a link that the daemon closed


def serve(
    engine: Engine,
    rings: Sequence[linkw.RingSpec],
    frames: socket.socket,
    descriptors: socket.socket,
    *,
    name: str = "worker",
    in_process: bool = False,
) -> int:
    """Serve one engine until the daemon closes the link; the exit code, 0.

    Everything is blocking and on this thread; sockets and engine stay the caller's. Raises LinkError or ShmError for
    what breaks the protocol (exit 1), OSError, and EngineFatal when the runtime broke in a tick (exit 70), which an
    in-process worker answers with a refusal of -1 instead.
    """
    server = Server(engine, rings, frames, descriptors, in_process)
    try:
        return server.run()
    finally:
        server.close()


class _Received(NamedTuple):
    seq: int
    message: Any


class _Draft(NamedTuple):
    """A request that is answered once the work for it, on another thread, is done."""

    received: _Received
    work: Future[None]


@attrs.define
class _Loan:
    """An open state operation and the buffer it works on."""

    buf_id: int
    view: memoryview


class Server:
    """One connection. Made by `serve`."""

    def __init__(
        self,
        engine: Engine,
        rings: Sequence[linkw.RingSpec],
        frames: socket.socket,
        descriptors: socket.socket,
        in_process: bool,
    ) -> None:
        self._engine = engine
        self._specs = {spec.ring_id: spec for spec in rings}
        self._channel = BlockingChannel(frames, linkw.VERSION)
        self._descriptors = descriptors
        self._in_process = in_process
        self._rings: dict[int, Ring] = {}
        self._control: Control | None = None
        self._buffers = Buffers()
        self._open: dict[int, _Loan] = {}
        self._mem = linkw.MemCounters()
        self._kept: deque[_Received] = deque()  # frames that came while a transcription streamed
        self._drafts: deque[_Draft] = deque()
        self._drafting = ThreadPoolExecutor(1, "grammars")
        self._ended = False
        self._failure: LinkError | None = None  # what broke the link while a transcription streamed
        self._desk = Desk(engine, self._read_span, self._on_segment)
        self._handlers: dict[type[Any], Callable[[int, Any], None]] = {
            linkw.RingAttach: self._attach_ring,
            linkw.ControlAttach: self._attach_control,
            linkw.TickSubmit: self._tick,
            linkw.MatchReq: self._match,
            linkw.SeedAcquire: self._acquire_seed,
            linkw.SeedRelease: self._release_seed,
            linkw.StateOpSubmit: self._submit_operation,
            linkw.OpCancel: self._cancel_operation,
            linkw.StrategyRegister: self._register_strategy,
            linkw.StateSyncReq: self._answer,
            linkw.BufAlloc: self._ignore,
            linkw.BufAttach: self._attach_buffer,
            linkw.BufRelease: self._release_buffer,
            linkw.Ping: self._ping,
            linkw.DrainReq: self._drain,
            linkw.TranscribeCancel: self._ignore,
            linkw.Telemetry: self._ignore,
        }

    def run(self) -> int:
        if not self._shake_hands():
            return CLEAN
        while True:
            busy = self._open or self._engine.idle_work or self._drafts
            if not self._kept and not self._channel.poll(PUMP_SECONDS if busy else None):
                self._pump()
                self._answer_drafts()
                continue
            received = self._next()
            if received is None:
                return CLEAN
            self._handle(received)
            self._answer_drafts()
            if self._open or self._engine.idle_work:
                self._pump()

    def close(self) -> None:
        """Unmap the rings and the control words; a grammar that is being compiled is waited for."""
        self._drafting.shutdown(cancel_futures=True)
        for ring in self._rings.values():
            ring.close()
        if self._control is not None:
            self._control.close()

    # ---- frames

    def _shake_hands(self) -> bool:
        """Answer HELLO; false when the daemon left before it."""
        first = self._channel.recv()
        if first is None:
            return False
        seq, _, hello = first
        if not isinstance(hello, linkw.Hello):
            raise ProtocolError(f"{type(hello).__name__} before the handshake")
        version = negotiate(hello.proto_versions, (linkw.VERSION, linkw.VERSION))
        engine = self._engine
        self._channel.send(
            linkw.HelloAckW(
                version,
                bytes(32),
                engine.capability_descriptor() or "",
                engine.state_spaces(),
                [],
                linkw.LinkWLimits(ring_specs=list(self._specs.values())),
                engine.kv_bits(),
            ),
            seq,
        )
        return True

    def _next(self) -> _Received | None:
        """The next request; none when the daemon has closed the link."""
        if self._kept:
            return self._kept.popleft()
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return None
        received = self._channel.recv()
        return None if received is None else _Received(received[0], received[2])

    def _handle(self, received: _Received) -> None:
        message = received.message
        kind = type(message)
        handler = self._handlers.get(kind) or self._handlers.get(kind.__mro__[1])
        if handler is None:
            raise ProtocolError(f"{kind.__name__} is nothing a daemon sends here")
        handler(received.seq, message)

    def _ignore(self, seq: int, message: object) -> None:
        return

    # ---- shared memory

    def _attach_ring(self, seq: int, request: linkw.RingAttach) -> None:
        spec = self._specs.get(request.ring_id)
        if spec is None or request.layout != spec:
            raise ProtocolError(f"RING_ATTACH of ring {request.ring_id} as {request.layout}; announced was {spec}")
        ring = Ring.attach(recv_descriptor(self._descriptors, request.ring_id), spec)
        self._engine.attach_ring(ring)
        replaced, self._rings[request.ring_id] = self._rings.get(request.ring_id), ring
        if replaced is not None:
            replaced.close()
        self._channel.send(linkw.RingAck(request.ring_id), seq)

    def _attach_control(self, seq: int, request: linkw.ControlAttach) -> None:
        if request.bytes < CONTROL_BYTES:
            raise ProtocolError(f"CONTROL_ATTACH of {request.bytes} bytes; the words take {CONTROL_BYTES}")
        control = Control.attach(recv_descriptor(self._descriptors, CONTROL_TAG))
        self._engine.attach_control(control)
        replaced, self._control = self._control, control
        if replaced is not None:
            replaced.close()
        self._channel.send(linkw.ControlAck(request.bytes), seq)

    def _attach_buffer(self, seq: int, request: linkw.BufAttach) -> None:
        fd = recv_descriptor(self._descriptors, request.buf_id)
        self._buffers.attach(request.buf_id, Segment.attach(fd, request.len))

    def _release_buffer(self, seq: int, request: linkw.BufRelease) -> None:
        self._buffers.release(request.buf_id)

    def _require_rings(self, what: str) -> None:
        if len(self._rings) < len(self._specs):
            raise ProtocolError(f"{what} with {len(self._rings)} of {len(self._specs)} rings attached")

    def _read_span(self, ref: linkw.TokenRef) -> TokenArray:
        """Raises EngineError -103."""
        ring = self._rings.get(linkw.RING_IN)
        if ring is None:
            raise EngineError(Status.RejectBadRefGeneration, "no inbound ring is attached")
        try:
            return ring.read_tokens(ref)
        except RingError as error:
            raise EngineError(Status.RejectBadRefGeneration, str(error)) from error

    # ---- the tick

    def _tick(self, seq: int, request: linkw.TickSubmit) -> None:
        self._require_rings("TICK_SUBMIT")
        try:
            events = self._engine.tick(request.plan, self._on_emit)
        except EngineFatal as error:
            if not self._in_process:
                raise
            self._channel.send(linkw.TickRejected(error.status), seq)
            return
        except EngineError as error:
            self._channel.send(linkw.TickRejected(error.status), seq)
            return
        self._mem = events.mem
        self._report(events.op_completions)
        self._channel.send(linkw.TickAccepted(events), seq)

    def _on_emit(self, lanes: list[tuple[int, list[int]]]) -> None:
        self._channel.send_many(linkw.TickEmit(lane_tag, tokens) for lane_tag, tokens in lanes)

    # ---- the prefix cache

    def _match(self, seq: int, request: linkw.MatchReq) -> None:
        self._require_rings("MATCH_REQ")
        try:
            span = self._read_span(request.span)
        except EngineError as error:
            raise ProtocolError(f"MATCH_REQ with a span that cannot be read: {error.reason}") from error
        try:
            spaces = self._engine.space_match(request.space_id, span)
        except EngineError:
            spaces = []
        self._channel.send(linkw.MatchRes(spaces), seq)

    def _acquire_seed(self, seq: int, request: linkw.SeedAcquire) -> None:
        self._require_rings("SEED_ACQUIRE")
        reply: linkw.SeedGrant
        try:
            span = self._read_span(request.span)
            seed = self._engine.seed_acquire(span, request.prefix_len, request.determinism_class)
            reply = linkw.SeedGranted(seed, SEED_TTL_MS, self._engine.seed_lease_ticks())
        except EngineError as error:
            reply = linkw.SeedRefused(error.status)
        self._channel.send(reply, seq)

    def _release_seed(self, seq: int, request: linkw.SeedRelease) -> None:
        try:
            self._engine.seed_release(request.seed_handle)
        except EngineError as error:
            if error.status != Status.UnknownHandle:
                raise

    # ---- state operations

    def _submit_operation(self, seq: int, request: linkw.StateOpSubmit) -> None:
        try:
            handle = self._start(request.op)
        except EngineError as error:
            self._channel.send(linkw.StateOpRejected(error.status), seq)
            return
        self._channel.send(linkw.StateOpAccepted(handle), seq)

    def _start(self, op: Any) -> int:
        if len(self._open) >= linkw.OP_WINDOW:
            raise EngineError(Status.Busy, f"{len(self._open)} state operations are open")
        engine = self._engine
        match op:
            case linkw.Snapshot():
                view = self._buffers.borrow_empty(op.buf_id)
                handle = engine.space_snapshot(op.sequence, op.space_id, op.boundary_pos, view, op.sizing_gen)
            case linkw.Demote():
                view = self._buffers.borrow_empty(op.buf_id)
                start, end = op.range.start, op.range.end
                handle = engine.space_demote(op.sequence, op.space_id, start, end, op.encoding, view, op.sizing_gen)
            case linkw.Restore():
                view = self._buffers.borrow_sealed(op.buf_id)
                handle = engine.space_restore(op.sequence, op.space_id, view)
            case _:
                view = self._buffers.borrow_sealed(op.buf_id)
                handle = engine.space_promote(op.sequence, op.space_id, op.range.start, op.range.end, view)
        self._buffers.lend(op.buf_id)
        self._open[handle] = _Loan(op.buf_id, view)
        return handle

    def _cancel_operation(self, seq: int, request: linkw.OpCancel) -> None:
        try:
            self._engine.op_cancel(request.op_handle)
        except EngineError as error:
            if error.status != Status.UnknownHandle:
                raise

    def _pump(self) -> None:
        self._report(self._engine.pump())

    def _report(self, ended: Sequence[linkw.OpComplete]) -> None:
        """Tell the daemon of operations that ended, each once."""
        done = []
        for end in ended:
            loan = self._open.pop(end.op, None)
            if loan is None:
                continue
            loan.view.release()
            self._buffers.give_back(loan.buf_id)
            done.append(linkw.StateOpDone(end.op, end.state, end.error & 0xFFFFFFFF, end.bytes_moved))
        self._channel.send_many(done)

    def _drain(self, seq: int, request: linkw.DrainReq) -> None:
        self._pump()
        while self._open:
            time.sleep(DRAIN_PAUSE)
            self._pump()
        self._channel.send(linkw.Drained(), seq)

    # ---- the rest

    def _register_strategy(self, seq: int, request: linkw.StrategyRegister) -> None:
        reply: linkw.StrategyGrant
        try:
            reply = linkw.StrategyGranted(self._engine.strategy_register(request))
        except EngineError as error:
            reply = linkw.StrategyRefused(error.status)
        self._channel.send(reply, seq)

    def _ping(self, seq: int, request: linkw.Ping) -> None:
        self._channel.send(linkw.Pong(len(self._open), self._mem), seq)

    def _answer(self, seq: int, request: linkw.StateSyncReq) -> None:
        draft = self._desk.draft(request)
        if draft is not None:
            work = self._drafting.submit(draft)
            if not wait([work], DRAFT_SECONDS).done:
                self._drafts.append(_Draft(_Received(seq, request), work))
                return
        self._channel.send(self._desk.answer(request), seq)

    def _answer_drafts(self) -> None:
        while self._drafts and self._drafts[0].work.done():
            (seq, request), _ = self._drafts.popleft()
            self._channel.send(self._desk.answer(request), seq)

    def _on_segment(self, segment: linkw.Segment) -> bool:
        """Send a segment; false when the daemon cancelled, left, or broke the link. Other frames wait their turn."""
        self._channel.send(linkw.TranscribeSegment(segment.start_ms, segment.end_ms, segment.text))
        while self._channel.poll(0):
            try:
                received = self._channel.recv()
            except LinkError as error:
                self._failure = error
                return False
            if received is None:
                self._ended = True
                return False
            seq, _, message = received
            if isinstance(message, linkw.TranscribeCancel):
                return False
            self._kept.append(_Received(seq, message))
        return True
