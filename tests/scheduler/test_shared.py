"""Shared prefixes: a burst prefills its prefix once; checkpoints of engines that cut state only at its head."""

import numpy as np
import pytest
import trio
from hypothesis import given, strategies as st

from superfluid.engines.mock.config import MockConfig, default_spaces
from superfluid.link import linkw
from superfluid.link.codes import FORK_PRIVATE, Status
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Ended, Generation, Job
from superfluid.scheduler.link import EngineRefused
from superfluid.scheduler.loop import SchedulerConfig
from superfluid.scheduler.planner import Settings
from superfluid.scheduler.shared import common_prefix
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.doubles import MockLink, job

BIG = MockConfig(pool_bytes=1 << 24)
SLOW = SchedulerConfig(max_batch=8, settings=Settings(decode_budget=80))


def burst(count: int, shared: int, **more: object) -> list[Job]:
    """Jobs that share a prefix and differ after it."""
    jobs = []
    for session in range(count):
        one = job(session, length=shared, **more)
        one.stream += [30_000 + session] * 40
        jobs.append(one)
    return jobs


async def end_of(generation: Generation) -> Ended:
    return (await generation.collect())[2]


async def run_all(bench: Bench, jobs: list[Job]) -> list[Ended]:
    ends: list[Ended] = []

    async def one(each: Job) -> None:
        ends.append(await end_of(bench.scheduler.submit(each)))

    async with bench.serving(), trio.open_nursery() as nursery:
        for each in jobs:
            nursery.start_soon(one, each)
    return ends


async def test_a_burst_prefills_its_prefix_once_while_the_leader_goes_on(make_bench: MakeBench) -> None:
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    ends = await run_all(bench, burst(16, 1280, max_tokens=400))
    assert all(end.tokens_generated == 400 for end in ends)
    assert bench.metrics.prefill_tokens_total == 1280 + 16 * 40
    assert sorted(end.warm_prefix for end in ends) == [0] + [1280] * 15


async def test_a_prefix_under_the_threshold_is_not_waited_for(make_bench: MakeBench) -> None:
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(50, length=512, start=20_000)))  # now the engine is known to be fast
        for generation in [scheduler.submit(one) for one in burst(4, 512)]:
            await end_of(generation)
    assert bench.metrics.cold_admissions_total == 5


@pytest.mark.parametrize(("shared", "cold"), [(512, 1), (128, 4)])
async def test_before_anything_is_known_of_the_engine_it_may_be_slow(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, shared: int, cold: int
) -> None:
    monkeypatch.setattr("superfluid.engines.mock.engine.PREFILL_NS", 2_000_000)
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    await run_all(bench, burst(4, shared))
    assert bench.metrics.cold_admissions_total == cold


async def test_urgent_jobs_do_not_wait(make_bench: MakeBench) -> None:
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    await run_all(bench, burst(4, 1280, klass=Class.INTERACTIVE))
    assert bench.metrics.cold_admissions_total == 4


async def test_others_go_on_while_a_job_is_held(make_bench: MakeBench) -> None:
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    leader, follower = burst(2, 2560)
    other = job(9, start=20_000)
    async with bench.serving() as scheduler:
        generations = [scheduler.submit(one) for one in (leader, follower, other)]
        for generation in generations:
            await end_of(generation)
    assert [bench.starts[a.lane_tag] for p in bench.link.plans for a in p.admits] == [0, 20_000, 0]


async def test_a_held_job_can_be_cancelled(make_bench: MakeBench) -> None:
    bench = make_bench(SLOW, link=make_bench.link(BIG))
    leader, follower = burst(2, 2560)
    async with bench.serving() as scheduler:
        first, second = scheduler.submit(leader), scheduler.submit(follower)
        while scheduler.ticks < 2:
            await trio.lowlevel.checkpoint()
        second.cancel()
        assert (await end_of(second)).tokens_generated == 0
        await end_of(first)
    assert bench.metrics.cold_admissions_total == 1


async def test_an_engine_that_cannot_fork_is_asked_once(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    link = make_bench.link(BIG)
    sync = link.sync

    async def no_fork(request: linkw.StateSyncReq) -> linkw.StateSyncOk:
        if isinstance(request, linkw.ForkReq):
            link.requests.append(request)
            raise EngineRefused(Status.Unsupported)
        return await sync(request)

    monkeypatch.setattr(link, "sync", no_fork)
    bench = make_bench(SLOW, link=link)
    ends = await run_all(bench, burst(6, 1280, max_tokens=200))
    assert len(ends) == 6
    assert sum(isinstance(request, linkw.ForkReq) for request in link.requests) == 1


# ---- head-only engines


def head_only(make_bench: MakeBench) -> MockLink:
    link = make_bench.link(MockConfig(pool_bytes=1 << 24, spaces=default_spaces()[:1]))
    link.record["state"] = {"rollback": "cuts only at its head", "shared_prefix_seed": "cuts only at its head"}
    return link


async def test_a_chunk_stops_where_the_jobs_behind_stop_sharing(make_bench: MakeBench) -> None:
    link = head_only(make_bench)
    bench = make_bench(SLOW, link=link)
    ends = await run_all(bench, burst(8, 1280, max_tokens=100))
    assert sorted(end.warm_prefix for end in ends) == [0] + [1280] * 7
    assert bench.metrics.prefill_tokens_total == 1280 + 8 * 40
    ends_at = [p.token_offset + p.token_count for plan in link.plans for p in plan.prefills if p.lane_tag == 1]
    assert ends_at == [512, 1024, 1280, 1320]
    assert [request for request in link.requests if isinstance(request, linkw.ForkReq)][0].flags == 0  # noqa: RUF015


async def test_each_turn_leaves_one_private_checkpoint_where_its_input_ends(make_bench: MakeBench) -> None:
    link = head_only(make_bench)
    bench = make_bench(SLOW, link=link)
    opener = [31_500, 31_501, 31_502]
    stream: list[int] = []
    async with bench.serving() as scheduler:
        for turn in range(3):
            stream += list(range(1000 * turn, 1000 * turn + 160))
            one = job(1, max_tokens=20)
            one.stream, one.turn_point = [*stream, *opener], len(stream)
            before = len(bench.store.tokens(1))
            end = await end_of(scheduler.submit(one))
            assert (turn == 0) == (end.warm_prefix == 0)
            stream += [*opener, *bench.store.tokens(1)[before:]]
    forks = [request for request in link.requests if isinstance(request, linkw.ForkReq)]
    assert [fork.flags for fork in forks] == [FORK_PRIVATE] * 3
    assert sum(isinstance(request, linkw.UnpublishReq) for request in link.requests) == 2


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(np.array(left, np.uint32), np.array(right, np.uint32)) == expected
