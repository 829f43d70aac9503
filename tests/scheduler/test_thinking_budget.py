"""A thought that has taken its tokens is ended, and the turn goes on in text (spec: codec, reasoning)."""

from collections.abc import Sequence
from typing import Any

import pytest

from superfluid.codec.codec import Codec
from superfluid.link.events import Channel, Finish, Generated, GenerationPrompt
from superfluid.scheduler.generation import Committed, Ended, Generation, Item, Job, Provisional
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer
from tests.scheduler.conftest import MakeBench, make_bench as make_bench

CODEC = Codec.open(chatml_tokenizer())
OPENER = CODEC.tokenizer.encode("<|im_start|>assistant\n<think>\n")
END = CODEC.close_reasoning() or []
ANSWER = list(b"The answer.")


def thinks(tag: int, prompt: Sequence[int]) -> list[int]:
    """Thinks for ever, until it is told to answer."""
    return ANSWER if list(prompt[-len(END) :]) == END else list("hm é ".encode()) * 200


def job(budget: int | None, max_tokens: int = 90, **more: Any) -> Job:
    router = CODEC.router(open_tokens=OPENER)
    stream = [*range(40, 60), *OPENER]
    more |= {"thinking_budget": budget, "thought_end": END if budget is not None else []}
    return Job(1, stream, max_tokens, router, want_provisional=True, start_channel=Channel.REASONING, **more)


async def items_of(generation: Generation) -> list[Item]:
    async with generation:
        return [item async for item in generation]


def shown(items: Sequence[Item], channel: int) -> str:
    return "".join(item.text for item in items if isinstance(item, Provisional) and item.channel == channel)


def committed(items: Sequence[Item]) -> list[Any]:
    return [event.body for item in items if isinstance(item, Committed) for event in item.events]


def texts(bodies: Sequence[Any], channel: int) -> str:
    return "".join(body.text for body in bodies if isinstance(body, Generated) and body.channel == channel)


async def test_a_spent_thought_is_ended_and_the_answer_follows(make_bench: MakeBench) -> None:
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = thinks
    async with bench.serving() as scheduler:
        items = await items_of(scheduler.submit(job(20)))
    end = items[-1]
    assert isinstance(end, Ended)
    bodies = committed(items)
    at = next(i for i, body in enumerate(bodies) if isinstance(body, GenerationPrompt))
    assert bodies[at] == GenerationPrompt(END)
    thought, answer = bodies[:at], bodies[at + 1 :]
    assert all(body.channel == Channel.REASONING for body in thought)
    assert all(body.channel == Channel.TEXT for body in answer)
    reasoned = sum(len(body.span) for body in thought)
    assert reasoned >= 20
    assert texts(answer, Channel.TEXT).startswith("The answer.")
    assert (answer[-1].finish, end.finish, end.reason) == (Finish.EOS, Finish.EOS, None)
    assert end.tokens_generated == reasoned + len(ANSWER) + 1  # the end of the thought is nobody's token
    # what ran ahead is what was committed, and nothing of the server's own words
    assert shown(items, Channel.TEXT) == texts(bodies, Channel.TEXT)
    assert texts(bodies, Channel.REASONING).startswith(shown(items, Channel.REASONING))
    # the second lane begins behind the end of the thought, from the first one's state
    first, second = bench.link.prompts.values()
    assert second == [*first, *(token for body in thought for token in body.span), *END]
    spans = [token for event in bench.store.events[1] for token in event.body.span]  # type: ignore[attr-defined]
    assert [*first, *spans][: len(second)] == second
    admits = [admit for plan in bench.link.plans for admit in plan.admits]
    assert [admit.decode_replay for admit in admits] == [0, 0]
    assert admits[1].seed_handle and not admits[0].seed_handle
    assert bench.metrics.preemptions_total == 0


@pytest.mark.parametrize("budget", [None, 10_000])
async def test_without_a_budget_or_under_it_nothing_ends_a_thought(make_bench: MakeBench, budget: int | None) -> None:
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = thinks
    async with bench.serving() as scheduler:
        items = await items_of(scheduler.submit(job(budget, max_tokens=50)))
    assert not any(isinstance(body, GenerationPrompt) for body in committed(items))
    assert isinstance(items[-1], Ended) and items[-1].tokens_generated == 50
    assert len(bench.link.prompts) == 1


async def test_max_tokens_counts_over_both_parts(make_bench: MakeBench) -> None:
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = thinks
    async with bench.serving() as scheduler:
        items = await items_of(scheduler.submit(job(1, max_tokens=4)))
    end = items[-1]
    assert isinstance(end, Ended)
    assert end.tokens_generated <= 4
    made = [token for body in committed(items) if isinstance(body, Generated) for token in body.span]
    assert len(made) == end.tokens_generated


async def test_a_thought_that_is_opened_again_is_ended_again(make_bench: MakeBench) -> None:
    tokenizer = CODEC.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = lambda tag, prompt: [tokenizer.ids["<think>"], *b"again " * 50]
    async with bench.serving() as scheduler:
        items = await items_of(scheduler.submit(job(5, max_tokens=40)))
    end = items[-1]
    assert isinstance(end, Ended) and end.tokens_generated == 40
    bodies = committed(items)
    assert sum(isinstance(body, GenerationPrompt) for body in bodies) >= 1
    assert sum(len(body.span) for body in bodies if isinstance(body, Generated)) == 40


async def test_a_grammar_is_replayed_over_the_end_of_the_thought(make_bench: MakeBench) -> None:
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = thinks
    async with bench.serving() as scheduler:
        items = await items_of(scheduler.submit(job(20, grammar=("schema", '{"type":"object"}'))))
    thought = sum(len(b.span) for b in committed(items) if isinstance(b, Generated) and b.channel == Channel.REASONING)
    replays = [admit.grammar_replay for plan in bench.link.plans for admit in plan.admits]
    assert replays == [0, thought + len(END)]


async def test_one_that_is_cancelled_between_its_parts_ends(make_bench: MakeBench) -> None:
    bench = make_bench(codec=CODEC)  # type: ignore[arg-type]
    bench.link.knobs.script = thinks
    async with bench.serving() as scheduler:
        generation = scheduler.submit(job(5))
        items: list[Item] = []
        async with generation:
            async for item in generation:
                items.append(item)
                if any(isinstance(body, GenerationPrompt) for body in committed([item])):
                    generation.cancel()
    end = items[-1]
    assert isinstance(end, Ended)
    assert end.finish in (Finish.CANCELLED, Finish.EOS)
    assert end.tokens_generated == sum(len(b.span) for b in committed(items) if isinstance(b, Generated))
