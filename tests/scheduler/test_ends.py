"""How generations end: cancels, deadlines, windows, tool calls, refusals, faults, a dead worker, a broken log."""

import contextlib
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from superfluid.engines.mock.config import MockConfig
from superfluid.link import linkw
from superfluid.link.codes import Status
from superfluid.link.events import Body, Finish, Generated, ToolParseFailure, ToolUse
from superfluid.scheduler.admission import ContextExceeded
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Ended, Failure, Generation, Provisional
from superfluid.scheduler.lanes import Ticket
from superfluid.scheduler.link import EngineLink, WorkerGone
from superfluid.scheduler.loop import SchedulerConfig
from superfluid.scheduler.planner import Settings
from tests.scheduler.conftest import Bench, MakeBench
from tests.scheduler.doubles import MemoryCommit, WordCodec, WordRouter, job


async def end_of(generation: Generation) -> Ended:
    return (await generation.collect())[2]


# ---- cancels


async def test_cancel_of_a_queued_job_never_reaches_the_engine(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=1))
    async with bench.serving() as scheduler:
        running = scheduler.submit(job(1, max_tokens=50))
        queued = scheduler.submit(job(2))
        assert scheduler.cancel(2)
        end = await end_of(queued)
        assert (end.finish, end.tokens_generated) == (Finish.CANCELLED, 0)
        assert not scheduler.generating(2)
        assert (await end_of(running)).tokens_generated == 50
    assert 2 not in bench.store.events
    assert sum(len(plan.admits) for plan in bench.link.plans) == 1


async def test_cancel_while_prefilling_ends_the_tick_at_a_step(bench: Bench) -> None:
    bench.link.engine.config.prefill_step_tokens = 64
    steps = 0

    def cancel_at_second_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            assert bench.scheduler.cancel(1)

    bench.link.knobs.on_step = cancel_at_second_step
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, length=500)))
    assert (end.finish, end.tokens_generated) == (Finish.CANCELLED, 0)
    assert bench.metrics.prefill_tokens_total == 128
    assert bench.store.finishes(1) == [Finish.CANCELLED]
    assert len(bench.link.plans) == 2  # the one cut short, and the retire


async def test_cancel_while_decoding_keeps_what_was_made_and_disturbs_nobody(
    bench: Bench, make_bench: MakeBench
) -> None:
    calm = make_bench.link()

    def cancel_at_tenth_step() -> None:
        if bench.link.engine._steps == 10 and bench.scheduler.generating(1):
            bench.scheduler.cancel(1)

    async with bench.serving() as scheduler:
        bench.link.knobs.on_step = cancel_at_tenth_step
        cancelled = scheduler.submit(job(1, max_tokens=500))
        other = scheduler.submit(job(2, max_tokens=60, start=1000))
        end = await end_of(cancelled)
        assert (await end_of(other)).tokens_generated == 60
    assert end.finish == Finish.CANCELLED
    assert end.tokens_generated == len(bench.store.tokens(1)) < 32
    assert bench.store.finishes(1)[-1] == Finish.CANCELLED
    alone = Bench(bench.scheduler, calm, bench.store, bench.metrics)
    async with alone.serving() as scheduler:
        await end_of(scheduler.submit(job(3, max_tokens=60, start=1000)))
    assert bench.store.tokens(2) == bench.store.tokens(3)


async def test_cancel_while_finishing_changes_nothing(bench: Bench) -> None:
    def cancel_with_the_retire(plan: linkw.TickPlan) -> None:
        if plan.retires:
            assert bench.scheduler.cancel(1)

    bench.link.on_plan = cancel_with_the_retire
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, max_tokens=4)))
        assert not scheduler.cancel(1)
    assert (end.finish, end.tokens_generated) == (Finish.NONE, 4)
    assert bench.store.finishes(1) == [Finish.NONE]


async def test_a_consumer_that_leaves_frees_its_lane(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        async with scheduler.submit(job(1, max_tokens=3000, want_provisional=True)) as generation:
            async for item in generation:
                if isinstance(item, Provisional):
                    break
        await scheduler.wait_idle()
        assert not scheduler.lanes
        assert not scheduler.generating(1)
    assert bench.store.finishes(1)[-1] == Finish.CANCELLED


async def test_a_new_generation_is_not_hit_by_an_old_cancel(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        first = scheduler.submit(job(1, max_tokens=4))
        await end_of(first)
        first.cancel()
        assert (await end_of(scheduler.submit(job(1, max_tokens=4)))).finish == Finish.NONE


async def test_the_session_is_free_when_the_end_arrives(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        for _ in range(3):
            async with scheduler.submit(job(1, max_tokens=2)) as generation:
                with pytest.raises(ValueError, match="session 1 is generating"):
                    scheduler.submit(job(1))
                async for item in generation:
                    assert not (isinstance(item, Ended) and scheduler.generating(1))


# ---- deadlines, windows, limits


async def test_deadlines(make_bench: MakeBench, autojump_clock: trio.testing.MockClock) -> None:
    bench = make_bench(SchedulerConfig(max_batch=2, settings=Settings()))
    bench.link.tick_s = 1.0
    async with bench.serving() as scheduler:
        now = trio.current_time()
        lane = scheduler.submit(job(1, max_tokens=3000, deadline=now + 3.5))
        raw = scheduler.submit(job(None, max_tokens=3000, deadline=now + 3.5, raw=True))
        late = scheduler.submit(job(None, max_tokens=3000, deadline=now + 0.5, raw=True, klass=Class.BACKGROUND))
        queued = scheduler.submit(job(2, deadline=now + 0.5, klass=Class.BACKGROUND))
        end = await end_of(lane)
        assert (end.finish, end.expired) == (Finish.LENGTH, False)
        assert end.tokens_generated > 0
        end = await end_of(raw)
        assert (end.finish, end.expired) == (Finish.LENGTH, True)
        end = await end_of(late)
        assert (end.tokens_generated, end.expired) == (0, True)
        end = await end_of(queued)
        assert (end.finish, end.tokens_generated, end.expired) == (Finish.LENGTH, 0, False)
    assert bench.store.finishes(1)[-1] == Finish.LENGTH


async def test_max_tokens_0_is_answered_at_once(bench: Bench) -> None:
    end = await end_of(bench.scheduler.submit(job(1, max_tokens=0)))
    assert (end.finish, end.tokens_generated) == (Finish.NONE, 0)
    assert not bench.store.events


async def test_a_stream_over_the_window_is_refused(bench: Bench) -> None:
    bench.link.max_window = 64
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1)))
        with pytest.raises(ContextExceeded, match=r"maximum context length is 64 tokens.*your request has 65 tokens"):
            scheduler.submit(job(2, length=65))
        with pytest.raises(ContextExceeded):
            scheduler.submit(job(2, length=65, max_tokens=0))


async def test_a_smaller_window_after_a_respawn_refuses_at_admission(bench: Bench) -> None:
    queued = bench.scheduler.submit(job(1, length=65))
    bench.link.max_window = 64
    async with bench.serving():
        end = await end_of(queued)
    assert end.error_code == Failure.CONTEXT


async def test_a_full_window_ends_with_length(bench: Bench) -> None:
    bench.link.max_window = 64
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, length=60, max_tokens=100)))
        assert (end.finish, end.tokens_generated) == (Finish.LENGTH, 4)
        end = await end_of(scheduler.submit(job(2, length=64, max_tokens=100)))
        assert (end.finish, end.tokens_generated) == (Finish.LENGTH, 0)
    assert bench.store.finishes(1)[-1] == bench.store.finishes(2)[-1] == Finish.LENGTH


async def test_fewer_lanes_than_asked_for(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=8))
    bench.link.record["limits"] = {"max_seqs": 3}
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1)))
        assert scheduler.max_lanes == 3


# ---- what a tick brings


async def test_a_terminator_ends_the_turn(make_bench: MakeBench) -> None:
    bench = make_bench(codec=WordCodec(terminators=[777]))
    bench.link.knobs.script = [5, 6, 777, 8, 9]
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, max_tokens=5)))
        assert end.finish == Finish.EOS
        end = await end_of(scheduler.submit(job(2, max_tokens=5, ignore_eos=True)))
        assert end.finish == Finish.NONE
    assert bench.store.tokens(1) == [5, 6, 777, 8, 9]


async def test_tool_calls_follow_the_run_that_closes_them(bench: Bench) -> None:
    call = WordRouter.CALL
    bench.link.knobs.script = [1, call, 7, 8, call + 1, 2, call, 9, call + 1, 3, call, 4, 5]
    async with bench.serving() as scheduler:
        events, _, _ = await scheduler.submit(job(1, max_tokens=20)).collect()
    shapes = [(type(e.body).__name__, e.body.channel) if isinstance(e.body, Generated) else e.body for e in events]
    assert shapes == [
        ("Generated", 0),
        ("Generated", 2),
        ToolUse("7", '["8"]'),
        ("Generated", 0),
        ("Generated", 2),
        ToolParseFailure("9 "),
        ("Generated", 0),
        ("Generated", 2),
        ToolUse("4", '["5", "2"]'),  # open at the end, which is token 2
    ]
    assert [event.event_id for event in events] == list(range(len(events)))
    assert bench.store.finishes(1) == [0, 0, 0, 0, 0, Finish.EOS]


@pytest.mark.parametrize("finish", [Finish.CANCELLED, Finish.ERROR])
def test_a_call_that_a_cancel_or_a_fault_cuts_is_dropped(finish: int) -> None:
    for tokens in ([WordRouter.CALL, 7], []):
        one = job(1)
        ticket = Ticket(one, Generation(one, lambda _: None), 0, 0)
        ticket.records([WordRouter.CALL, 4], Finish.NONE, False, WordCodec())
        ended = ticket.records(tokens, finish, True, WordCodec())
        assert [type(body) for body in ended] == [Generated]
        assert not ticket.tool_text


async def test_provisional_text_of_calls_is_for_those_who_ask(bench: Bench) -> None:
    class CallRouter(WordRouter):
        def provisional(self, tokens: list[int]) -> list[tuple[int, str, bool]]:
            return [(2, f"{token} ", token % 2 == 1) for token in tokens]

    bench.link.knobs.script = [2, 4, 5, 6, 7]
    previews: list[tuple[int, str]] = []
    async with bench.serving() as scheduler:
        asked = attrs.evolve(job(1, max_tokens=9), want_provisional=True, want_calls=True, router=CallRouter())
        deaf = attrs.evolve(job(2, max_tokens=9), want_provisional=True, router=CallRouter())
        scheduler.watch(1, lambda channel, text: previews.append((channel, text)))
        seen: dict[int, list[Provisional]] = {}
        for session, one in ((1, asked), (2, deaf)):
            async with scheduler.submit(one) as generation:
                seen[session] = [item async for item in generation if isinstance(item, Provisional)]
    text, ends = "", 0
    for item in seen[1]:
        text += item.text
        ends += item.closes
        assert not item.closes or item.text.endswith(("5 ", "7 "))  # nothing is merged over the end of a call
    assert (text.split()[:5], ends) == (["2", "4", "5", "6", "7"], 2)
    assert seen[2] == [] and previews == []


async def test_logprobs_come_with_their_tokens(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        events, logprobs, _ = await scheduler.submit(job(1, max_tokens=40, logprobs=2)).collect()
    tokens = [token for event in events for token in event.body.span]  # type: ignore[attr-defined]
    assert [record.token for record in logprobs] == tokens
    assert [record.logprob for record in logprobs] == pytest.approx([-((t % 20) + 1) / 20 for t in tokens])
    assert bench.link.plans[0].admits[0].top_logprobs == 2


# ---- refusals and faults


async def test_an_admit_the_engine_rejects_fails_alone(bench: Bench) -> None:
    bench.link.knobs.refuse_admit = lambda admit: -140 if admit.lane_tag == 1 else None
    async with bench.serving() as scheduler:
        refused, fine = scheduler.submit(job(1)), scheduler.submit(job(2))
        end = await end_of(refused)
        assert end.error_code == Failure.ADMIT_REFUSED
        assert end.reason is not None
        assert "the engine refused to admit this request (RejectCertUnmatched)" in end.reason
        assert (await end_of(fine)).finish == Finish.NONE


async def test_a_lane_fault_ends_that_lane(bench: Bench) -> None:
    def fault_second_tick(plan: linkw.TickPlan) -> None:
        if plan.plan_seq == 2:
            bench.link.engine.inject_fault(1, 4)

    bench.link.on_plan = fault_second_tick
    async with bench.serving() as scheduler:
        faulted, fine = scheduler.submit(job(1, max_tokens=100)), scheduler.submit(job(2, max_tokens=100))
        end = await end_of(faulted)
        assert (end.finish, end.error_code, end.fault) == (Finish.ERROR, Failure.FAULT, 4)
        assert (await end_of(fine)).tokens_generated == 100
    assert len(bench.store.tokens(1)) == end.tokens_generated == 32
    assert bench.store.finishes(1)[-1] == Finish.ERROR


async def test_a_refused_tick_fails_its_lanes_and_serving_goes_on(bench: Bench) -> None:
    bench.link.refuse_plan = lambda plan: Status.RejectBounds if plan.plan_seq == 2 else Status.Ok
    async with bench.serving() as scheduler:
        first, second = scheduler.submit(job(1, max_tokens=100)), scheduler.submit(job(2, max_tokens=100))
        for generation in (first, second):
            end = await end_of(generation)
            assert end.error_code == Failure.TICK_FAILED
            assert end.reason is not None
            assert "RejectBounds" in end.reason
        assert (await end_of(scheduler.submit(job(1)))).finish == Finish.NONE
    assert [retire.lane_tag for retire in bench.link.plans[1].retires] == [1, 2]
    assert not bench.link.engine._lanes


async def test_a_plan_that_does_not_fit_is_halved(bench: Bench) -> None:
    bench.link.refuse_plan = lambda plan: Status.NeedsReplan if len(plan.admits) > 2 else Status.Ok
    async with bench.serving() as scheduler:
        generations = [scheduler.submit(job(session, start=100 * session)) for session in range(8)]
        for generation in generations:
            assert (await end_of(generation)).tokens_generated == 4
    assert bench.metrics.admits_deferred_total >= 6
    assert max(len(plan.admits) for plan in bench.link.plans) == 2
    seqs = [plan.plan_seq for plan in bench.link.plans]
    assert seqs == sorted(set(seqs))
    assert next(plan.admits[0].lane_tag for plan in bench.link.plans if plan.admits) == 1


async def test_an_engine_that_was_full_for_a_moment_loses_nobody(bench: Bench) -> None:
    refusals = iter([Status.NeedsReplan] * 3)
    bench.link.refuse_plan = lambda plan: next(refusals, Status.Ok) if len(plan.admits) > 1 else Status.Ok
    async with bench.serving() as scheduler:
        for _ in range(2):
            generations = [scheduler.submit(job(session, start=100 * session)) for session in range(3)]
            for generation in generations:
                assert (await end_of(generation)).tokens_generated == 4


async def test_a_lone_warm_job_that_does_not_fit_is_tried_cold(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        await end_of(scheduler.submit(job(1, length=64)))
        bench.link.refuse_plan = lambda plan: (
            Status.NeedsReplan if any(admit.seed_handle for admit in plan.admits) else Status.Ok
        )
        end = await end_of(scheduler.submit(job(2, length=80)))
    assert (end.finish, end.warm_prefix) == (Finish.NONE, 0)


async def test_a_purged_session_does_not_take_the_others_of_its_tick_along(bench: Bench) -> None:
    stage = bench.store.stage

    def refuse_one(batch: list[tuple[int, Body]]) -> MemoryCommit:
        if any(session == 1 for session, _ in batch):
            raise KeyError("session 1 was purged")
        return stage(batch)

    bench.store.stage = refuse_one  # type: ignore[method-assign]
    async with bench.serving() as scheduler:
        lost, fine = scheduler.submit(job(1, max_tokens=50)), scheduler.submit(job(2, max_tokens=50))
        assert (await end_of(lost)).error_code == Failure.LOG
        assert (await end_of(fine)).tokens_generated == 50
    assert len(bench.store.tokens(2)) == 50


async def test_a_job_that_an_idle_engine_cannot_hold_fails(make_bench: MakeBench) -> None:
    bench = make_bench(link=make_bench.link(MockConfig(pool_bytes=1 << 14)))
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, length=1000)))
        assert end.error_code == Failure.TOO_LARGE
        assert (await end_of(scheduler.submit(job(2, length=32)))).finish == Finish.NONE


async def test_a_tick_without_admits_that_does_not_fit_fails(bench: Bench) -> None:
    bench.link.refuse_plan = lambda plan: Status.NeedsReplan if plan.plan_seq == 2 else Status.Ok
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, max_tokens=100)))
    assert end.error_code == Failure.TICK_FAILED


# ---- grammars, biases, side operations


async def test_grammar_and_bias_live_as_long_as_their_lane(bench: Bench) -> None:
    asked = job(1, grammar=("schema", '{"type":"object"}'), logit_bias={7: 1.5})
    async with bench.serving() as scheduler:
        assert (await end_of(scheduler.submit(asked))).error_code is None
        await scheduler.side(nothing)
    admit = bench.link.plans[0].admits[0]
    assert admit.grammar_handle
    assert admit.logit_bias_handle
    assert bench.link.requests == [
        linkw.CreateGrammarReq('{"type":"object"}'),
        linkw.CreateLogitBiasReq([7], [0x3FC00000]),
        linkw.FreeGrammarReq(admit.grammar_handle),
        linkw.FreeLogitBiasReq(admit.logit_bias_handle),
    ]


async def test_a_refused_grammar_fails_its_request(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        end = await end_of(scheduler.submit(job(1, grammar=("schema", "{"))))
        assert end.error_code == Failure.CONSTRAINT
        assert (await end_of(scheduler.submit(job(1)))).error_code is None


async def nothing(link: EngineLink) -> int:
    await trio.lowlevel.checkpoint()
    return 7


async def test_side_operations_run_between_ticks(bench: Bench) -> None:
    order: list[str] = []

    async def note(link: EngineLink) -> None:
        await trio.lowlevel.checkpoint()
        order.append(f"side after {bench.scheduler.ticks}")

    async with bench.serving() as scheduler:
        assert await scheduler.side(nothing) == 7
        running = scheduler.submit(job(1, max_tokens=2000, klass=Class.AGENT))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scheduler.side, note, Class.BACKGROUND)
        assert order in (["side after 8"], ["side after 9"])  # it aged: a better class ran
        running.cancel()
        await end_of(running)


# ---- a dead worker


async def test_a_worker_that_dies_in_a_tick_fails_its_lanes_and_queued_jobs_go_on(make_bench: MakeBench) -> None:
    bench = make_bench(SchedulerConfig(max_batch=1))
    bench.link.die_at, bench.link.emits_before_death = 2, 3
    scheduler = bench.scheduler
    running, queued = scheduler.submit(job(1, max_tokens=100, want_provisional=True)), scheduler.submit(job(2))
    with pytest.raises(WorkerGone, match="killed by signal 9"):
        await scheduler.run(bench.link)
    text = ""
    async for item in running:
        if isinstance(item, Provisional):
            text += item.text
        elif isinstance(item, Ended):
            assert (item.finish, item.error_code) == (Finish.ERROR, Failure.WORKER_DIED)
            assert item.reason == "generation failed: the model's worker died (killed by signal 9)"
            assert item.tokens_generated == 35
    assert text == bench.store.text(1)  # what was shown is in the log
    assert not scheduler.generating(1)
    async with Bench(scheduler, make_bench.link(), bench.store, bench.metrics).serving():
        assert (await end_of(queued)).finish == Finish.NONE
        assert (await end_of(scheduler.submit(job(1)))).finish == Finish.NONE


async def test_a_worker_dead_at_admission_leaves_the_job_queued(bench: Bench, make_bench: MakeBench) -> None:
    waiting = bench.scheduler.submit(job(1, length=40))
    bench.link.dead = "killed by signal 9"
    with pytest.raises(WorkerGone):
        await bench.scheduler.run(bench.link)
    assert bench.scheduler.queue_depths == [0, 0, 1, 0]
    async with bench.serving(make_bench.link()):
        assert (await end_of(waiting)).finish == Finish.NONE


async def test_a_cancelled_scheduler_ends_its_lanes(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        running = scheduler.submit(job(1, max_tokens=3000))
        async for _ in running:
            break
    assert (await end_of(running)).error_code == Failure.STOPPED


async def test_a_worker_that_goes_with_the_server_did_not_die(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = bench.link.tick
    running = bench.scheduler.submit(job(1, max_tokens=3000))
    with trio.CancelScope() as server, contextlib.suppress(WorkerGone):

        async def last(plan: Any, *rest: Any) -> Any:
            if plan.plan_seq < 2:
                return await tick(plan, *rest)
            server.cancel()
            raise WorkerGone("the worker closed its link")

        monkeypatch.setattr(bench.link, "tick", last)
        await bench.scheduler.run(bench.link)
    assert (await end_of(running)).error_code == Failure.STOPPED


async def test_retire_fails_what_waits(bench: Bench) -> None:
    waiting = bench.scheduler.submit(job(1))
    bench.scheduler.retire("model 'm' was unloaded; it loads again on its next request")
    end = await end_of(waiting)
    assert end.error_code == Failure.RETIRED
    assert end.reason is not None
    assert end.reason.startswith("model 'm' was unloaded")
    assert not bench.scheduler.generating(1)


# ---- slow readers


async def test_a_slow_reader_gets_merged_deltas(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        generation = scheduler.submit(job(1, max_tokens=2000, want_provisional=True))
        await scheduler.wait_idle()
        items = [item async for item in generation]
    assert len(items) <= 68
    text = "".join(item.text for item in items if isinstance(item, Provisional))
    assert text == bench.store.text(1)
    assert isinstance(items[-1], Ended)
    assert items[-1].tokens_generated == 2000


async def test_a_reader_that_reads_nothing_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superfluid.scheduler.generation.LAG_TOKENS", 100)
    async with bench.serving() as scheduler:
        generation = scheduler.submit(job(1, max_tokens=3000))
        await scheduler.wait_idle()
        assert not scheduler.lanes
        items = [item async for item in generation]
    assert len(items) == 1
    assert isinstance(items[0], Ended)
    assert items[0].error_code == Failure.LAGGED
    assert bench.store.finishes(1)[-1] == Finish.CANCELLED


async def test_watchers_see_provisional_text(bench: Bench) -> None:
    seen: list[str] = []
    async with bench.serving() as scheduler:
        stop = scheduler.watch(1, lambda channel, text: seen.append(text))
        await end_of(scheduler.submit(job(1, max_tokens=40)))
        stop()
        await end_of(scheduler.submit(job(1, max_tokens=40)))
    assert bench.store.text(1).startswith("".join(seen))
    assert len("".join(seen).split()) == 40
