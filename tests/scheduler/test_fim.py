"""Fill-in-the-middle: clients' buckets, the answers that are kept, and lanes that leave nothing behind."""

import math

import trio
import trio.testing
from hypothesis import given, strategies as st

from superfluid.link.codes import PlanFlag
from superfluid.link.events import Event, Finish, Generated
from superfluid.scheduler.classes import Class
from superfluid.scheduler.fim import (
    CACHED_ANSWERS,
    IDLE,
    LONGEST_CACHED,
    LONGEST_WAIT_MS,
    MOST_CLIENTS,
    Answer,
    Answers,
    Buckets,
    Rate,
)
from superfluid.scheduler.generation import Ended, Failure, Job
from superfluid.scheduler.loop import SchedulerConfig
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.doubles import job


def fim(length: int = 8, max_tokens: int = 4, **more: object) -> Job:
    return job(None, length, max_tokens, klass=Class.COMPLETION, raw=True, fim=True, **more)


# ---- buckets


def test_a_bucket_starts_full_and_refills_while_time_passes() -> None:
    buckets = Buckets(Rate(10, 3))
    assert [buckets.take("a", 5.0) for _ in range(5)] == [0, 0, 0, 100, 100]
    assert buckets.take("b", 5.0) == 0  # another client has its own
    assert buckets.take("a", 5.04) == 60
    assert buckets.take("a", 5.1) == 0
    assert [buckets.take("a", 50.0) for _ in range(4)] == [0, 0, 0, 100]  # no more than the burst


def test_a_rate_of_nothing_is_no_limit() -> None:
    buckets = Buckets(Rate(0, 1))
    assert not any(buckets.take("a", 0.0) for _ in range(1000))
    assert not buckets


@given(
    st.floats(0.001, 5000),
    st.floats(1, 50),
    st.floats(1e4, 1e6),
    st.lists(st.floats(0, 3), max_size=40),
)
def test_waiting_as_told_suffices(rate: float, burst: float, start: float, pauses: list[float]) -> None:
    buckets = Buckets(Rate(rate, burst))
    now, granted = start, 0
    for pause in pauses:
        now += pause
        wait = buckets.take("a", now)
        assert 0 <= wait <= LONGEST_WAIT_MS
        granted += not wait
        if wait:
            now += wait / 1000
            assert buckets.take("a", math.nextafter(now, math.inf)) in (0, 1)  # a clock far from 0 is that coarse
    assert granted <= burst + (now - start) * rate + 1


def test_idle_clients_are_forgotten_and_a_crowd_loses_its_oldest_tenth() -> None:
    buckets = Buckets(Rate(1, 1))
    assert buckets.take("a", 0.0) == 0
    assert buckets.take("b", 1.0) == 0
    assert buckets.take("a", IDLE - 1) == 0
    assert buckets.take("c", IDLE + 1) == 0  # b is gone
    assert len(buckets) == 2
    for client in range(MOST_CLIENTS - 2):
        buckets.take(client, IDLE + 1)
    assert len(buckets) == MOST_CLIENTS
    buckets.take("late", IDLE + 1)
    assert len(buckets) == MOST_CLIENTS - MOST_CLIENTS // 10 + 1
    assert buckets.take("late", IDLE + 1) == 1000
    assert buckets.take("a", IDLE + 1) == 0  # forgotten, though it asked not long ago


# ---- answers


def test_the_answers_asked_for_last_are_kept() -> None:
    answers = Answers(2)
    one, two, three = (Answer([n], str(n), Finish.EOS) for n in range(3))
    answers.put(1, one)
    answers.put(2, two)
    assert answers.get(1) is one
    answers.put(3, three)
    assert [answers.get(key) for key in (1, 2, 3)] == [one, None, three]
    answers.put(4, Answer([0] * (LONGEST_CACHED + 1), "", Finish.LENGTH))
    assert answers.get(4) is None
    assert CACHED_ANSWERS == 256


# ---- lanes


async def test_a_lane_streams_and_leaves_nothing_behind(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        _, _, end = await scheduler.submit(fim(length=100)).collect()
        assert end.tokens_generated == 4
        _, _, end = await scheduler.submit(job(1, 100, 4)).collect()
        assert end.warm_prefix == 0  # the state of the first was not published
        await scheduler.wait_idle()
    plans = bench.link.plans
    fim_plans = [plan for plan in plans if plan.decodes and plan.decodes[0].lane_tag == 1]
    assert fim_plans and all(plan.flags & PlanFlag.PARTIAL_EMITS for plan in fim_plans)
    assert [retire.publish_to_cache for plan in plans for retire in plan.retires] == [False, True]
    assert bench.store.events.keys() == {1}


async def test_a_refused_tick_publishes_nothing_of_it(bench: Bench) -> None:
    bench.link.refuse_plan = lambda plan: -5 if plan.decodes and not plan.admits else 0
    async with bench.serving() as scheduler:
        _, _, end = await scheduler.submit(fim(max_tokens=400)).collect()
        assert end.error_code == Failure.TICK_FAILED
    assert not any(retire.publish_to_cache for plan in bench.link.plans for retire in plan.retires)


async def test_nobody_waits_for_its_prefix(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=2))
    bench.link.engine.config.prefill_step_tokens = 64
    async with bench.serving() as scheduler:
        middle = scheduler.submit(fim(length=3000, max_tokens=200))
        other = scheduler.submit(job(1, 3000, 4))
        await other.collect()
        await middle.collect()
    admitted = [len(plan.admits) for plan in bench.link.plans if plan.admits]
    assert admitted == [2]


# ---- deadlines


async def test_what_waits_past_its_deadline_expires_before_a_lane_is_free(
    make_bench: MakeBench, autojump_clock: trio.testing.MockClock
) -> None:
    bench = make_bench(SchedulerConfig(max_batch=1))
    bench.link.tick_s = 1.0
    async with bench.serving() as scheduler:
        long = scheduler.submit(job(1, max_tokens=3000, klass=Class.INTERACTIVE))
        await trio.sleep(0.5)
        began = trio.current_time()
        timed = [scheduler.submit(fim(deadline=began + seconds)) for seconds in (2, 2, 4)]
        logged = scheduler.submit(job(2, deadline=began + 3))
        for generation, seconds in zip(timed, (2, 2, 4), strict=True):
            _, _, end = await generation.collect()
            assert (end.finish, end.expired, end.tokens_generated) == (Finish.LENGTH, True, 0)
            assert seconds <= trio.current_time() - began <= seconds + 1
        _, _, end = await logged.collect()
        assert (end.finish, end.expired) == (Finish.LENGTH, False)
        assert not long.ended
        long.cancel()
    assert bench.store.finishes(2) == [Finish.LENGTH]
    assert sum(len(plan.admits) for plan in bench.link.plans) == 1


async def test_one_in_flight_expires_at_the_next_tick(bench: Bench, autojump_clock: trio.testing.MockClock) -> None:
    bench.link.tick_s = 1.0
    async with bench.serving() as scheduler:
        _, _, end = await scheduler.submit(fim(max_tokens=900, deadline=trio.current_time() + 2.5)).collect()
    assert (end.finish, end.expired) == (Finish.LENGTH, True)
    assert 0 < end.tokens_generated < 900


# ---- observers


async def test_an_observer_is_told_of_everything_and_of_the_end(bench: Bench) -> None:
    seen: list[int] = []
    ends: list[Ended] = []

    def observe(news: object) -> None:
        if isinstance(news, Ended):
            ends.append(news)
        else:
            assert isinstance(news, list)
            seen.extend(t for e in news if isinstance(e, Event) and isinstance(e.body, Generated) for t in e.body.span)

    async with bench.serving() as scheduler:
        events, _, end = await scheduler.submit(fim(max_tokens=60, observer=observe)).collect()
        assert ends == [end]
        assert seen == [t for e in events if isinstance(e.body, Generated) for t in e.body.span]
        assert len(seen) == 60
        async with scheduler.submit(fim(max_tokens=900, observer=observe)):
            pass
        await scheduler.wait_idle()
    assert [end.finish for end in ends[1:]] == [Finish.CANCELLED]


async def test_a_job_without_tokens_to_make_ends_at_once(bench: Bench) -> None:
    ends: list[object] = []
    generation = bench.scheduler.submit(fim(max_tokens=0, observer=ends.append))
    assert generation.ended
    assert len(ends) == 1
