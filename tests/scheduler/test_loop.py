"""The loop over a MockEngine: admission, ticks, commits, streams, retires, cancels, failures."""

import trio

from superfluid.link.events import Finish, Generated
from superfluid.scheduler.generation import Committed, Ended, Provisional
from superfluid.scheduler.loop import SchedulerConfig
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.doubles import job


async def test_a_job_is_generated_committed_and_ended(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        events, _, end = await scheduler.submit(job(1, length=8, max_tokens=5)).collect()
    assert end.finish == Finish.NONE
    assert end.tokens_generated == 5
    spans = [token for event in events if isinstance(event.body, Generated) for token in event.body.span]
    assert len(spans) == 5
    assert spans == bench.store.tokens(1)
    assert not bench.scheduler.lanes


async def test_worked_example_of_metrics(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=4))
    async with bench.serving() as scheduler:
        first = job(1, length=32, max_tokens=40)
        await scheduler.submit(first).collect()
        stream = first.stream + bench.store.tokens(1)
        second = job(1, max_tokens=8)
        second.stream = stream
        _, _, end = await scheduler.submit(second).collect()
    metrics = bench.metrics
    assert end.warm_prefix == 64
    assert metrics.decode_tokens_total == 48
    assert metrics.prefill_tokens_total == 40
    assert metrics.warm_prefix_tokens_total == 64
    assert metrics.cold_admissions_total == 1
    assert metrics.ttft_seconds.count == 2


async def test_provisional_text_is_a_prefix_of_what_is_committed(bench: Bench) -> None:
    previews, committed = "", ""
    asked = job(1, max_tokens=20, want_provisional=True)
    async with bench.serving() as scheduler, scheduler.submit(asked) as generation:
        async for item in generation:
            if isinstance(item, Provisional):
                previews += item.text
            elif isinstance(item, Committed):
                committed += "".join(e.body.text for e in item.events if isinstance(e.body, Generated))
                assert previews.startswith(committed)
    assert previews == committed == bench.store.text(1)


async def test_eight_requests_share_ticks(bench: Bench) -> None:
    ends: list[Ended] = []

    async def run(session: int) -> None:
        _, _, end = await bench.scheduler.submit(job(session, max_tokens=32, start=100 * session)).collect()
        ends.append(end)

    async with bench.serving(), trio.open_nursery() as nursery:
        for session in range(8):
            nursery.start_soon(run, session)
    assert [end.tokens_generated for end in ends] == [32] * 8
    assert max(len(plan.decodes) for plan in bench.link.plans) == 8
    assert len(bench.link.plans) <= 6
