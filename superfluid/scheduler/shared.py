"""Shared prefixes: a queued job waits for the lane that prefills its prefix, and is seeded from a copy of it."""

from collections.abc import Iterable, Sequence
from enum import Enum

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link import linkw
from superfluid.link.codes import FORK_PRIVATE, Status
from superfluid.scheduler.admission import Worker
from superfluid.scheduler.lanes import Lane, Ticket
from superfluid.scheduler.link import EngineRefused, LinkFault
from superfluid.scheduler.rates import PREFILL_SAMPLE, Rates

WAIT_TICKS = 64
"""Longest wait for a leader, from the enqueue."""

WORTH_TOKENS = 1024
WORTH_SECONDS = 0.5
"""A prefix worth waiting for: so many tokens, or so many seconds of prefill."""

NEAR_END = 64
"""Tokens a leader may have left where only its retire publishes the prefix."""

TURN_POINT_LEAST = 128
TURN_POINTS_TRACKED = 64


class Verdict(Enum):
    GO = 0
    HOLD = 1
    PUBLISH = 2  # the leader holds the prefix: copy it, then go


@attrs.frozen
class Decision:
    verdict: Verdict
    leader: Lane | None = None
    length: int = 0


GO = Decision(Verdict.GO)


class SharedPrefixes:
    """What lanes of one worker share with the jobs behind them, and the copies that were published for it."""

    def __init__(self, worker: Worker, rates: Rates) -> None:
        self._worker = worker
        self._rates = rates
        self._enabled = worker.spaces.cached and not worker.spaces.unservable
        self._can_copy = True
        self._head_only = not (worker.record.shared_prefix_seed and worker.record.rollback)
        self._turns: dict[bytes, npt.NDArray[np.uint32]] = {}

    # ---- followers

    def decide(self, ticket: Ticket, lanes: Sequence[Lane], tick: int) -> Decision:
        """Whether a job at the head goes now, waits for a lane, or needs a lane's prefix published first."""
        if (
            not self._enabled
            or not lanes
            or ticket.klass.urgent
            or ticket.requeued
            or ticket.cancelled
            or ticket.exclusive
            or tick - ticket.enqueued_tick >= WAIT_TICKS
        ):
            return GO
        best = GO
        for lane in lanes:
            if lane.preempted or lane.media or lane.exclusive or lane.ticket.job.fim:
                continue
            length = self._share(ticket, lane)
            if length > best.length and self._worth(length) and length > lane.seeded and length > lane.published:
                verdict = self._verdict(lane, length)
                if verdict is not Verdict.GO:
                    best = Decision(verdict, lane, length)
        return best

    def _verdict(self, lane: Lane, length: int) -> Verdict:
        if lane.finishing and not self._head_only:
            return Verdict.HOLD  # its retire publishes the prefix in this tick
        if not self._can_copy or lane.unshared:
            near = not self._head_only and lane.left <= NEAR_END and not lane.prefilling
            return Verdict.HOLD if near else Verdict.GO
        if self._head_only:
            # a copy is as long as the state: only a lane that has yet to come to the point can stop there
            return Verdict.HOLD if lane.prefilled < length < lane.prefill_end - 1 else Verdict.GO
        return Verdict.HOLD if lane.prefilled < length else Verdict.PUBLISH

    def _share(self, ticket: Ticket, lane: Lane) -> int:
        """Tokens of a lane's prompt that a job begins with, in whole pages and short of the job's last token."""
        length = ticket.shares.get(lane.tag)
        if length is None:
            length = ticket.shares[lane.tag] = common_prefix(ticket.ids, lane.ticket.ids)
        length = min(length, ticket.stream_len - 1, lane.prompt_len)
        return length - length % self._worker.spaces.page

    def _worth(self, length: int) -> bool:
        if length >= WORTH_TOKENS or self._head_only:
            return length >= WORTH_TOKENS
        seconds = self._rates.prefill_seconds(length)
        # an engine that nothing is known of may be a slow one; what it is waited for will tell
        return length >= PREFILL_SAMPLE if seconds is None else seconds > WORTH_SECONDS

    # ---- leaders

    def set_points(self, lanes: Iterable[Lane], queued: Iterable[Ticket]) -> None:
        """On an engine that cuts state only at its head: where the next prefill chunk of each lane must stop."""
        if not (self._enabled and self._head_only and self._can_copy):
            return
        waiting: list[Ticket] | None = None
        for lane in lanes:
            lane.stop_at = None
            if not lane.prefilling or lane.media or lane.preempted or lane.unshared or lane.ticket.job.fim:
                continue
            waiting = list(queued) if waiting is None else waiting
            shares = (
                length
                for length in (self._share(ticket, lane) for ticket in waiting if not ticket.klass.urgent)
                if length >= WORTH_TOKENS
                and max(lane.prefilled, lane.published) < length < lane.prefill_end - 1
                and length > lane.seeded
            )
            shared = min(shares, default=None)
            turn = self._turn_point(lane)
            lane.stop_at = min((point for point in (shared, turn) if point is not None), default=None)

    def _turn_point(self, lane: Lane) -> int | None:
        point = lane.ticket.job.turn_point
        if point is None or lane.ticket.produced:
            return None
        fits = TURN_POINT_LEAST <= point < lane.prefill_end - 1 and point > lane.prefilled and point != lane.seeded
        return point if fits else None

    async def checkpoint(self, lanes: Iterable[Lane]) -> None:
        """After a tick: copy and publish the lanes that stopped at their point. Raises WorkerGone."""
        for lane in lanes:
            if lane.stop_at is None or lane.prefilled != lane.stop_at or lane.finishing:
                continue
            private = lane.stop_at == lane.ticket.job.turn_point
            if await self.publish(lane, lane.stop_at, private=private) and private:
                await self._track_turn(lane.ticket.ids[: lane.stop_at])

    async def _track_turn(self, turn: npt.NDArray[np.uint32]) -> None:
        """Drop the turn checkpoints that a newer one extends: a chat holds one."""
        for key, older in list(self._turns.items()):
            if len(older) < len(turn) and np.array_equal(older, turn[: len(older)]):
                del self._turns[key]
                if self._worker.can_stage:
                    await self._ask(linkw.UnpublishReq(self._worker.stage(older)))
        self._turns[turn.tobytes()] = turn
        while len(self._turns) > TURN_POINTS_TRACKED:
            del self._turns[next(iter(self._turns))]

    async def publish(self, lane: Lane, length: int, *, private: bool = False) -> bool:
        """Publish a copy of a lane's state under its first `length` tokens; whether that worked. Raises WorkerGone.

        An engine that cannot fork is not asked again; any other failure loses only this copy.
        """
        lane.published = max(lane.published, length)
        if not self._can_copy or not self._worker.can_stage:
            return False
        sequence = await self._ask(linkw.LaneSequenceReq(lane.tag))
        if not isinstance(sequence, linkw.LaneSequenceOk):
            return False
        fork = await self._ask(linkw.ForkReq(sequence.sequence, FORK_PRIVATE if private else 0))
        if not isinstance(fork, linkw.ForkOk):
            self._can_copy = self._can_copy and fork != Status.Unsupported
            lane.unshared = True
            return False
        span = self._worker.stage(lane.ticket.ids[:length])
        if isinstance(await self._ask(linkw.PublishSequenceReq(fork.child_sequence, span)), linkw.PublishSequenceOk):
            return True
        await self._ask(linkw.FreeSequenceReq(fork.child_sequence))
        lane.unshared = True
        return False

    async def _ask(self, request: linkw.StateSyncReq) -> linkw.StateSyncOk | int:
        """The answer, or the status of a refusal."""
        try:
            return await self._worker.link.sync(request)
        except EngineRefused as refusal:
            return refusal.status
        except LinkFault:
            return Status.Fatal


def common_prefix(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> int:
    """How many ids two streams begin with in common."""
    length = min(len(left), len(right))
    differing = left[:length] != right[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length
