"""Doubles of the scheduler's neighbours: a link that drives a MockEngine in process, a store and a codec."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

from superfluid.codec.channels import Plain
from superfluid.engines.engine import EngineError
from superfluid.engines.mock.config import RINGS, Knobs, MockConfig
from superfluid.engines.mock.engine import MockEngine
from superfluid.link import linkw
from superfluid.link.codes import OpState, Status
from superfluid.link.events import Body, Event, Generated
from superfluid.link.relay import TextOut
from superfluid.scheduler.generation import Job
from superfluid.scheduler.link import EngineRefused, OnEmit, WorkerGone
from superfluid.scheduler.states import BYTES, PAYLOAD_LEN, PAYLOAD_LEN_AT
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring
from superfluid.shm.segment import Segment


class MockLink:
    """A worker in process: real rings and control words, and a MockEngine that runs each plan at once.

    Emits are handed on after the engine ran, a round at a time with a checkpoint between. `tick_s` is how long a
    tick takes on the trio clock, `op_s` a state operation, which `op_failure` makes fail. `plans` are the accepted
    plans; `refuse_plan` answers a plan with a status code. `die_at` kills the worker in that plan, after
    `emits_before_death` rounds were handed on.
    """

    def __init__(self, config: MockConfig | None = None, knobs: Knobs | None = None) -> None:
        self.engine = MockEngine(config or MockConfig(), knobs or Knobs())
        self.knobs = self.engine.knobs
        self.record: dict[str, Any] = json.loads(self.engine.config.record)
        self.control = Control.create()
        self.rings = {spec.ring_id: Ring.create(spec) for spec in RINGS}
        for ring in self.rings.values():
            self.engine.attach_ring(ring)
        self.engine.attach_control(self.control)
        self.hello = linkw.HelloAckW(
            linkw.VERSION, bytes(32), self.engine.config.record, self.engine.state_spaces(), [], linkw.LinkWLimits()
        )
        self.plans: list[linkw.TickPlan] = []
        self.prompts: dict[int, list[int]] = {}  # of admitted lanes, by tag
        self.events: list[linkw.TickEvents] = []
        self.requests: list[object] = []
        self.tick_s = 0.0
        self.op_s = 0.0
        self.op_failure: int | None = None
        self.refuse_plan: Callable[[linkw.TickPlan], int] = lambda plan: Status.Ok
        self.on_plan: Callable[[linkw.TickPlan], None] = lambda plan: None
        self.die_at: int | None = None
        self.emits_before_death = 0
        self.max_window = 4096
        self.dead: str | None = None

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        self.control.close()

    @property
    def window(self) -> int:
        return min(self.rings[linkw.RING_IN].room // 4, self.max_window)

    @property
    def out_slots(self) -> int:
        return self.rings[linkw.RING_OUT].spec.slots

    @property
    def in_slots(self) -> int:
        return self.rings[linkw.RING_IN].spec.slots

    def stage_prompt(self, tokens: Sequence[int] | npt.NDArray[np.uint32]) -> linkw.TokenRef:
        return self.rings[linkw.RING_IN].push_tokens(tokens)

    def read_tokens(self, ref: linkw.TokenRef) -> list[int]:
        tokens: list[int] = self.rings[linkw.RING_OUT].read_tokens(ref).tolist()
        return tokens

    async def tick(
        self, plan: linkw.TickPlan, on_emit: OnEmit, texts: Mapping[int, TextOut] | None = None
    ) -> linkw.TickEvents:
        await self._alive()
        if (status := self.refuse_plan(plan)) != Status.Ok:
            raise EngineRefused(status)
        rounds: list[list[tuple[int, list[int]]]] = []
        self.on_plan(plan)
        events: linkw.TickEvents = self._ask(lambda: self.engine.tick(plan, rounds.append))
        self.plans.append(plan)
        for admit in plan.admits:
            self.prompts[admit.lane_tag] = self.rings[linkw.RING_IN].read_tokens(admit.prompt).tolist()
        self.events.append(events)
        if self.tick_s:
            await trio.sleep(self.tick_s)
        dying = self.die_at is not None and plan.plan_seq >= self.die_at
        lent = texts or {}

        def take_over(tag: int) -> None:
            if tag in lent and (taken := lent[tag].take()):
                on_emit(tag, taken, True)

        for emits in rounds[: self.emits_before_death] if dying else rounds:
            for tag, tokens in emits:
                if tag in lent and lent[tag].put(tokens):
                    continue
                take_over(tag)
                on_emit(tag, tokens, False)
            await trio.lowlevel.checkpoint()
        for tag in lent:
            take_over(tag)
        if dying:
            self.dead = "killed by signal 9"
        await self._alive()
        return events

    async def match(self, span: linkw.TokenRef, space_id: int = linkw.ALL_SPACES) -> linkw.MatchRes:
        await self._alive()
        tokens = self.rings[linkw.RING_IN].read_tokens(span)
        return linkw.MatchRes(self._ask(lambda: self.engine.space_match(space_id, tokens)))

    async def seed_acquire(self, span: linkw.TokenRef, prefix_len: int, determinism: int = 0) -> linkw.SeedGranted:
        await self._alive()
        tokens = self.rings[linkw.RING_IN].read_tokens(span)
        handle = self._ask(lambda: self.engine.seed_acquire(tokens, prefix_len, determinism))
        return linkw.SeedGranted(handle, ttl_ticks=self.engine.seed_lease_ticks())

    def seed_release(self, handle: int) -> None:
        self.requests.append(linkw.SeedRelease(handle))
        self._ask(lambda: self.engine.seed_release(handle))

    async def sync(self, request: linkw.StateSyncReq) -> linkw.StateSyncOk:
        await self._alive()
        self.requests.append(request)
        engine = self.engine
        match request:
            case linkw.CreateGrammarReq(json_schema):
                return linkw.CreateGrammarOk(self._ask(lambda: engine.grammar_create(json_schema)))
            case linkw.FreeGrammarReq(grammar):
                self._ask(lambda: engine.grammar_free(grammar))
                return linkw.FreeGrammarOk()
            case linkw.CreateLogitBiasReq(tokens, values):
                return linkw.CreateLogitBiasOk(self._ask(lambda: engine.logit_bias_create(tokens, values)))
            case linkw.FreeLogitBiasReq(bias):
                self._ask(lambda: engine.logit_bias_free(bias))
                return linkw.FreeLogitBiasOk()
            case linkw.LaneSequenceReq(tag):
                held = engine.lane_sequence(tag)
                if held is None:
                    raise EngineRefused(Status.UnknownHandle)
                return linkw.LaneSequenceOk(held)
            case linkw.ForkReq(parent, flags):
                return linkw.ForkOk(self._ask(lambda: engine.seq_fork(parent, flags)))
            case linkw.PublishSequenceReq(sequence, span):
                ids = self.rings[linkw.RING_IN].read_tokens(span)
                self._ask(lambda: engine.publish_sequence(sequence, ids))
                return linkw.PublishSequenceOk()
            case linkw.FreeSequenceReq(sequence):
                self._ask(lambda: engine.free_sequence(sequence))
                return linkw.FreeSequenceOk()
            case linkw.UnpublishReq(span):
                ids = self.rings[linkw.RING_IN].read_tokens(span)
                self._ask(lambda: engine.unpublish(ids))
                return linkw.UnpublishOk()
            case linkw.CreateSequenceReq():
                return linkw.CreateSequenceOk(self._ask(engine.create_sequence))
            case linkw.AdoptSequenceReq(sequence, span):
                ids = self.rings[linkw.RING_IN].read_tokens(span)
                return linkw.AdoptSequenceOk(self._ask(lambda: engine.seed_adopt(sequence, ids)))
            case linkw.SnapshotBoundaryReq(sequence, space, cap):
                return linkw.SnapshotBoundaryOk(self._ask(lambda: engine.space_snapshot_boundary(sequence, space, cap)))
            case linkw.ExportSizeReq(sequence, space, span, encoding):
                sized = self._ask(lambda: engine.space_export_size(sequence, space, span.start, span.end, encoding))
                return linkw.ExportSizeOk(*sized)
            case linkw.CacheEvictReq(target, policy):
                return linkw.CacheEvictOk(self._ask(lambda: engine.cache_evict(target, policy)))
        raise NotImplementedError(type(request).__name__)

    async def begin(self, request: linkw.StateSyncReq) -> Callable[[], Awaitable[linkw.StateSyncOk]]:
        async def answer() -> linkw.StateSyncOk:
            return await self.sync(request)

        await self._alive()
        return answer

    def grammar_free(self, handle: int) -> None:
        self.requests.append(linkw.FreeGrammarReq(handle))
        self._ask(lambda: self.engine.grammar_free(handle))

    async def state_op(self, segment: Segment, make: Callable[[int], linkw.StateOp]) -> int:
        await self._alive()
        op = make(1)
        self.requests.append(op)
        if self.op_s:
            await trio.sleep(self.op_s)
        if self.op_failure is not None:
            raise EngineRefused(self.op_failure)
        engine = self.engine
        with memoryview(segment.buf) as view:
            match op:
                case linkw.Snapshot(sequence, space, boundary, _, generation):
                    self._ask(lambda: engine.space_snapshot(sequence, space, boundary, view, generation))
                case linkw.Demote(sequence, space, span, encoding, _, generation):
                    self._ask(
                        lambda: engine.space_demote(sequence, space, span.start, span.end, encoding, view, generation)
                    )
                case linkw.Restore(sequence, space, _):
                    sealed = view[: BYTES + PAYLOAD_LEN.unpack_from(view, PAYLOAD_LEN_AT)[0]]
                    self._ask(lambda: engine.space_restore(sequence, space, sealed))
                case _:
                    raise NotImplementedError(type(op).__name__)
            (end,) = engine.pump()
        if end.state != OpState.DONE:
            raise EngineRefused(end.error)
        return end.bytes_moved

    async def _alive(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.dead is not None:
            raise WorkerGone(self.dead)

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EngineError as error:
            raise EngineRefused(error.status) from error


class MemoryStore:
    """A log in memory. `sync_s` is how long a sync takes; `fail_after` commits, the log cannot be written."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self.commits = 0
        self.sync_s = 0.0
        self.fail_after: int | None = None

    def stage(self, batch: list[tuple[int, Body]]) -> "MemoryCommit":
        self.commits += 1
        if self.fail_after is not None and self.commits > self.fail_after:
            return MemoryCommit(self, [], OSError(28, "No space left on device"))
        made: list[tuple[int, Event]] = []
        for session, body in batch:
            log = self.events.setdefault(session, [])
            event = Event(len(log), 1, 0, body)
            log.append(event)
            made.append((session, event))
        return MemoryCommit(self, [event for _, event in made], None)

    def tokens(self, session: int) -> list[int]:
        """Every generated token of a session, in order."""
        return [t for e in self.events.get(session, []) if isinstance(e.body, Generated) for t in e.body.span]

    def text(self, session: int) -> str:
        return "".join(e.body.text for e in self.events.get(session, []) if isinstance(e.body, Generated))

    def finishes(self, session: int) -> list[int]:
        return [e.body.finish for e in self.events.get(session, []) if isinstance(e.body, Generated)]


@attrs.define
class MemoryCommit:
    store: MemoryStore
    events: list[Event]
    error: Exception | None

    async def wait(self) -> list[Event]:
        await trio.sleep(self.store.sync_s) if self.store.sync_s else await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.events


@attrs.define
class WordRun:
    span: list[int]
    text: str
    channel: int
    closes: bool


class WordRouter:
    """Tokens as words of their number; `CALL`..`CALL + 1` enclose a tool call whose text is its tokens' words."""

    CALL = 31_000

    def __init__(self) -> None:
        self.channel = 0
        self.pending = ""
        self.plain: Plain | None = None  # nothing is bytes of tokens here

    def provisional(self, tokens: list[int]) -> list[tuple[int, str, bool]]:
        return [(0, "".join(f"{token} " for token in tokens), False)] if tokens else []

    def commit(self, tokens: list[int], last: bool) -> list[WordRun]:
        runs: list[WordRun] = []
        for token in tokens:
            if token == self.CALL or not runs or runs[-1].closes:
                self.channel = 2 if token == self.CALL else self.channel
                runs.append(WordRun([], "", self.channel, False))
            run = runs[-1]
            run.span.append(token)
            if token == self.CALL + 1:
                run.closes = True
                self.channel = 0
            elif token != self.CALL:
                run.text += f"{token} "
        return runs

    def flush(self) -> str:
        pending, self.pending = self.pending, ""
        return pending


@attrs.define
class WordCall:
    name: str
    arguments_json: str


class WordCodec:
    """Reads a call as `<name> <argument>...`; a call without arguments does not parse."""

    def __init__(self, terminators: Sequence[int] = ()) -> None:
        self.terminators = frozenset(terminators)

    def read_call(self, raw: str, tools: Sequence[dict[str, Any]], *, cut: bool = False) -> list[WordCall] | None:
        name, *arguments = raw.split()
        return [WordCall(name, json.dumps(arguments))] if arguments else None


def job(session: int | None, length: int = 8, max_tokens: int = 4, start: int = 0, **more: Any) -> Job:
    """A job whose prompt is `length` consecutive numbers from `start`."""
    return Job(session, list(range(start, start + length)), max_tokens, WordRouter(), **more)
