"""Which grammar of a request is in force: tried on the worker before anything is queued, and nothing is left there."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from superfluid.codec.toolcalls.constraints import Attempt, Constraint, ConstraintUnsatisfiable, ToolChoice
from superfluid.daemon.grammars import REMEMBERED, TRIES, Grammars
from superfluid.daemon.supervisor import ModelFailed
from superfluid.link import linkw
from superfluid.scheduler.link import WorkerGone
from tests.scheduler.conftest import Bench, MakeBench, bench as bench, make_bench as make_bench
from tests.scheduler.doubles import MockLink, job

GOOD, OTHER = Attempt("schema", '{"type":"object"}'), Attempt("schema", "{}", holds_calls=True)
BROKEN = Attempt("schema", "{", holds_calls=True)  # the mock takes balanced objects only


async def serving() -> None:
    await trio.lowlevel.checkpoint()


def asked_of(link: MockLink) -> list[str]:
    return [type(request).__name__ for request in link.requests]


async def test_the_first_that_compiles_is_in_force(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        grammars = Grammars(scheduler, serving)
        assert await grammars.choose(Constraint(attempts=(BROKEN, OTHER, GOOD), refusal="no")) is OTHER
        assert asked_of(bench.link) == ["CreateGrammarReq", "CreateGrammarReq", "FreeGrammarReq"]
        assert await grammars.choose(Constraint(attempts=(BROKEN, OTHER))) is OTHER
        assert len(bench.link.requests) == 3  # what was tried once is known
        assert await grammars.choose(Constraint(attempts=(BROKEN,))) is None  # an auto tag is left off
        assert await grammars.choose(Constraint()) is None
        demanded = Constraint(ToolChoice("required"), (BROKEN,), "no tool-call grammar could be compiled")
        with pytest.raises(ConstraintUnsatisfiable, match="constraint unsatisfiable: no tool-call") as refused:
            await grammars.choose(demanded)
        assert refused.value.param == "tool_choice"
        with pytest.raises(ConstraintUnsatisfiable) as refused:
            await grammars.choose(Constraint(attempts=(BROKEN,), refusal="no"))
        assert refused.value.param == "response_format"


async def test_verdicts_are_bounded(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        grammars = Grammars(scheduler, serving)
        for n in range(REMEMBERED + 1):
            await grammars.choose(Constraint(attempts=(Attempt("schema", f'{{"const":{n}}}'),)))
        made = len(bench.link.requests)
        await grammars.choose(Constraint(attempts=(Attempt("schema", f'{{"const":{REMEMBERED}}}'),)))
        assert len(bench.link.requests) == made
        await grammars.choose(Constraint(attempts=(Attempt("schema", '{"const":0}'),)))
        assert len(bench.link.requests) == made + 2


async def test_one_who_leaves_leaves_nothing(bench: Bench) -> None:
    """A request that goes away while it waits is forgotten; one that is being tried is freed all the same."""
    async with bench.serving() as scheduler:
        grammars = Grammars(scheduler, serving)
        generation = scheduler.submit(job(1, max_tokens=30))
        with trio.CancelScope() as scope:
            scope.cancel()
            await grammars.choose(Constraint(attempts=(GOOD,)))
        assert scope.cancelled_caught
        await generation.collect()
        await grammars.choose(Constraint(attempts=(OTHER,)))
    made = sum(isinstance(request, linkw.CreateGrammarReq) for request in bench.link.requests)
    freed = sum(isinstance(request, linkw.FreeGrammarReq) for request in bench.link.requests)
    assert made == freed


async def test_ticks_run_while_a_grammar_is_compiled(bench: Bench) -> None:
    asked, compiled = trio.Event(), trio.Event()
    begin = bench.link.begin

    async def begin_slowly(request: linkw.StateSyncReq) -> Callable[[], Awaitable[linkw.StateSyncOk]]:
        answer = await begin(request)
        asked.set()

        async def answer_later() -> linkw.StateSyncOk:
            await compiled.wait()
            return await answer()

        return answer_later

    bench.link.begin = begin_slowly  # type: ignore[method-assign]
    async with bench.serving() as scheduler, trio.open_nursery() as nursery:
        grammars = Grammars(scheduler, serving)
        nursery.start_soon(grammars.choose, Constraint(attempts=(GOOD,)))
        await asked.wait()
        _, _, end = await scheduler.submit(job(1, max_tokens=30)).collect()
        assert end.tokens_generated == 30
        compiled.set()
    assert asked_of(bench.link) == ["CreateGrammarReq", "FreeGrammarReq"]


async def test_a_worker_that_dies_is_followed_by_the_next(make_bench: MakeBench) -> None:
    first, second = make_bench.link(), make_bench.link()
    first.dead = "killed by signal 9"
    bench = make_bench(link=first)

    async def serve() -> None:
        with pytest.raises(WorkerGone):
            await bench.scheduler.run(first)
        await bench.scheduler.run(second)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        grammars = Grammars(bench.scheduler, serving)
        assert await grammars.choose(Constraint(attempts=(GOOD,))) is GOOD
        assert asked_of(second) == ["CreateGrammarReq", "FreeGrammarReq"]
        nursery.cancel_scope.cancel()


async def test_no_worker_at_all(bench: Bench) -> None:
    grammars = Grammars(bench.scheduler, serving)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ModelFailed, match="gone for good"):
                await grammars.choose(Constraint(attempts=(GOOD,)))

        nursery.start_soon(ask)
        for _ in range(TRIES):
            await trio.testing.wait_all_tasks_blocked()
            bench.scheduler.retire("gone for good")


async def test_what_a_worker_died_over_is_never_compiled_again(bench: Bench) -> None:
    asked: list[linkw.StateSyncReq] = []

    async def begin_and_die(request: linkw.StateSyncReq) -> Callable[[], Awaitable[linkw.StateSyncOk]]:
        asked.append(request)

        async def die() -> linkw.StateSyncOk:
            raise WorkerGone("killed by signal 11")

        return die

    bench.link.begin = begin_and_die  # type: ignore[method-assign]
    async with bench.serving() as scheduler:
        grammars = Grammars(scheduler, serving)
        for _ in range(2):
            with pytest.raises(ConstraintUnsatisfiable, match="not compiled again"):
                await grammars.choose(Constraint(attempts=(GOOD, OTHER), refusal="no"))
        assert await grammars.choose(Constraint(attempts=(GOOD, OTHER))) is None
    assert len(asked) == 1
