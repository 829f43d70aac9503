"""Ends and the log: what waits for its sync, what does not, and a log that cannot be written."""

import pytest
import trio
import trio.testing

from superfluid.link.events import Finish
from superfluid.scheduler.generation import Committed, Ended, Failure, Generation, Provisional
from tests.scheduler.conftest import Bench
from tests.scheduler.doubles import job


async def end_of(generation: Generation) -> Ended:
    return (await generation.collect())[2]


async def test_a_raw_job_is_not_logged(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        events, _, end = await scheduler.submit(job(None, max_tokens=5)).collect()
    assert end.tokens_generated == sum(len(event.body.span) for event in events)  # type: ignore[attr-defined]
    assert not bench.store.events
    assert bench.store.commits == 0


async def test_the_next_tick_runs_while_records_sync(bench: Bench, autojump_clock: trio.testing.MockClock) -> None:
    bench.link.tick_s = bench.store.sync_s = 1.0
    async with bench.serving() as scheduler:
        start = trio.current_time()
        await end_of(scheduler.submit(job(1, max_tokens=64)))
        ticks = len(bench.link.plans)
        assert trio.current_time() - start == pytest.approx(ticks * 1.0)


async def test_ends_wait_for_their_sync(bench: Bench, autojump_clock: trio.testing.MockClock) -> None:
    bench.store.sync_s = 5.0
    async with bench.serving() as scheduler:
        start = trio.current_time()
        generation = scheduler.submit(job(1, max_tokens=8, want_provisional=True))
        async for item in generation:
            if isinstance(item, Provisional):
                assert trio.current_time() == start
            else:
                assert trio.current_time() == start + 5.0


@pytest.mark.parametrize("early", [True, False])
async def test_an_early_end_does_not_wait_for_the_retire(
    bench: Bench, autojump_clock: trio.testing.MockClock, early: bool
) -> None:
    bench.link.tick_s, bench.store.sync_s = 10.0, 1.0
    async with bench.serving() as scheduler:
        asked = job(1, max_tokens=4)
        asked.early_end = early
        end = await end_of(scheduler.submit(asked))
        assert (end.finish, end.tokens_generated) == (Finish.NONE, 4)
        ticks = len(bench.link.plans)
        assert trio.current_time() % 10 == pytest.approx(1.0 if early else 0.0)  # the sync; else the retire's tick
        assert len(scheduler.lanes) == early  # the lane is yet to be retired
        assert not scheduler.generating(1)  # but the session is free
        again = scheduler.submit(job(1, max_tokens=4, start=100))
        assert scheduler.generating(1)
        await scheduler.wait_quiet(1)
        assert (await end_of(again)).tokens_generated == 4
        await scheduler.wait_idle()
        assert not scheduler.lanes
    plans = bench.link.plans
    assert sum(len(plan.retires) for plan in plans) == 2
    assert len(plans) > ticks
    assert bench.store.tokens(1)


async def test_a_purge_waits_for_the_lane_of_an_early_end(bench: Bench, autojump_clock: trio.testing.MockClock) -> None:
    bench.link.tick_s = 10.0
    async with bench.serving() as scheduler:
        asked = job(1, max_tokens=4)
        asked.early_end = True
        await end_of(scheduler.submit(asked))
        assert scheduler.lanes
        assert scheduler.cancel(1)  # as a purge does, to learn whether there is anything to wait for
        await scheduler.wait_quiet(1)
        assert not scheduler.lanes
        assert bench.store.finishes(1) == [Finish.NONE]


async def test_no_early_end_of_what_could_not_be_written(bench: Bench) -> None:
    bench.store.fail_after = 0
    async with bench.serving() as scheduler:
        asked = job(1, max_tokens=4)
        asked.early_end = True
        end = await end_of(scheduler.submit(asked))
        assert (end.finish, end.error_code) == (Finish.ERROR, Failure.LOG)


async def test_a_log_that_cannot_be_written_ends_the_lanes_in_it(bench: Bench) -> None:
    bench.store.fail_after = 1
    async with bench.serving() as scheduler:
        generation = scheduler.submit(job(1, max_tokens=3000))
        items = [item async for item in generation]
        await scheduler.wait_idle()
        assert not scheduler.lanes
    end = items[-1]
    assert isinstance(end, Ended)
    assert end.error_code == Failure.LOG
    assert end.reason is not None
    assert end.reason.startswith("io: ")
    shown = sum(len(e.body.span) for item in items if isinstance(item, Committed) for e in item.events)  # type: ignore[attr-defined]
    assert shown == len(bench.store.tokens(1)) == 32
