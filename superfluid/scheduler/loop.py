"""The scheduler of one model: a task that takes jobs in, plans ticks, and moves what they bring to their callers."""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import trio

from superfluid.link import linkw
from superfluid.link.codes import AdmitStatus, PlanFlag, Status, status_name
from superfluid.link.events import Finish
from superfluid.observe.metrics import ModelMetrics
from superfluid.observe.tasks import asker
from superfluid.scheduler.admission import ContextExceeded, NotAdmitted, Worker, admit_of
from superfluid.scheduler.classes import Class
from superfluid.scheduler.config import SchedulerConfig as SchedulerConfig, TickInFlight
from superfluid.scheduler.generation import CodecLike, Failure, Generation, Job
from superfluid.scheduler.harvest import Harvest, Yield
from superfluid.scheduler.intake import Intake
from superfluid.scheduler.keeping import Keeper, ids_of
from superfluid.scheduler.lanes import Lane, Ticket
from superfluid.scheduler.link import EngineLink, EngineRefused, LinkFault, WorkerGone
from superfluid.scheduler.outbox import Batch, Outbox, StoreLike
from superfluid.scheduler.pins import Pins
from superfluid.scheduler.planner import Plan, Situation, age, plan_tick
from superfluid.scheduler.queue import Queues
from superfluid.scheduler.rates import ADAPTIVE_START, Rates, adapt_budget
from superfluid.scheduler.roster import Roster
from superfluid.scheduler.shared import SharedPrefixes
from superfluid.scheduler.side import SideOperation, SideOperations, contained
from superfluid.scheduler.streaming import Streaming
from superfluid.scheduler.tickets import Tickets
from superfluid.scheduler.watchers import Sink, Watchers
from superfluid.shm.ring import RingError

log = logging.getLogger(__name__)

LATENCY_LINGER = 300.0
"""Seconds the latency word stays up after the last class 0 or 1 job arrived."""

T = TypeVar("T")


class Scheduler:
    """Jobs in, generations out. Outlives its workers: `run` serves with one of them until it is gone.

    `store` keeps the log, `codec` turns tokens to text, `metrics` counts, `keeper` keeps states of finished lanes.
    """

    def __init__(
        self,
        store: StoreLike,
        codec: CodecLike,
        config: SchedulerConfig,
        metrics: ModelMetrics,
        name: str = "",
        keeper: Keeper | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.settings = config.settings
        self.metrics = metrics
        self.rates = Rates()
        self.in_flight: TickInFlight | None = None
        self.last_tick_wall = 0.0
        self.ticks = 0
        self._codec = codec
        self._outbox = Outbox(store, self._forget)
        self._queues: Queues[Ticket] = Queues()
        self._tickets = Tickets()
        self._roster = Roster()
        self._watchers = Watchers()
        self._streaming = Streaming(self._roster, self._watchers)
        self._side = SideOperations()
        self._harvest = Harvest(codec, metrics, self.rates)
        self._worker: Worker | None = None
        self._window: int | None = None
        self._wake = trio.Event()
        self.pins = Pins(metrics, config.pin_budget_pct, lambda: self._wake.set())
        self._pool = linkw.MemCounters()  # as the last tick left it
        self._keeper = keeper
        if keeper is not None:
            keeper.attach(self.rates, lambda: self._wake.set(), self.pins.awaits_lease)
        self._orders = 0
        self._plan_seq = 0
        self._budget = self.settings.prefill_budget or ADAPTIVE_START
        self._latency_until = float("-inf")
        self._only_retired = False
        self._intake = Intake(self._queues, self._roster, self._outbox, codec, config, metrics, keeper, self._side)
        metrics.prefill_budget_tokens = self._budget

    # ---- for the facade

    @property
    def window(self) -> int | None:
        """Longest stream in tokens, as the last worker allowed; none before the first."""
        return self._window

    @property
    def max_lanes(self) -> int:
        return self._worker.max_lanes if self._worker else self.config.max_batch

    @property
    def lanes(self) -> list[Lane]:
        """The lanes as they are, oldest first; read only."""
        return self._roster.lanes

    @property
    def queue_depths(self) -> list[int]:
        """Jobs waiting per class, best class first."""
        return self._queues.depths()

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets that are not in a lane, in no certain order."""
        return list(self._queues)

    def generating(self, session: int) -> bool:
        """Whether a generation is queued or runs on the session."""
        return session in self._tickets

    def check_window(self, length: int) -> None:
        """Raises ContextExceeded when a stream of `length` tokens does not fit the window."""
        if self._window is not None and length > self._window:
            raise ContextExceeded(length, self._window)

    def submit(self, job: Job) -> Generation:
        """Queue a job. Raises ContextExceeded; ValueError when its session is already generating."""
        self.check_window(len(job.stream))
        generation = Generation(job, self._cancel, asked_by=asker())
        ticket = Ticket(
            job,
            generation,
            self._orders,
            self.ticks,
            tool_lease_ms=self.config.tool_lease_ms,
        )
        ticket.channel = job.start_channel
        if job.max_tokens <= 0:
            generation.put_end(ticket.ended(Finish.NONE))
            return generation
        self._tickets.check(job.session)
        self._orders += 1
        self._tickets.add(ticket)
        self._queues.push(ticket)
        if self._keeper is not None:
            self._keeper.began(ticket)
        if job.klass.urgent:
            self._latency_until = trio.current_time() + LATENCY_LINGER
        if job.klass.urgent or (self._worker is not None and self._roster.free(self._worker.max_lanes) > 0):
            self._raise_yield()  # it can be admitted as soon as the running tick ends
        self._wake.set()
        return generation

    def cancel(self, session: int) -> bool:
        """Stop the generation of a session; false when there is none."""
        ticket = self._tickets.of_session(session)
        if ticket is None:
            return False
        self._cancel(ticket.generation)
        return True

    async def side(self, run: Callable[[EngineLink], Awaitable[T]], klass: Class | None = None) -> T:
        """Run work on the worker between ticks: at once without a class, else in its turn. Raises WorkerGone."""
        operation = SideOperation(run, klass, self.ticks)
        self._side.add(operation)
        self._wake.set()
        if klass is None:
            self._raise_yield()
        try:
            await operation.done.wait()
        finally:
            self._side.drop(operation)
        if operation.error is not None:
            raise operation.error
        return operation.value

    def watch(self, session: int, sink: Sink) -> Callable[[], None]:
        """Hand provisional text of a session's generations to `sink` too, until the returned function is called.

        It begins with a tick: of one that runs, `sink` gets nothing.
        """
        return self._watchers.add(session, sink, self.ticks + 1 if self.in_flight else self.ticks)

    def set_background_rate(self, divisor: int) -> None:
        """Let lanes of classes 2 and 3 decode only in every `divisor`-th tick; 0 counts as 1."""
        self.settings = attrs.evolve(self.settings, background_rate=max(divisor, 1))

    def retire(self, reason: str, code: str = Failure.RETIRED) -> None:
        """Fail every lane, every queued job and every side operation with `reason`."""
        self._fail_lanes(code, reason)
        for ticket in list(self._queues):
            self._queues.remove(ticket)
            self._outbox.end(ticket, ticket.ended(Finish.ERROR, code, reason))
        self._side.fail(WorkerGone(reason))
        self._gauges()

    async def wait_idle(self) -> None:
        """Return once no generation is queued or running."""
        await self._tickets.wait_idle()

    async def wait_quiet(self, session: int) -> None:
        """Return once no generation is queued or runs on the session; its last events are durable then."""
        await self._tickets.wait_quiet(session)

    # ---- the loop

    async def run(self, link: EngineLink) -> None:
        """Serve with a worker until it is gone (raises WorkerGone) or the task is cancelled; its lanes fail then.

        Queued jobs stay for the next worker. What was staged in the log is still delivered.
        """
        worker = self._worker = Worker.open(link, self.config.max_batch, self._keeper)
        self._window = link.window
        if (limit := worker.lane_limit(self.config.max_batch)) is not None:
            log.info("%s: %s", self.name or "scheduler", limit)
        gone: WorkerGone | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver, name=f"commits:{self.name}")
            try:
                await trio.lowlevel.checkpoint()  # those who wait for this worker submit their jobs first
                await self._serve(worker)
            except WorkerGone as error:
                gone = error
                if trio.current_effective_deadline() > -math.inf:  # else the server stops, and its worker with it
                    self._intake.take_back()
                    reason = f"generation failed: the model's worker died ({error.reason})"
                    self._fail_lanes(Failure.WORKER_DIED, reason)
            finally:
                self._fail_lanes(Failure.STOPPED, "generation failed: the server stopped it")
                self._side.fail(gone or WorkerGone("the worker was stopped"))
                self._worker = None
                self._pool = linkw.MemCounters()
                self.pins.lost()
                self.in_flight = None
                self._gauges()
                self._outbox.close()
        if gone is not None:
            raise gone

    async def _deliver(self) -> None:
        with trio.CancelScope(shield=True):
            await self._outbox.run()

    async def _serve(self, worker: Worker) -> None:
        control = worker.link.control
        shared = SharedPrefixes(worker, self.rates)
        latency = False
        while True:
            if not (self._roster or self._side or self.pins.due or self._intake.ready):
                self._gauges()
                self._wake = trio.Event()
                with trio.move_on_after(self.pins.until_expiry()):
                    await self._wake.wait()
            control.yield_requested = False
            urgent = self._queues.urgent or any(lane.klass <= Class.COMPLETION for lane in self._roster)
            if latency != (urgent or trio.current_time() < self._latency_until):
                latency = control.latency = not latency
            self._settle()
            self._intake.preempt(worker)
            if self.pins.any or self.pins.due:
                worker.staged = 0 if not any(lane.new for lane in self._roster) else worker.staged
                with contained("the upkeep of pins"):
                    await self.pins.step(worker, self.ticks, self._pool)
            await self._intake.admit(worker, shared, self.ticks)
            if self._side:
                await self._side.run_due(worker.link, self.ticks, self.settings.starvation_ticks, self._better_work)
            if self._roster:
                await self._outbox.room()
                if self._keeper is not None:
                    with contained("a copy of a lane's state"):
                        await self._keeper.before_retire(worker, self._roster.lanes)
                shared.set_points(self._roster.lanes, self._queues)
                await self._tick(worker, latency)
                with contained("a shared prefix"):
                    await shared.checkpoint(self._roster.lanes)
            else:
                await trio.lowlevel.checkpoint()

    def _settle(self) -> None:
        """Stop the lanes whose caller is gone, whose time is up, or whose records could not be kept."""
        batch = Batch()
        now = trio.current_time()
        for ticket in self._tickets.expired(self._queues, now):
            self._queues.remove(ticket)
            self._intake.refuse(ticket, NotAdmitted(Finish.LENGTH, expired=ticket.job.raw))
        for lane in self._roster:
            ticket = lane.ticket
            if lane.finishing:
                continue
            if ticket.failure is not None:
                lane.stop(Finish.ERROR, *ticket.failure)
            elif ticket.cancelled:
                batch.add(ticket, ticket.ending_record(Finish.CANCELLED, self._codec))
                lane.stop(Finish.CANCELLED)
            elif ticket.past_deadline(now):
                batch.add(ticket, ticket.ending_record(Finish.LENGTH, self._codec))
                lane.stop(Finish.LENGTH)
                lane.expired = ticket.job.raw
        self._outbox.commit(batch)

    def _better_work(self, klass: Class) -> bool:
        """Whether a class better than `klass` has a lane or a job."""
        return any(lane.klass < klass for lane in self._roster) or any(self._queues[k] for k in Class if k < klass)

    # ---- one tick

    async def _tick(self, worker: Worker, latency: bool) -> None:
        self._intake.drop_unwanted(worker, self.ticks)
        if not self._roster:
            return
        self.ticks += 1
        self._streaming.tick = self.ticks
        now = Situation(
            tick=self.ticks,
            max_lanes=worker.max_lanes,
            budget=self._budget,
            adaptive=self.settings.prefill_budget == 0,
            queued=len(self._queues),
            urgent_queued=self._queues.urgent,
            latency=latency,
            only_retired=self._only_retired,
            round_granular=worker.record.round_granular,
            tick_yield=worker.record.tick_yield,
        )
        plan = plan_tick(self._roster.lanes, self.rates, self.settings, now)
        self._plan_seq += 1
        wire = self._wire(worker, plan)
        started = trio.current_time()
        self.in_flight = TickInFlight.of(plan, len(self._roster), len(wire.admits), started)
        self._gauges()
        try:
            events = await self._submit(worker, plan, wire)
        except EngineRefused as refusal:
            await self._fail_tick(worker, f"the engine refused the tick ({status_name(refusal.status)})")
            return
        except LinkFault as fault:
            await self._fail_tick(worker, str(fault))
            return
        finally:
            self.in_flight = None
        if events is None:
            return
        self.last_tick_wall = trio.current_time() - started
        try:
            await self._after(worker, plan, events)
        except RingError as error:
            await self._fail_tick(worker, f"the tick's tokens could not be read: {error}")

    def _wire(self, worker: Worker, plan: Plan[Lane]) -> linkw.TickPlan:
        return linkw.TickPlan(
            self._plan_seq,
            PlanFlag.PARTIAL_EMITS if self._streaming.wanted else 0,
            plan.budget,
            worker.max_lanes,
            [admit_of(lane) for lane in self._roster if lane.new],
            [],
            [linkw.LanePrefill(lane.tag, offset, count) for lane, offset, count in plan.prefills],
            [linkw.LaneDecode(lane.tag, grant, overshoot) for lane, grant, overshoot in plan.decodes],
            [linkw.LaneRetire(lane.tag, lane.publish) for lane in plan.retires],
        )

    async def _submit(self, worker: Worker, plan: Plan[Lane], wire: linkw.TickPlan) -> linkw.TickEvents | None:
        """Send a plan, with half of its admits again and again while they do not fit; none when nothing is left."""
        while True:
            try:
                return await worker.link.tick(wire, self._streaming.emit, self._streaming.texts())
            except WorkerGone as gone:
                for lane in self._roster:
                    lane.new = lane.new and gone.unread
                raise
            except EngineRefused as refusal:
                if refusal.status != Status.NeedsReplan or not wire.admits:
                    raise
            self._intake.defer(worker, plan, wire, self.ticks)
            if not self._roster:
                return None

    async def _after(self, worker: Worker, plan: Plan[Lane], events: linkw.TickEvents) -> None:
        """Move what a tick brought: admissions, prefill, tokens, faults, retires; then learn from it."""
        now = trio.current_time()
        worker.staged = 0
        batch = Batch()
        for result in events.admit_results:
            lane = self._roster.by_tag.get(result.lane_tag)
            if lane is None:
                continue
            lane.new = False
            if result.status == AdmitStatus.REJECTED:
                self._reject(worker, lane, result.reject_code)
            else:
                worker.count(lane, self.metrics)
        took = self._harvest.take(worker, plan, events, self._roster.by_tag, batch, now)
        self._outbox.commit(batch)
        await self._retire(worker, plan)
        age(self._roster.lanes, plan)
        prefill_s = self.rates.measure(took.prefilled, took.rounds, len(plan.decodes), events.timings)
        if self.settings.prefill_budget == 0 and took.prefilled:
            prefilling = len(plan.prefills) + len(self._queues)
            self._budget = adapt_budget(
                self._budget, self.settings.tick_target, prefilling, len(plan.decodes), prefill_s
            )
        self._only_retired = bool(plan.retires) and not plan.prefills and not plan.decodes
        self._count(plan, events, took)

    def _reject(self, worker: Worker, lane: Lane, code: int) -> None:
        """End a request whose admission the engine refused."""
        code = code - (1 << 32) if code >= 1 << 31 else code
        reason = f"generation failed: the engine refused to admit this request ({status_name(code)})"
        self._intake.unmake(worker, lane, self.ticks)
        self._outbox.end(lane.ticket, lane.ticket.ended(Finish.ERROR, Failure.ADMIT_REFUSED, reason))

    async def _retire(self, worker: Worker, plan: Plan[Lane]) -> None:
        """Let the lanes go that this tick retired, and tell their callers."""
        for lane in plan.retires:
            self._roster.remove(lane)
            if lane.publish and self.pins.any:
                self.pins.retired(lane.ticket.job.session, ids_of(lane.ticket))
            self._end(lane)
            self._intake.room_was_made()
        for lane in plan.retires:
            if lane.grammar or lane.bias:
                await worker.free(lane.grammar, lane.bias)

    def _end(self, lane: Lane) -> None:
        """A finishing lane is gone: its caller gets the end, or its place in the queue back."""
        ticket = lane.ticket
        if lane.preempted and ticket.failure is None:
            if ticket.cancelled:
                self._intake.refuse(ticket, NotAdmitted(Finish.CANCELLED))
            else:
                if ticket.thought_ended:
                    ticket.go_on()
                ticket.requeued = True
                self._queues.push_front(ticket)
            return
        self._outbox.end(
            ticket, ticket.ended(lane.finish, lane.code, lane.reason, expired=lane.expired, fault=lane.fault)
        )

    def _count(self, plan: Plan[Lane], events: linkw.TickEvents, took: Yield) -> None:
        metrics = self.metrics
        metrics.ticks_total += 1
        metrics.prefill_tokens_total += took.prefilled
        metrics.decode_tokens_total += took.tokens
        metrics.starvation_grants_total += plan.starving_grants
        metrics.pool_blocks_used = events.mem.pool_blocks_used
        self._pool = events.mem
        metrics.pool_blocks_total = events.mem.pool_blocks_total
        metrics.prefill_budget_tokens = self._budget
        if plan.rounds:
            metrics.decode_grant_tokens = plan.rounds
        self._gauges()

    def _gauges(self) -> None:
        self.metrics.lanes_active = len(self._roster)
        self.metrics.queue_depth = self._queues.depths()

    # ---- failures and cancels

    async def _fail_tick(self, worker: Worker, reason: str) -> None:
        """A tick was refused or failed: its lanes end, and are retired in a plan of their own."""
        retires = [linkw.LaneRetire(lane.tag, lane.publish) for lane in self._roster if not lane.new]
        for lane in [lane for lane in self._roster if lane.new and lane.seed]:
            worker.link.seed_release(lane.seed)
        held = [lane for lane in self._roster if lane.grammar or lane.bias]
        self._fail_lanes(Failure.TICK_FAILED, f"generation failed: {reason}")
        log.warning("%s: %s", self.name or "scheduler", reason)
        if retires:
            self._plan_seq += 1
            self.ticks += 1
            plan = linkw.TickPlan(self._plan_seq, 0, self._budget, worker.max_lanes, retires=retires)
            try:
                await worker.link.tick(plan, self._streaming.emit)
            except (EngineRefused, LinkFault) as error:
                log.warning("%s: the lanes of a failed tick could not be retired: %s", self.name or "scheduler", error)
        for lane in held:
            await worker.free(lane.grammar, lane.bias)

    def _fail_lanes(self, code: str, reason: str) -> None:
        """End every lane with an error; a finishing one ends as it was. What a tick has shown is kept in the log."""
        lanes = self._roster.clear()
        batch = Batch()
        for lane in lanes:
            if lane.finishing:
                continue
            ticket = lane.ticket
            if lane.streamed:
                ticket.produced += lane.streamed
                batch.add(ticket, ticket.records(lane.streamed, Finish.ERROR, True, self._codec))
            lane.stop(Finish.ERROR, code, reason)
        self._outbox.commit(batch)
        for lane in lanes:
            self._end(lane)

    def _cancel(self, generation: Generation) -> None:
        ticket = self._tickets.of(generation)
        if ticket is None or ticket.cancelled:
            return
        ticket.cancelled = True
        if self._queues.remove(ticket):
            self._intake.refuse(ticket, NotAdmitted(Finish.CANCELLED))
            self.metrics.queue_depth = self._queues.depths()
        else:
            self._raise_yield()
            self._wake.set()

    def _raise_yield(self) -> None:
        if self._worker is not None and self._roster:
            self._worker.link.control.yield_requested = True

    def _forget(self, ticket: Ticket) -> None:
        """A ticket's end is about to be told."""
        self._tickets.forget(ticket)
        if self._keeper is not None:
            self._keeper.ended(ticket)
