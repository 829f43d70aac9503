"""Who runs when: order of admission, classes, preemption, exclusive jobs, chunked prefill, seeds, words."""

import attrs
import pytest
import trio
import trio.testing

from superfluid.link import linkw
from superfluid.link.codes import PlanFlag
from superfluid.link.events import Finish
from superfluid.scheduler.admission import MOST_REPLAYED
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Ended, Generation, Job, Provisional
from superfluid.scheduler.loop import SchedulerConfig
from superfluid.scheduler.planner import Settings
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.doubles import job

SLOW = Settings(decode_budget=10)  # tokens a tick, so that a generation takes many
ONE = SchedulerConfig(max_batch=1, settings=SLOW)


async def end_of(generation: Generation) -> Ended:
    return (await generation.collect())[2]


def admitted(bench: Bench) -> list[int]:
    """First tokens of the prompts, in the order in which they were admitted."""
    return [bench.starts[admit.lane_tag] for plan in bench.link.plans for admit in plan.admits]


async def run_all(bench: Bench, jobs: list[Job]) -> list[Ended]:
    async with bench.serving() as scheduler:
        return [await end_of(generation) for generation in [scheduler.submit(one) for one in jobs]]


async def test_first_in_first_out_and_turns_between_clients(make_bench: MakeBench) -> None:
    bench = make_bench(ONE)
    jobs = [job(n, start=100 * n, client="burst") for n in range(4)]
    jobs += [job(4, start=400, client="one"), job(5, start=500, client="two")]
    await run_all(bench, jobs)
    assert admitted(bench) == [0, 400, 500, 100, 200, 300]


async def test_classes_go_first_and_waiting_ages(make_bench: MakeBench) -> None:
    bench = make_bench(
        SchedulerConfig(max_batch=1, settings=Settings(starvation_ticks=4, decode_budget=10), preemption=False)
    )
    first = job(0, start=0, max_tokens=400)
    background = job(1, start=100, klass=Class.BACKGROUND)
    agent = job(2, start=200, klass=Class.AGENT)
    completion = job(3, start=300, klass=Class.COMPLETION)
    async with bench.serving() as scheduler:
        generations = [scheduler.submit(one) for one in (first, background, agent, completion)]
        while scheduler.ticks < 10:
            await trio.lowlevel.checkpoint()
        generations.append(scheduler.submit(job(4, start=400, klass=Class.AGENT)))
        for generation in generations:
            await end_of(generation)
    # 1 and 2 have aged to class 0 while 0 ran: the first enqueued of them goes
    assert admitted(bench) == [300, 0, 100, 200, 400]


async def test_class_lanes_cap_a_class(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=4, class_lanes={Class.BACKGROUND: 1}))
    jobs = [job(n, start=100 * n, max_tokens=40, klass=Class.BACKGROUND) for n in range(3)] + [job(9, start=900)]
    await run_all(bench, jobs)
    assert all(sum(bench.starts[tag] < 900 for tag in tags) <= 1 for tags in lanes_by_plan(bench))
    assert bench.metrics.lanes_active == 0


def lanes_by_plan(bench: Bench) -> list[set[int]]:
    """Tags resident after each plan."""
    alive: set[int] = set()
    seen = []
    for plan in bench.link.plans:
        alive -= {retire.lane_tag for retire in plan.retires}
        alive |= {admit.lane_tag for admit in plan.admits}
        seen.append(set(alive))
    return seen


async def test_an_exclusive_job_runs_alone(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=4))
    jobs = [job(0, max_tokens=40), job(1, start=100, max_tokens=40, batch_invariant=True), job(2, start=200)]
    await run_all(bench, jobs)
    assert admitted(bench) == [0, 100, 200]
    assert max(map(len, lanes_by_plan(bench))) == 1


async def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=2, settings=SLOW))
    async with bench.serving() as scheduler:
        short = scheduler.submit(job(0, max_tokens=400))
        async for _ in short:
            break
        long = scheduler.submit(job(1, start=1000, length=3000))
        await end_of(long)
        await end_of(short)
    chunks = [p.token_count for plan in bench.link.plans for p in plan.prefills if p.lane_tag == 2]
    assert sum(chunks) == 3000
    assert chunks[0] == chunks[1] == 512
    beside = [plan for plan in bench.link.plans if plan.prefills and plan.prefills[0].lane_tag == 2]
    assert all(any(decode.lane_tag == 1 for decode in plan.decodes) for plan in beside)
    assert bench.metrics.prefill_tokens_total == 3008


async def test_a_second_turn_is_seeded_from_the_cache(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        first = job(1, length=100, max_tokens=60)
        cold = await end_of(scheduler.submit(first))
        stream = first.stream + bench.store.tokens(1)
        second = job(1, max_tokens=8)
        second.stream = [*stream, 1, 2, 3]
        warm = await end_of(scheduler.submit(second))
    assert (cold.warm_prefix, warm.warm_prefix) == (0, 160)
    assert bench.metrics.prefill_tokens_total == 100 + 3
    assert bench.link.plans[-2].admits[0].rng_counter_base == 163


async def test_a_retired_lane_is_told_its_end_after_the_retire(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1)))
        assert [retire.lane_tag for retire in bench.link.plans[-1].retires] == [1]
        assert bench.link.plans[-1].retires[0].publish_to_cache


# ---- preemption


@pytest.mark.parametrize("grammar", [None, ("schema", '{"type":"object"}')])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_a_preempted_lane_goes_on_as_if_nothing_had_happened(
    make_bench: MakeBench, temperature: float, grammar: tuple[str, str] | None
) -> None:
    def agent(session: int) -> Job:
        return job(
            session,
            length=50,
            max_tokens=200,
            params=linkw.SamplingParams(temperature=temperature),
            seed=7,
            grammar=grammar,
            want_provisional=True,
        )

    calm = make_bench(ONE)
    await run_all(calm, [agent(1)])
    bench = make_bench(ONE)
    text = ""
    async with bench.serving() as scheduler:
        generation = scheduler.submit(agent(1))
        chats = 0
        async for item in generation:
            if isinstance(item, Provisional):
                text += item.text
                if chats < 3:
                    chats += 1
                    end = await end_of(scheduler.submit(job(10 + chats, klass=Class.INTERACTIVE, start=900)))
                    assert end.tokens_generated == 4
                    assert not generation.ended
    assert isinstance(item, Ended)
    assert (item.tokens_generated, item.warm_prefix, item.finish) == (200, 0, Finish.NONE)
    assert bench.metrics.preemptions_total == chats == 3
    assert bench.store.tokens(1) == calm.store.tokens(1)
    assert text == bench.store.text(1) == calm.store.text(1)
    resumed = [admit for plan in bench.link.plans for admit in plan.admits if admit.decode_replay]
    assert len(resumed) == 3
    assert all(admit.grammar_replay == (admit.decode_replay if grammar else 0) for admit in resumed)
    assert bench.metrics.decode_tokens_total == 200 + 3 * 4


async def test_the_worst_class_and_the_youngest_decoding_lane_gives_way(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=3, settings=Settings(decode_budget=30)))
    async with bench.serving() as scheduler:
        others = [
            scheduler.submit(job(0, start=0, max_tokens=300, klass=Class.BACKGROUND)),
            scheduler.submit(job(1, start=100, max_tokens=300, klass=Class.BACKGROUND)),
            scheduler.submit(job(2, start=200, max_tokens=300, klass=Class.AGENT)),
        ]
        while scheduler.ticks < 2:
            await trio.lowlevel.checkpoint()
        await end_of(scheduler.submit(job(9, start=900, klass=Class.INTERACTIVE)))
        for other in others:
            assert (await end_of(other)).tokens_generated == 300
    assert admitted(bench) == [200, 0, 100, 900, 100]


async def test_a_preempted_job_can_be_cancelled_in_the_queue(make_bench: MakeBench) -> None:
    bench = make_bench(ONE)
    async with bench.serving() as scheduler:
        agent = scheduler.submit(job(1, max_tokens=500))
        async for _ in agent:
            break
        chat = scheduler.submit(job(2, start=900, max_tokens=200, klass=Class.INTERACTIVE))
        while not scheduler.queue_depths[Class.AGENT]:
            await trio.lowlevel.checkpoint()
        made = len(bench.store.tokens(1))
        assert scheduler.cancel(1)
        end = await end_of(agent)
        assert (end.finish, end.tokens_generated) == (Finish.CANCELLED, made)
        await end_of(chat)
    assert bench.store.finishes(1)[-1] == Finish.CANCELLED


async def test_equal_classes_do_not_preempt(make_bench: MakeBench) -> None:
    bench = make_bench(ONE)
    await run_all(bench, [job(1, max_tokens=80, klass=Class.INTERACTIVE), job(2, start=9, klass=Class.INTERACTIVE)])
    assert bench.metrics.preemptions_total == 0


# ---- words


async def test_the_words(bench: Bench, autojump_clock: trio.testing.MockClock) -> None:
    control = bench.link.control
    async with bench.serving() as scheduler:
        agent = scheduler.submit(job(1, max_tokens=100))
        async for _ in agent:
            break
        assert not control.yield_requested
        chat = scheduler.submit(job(2, klass=Class.INTERACTIVE))
        assert control.yield_requested
        await end_of(chat)
        await end_of(agent)
        assert control.latency
        assert not control.yield_requested
        await trio.sleep(301)
        await end_of(scheduler.submit(job(3)))
        assert not control.latency


async def test_partial_emits_only_while_someone_listens(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1)))
        await end_of(scheduler.submit(job(1, want_provisional=True)))
    flags = [plan.flags for plan in bench.link.plans]
    assert flags == [0, 0, PlanFlag.PARTIAL_EMITS, 0]


async def test_the_tick_in_flight_is_visible(bench: Bench) -> None:
    shown = []
    bench.link.on_plan = lambda plan: shown.append(bench.scheduler.in_flight)
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1)))
    assert [tick.lanes for tick in shown if tick] == [1, 1]
    assert bench.scheduler.in_flight is None


async def test_ttft_is_from_admission_to_the_first_token(
    make_bench: MakeBench, autojump_clock: trio.testing.MockClock
) -> None:
    bench = make_bench(ONE)
    bench.link.tick_s = 2.0
    async with bench.serving() as scheduler:
        first, second = scheduler.submit(job(1, max_tokens=64)), scheduler.submit(job(2, start=90))
        end = await end_of(first)
        assert end.ttft == pytest.approx(2.0, rel=1e-3)
        assert end.decode_rate == pytest.approx(54 / 12, rel=1e-3)
        end = await end_of(second)
        assert end.ttft == pytest.approx(2.0, rel=1e-3)
        assert end.decode_rate is None
    assert bench.metrics.ttft_seconds.count == 2


# ---- replies that go on


async def test_a_continued_reply_is_decoded_again_where_no_state_has_it(make_bench: MakeBench) -> None:
    whole = make_bench(ONE)
    await run_all(whole, [job(1, length=50, max_tokens=30)])
    reply = whole.store.tokens(1)
    prompt = job(1, length=50).stream

    bench = make_bench(ONE)
    rest = attrs.evolve(job(1, max_tokens=18), stream=[*prompt, *reply[:12]], continued=12)
    await run_all(bench, [rest])
    (admit,) = (admit for plan in bench.link.plans for admit in plan.admits)
    assert admit.decode_replay == 12
    assert sum(chunk.token_count for plan in bench.link.plans for chunk in plan.prefills) == 50
    assert bench.store.tokens(1) == reply[12:]

    again = attrs.evolve(job(1, max_tokens=5), stream=[*prompt, *reply], continued=30)
    await run_all(bench, [again])
    admits = [admit for plan in bench.link.plans for admit in plan.admits]
    assert admits[-1].seed_handle  # the lane left its state
    assert admits[-1].decode_replay == 80 - 64  # what is past the last whole page


async def test_a_continued_reply_too_long_to_decode_again_is_prefilled(make_bench: MakeBench) -> None:
    bench = make_bench(ONE)
    long = MOST_REPLAYED + 1
    await run_all(bench, [job(1, length=50 + long, max_tokens=2, continued=long)])
    (admit,) = (admit for plan in bench.link.plans for admit in plan.admits)
    assert admit.decode_replay == 0
