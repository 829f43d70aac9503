"""The daemon's end of Link W: handshake, rings, and one request at a time."""

import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import trio

from superfluid.daemon.state_ops import StateOps
from superfluid.link import linkw
from superfluid.link.channel import AsyncChannel, decode_message
from superfluid.link.codes import OpState
from superfluid.link.envelope import EnvelopeError, Frame
from superfluid.link.linkw import RING_IN, RING_LOGITS, RING_OUT
from superfluid.link.postcard import PostcardError
from superfluid.link.relay import Relay, TextOut
from superfluid.scheduler.link import EngineRefused, LinkFault, OnEmit, WorkerGone
from superfluid.shm.control import Control
from superfluid.shm.descriptors import send_descriptor_async
from superfluid.shm.ring import Ring
from superfluid.shm.segment import Segment

CONTROL_TAG = 0xC0
CONTROL_BYTES = 64
SLOT_HEADER = 16

M = TypeVar("M")


@attrs.define
class _Awaited:
    """A request whose reply is not there yet."""

    request: object
    answered: trio.Event = attrs.Factory(trio.Event)
    frame: Frame | None = None


class WorkerLink:
    """A connected worker. Made by `open`; `run` must be running in a task while requests are made.

    Every request raises EngineRefused when the worker refuses it and WorkerGone when the worker is gone.
    """

    def __init__(
        self,
        channel: AsyncChannel,
        descriptors: trio.socket.SocketType,
        hello: linkw.HelloAckW,
        rings: dict[int, Ring],
        control: Control,
    ) -> None:
        self.hello = hello
        self.record: dict[str, Any] = read_record(hello.capabilities)
        self.control = control
        self._channel = channel
        self._rings = rings
        self._inbound = rings[RING_IN]
        self._outbound = rings[RING_OUT]
        self._requests = trio.Lock()
        self._awaited: dict[int, _Awaited] = {}  # by the seq of the request
        self._on_emit: OnEmit | None = None
        self._relay: Relay | None = None  # while `run` reads
        self._texts: Mapping[int, TextOut] = {}  # of the tick that runs, by lane
        self._gone: str | None = None
        self._unread = False  # the worker ended without reading the last request
        self._state_ops = StateOps(channel, descriptors, lambda release: self._unanswered.append(release))
        self._unanswered: list[object] = []  # sent ahead of the next request

    @classmethod
    async def open(cls, frames: trio.SocketStream, descriptors: socket.socket) -> "WorkerLink":
        """Shake hands and attach rings and control words.

        Waits without a deadline: the worker loads its model first. Raises WorkerGone when the stream ends (the load
        failed) or the worker breaks the protocol.
        """
        channel = AsyncChannel(frames, linkw.VERSION, linkw.MESSAGES)
        fds = trio.socket.from_stdlib_socket(descriptors)
        rings: dict[int, Ring] = {}
        control: Control | None = None
        try:
            await channel.send(linkw.Hello((linkw.VERSION, linkw.VERSION), linkw.LinkRole.NodeAgent))
            hello = await _expect(channel, linkw.HelloAckW)
            if hello.chosen_version != linkw.VERSION:
                raise WorkerGone(f"worker chose Link W {hello.chosen_version}; this daemon speaks {linkw.VERSION}")
            for spec in hello.limits.ring_specs:
                if spec.ring_id not in (RING_IN, RING_OUT, RING_LOGITS):
                    raise WorkerGone(f"worker announced ring {spec.ring_id}; only rings 1, 2 and 3 are known")
                ring = rings[spec.ring_id] = Ring.create(spec)
                await channel.send(linkw.RingAttach(spec.ring_id, spec))
                await send_descriptor_async(fds, spec.ring_id, ring.fd)
                await _expect(channel, linkw.RingAck)
            if len(rings) != 3:
                raise WorkerGone(f"worker announced rings {sorted(rings)}; 1, 2 and 3 are needed")
            control = Control.create()
            await channel.send(linkw.ControlAttach(CONTROL_BYTES))
            await send_descriptor_async(fds, CONTROL_TAG, control.fd)
            await _expect(channel, linkw.ControlAck)
        except BaseException as error:
            for ring in rings.values():
                ring.close()
            if control is not None:
                control.close()
            if isinstance(error, EnvelopeError | PostcardError | trio.BrokenResourceError | OSError):
                raise WorkerGone(f"the link to the worker broke: {error}") from error
            raise
        return cls(channel, fds, hello, rings, control)

    @property
    def window(self) -> int:
        """Longest stream the worker takes, in tokens."""
        slot = (self._inbound.spec.slot_bytes - SLOT_HEADER) // 4
        limit = self.record.get("limits", {}).get("max_seq_len") or slot
        return min(slot, int(limit))

    @property
    def out_slots(self) -> int:
        """Slots of the outbound ring: an upper bound of lanes per tick."""
        return self._outbound.spec.slots

    @property
    def in_slots(self) -> int:
        """Slots of the inbound ring: spans that may be staged and not yet read."""
        return self._inbound.spec.slots

    async def run(self, describe: Callable[[], Awaitable[str]] | None = None) -> str:
        """Read frames until the worker is gone, handing on emits and replies; why it is gone.

        `describe` may say better how the process ended than the end of its stream does.
        """
        why = "the worker closed its link"
        relay: Relay | None = None
        try:
            relay = self._relay = self._channel.relayed()
            try:
                while frames := await self._channel.receive_frames():
                    for frame in frames:
                        self._route(frame)
            except trio.BrokenResourceError as error:
                if not isinstance(error.__cause__, ConnectionResetError):
                    raise
                self._unread = True  # that is what a peer's end says when it leaves bytes unread
            if describe is not None:
                why = await describe()
        except (EnvelopeError, trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            why = f"the link to the worker broke: {error}"
        finally:
            self._gone = why
            self._relay = None
            if relay is not None:
                relay.close()
            for tag in self._texts:
                self._take_over(tag)
            for awaited in self._awaited.values():
                awaited.answered.set()
            self._state_ops.worker_gone(why)
        return why

    def _route(self, frame: Frame) -> None:
        if frame.correlation_id:
            awaited = self._awaited.pop(frame.correlation_id, None)
            if awaited is not None:
                for tag in self._texts if isinstance(awaited.request, linkw.TickSubmit) else ():
                    self._take_over(tag)
                awaited.frame = frame
                awaited.answered.set()
            return
        try:
            message = decode_message(frame)
        except PostcardError:
            return  # an unsolicited frame that does not decode is dropped; the result is authoritative
        if isinstance(message, linkw.TickEmit):
            if self._on_emit is not None:
                self._take_over(message.lane_tag)
                self._on_emit(message.lane_tag, message.tokens, False)
        elif isinstance(message, linkw.StateOpDone):
            self._state_ops.ended(message)

    def _take_over(self, tag: int) -> None:
        """Hand on the tokens that went straight to the text of a lane."""
        text = self._texts.get(tag)
        if text is not None and self._on_emit is not None and (tokens := text.take()):
            self._on_emit(tag, tokens, True)

    async def _request(
        self, message: object, expected: type[M], before: Callable[[], Awaitable[None]] | None = None
    ) -> M:
        """Send a request, right after what `before` sends, and wait for its reply."""
        async with self._requests:
            return await self._answer(await self._send(message, before), expected)

    async def _send(self, message: object, before: Callable[[], Awaitable[None]] | None = None) -> "_Awaited":
        """Send a request; nobody else may be sending one."""
        if self._gone is not None:
            raise WorkerGone(self._gone, unread=True)
        ahead, self._unanswered = self._unanswered, []
        try:
            for unanswered in ahead:
                await self._channel.send(unanswered)
            if before is not None:
                await before()
            if self._gone is not None:
                raise WorkerGone(self._gone, unread=True)
            seq = self._channel.next_seq
            awaited = self._awaited[seq] = _Awaited(message)  # first: the reply may be read before `send` returns
            await self._channel.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            raise WorkerGone("the worker closed its link", unread=True) from error
        return awaited

    async def _answer(self, awaited: "_Awaited", expected: type[M]) -> M:
        with trio.CancelScope(shield=True):  # what it brings must not be lost
            await awaited.answered.wait()
        if awaited.frame is None:
            raise WorkerGone(self._gone or "the link was closed", unread=self._unread)
        try:
            reply = decode_message(awaited.frame)
        except PostcardError as error:
            raise LinkFault(f"the worker's reply does not decode: {error}") from error
        if not isinstance(reply, expected):
            raise LinkFault(f"the worker answered {type(reply).__name__} to {type(awaited.request).__name__}")
        return reply

    # ---- the tick

    def stage_prompt(self, tokens: Sequence[int] | npt.NDArray[np.uint32]) -> linkw.TokenRef:
        """Write a span into the inbound ring; at most `in_slots` may wait unread."""
        return self._inbound.push_tokens(tokens)

    def read_tokens(self, ref: linkw.TokenRef) -> list[int]:
        """The tokens of an emit. Raises a RingError when the slot was written over."""
        tokens: list[int] = self._outbound.read_tokens(ref).tolist()
        return tokens

    async def tick(
        self, plan: linkw.TickPlan, on_emit: OnEmit | None = None, texts: Mapping[int, TextOut] | None = None
    ) -> linkw.TickEvents:
        """Run one plan; `on_emit` is called with each lane's tokens as they stream in.

        Those of lanes in `texts` go to their text; `on_emit` is told later, before what comes behind them.
        """
        self._on_emit = on_emit
        if texts and self._relay is not None:
            self._texts = texts
            for tag, text in texts.items():
                self._relay.lend(tag, text)
        try:
            result = await self._request(linkw.TickSubmit(plan), linkw.TickResult)
        finally:
            if self._texts:
                if self._relay is not None:
                    self._relay.take_back()
                self._texts = {}
            self._on_emit = None
        if isinstance(result, linkw.TickAccepted):
            if result.events.plan_seq != plan.plan_seq:
                raise LinkFault(f"the worker answered plan {result.events.plan_seq}, not {plan.plan_seq}")
            return result.events
        assert isinstance(result, linkw.TickRejected)
        raise EngineRefused(result.status)

    # ---- prefix cache and the rest

    async def match(self, span: linkw.TokenRef, space_id: int = linkw.ALL_SPACES) -> linkw.MatchRes:
        return await self._request(linkw.MatchReq(space_id, span), linkw.MatchRes)

    async def seed_acquire(
        self, span: linkw.TokenRef, prefix_len: int, determinism_class: int = 0
    ) -> linkw.SeedGranted:
        grant = await self._request(linkw.SeedAcquire(span, prefix_len, determinism_class), linkw.SeedGrant)
        if isinstance(grant, linkw.SeedGranted):
            return grant
        assert isinstance(grant, linkw.SeedRefused)
        raise EngineRefused(grant.status)

    def seed_release(self, handle: int) -> None:
        """Give a seed back; it is sent ahead of the next request, and nothing is answered."""
        self._unanswered.append(linkw.SeedRelease(handle))

    async def sync(self, request: linkw.StateSyncReq) -> linkw.StateSyncOk:
        """A synchronous request; its `StateSyncOk` variant. Raises EngineRefused with the worker's status."""
        return _synced(await self._request(request, linkw.StateSyncRes))

    async def begin(self, request: linkw.StateSyncReq) -> Callable[[], Awaitable[linkw.StateSyncOk]]:
        """Send a synchronous request that may take long; what it brings is waited for with the function."""
        async with self._requests:
            awaited = await self._send(request)

        async def answer() -> linkw.StateSyncOk:
            return _synced(await self._answer(awaited, linkw.StateSyncRes))

        return answer

    def grammar_free(self, handle: int) -> None:
        """Give a grammar back; it is sent ahead of the next request, and what is answered is not waited for."""
        self._unanswered.append(linkw.FreeGrammarReq(handle))

    async def state_op(self, segment: Segment, make: Callable[[int], linkw.StateOp]) -> int:
        """Run the state operation that `make` makes of a buffer's id, with `segment` lent as that buffer, to its end.

        It stays lent until it is closed. The bytes it moved. Raises EngineRefused when it is rejected, fails or is
        cancelled. A task that is cancelled while it waits has the operation cancelled too.
        """
        ops = self._state_ops
        submit = linkw.StateOpSubmit(make(ops.buffer(segment)))
        reply = await self._request(submit, linkw.StateOpReply, before=partial(ops.lend, segment))
        if isinstance(reply, linkw.StateOpRejected):
            raise EngineRefused(reply.status)
        assert isinstance(reply, linkw.StateOpAccepted)
        try:
            done = await ops.wait(reply.op_handle)
        except trio.Cancelled:
            self._unanswered.append(linkw.OpCancel(reply.op_handle))
            raise
        if done.state != OpState.DONE:
            raise EngineRefused(signed(done.error), "the state operation failed")
        return done.bytes_moved

    def close(self) -> None:
        """Unmap the shared memory; the sockets belong to the process's host."""
        for ring in self._rings.values():
            ring.close()
        self.control.close()


def _synced(result: linkw.StateSyncRes) -> linkw.StateSyncOk:
    if isinstance(result, linkw.StateSyncDone):
        return result.ok
    assert isinstance(result, linkw.StateSyncErr)
    raise EngineRefused(result.status)


def signed(code: int) -> int:
    """A status code that travelled as a u32."""
    return code - (1 << 32) if code >= 1 << 31 else code


def read_record(text: str) -> dict[str, Any]:
    """The capability record: a JSON object, or empty when the worker describes nothing."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


async def _expect(channel: AsyncChannel, kind: type[M]) -> M:
    """The next frame of a handshake, which must be a `kind`."""
    frames = await channel.receive_frames()
    if not frames:
        raise WorkerGone("the worker ended before it was ready")
    message = decode_message(frames[0])
    if not isinstance(message, kind):
        raise WorkerGone(f"the worker sent {type(message).__name__} where {kind.__name__} was due")
    return message
