"""The planner: exact examples of its rules, and properties over any lanes."""

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.link.linkw import TickTimings
from superfluid.scheduler.planner import (
    PlannedLane,
    Settings,
    Situation,
    age,
    deal_prefill,
    plan_tick,
    prefill_budget,
    tick_target,
)
from superfluid.scheduler.rates import Rates, adapt_budget

BUSY = Situation(tick=1, max_lanes=1, budget=4096)


def lane(tag: int, left: int = 100, *, klass: int = 2, prefill: int = 0, **more: object) -> PlannedLane:
    """A lane with `prefill` prompt tokens still to do and `left` tokens to produce."""
    made = PlannedLane(tag, klass, prompt_len=prefill + 8, prefill_end=prefill + 8, left=left, prefilled=8)
    return attrs.evolve(made, **more)  # type: ignore[arg-type]


def counts(lanes: list[PlannedLane], budget: int = 4096) -> list[int]:
    """What each lane gets, in the order the lanes were given."""
    dealt = {lane.tag: count for lane, _, count in deal_prefill(lanes, budget, 8)}
    return [dealt.get(lane.tag, 0) for lane in lanes]


def rates(round_s: float | None = 0.01, prefill_s: float | None = 0.005, lanes: int = 1) -> Rates:
    made = Rates(prefill_s=prefill_s, bulk_s=prefill_s, bulk_last=prefill_s, bulk_ticks=2)
    if round_s is not None:
        made.round_s[lanes] = round_s
    return made


@pytest.mark.parametrize(
    ("remainders", "dealt"),
    [
        ([500, 4000, 4000], [500, 500, 0]),
        ([40, 4000, 4000], [40, 256, 0]),
    ],
)
def test_after_the_first_prompt_that_completes_the_rest_is_cut(remainders: list[int], dealt: list[int]) -> None:
    assert counts([lane(tag, prefill=n) for tag, n in enumerate(remainders, 1)]) == dealt


def test_the_cut_is_at_the_first_completing_prompts_chunk() -> None:
    # a starving lane goes first, so that 1000 completes before the shorter ones
    lanes = [
        lane(1, prefill=1000, prefill_starved=8),
        lane(2, prefill=300),
        lane(3, prefill=200),
        lane(4, prefill=4000),
    ]
    assert counts(lanes) == [1000, 300, 200, 500]


def test_prefill_order_is_starving_class_rest_tag() -> None:
    lanes = [
        lane(1, prefill=10, klass=3),
        lane(2, prefill=30, klass=2),
        lane(3, prefill=20, klass=2),
        lane(4, prefill=20, klass=2),
        lane(5, prefill=4000, klass=3, prefill_starved=8),
    ]
    assert [chunk[0].tag for chunk in deal_prefill(lanes, 16_384, 8)] == [5, 3, 4, 2, 1]


def test_behind_an_urgent_prompt_that_completes_nothing_worse_is_prefilled() -> None:
    lanes = [lane(1, prefill=100, klass=0), lane(2, prefill=100, klass=0), lane(3, prefill=10, klass=1)]
    assert counts(lanes) == [100, 100, 0]


def test_a_chunk_stops_at_a_checkpoint() -> None:
    assert counts([lane(1, prefill=1000, stop_at=508)]) == [500]
    assert counts([lane(1, prefill=1000, stop_at=8)]) == [1000]


@pytest.mark.parametrize(
    ("round_granular", "relaxed", "target"),
    [(False, False, 0.25), (True, False, 0.25), (False, True, 2.0), (True, True, 0.25)],
)
def test_target_length(round_granular: bool, relaxed: bool, target: float) -> None:
    assert tick_target(2.0, round_granular, relaxed) == target
    assert tick_target(0.01, round_granular, relaxed) == 0.01


def test_an_open_tick_prefills_512_until_two_bulk_ticks_were_measured() -> None:
    now = attrs.evolve(BUSY, max_lanes=8)
    lanes = [lane(1, prefill=4000)]
    assert prefill_budget(lanes, lanes, 7, Rates(), now) == 512
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.0001), now) == 1024
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.0008), now) == 512
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.00125), now) == 384
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.1), now) == 128
    eager = attrs.evolve(now, tick_yield=True)
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.0025), eager) == 512
    assert prefill_budget(lanes, lanes, 7, rates(prefill_s=0.0025), attrs.evolve(eager, latency=True)) == 128


def test_a_tick_is_open_while_a_lane_could_be_preempted() -> None:
    now = attrs.evolve(BUSY, max_lanes=2)
    agents = [lane(1, prefill=4000), lane(2)]
    assert prefill_budget(agents, agents[:1], 0, Rates(), now) == 512
    chats = [lane(1, prefill=4000, klass=0), lane(2, klass=0)]
    assert prefill_budget(chats, chats[:1], 0, Rates(), now) == 4096
    assert prefill_budget(chats, chats[:1], 0, Rates(), attrs.evolve(now, urgent_queued=True)) == 512


def test_closed_budgets() -> None:
    lone = [lane(1, prefill=20_000)]
    assert prefill_budget(lone, lone, 0, rates(prefill_s=0.004), BUSY) == 4000  # 16 s of work
    assert prefill_budget(lone, lone, 0, rates(prefill_s=0.004), attrs.evolve(BUSY, queued=1)) == 2000  # 8 s
    assert prefill_budget(lone, lone, 0, rates(prefill_s=1.0), BUSY) == 512
    assert prefill_budget(lone, lone, 0, rates(prefill_s=0.001), attrs.evolve(BUSY, budget=1024, adaptive=True)) == 8000
    media = [lane(1, prefill=20_000, media=True)]
    assert prefill_budget(media, media, 7, Rates(), attrs.evolve(BUSY, max_lanes=8)) == 4096


def test_rounds_without_a_known_rate_are_the_floor() -> None:
    for round_granular, floor in ((False, 32), (True, 4)):
        plan = plan_tick([lane(1)], Rates(), Settings(), attrs.evolve(BUSY, round_granular=round_granular))
        assert [grant for _, grant, _ in plan.decodes] == [floor]


def test_rounds_fill_the_target_and_stop_at_the_fewest_wanted() -> None:
    now = attrs.evolve(BUSY, max_lanes=2, round_granular=True)
    known = rates(round_s=0.005, lanes=2)
    plan = plan_tick([lane(1, klass=0), lane(2, klass=0)], known, Settings(), now)
    assert [grant for _, grant, _ in plan.decodes] == [50, 50]  # 0.25 s
    plan = plan_tick([lane(1, 7, klass=0), lane(2, klass=0)], known, Settings(), now)
    assert [(grant, overshoot) for _, grant, overshoot in plan.decodes] == [(7, 0), (7, 16)]


def test_rounds_beside_prefill_are_a_share_of_its_time() -> None:
    now = attrs.evolve(BUSY, max_lanes=2, round_granular=True, budget=400)
    known = rates(round_s=0.01, prefill_s=0.005)
    decoding, prefilling = lane(1, 1000), lane(2, prefill=2000)
    plan = plan_tick([decoding, prefilling], known, Settings(), now)
    assert plan.prefill_tokens == 128  # open, at 0.5 s
    assert [grant for _, grant, _ in plan.decodes] == [16]  # 0.64 s x 0.25 / 0.01
    plan = plan_tick([attrs.evolve(decoding, klass=0), prefilling], known, Settings(), now)
    assert [grant for _, grant, _ in plan.decodes] == [128]


def test_a_tick_that_only_retires_decodes_nothing_and_the_next_one_little() -> None:
    done = lane(1, 0, finishing=True)
    plan = plan_tick([done, lane(2)], rates(), Settings(), attrs.evolve(BUSY, max_lanes=2))
    assert (plan.retires, plan.decodes) == ([done], [])
    after = attrs.evolve(BUSY, only_retired=True)
    assert [grant for _, grant, _ in plan_tick([lane(2)], rates(), Settings(), after).decodes] == [8]
    after = attrs.evolve(after, round_granular=True)
    assert [grant for _, grant, _ in plan_tick([lane(2)], rates(), Settings(), after).decodes] == [1]


def test_background_rate_holds_agents_back() -> None:
    lanes = [lane(1, klass=0), lane(2, klass=2), lane(3, klass=3)]
    slow = Settings(background_rate=4)
    for tick, served in ((3, [1]), (4, [1, 2, 3])):
        plan = plan_tick(lanes, Rates(), slow, attrs.evolve(BUSY, max_lanes=4, tick=tick))
        assert [lane.tag for lane, _, _ in plan.decodes] == served


def test_a_decode_budget_goes_to_the_starving_first() -> None:
    lanes = [lane(1, klass=0), lane(2, klass=2), lane(3, klass=2, decode_starved=8)]
    plan = plan_tick(lanes, Rates(), Settings(decode_budget=40), attrs.evolve(BUSY, max_lanes=4))
    assert [(lane.tag, grant) for lane, grant, _ in plan.decodes] == [(3, 32), (1, 8)]
    assert plan.starving_grants == 1


def test_a_replayed_tail_is_fed_by_decode_grants() -> None:
    resumed = PlannedLane(1, 2, prompt_len=50, prefill_end=40, left=2, prefilled=40, replay=10)
    plan = plan_tick([resumed], Rates(), Settings(), attrs.evolve(BUSY, round_granular=True))
    assert [(grant, overshoot) for _, grant, overshoot in plan.decodes] == [(4, 8)]


def test_starvation_counts_what_younger_lanes_got() -> None:
    old, young, decoding = lane(1, prefill=4000), lane(2, prefill=100), lane(3)
    plan = plan_tick([old, young], Rates(), Settings(), attrs.evolve(BUSY, max_lanes=2, budget=100))
    age([old, young], plan)
    assert (old.prefill_starved, young.prefill_starved) == (1, 0)
    plan = plan_tick([old], Rates(), Settings(), BUSY)
    age([old, decoding], plan)
    assert old.prefill_starved == 0


LANES = st.lists(
    st.builds(
        lambda klass, prefill, left, finishing, starved, replay: lane(
            1, left, klass=klass, prefill=prefill, finishing=finishing, prefill_starved=starved, replay=replay
        ),
        st.integers(0, 3),
        st.integers(0, 5000),
        st.integers(1, 500),
        st.booleans(),
        st.integers(0, 10),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    lanes=LANES,
    now=st.builds(
        Situation,
        tick=st.integers(1, 20),
        max_lanes=st.integers(1, 12),
        budget=st.integers(64, 4096),
        adaptive=st.booleans(),
        queued=st.integers(0, 3),
        urgent_queued=st.booleans(),
        latency=st.booleans(),
        only_retired=st.booleans(),
        round_granular=st.booleans(),
        tick_yield=st.booleans(),
    ),
    known=st.builds(rates, st.none() | st.floats(1e-4, 1), st.none() | st.floats(1e-5, 0.1)),
    options=st.builds(Settings, decode_budget=st.none() | st.integers(1, 600), background_rate=st.integers(1, 4)),
)
def test_every_plan_is_legal(lanes: list[PlannedLane], now: Situation, known: Rates, options: Settings) -> None:
    lanes = [attrs.evolve(lane, tag=tag) for tag, lane in enumerate(lanes, 1)]
    before = [attrs.asdict(lane) for lane in lanes]
    plan = plan_tick(lanes, known, options, now)
    assert before == [attrs.asdict(lane) for lane in lanes]
    assert plan.prefill_tokens <= plan.budget
    assert plan.retires == [lane for lane in lanes if lane.finishing]
    done = {}
    for lane, offset, count in plan.prefills:
        assert offset == lane.prefilled
        assert 0 < count <= lane.prefill_left
        assert lane.tag not in done
        assert not lane.finishing
        done[lane.tag] = offset + count
    granted = set()
    for lane, grant, overshoot in plan.decodes:
        assert done.get(lane.tag, lane.prefilled) == lane.prefill_end
        assert 1 <= grant <= 256
        assert grant + overshoot <= lane.left + lane.replay
        assert 0 <= overshoot <= 16
        assert lane.tag not in granted
        assert not lane.finishing
        granted.add(lane.tag)
    if any(lane.prefilling for lane in lanes):
        assert plan.prefills  # something always moves
    elif not plan.retires and options.background_rate == 1 and any(not lane.finishing for lane in lanes):
        assert plan.decodes


def test_rates_learn_from_what_ran() -> None:
    known = Rates()
    known.measure(0, 10, 4, TickTimings(wall_ns=200_000_000, decode_ns=200_000_000))
    assert known.round_seconds(4) == pytest.approx(0.02)
    known.measure(0, 10, 4, TickTimings(wall_ns=300_000_000, decode_ns=300_000_000))
    assert known.round_seconds(4) == pytest.approx(0.023)
    assert known.round_seconds(8) == known.round_seconds(4)  # the nearest known
    known.measure(255, 0, 0, TickTimings(wall_ns=10**9, prefill_ns=10**9))
    assert known.prefill_s is None
    known.measure(256, 0, 0, TickTimings(wall_ns=256 * 10**6, prefill_ns=256 * 10**6))
    assert known.prefill_s == pytest.approx(0.001)
    assert known.bulk_ticks == 0
    known.measure(1000, 0, 0, TickTimings(wall_ns=2 * 10**9, prefill_ns=2 * 10**9))
    assert known.bulk_ticks == 1
    assert known.slow_prefill() == pytest.approx(0.002)
    # no split reported: the prefill's estimate is subtracted
    known.measure(100, 5, 1, TickTimings(wall_ns=10**9))
    assert known.round_seconds(1) == pytest.approx((1 - 100 * known.prefill_s) / 5)


def test_adaptive_budget_follows_the_share_of_the_tick() -> None:
    assert adapt_budget(1024, 2.0, 1, 0, 0.5) == 2048
    assert adapt_budget(1024, 2.0, 1, 1, 1.0) == 1024
    assert adapt_budget(1024, 2.0, 1, 3, 2.0) == 512
    assert adapt_budget(256, 2.0, 1, 7, 9.0) == 256
    assert adapt_budget(4096, 2.0, 1, 0, 0.1) == 4096
