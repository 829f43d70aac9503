"""Taking in what a tick brought: prefill that ran, tokens, faults; records for the log, times and counts."""

from collections.abc import Mapping

import attrs

from superfluid.link.codes import SHED_PREFILL
from superfluid.link.events import Finish
from superfluid.link.linkw import LaneFault, TickEvents
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.admission import Worker
from superfluid.scheduler.generation import CodecLike, Failure
from superfluid.scheduler.lanes import Lane, Ticket
from superfluid.scheduler.outbox import Batch
from superfluid.scheduler.planner import Plan
from superfluid.scheduler.rates import Rates
from superfluid.scheduler.reading import logprobs_by_lane


@attrs.define
class Yield:
    """What ran: prompt tokens prefilled, the longest lane's decode rounds, tokens made."""

    prefilled: int = 0
    rounds: int = 0
    tokens: int = 0


class Harvest:
    """Moves lanes on by a tick's events and gathers their records."""

    def __init__(self, codec: CodecLike, metrics: ModelMetrics, rates: Rates) -> None:
        self._codec = codec
        self._metrics = metrics
        self._rates = rates

    def take(
        self,
        worker: Worker,
        plan: Plan[Lane],
        events: TickEvents,
        lanes: Mapping[int, Lane],
        batch: Batch,
        now: float,
    ) -> Yield:
        """Take in a tick that ended at `now`. Raises RingError when its tokens cannot be read."""
        took = Yield(prefilled=_count_prefill(plan, events))
        for fault in events.faults:
            if (lane := lanes.get(fault.lane_tag)) is not None and not lane.finishing:
                self._break(lane, fault, batch)
        if events.emits:
            self._take_emits(worker, plan, events, lanes, batch, now, took)
        return took

    def _break(self, lane: Lane, fault: LaneFault, batch: Batch) -> None:
        """A lane faulted: what it has shown is kept, and its caller is told."""
        ticket = lane.ticket
        ticket.produced += lane.streamed
        batch.add(ticket, ticket.records(lane.streamed, Finish.NONE, False, self._codec))
        batch.add(ticket, ticket.ending_record(Finish.ERROR, self._codec))
        lane.streamed = []
        reason = f"generation failed: the lane faulted (code {fault.code}, detail {fault.detail})"
        lane.stop(Finish.ERROR, Failure.FAULT, reason)
        lane.fault = fault.code

    def _take_emits(
        self,
        worker: Worker,
        plan: Plan[Lane],
        events: TickEvents,
        lanes: Mapping[int, Lane],
        batch: Batch,
        now: float,
        took: Yield,
    ) -> None:
        codec, metrics, terminators = self._codec, self._metrics, self._codec.terminators
        grants = {lane.tag: grant for lane, grant, _ in plan.decodes}
        # a round-granular engine draws every token in a decode round, others the first one from the prefill
        from_prefill = set() if worker.record.round_granular else {lane.tag for lane, _, _ in plan.prefills}
        asking = any(lane.ticket.job.logprobs is not None for lane in lanes.values())
        logprobs = logprobs_by_lane(events.logprobs) if asking else {}
        for emit in events.emits:
            lane = lanes.get(emit.lane_tag)
            if lane is None or lane.finishing:
                continue
            count, finish, ticket = emit.n_tokens, emit.finish, lane.ticket
            if count == 0 and finish == Finish.NONE:
                lane.replay = max(lane.replay - grants.get(lane.tag, 0), 0)
                continue
            tokens = worker.link.read_tokens(emit.token_ref) if count else []
            spec = emit.spec
            if spec.proposed:
                metrics.spec_proposed_total += spec.proposed
                metrics.spec_accepted_total += spec.accepted
            took.rounds = max(took.rounds, count - spec.accepted - (lane.tag in from_prefill))
            took.tokens += count
            lane.replay = 0
            lane.left -= count
            ticket.produced += tokens
            lane.streamed = []
            if finish == Finish.NONE:
                if terminators and not ticket.job.ignore_eos and not terminators.isdisjoint(tokens):
                    finish = Finish.EOS
                elif lane.left <= 0 < ticket.left:
                    finish = Finish.LENGTH
            last = finish != Finish.NONE or lane.left <= 0
            asked = logprobs.get(lane.tag) if ticket.job.logprobs is not None else None
            batch.add(ticket, ticket.records(tokens, finish, last, codec), asked.read(tokens) if asked else None)
            if last:
                lane.stop(finish)
            elif ticket.thought_spent:
                batch.add(ticket, ticket.end_thought())
                lane.stop(Finish.NONE)
                lane.preempted = True  # it goes on from there in a lane of its own
            if tokens:
                self._time(ticket, count, len(plan.decodes), now)
            if last and ticket.job.early_end:
                batch.end(ticket, ticket.ended(finish))

    def _time(self, ticket: Ticket, count: int, lanes: int, now: float) -> None:
        if ticket.ttft is None:
            first = ticket.first_token_at
            if first is None:  # not streamed: the tick's end less the rounds after the first
                first = now - (self._rates.round_seconds(lanes) or 0.0) * (count - 1)
            ticket.ttft = ticket.generation.ttft = max(first - ticket.admitted_at, 0.0)
            ticket.first_tick_end, ticket.first_tick_tokens = now, count
            self._metrics.ttft_seconds.observe(ticket.ttft)
        ticket.last_tick_end = now


def _count_prefill(plan: Plan[Lane], events: TickEvents) -> int:
    """Move lanes on by what was prefilled; what was shed is planned again. Prompt tokens that ran."""
    if not plan.prefills:
        return 0
    shed: dict[int, int] = {}
    for entry in events.shed.entries:
        if entry.kind == SHED_PREFILL:
            shed[entry.lane_tag] = shed.get(entry.lane_tag, 0) + entry.tokens
    total = 0
    for lane, _, count in plan.prefills:
        done = max(count - shed.get(lane.tag, 0), 0)
        lane.prefilled += done
        total += done
    return total
