"""Planning a tick: a pure function of lanes, queues, learned rates and settings to what each lane does next."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs

from superfluid.scheduler.classes import Class
from superfluid.scheduler.rates import Rates

FREE_TARGET = 0.25
"""Longest tick in seconds while a lane is free or finishing. Who comes in meanwhile ends it at its next step."""

BUSY_TARGET_ROUND_GRANULAR = 0.25
FLOOR = {False: 32, True: 4}
"""Decode rounds of a tick whose speed is not known yet."""

LEAST = {False: 8, True: 1}
"""Fewest decode rounds beside prefill, and after a tick that only retired."""

MOST_ROUNDS = 256
MOST_OVERSHOOT = 16
MEDIA_BUDGET = 4096
FIRST_PROMPT_REST = 256
"""Prompt tokens that may follow the first prompt that completes, however short that one was."""

PREFILL_SHARE, URGENT_SHARE = 0.25, 2.0
"""Decode time beside prefill, as a share of the prefill's; urgent when a class 0 or 1 lane decodes."""


@attrs.define(eq=False)
class PlannedLane:
    """What the planner reads of a lane. Lengths and offsets are in tokens of its prompt; tags grow with age.

    `prefill_end` is where its prompt's prefill stops; the `replay` tokens behind it are fed by decode grants.
    `left` tokens are still to be produced. `stop_at` is the next point at which a prefill chunk must stop.
    """

    tag: int
    klass: int
    prompt_len: int
    prefill_end: int
    left: int
    prefilled: int = 0
    replay: int = 0
    finishing: bool = False
    preempted: bool = False
    exclusive: bool = False
    media: bool = False
    stop_at: int | None = None
    prefill_starved: int = 0
    decode_starved: int = 0

    @property
    def prefill_left(self) -> int:
        return self.prefill_end - self.prefilled

    @property
    def prefilling(self) -> bool:
        return not self.finishing and self.prefilled < self.prefill_end


L = TypeVar("L", bound=PlannedLane)


@attrs.frozen
class Settings:
    """Operator settings the planner obeys. `prefill_budget` 0 is adaptive, `decode_budget` none is by lane count."""

    tick_target: float = 2.0
    prefill_budget: int = 4096
    decode_budget: int | None = None
    starvation_ticks: int = 8
    background_rate: int = 1


@attrs.frozen
class Situation:
    """The rest of what a plan depends on. `budget` is the live prefill budget, `tick` this tick's number.

    `latency`: someone latency-sensitive is around; `only_retired`: the last tick retired lanes and did nothing else.
    """

    tick: int
    max_lanes: int
    budget: int
    adaptive: bool = False
    queued: int = 0
    urgent_queued: bool = False
    latency: bool = False
    only_retired: bool = False
    round_granular: bool = False
    tick_yield: bool = False


@attrs.define
class Plan(Generic[L]):
    """One tick: chunks are (lane, offset, tokens), grants (lane, tokens, overshoot)."""

    target: float
    budget: int
    prefills: list[tuple[L, int, int]]
    decodes: list[tuple[L, int, int]]
    retires: list[L]
    rounds: int = 0
    starving_grants: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum(count for _, _, count in self.prefills)


def plan_tick(lanes: Sequence[L], rates: Rates, settings: Settings, now: Situation) -> Plan[L]:
    """Plan the next tick for the lanes of a model; nothing is changed."""
    retires = [lane for lane in lanes if lane.finishing]
    occupied = sum(1 for lane in lanes if not lane.preempted)
    free = now.max_lanes - occupied
    target = tick_target(settings.tick_target, now.round_granular, relaxed=free <= 0 and not retires)
    prefilling = [lane for lane in lanes if lane.prefilling]
    budget = prefill_budget(lanes, prefilling, free, rates, now)
    chunks = deal_prefill(prefilling, budget, settings.starvation_ticks)
    ready = ready_lanes(lanes, chunks, settings.background_rate, now.tick)
    plan = Plan(target, budget, chunks, [], retires)
    if ready and not (retires and not chunks):
        plan.rounds = decode_rounds(ready, plan.prefill_tokens, rates, target, now)
        grant_decodes(plan, ready, settings)
    return plan


def tick_target(target: float, round_granular: bool, relaxed: bool) -> float:
    """Seconds a tick should last; `relaxed` when every lane is busy and nobody waits for one to retire."""
    if not relaxed:
        return min(target, FREE_TARGET)
    return min(target, BUSY_TARGET_ROUND_GRANULAR) if round_granular else target


def preemptible(lane: PlannedLane) -> bool:
    """Whether some better job could take this lane's place."""
    return lane.klass > Class.INTERACTIVE and not (lane.finishing or lane.exclusive or lane.media)


def prefill_budget(
    lanes: Sequence[PlannedLane], prefilling: Sequence[PlannedLane], free: int, rates: Rates, now: Situation
) -> int:
    """Prompt tokens the tick may prefill."""
    if any(lane.media for lane in prefilling):
        return MEDIA_BUDGET
    if now.max_lanes > 1 and (free > 0 or now.urgent_queued or any(map(preemptible, lanes))):
        return min(now.budget, _open_cap(rates, now))
    pace = rates.prefill_s
    if pace is None:
        return now.budget
    lone = prefilling[0] if len(lanes) == len(prefilling) == 1 and not now.queued else None
    if lone is not None and now.adaptive:
        return max(now.budget, _work(8.0, pace, 16_384))
    limit = _work(8.0, pace, 4096)
    if lone is not None and lone.prefill_left > (longer := _work(16.0, pace, 4096)):
        limit = longer
    return min(now.budget, limit)


def _work(seconds: float, pace: float, most: int) -> int:
    """Tokens of so many seconds' prefill, within 512..most."""
    return int(min(max(seconds / pace, 512), most))


def _open_cap(rates: Rates, now: Situation) -> int:
    """Prefill of a tick that someone better may be waiting behind."""
    pace = rates.slow_prefill()
    if rates.bulk_ticks < 2 or pace is None:
        return 512
    seconds = 2.0 if now.tick_yield and not now.latency else 0.5
    tokens = int(min(max(seconds / pace, 128), 1024))
    return tokens - tokens % (512 if tokens >= 512 else 128)


def deal_prefill(lanes: Sequence[L], budget: int, starvation_ticks: int) -> list[tuple[L, int, int]]:
    """Deal the budget over the prefilling lanes: starving first, then class, then the shortest rest."""
    order = sorted(
        lanes, key=lambda lane: (lane.prefill_starved < starvation_ticks, lane.klass, lane.prefill_left, lane.tag)
    )
    chunks: list[tuple[L, int, int]] = []
    completed = False
    barrier: int = Class.BACKGROUND
    for lane in order:
        if budget <= 0:
            break
        if lane.klass > barrier:
            continue
        stop = lane.prefill_end
        if lane.stop_at is not None and lane.prefilled < lane.stop_at < stop:
            stop = lane.stop_at
        count = min(stop - lane.prefilled, budget)
        chunks.append((lane, lane.prefilled, count))
        budget -= count
        if count < lane.prefill_left:
            continue
        if not completed:
            completed = True
            budget = min(budget, max(count, FIRST_PROMPT_REST))
        if lane.klass <= Class.COMPLETION:
            barrier = min(barrier, lane.klass)
    return chunks


def ready_lanes(lanes: Sequence[L], chunks: Sequence[tuple[L, int, int]], background_rate: int, tick: int) -> list[L]:
    """Lanes that may decode in this tick: their prompt is prefilled to its end when its decodes come."""
    ending = {lane.tag for lane, offset, count in chunks if offset + count == lane.prefill_end}
    held_back = tick % max(background_rate, 1) != 0
    return [
        lane
        for lane in lanes
        if not lane.finishing
        and (lane.prefilled == lane.prefill_end or lane.tag in ending)
        and lane.left > 0
        and not (held_back and lane.klass >= Class.AGENT)
    ]


def decode_rounds(
    ready: Sequence[PlannedLane], prefill_tokens: int, rates: Rates, target: float, now: Situation
) -> int:
    """Decode rounds each ready lane is granted in this tick."""
    floor, least = FLOOR[now.round_granular], LEAST[now.round_granular]
    round_s = rates.round_seconds(len(ready))
    prefill_s = rates.prefill_seconds(prefill_tokens)
    if round_s is None or (prefill_tokens and prefill_s is None):
        rounds = floor
    elif prefill_tokens:
        share = URGENT_SHARE if any(lane.klass <= Class.COMPLETION for lane in ready) else PREFILL_SHARE
        rounds = int(min(max((prefill_s or 0.0) * share / round_s, least), MOST_ROUNDS))
    else:
        rounds = int(min(max(target / round_s, floor), MOST_ROUNDS))
    if not prefill_tokens:
        rounds = min(rounds, max(min(lane.left + lane.replay for lane in ready), least))
        if now.only_retired:
            rounds = min(rounds, least)
    return rounds


def grant_decodes(plan: Plan[L], ready: Sequence[L], settings: Settings) -> None:
    """Deal the rounds out: starving lanes first, then class, then age."""
    total = len(ready) * plan.rounds if settings.decode_budget is None else settings.decode_budget
    bound = settings.starvation_ticks
    for lane in sorted(ready, key=lambda lane: (lane.decode_starved < bound, lane.klass, lane.tag)):
        grant = min(lane.left + lane.replay, plan.rounds, total)
        if grant <= 0:
            break
        total -= grant
        plan.decodes.append((lane, grant, min(lane.left + lane.replay - grant, MOST_OVERSHOOT)))
        plan.starving_grants += lane.decode_starved >= bound


def age(lanes: Sequence[L], plan: Plan[L]) -> None:
    """Count what the tick passed over: prefill behind a younger lane's, and lanes ready but without a grant."""
    served = {lane.tag for lane, _, _ in plan.prefills}
    youngest = max(served, default=0)
    granted = {lane.tag for lane, _, _ in plan.decodes}
    for lane in lanes:
        if lane.finishing:
            continue
        if lane.tag in served:
            lane.prefill_starved = 0
        elif lane.prefilling and lane.tag < youngest:
            lane.prefill_starved += 1
        if lane.tag in granted:
            lane.decode_starved = 0
        elif granted and not lane.prefilling and lane.tag not in served:
            lane.decode_starved += 1
