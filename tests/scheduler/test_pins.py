"""Pins: what is pinned survives other work in a small pool, is renewed, yields to the budget and ends in time."""

import time
from typing import Any

import numpy as np
import pytest
import trio

from superfluid.engines.mock.config import MockConfig
from superfluid.link import linkw
from superfluid.scheduler.loop import SchedulerConfig
from superfluid.scheduler.pins import LOOK_AHEAD, MOST_PREFIXES
from superfluid.scheduler.states import Ids
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.keeping import end_of, paged, prompt, turn

HOUR_MS = 3_600_000
BLOCK = 16 * 64  # bytes of a page of the mock's paged space
ALL = SchedulerConfig(pin_budget_pct=100)


def later() -> int:
    return time.time_ns() // 1_000_000 + HOUR_MS


def ids(tokens: list[int]) -> Ids:
    return np.array(tokens, np.uint32)


def pool(blocks: int, **more: Any) -> MockConfig:
    return paged(pool_bytes=blocks * BLOCK, **more)


async def chat(bench: Bench, session: int, stream: list[int], max_tokens: int = 8) -> int:
    """Warm tokens of one turn."""
    return (await end_of(bench.scheduler.submit(turn(session, stream, max_tokens, native=False)))).warm_prefix


async def settled(bench: Bench) -> None:
    while bench.scheduler.pins.due:
        await trio.lowlevel.checkpoint()


async def test_a_pinned_session_stays_in_a_small_pool(make_bench: MakeBench) -> None:
    for pinned in (False, True):
        bench = make_bench(ALL, link=make_bench.link(pool(40)))
        async with bench.serving() as scheduler:
            await chat(bench, 1, prompt(160))
            if pinned:
                scheduler.pins.pin_session(1, ids(prompt(160)), later())
                await settled(bench)
                assert bench.metrics.pins_held == 1
                assert bench.metrics.pinned_bytes == 10 * BLOCK
            for other in range(2, 12):
                await chat(bench, other, prompt(200, 1000 * other))
            assert (await chat(bench, 1, [*prompt(160), 5]) == 160) is pinned
            assert not pinned or bench.metrics.pins_held == 1


async def test_it_is_taken_when_the_session_retires_and_grows_with_it(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(200)))
    async with bench.serving() as scheduler:
        scheduler.pins.pin_session(1, ids(prompt(64)), later())
        await settled(bench)
        assert (bench.metrics.pins_held, scheduler.pins.awaits_lease(1)) == (0, True)
        await chat(bench, 1, prompt(64))
        await settled(bench)
        assert (bench.metrics.pinned_bytes, scheduler.pins.awaits_lease(1)) == (4 * BLOCK, False)
        await chat(bench, 1, prompt(160))
        await settled(bench)
        assert bench.metrics.pinned_bytes == 10 * BLOCK
        scheduler.pins.pin_session(1, ids(prompt(160)), 0)
        await settled(bench)
        assert (bench.metrics.pins_held, bench.metrics.pinned_bytes) == (0, 0)
        assert not bench.link.engine._cache._seeds


async def test_leases_are_renewed_while_ticks_run(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400, lease_ticks=4)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(160)), later())
        await settled(bench)
        first = set(bench.link.engine._cache._seeds)
        for other in range(2, 8):
            await chat(bench, other, prompt(40, 1000 * other), 20)
        held = set(bench.link.engine._cache._seeds)
        assert len(held) == 1
        assert held.isdisjoint(first)


async def test_a_lease_of_no_ticks_holds_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400, lease_ticks=0)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(160)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 0
        assert not bench.link.engine._cache._seeds
        assert await chat(bench, 1, [*prompt(160), 5]) == 160


@pytest.mark.parametrize("pct", [0, 50])
async def test_pins_yield_to_the_budget(make_bench: MakeBench, pct: int) -> None:
    bench = make_bench(SchedulerConfig(pin_budget_pct=pct), link=make_bench.link(pool(100)))
    async with bench.serving() as scheduler:
        for session in (1, 2, 3):
            await chat(bench, session, prompt(320, 1000 * session))
        for session in (1, 2, 3):
            scheduler.pins.pin_session(session, ids(prompt(320, 1000 * session)), later())
            await settled(bench)
        assert [scheduler.pins.awaits_lease(session) for session in (1, 2, 3)] == [True, not pct, not pct]
        assert bench.metrics.pinned_bytes == (40 * BLOCK if pct else 0)
        assert bench.metrics.pins_yielded_total == (1 if pct else 0)
        scheduler.pins.pin_session(4, ids(prompt(320, 1000)[:160]), later())  # shares pages with none that is held
        await settled(bench)
        scheduler.pins.pin_session(5, ids(prompt(160, 1000)), later())  # all of it is shared with 4
        await settled(bench)
        assert bench.metrics.pins_held == (4 if pct else 0)
        assert bench.metrics.pinned_bytes == (50 * BLOCK if pct else 0)


async def test_a_pin_larger_than_the_budget_yields_itself(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(pin_budget_pct=5), link=make_bench.link(pool(100)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(320))
        scheduler.pins.pin_session(1, ids(prompt(320)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 0
        assert not bench.link.engine._cache._seeds


async def test_a_deadline_ends_it(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(160)), time.time_ns() // 1_000_000 + 50)
        while not bench.metrics.pins_expired_total:
            await trio.lowlevel.checkpoint()
        assert bench.metrics.pins_held == 0
        await settled(bench)
        assert not bench.link.engine._cache._seeds


async def test_prefixes_are_held_for_whoever_has_them(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400)))
    async with bench.serving() as scheduler:
        scheduler.pins.pin_prefix(ids(prompt(100)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 0
        await chat(bench, 9, [*prompt(100), *prompt(50, 5000)])
        await settled(bench)
        assert bench.metrics.pinned_bytes == 6 * BLOCK  # whole pages
        scheduler.pins.pin_prefix(ids(prompt(100)), 5)  # an earlier deadline changes nothing
        await settled(bench)
        assert (bench.metrics.pins_held, bench.metrics.pins_expired_total) == (1, 0)
        for start in range(MOST_PREFIXES):
            scheduler.pins.pin_prefix(ids(prompt(32, 10_000 + start)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 0
        assert not bench.link.engine._cache._seeds


async def test_a_new_worker_takes_them_again(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(160)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 1
    assert bench.metrics.pins_held == 0
    async with bench.serving(make_bench.link(pool(400))):
        await chat(bench, 1, prompt(168))
        await settled(bench)
        assert (bench.metrics.pins_held, bench.metrics.pinned_bytes) == (1, 11 * BLOCK)


async def test_several_spaces_are_charged_together(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(MockConfig(pool_bytes=1 << 22)))
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160), 33)
        scheduler.pins.pin_session(1, ids(prompt(160)), later())
        await settled(bench)
        length = bench.metrics.pinned_bytes - 4096
        assert bench.metrics.pins_held == 1
        assert length % BLOCK == 0
        assert length > 0


async def test_the_last_page_is_held_by_a_look_ahead(make_bench: MakeBench) -> None:
    link = make_bench.link(pool(400))
    asked: list[list[int]] = []
    acquire = link.seed_acquire

    async def seed_acquire(span: linkw.TokenRef, prefix_len: int, determinism: int = 0) -> linkw.SeedGranted:
        asked.append(link.rings[linkw.RING_IN].read_tokens(span).tolist())
        return await acquire(span, prefix_len, determinism)

    link.seed_acquire = seed_acquire  # type: ignore[method-assign]
    bench = make_bench(ALL, link=link)
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(160)), later())
        await settled(bench)
    assert asked == [[*prompt(160), LOOK_AHEAD]]


async def test_a_stream_longer_than_the_window_is_held_as_far_as_it_fits(make_bench: MakeBench) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400)))
    bench.link.max_window = 192
    room = bench.link.rings[linkw.RING_IN].room // 4
    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        scheduler.pins.pin_session(1, ids(prompt(room + 600)), later())
        await settled(bench)
        assert bench.metrics.pinned_bytes == 10 * BLOCK
        assert await chat(bench, 2, [*prompt(160), 5]) == 160


async def test_a_pin_that_goes_wrong_ends_nothing_else(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(ALL, link=make_bench.link(pool(400)))

    async def broken(*_: object) -> linkw.MatchRes:
        raise AssertionError("a bug")

    async with bench.serving() as scheduler:
        await chat(bench, 1, prompt(160))
        await chat(bench, 2, prompt(160, 5000))
        with monkeypatch.context() as broke:
            broke.setattr(bench.link, "match", broken)
            scheduler.pins.pin_session(1, ids(prompt(160)), later())
            await settled(bench)
            with pytest.raises(AssertionError):
                await bench.link.match(linkw.TokenRef())
            assert "a pin is given up" in caplog.text
            answered = await end_of(scheduler.submit(turn(3, prompt(40, 900), 8, native=False)))
            assert "a bug" in (answered.reason or "")
        scheduler.pins.pin_session(2, ids(prompt(160, 5000)), later())
        await settled(bench)
        assert bench.metrics.pins_held == 1
