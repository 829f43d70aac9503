"""From the queues into lanes, and back: jobs that a worker takes, and lanes that it never saw."""

import logging

from superfluid.link import linkw
from superfluid.link.events import Finish
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.admission import NotAdmitted, NotYet, Worker
from superfluid.scheduler.classes import Class
from superfluid.scheduler.config import SchedulerConfig
from superfluid.scheduler.generation import CodecLike, Failure
from superfluid.scheduler.keeping import Keeper
from superfluid.scheduler.lanes import Lane, Ticket
from superfluid.scheduler.link import WorkerGone
from superfluid.scheduler.outbox import Batch, Outbox
from superfluid.scheduler.planner import Plan, preemptible
from superfluid.scheduler.queue import Queues
from superfluid.scheduler.roster import Roster
from superfluid.scheduler.shared import SharedPrefixes, Verdict
from superfluid.scheduler.side import SideOperation, SideOperations, contained

log = logging.getLogger(__name__)

DEFERRED_TICKS = 4
"""Ticks without admissions after the engine had no room for one, unless a lane retires before."""


class Intake:
    """Makes lanes of queued jobs, and takes back what did not come to run. `tick` is the number of the last tick."""

    def __init__(
        self,
        queues: Queues[Ticket],
        roster: Roster,
        outbox: Outbox,
        codec: CodecLike,
        config: SchedulerConfig,
        metrics: ModelMetrics,
        keeper: Keeper | None,
        side: SideOperations,
    ) -> None:
        self._queues = queues
        self._roster = roster
        self._outbox = outbox
        self._codec = codec
        self._config = config
        self._metrics = metrics
        self._keeper = keeper
        self._side = side
        self._not_before = 0  # the tick in which admissions go on

    @property
    def ready(self) -> bool:
        """Whether a job is queued that does not wait for a file."""
        return any(not self._loading(ticket) for ticket in self._queues)

    def preempt(self, worker: Worker) -> None:
        """Take a lane from the worst class when a job of class 0 or 1 finds none free."""
        if not self._config.preemption or self._roster.free(worker.max_lanes) > 0 or not self._queues.urgent:
            return
        held, caps = self._roster.held(), self._config.class_lanes
        waiting = next((klass for klass in Class if self._queues[klass]), None)
        if waiting is None or not waiting.urgent or held[waiting] >= caps.get(waiting, worker.max_lanes + 1):
            return
        victims = [lane for lane in self._roster if lane.klass > waiting and preemptible(lane)]
        if victims:
            lane = max(victims, key=lambda lane: (not lane.prefilling, lane.klass, lane.tag))
            lane.stop(Finish.NONE)
            lane.preempted = True
            self._metrics.preemptions_total += 1

    async def admit(self, worker: Worker, shared: SharedPrefixes, tick: int) -> None:
        """Make lanes of queued jobs while one is free."""
        if not self._queues or (self._roster and tick < self._not_before):
            return
        if not any(lane.new for lane in self._roster):
            worker.staged = 0
        held: list[Ticket] = []
        try:
            while self._roster.free(worker.max_lanes) > 0 and worker.can_stage:
                if any(lane.exclusive and not lane.preempted for lane in self._roster):
                    return
                ticket = self._queues.pop_next(
                    tick, self._config.settings.starvation_ticks, self._roster.held(), self._config.class_lanes
                )
                if ticket is None:
                    return
                decision = shared.decide(ticket, self._roster.lanes, tick)
                if decision.verdict is Verdict.HOLD or self._loading(ticket):
                    held.append(ticket)
                    continue
                try:
                    if decision.verdict is Verdict.PUBLISH and decision.leader is not None:
                        with contained("a shared prefix"):
                            await shared.publish(decision.leader, decision.length)
                    lane = await worker.place(ticket, self._roster.next_tag())
                except NotAdmitted as end:
                    self.refuse(ticket, end)
                except NotYet:
                    held.append(ticket)
                except WorkerGone:
                    self._queues.push_front(ticket)
                    raise
                except Exception as error:  # one job's bug is not every job's end
                    log.exception("a job is not admitted")
                    why = f"internal error: {type(error).__name__}: {error}"
                    self.refuse(ticket, NotAdmitted(Finish.ERROR, Failure.ADMIT_REFUSED, why))
                except BaseException:
                    self._queues.push_front(ticket)
                    raise
                else:
                    self._roster.add(lane)
        finally:
            for ticket in reversed(held):
                self._queues.push_front(ticket)

    def _loading(self, ticket: Ticket) -> bool:
        """Whether a ticket waits for the file of a state that it starts from."""
        return self._keeper is not None and not ticket.cancelled and self._keeper.loading(ticket)

    def refuse(self, ticket: Ticket, end: NotAdmitted) -> None:
        """End a ticket that did not become a lane; one that ran before leaves a record of its end."""
        if end.code is None and (ticket.made or end.finish == Finish.LENGTH):
            batch = Batch()
            batch.add(ticket, ticket.ending_record(end.finish, self._codec))
            self._outbox.commit(batch)
        self._outbox.end(ticket, ticket.ended(end.finish, end.code, end.reason, expired=end.expired))

    def drop_unwanted(self, worker: Worker, tick: int) -> None:
        """Forget new lanes whose caller went away while they were made."""
        for lane in [lane for lane in self._roster if lane.new and lane.ticket.cancelled]:
            self.unmake(worker, lane, tick)
            self.refuse(lane.ticket, NotAdmitted(Finish.CANCELLED))

    def unmake(self, worker: Worker, lane: Lane, tick: int) -> None:
        """Take back a lane that the engine never saw."""
        self._roster.remove(lane)
        if lane.seed:
            worker.link.seed_release(lane.seed)
        if lane.grammar or lane.bias:
            self._free_later(worker, lane, tick)

    def _free_later(self, worker: Worker, lane: Lane, tick: int) -> None:
        grammar, bias = lane.grammar, lane.bias
        self._side.add(SideOperation(lambda _: worker.free(grammar, bias), None, tick))

    def defer(self, worker: Worker, plan: Plan[Lane], wire: linkw.TickPlan, tick: int) -> None:
        """Put the second half of a plan's admits back at the head of their queues."""
        keep = len(wire.admits) // 2
        alone = len(wire.admits) == len(self._roster) == 1
        out = [self._roster.by_tag[admit.lane_tag] for admit in wire.admits[keep:]]
        tags = {lane.tag for lane in out}
        del wire.admits[keep:]
        wire.prefills = [chunk for chunk in wire.prefills if chunk.lane_tag not in tags]
        wire.decodes = [grant for grant in wire.decodes if grant.lane_tag not in tags]
        plan.prefills = [chunk for chunk in plan.prefills if chunk[0].tag not in tags]
        plan.decodes = [grant for grant in plan.decodes if grant[0].tag not in tags]
        for lane in reversed(out):
            self.unmake(worker, lane, tick)
            ticket = lane.ticket
            if alone and not lane.seed:
                reason = f"generation failed: the engine has no room for a prompt of {lane.prompt_len} tokens"
                self._outbox.end(ticket, ticket.ended(Finish.ERROR, Failure.TOO_LARGE, reason))
                continue
            ticket.cold = ticket.cold or alone
            ticket.requeued = True
            self._queues.push_front(ticket)
            self._metrics.admits_deferred_total += 1
        if not alone:
            self._not_before = tick + DEFERRED_TICKS

    def take_back(self) -> None:
        """Put the lanes that the worker never saw back at the head of their queues, for the next worker."""
        for lane in [lane for lane in reversed(self._roster.lanes) if lane.new]:
            self._roster.remove(lane)
            if lane.ticket.cancelled:
                self.refuse(lane.ticket, NotAdmitted(Finish.CANCELLED))
            else:
                lane.ticket.requeued = True
                self._queues.push_front(lane.ticket)

    def room_was_made(self) -> None:
        """A lane was retired: admissions need not wait any longer."""
        self._not_before = 0
