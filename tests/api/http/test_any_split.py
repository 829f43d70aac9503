"""Hostile streams on every published template's wire and on atem's: however a lane's tokens fall into rounds and ticks,
thinking or not, a client is told the same, streamed and whole."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.channels import REASONING, TEXT
from superfluid.codec.codec import Codec
from superfluid.codec.dialects import atem
from superfluid.codec.dialects.dialect import ConversationRefused
from tests.api.http.test_reply import TOOLS, run, same, whole_of
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model

ARGUMENTS = {"s": 'é "x" {[</a>', "n": 7}
CALL = {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}
HI = {"role": "user", "content": "hi"}
JSON_CALL = json.dumps({"name": "f", "arguments": ARGUMENTS})
THINKING = {
    "harmony": "<|channel|>analysis<|message|>",
    "atem": " to=self<|message|>",
}  # openers of a thought where no marker pair is one
TEXTS = [
    "Well",
    " ",
    "\n\n",
    "STOP",
    "ST",
    "é",
    "\N{GRINNING FACE}",
    "{",
    '"',
    "to=f",
    "analysis",
    "<",
    JSON_CALL,
    "[f(n=1)]",
]


@pytest.fixture(scope="module")
def opened(shared: Any) -> Callable[[str], Codec]:
    codecs: dict[str, Codec] = {}

    def source(name: str) -> str:
        text: str = (shared / "data/chat_templates" / f"{name}.jinja").read_text()
        return text

    def codec(name: str) -> Codec:
        if name not in codecs:
            if name == "atem":
                specials = ["<s>", *atem.MARKERS]
                codecs[name] = Codec.open(ByteTokenizer(specials, silent=specials, bos="<s>", eos="<|eot|>"), "atem")
            else:
                codecs[name] = Codec.open(model(name, source))
        return codecs[name]

    return codec


def call_of(codec: Codec) -> list[int]:
    """A call as the model writes it: what a past one adds to a prompt, or JSON where the template renders none."""
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    try:
        with_call = codec.render([HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}], TOOLS).tokens
        without = codec.render([HI], TOOLS).tokens
    except ConversationRefused:
        return tokenizer.encode(JSON_CALL)
    shared = next((i for i, (a, b) in enumerate(zip(with_call, without, strict=False)) if a != b), len(without))
    return with_call[shared:]


@st.composite
def streams(draw: st.DrawFn, codec: Codec, call: list[int]) -> list[int]:
    """Whole calls, cut ones, markers and texts, one after another."""
    pieces = draw(
        st.lists(
            st.one_of(
                st.just(call),
                st.integers(1, len(call)).map(lambda n: call[:n]),
                st.integers(1, len(call)).map(lambda n: call[-n:]),
                st.sampled_from(sorted(codec.encoder.special_texts)).map(lambda token: [token]),
                st.sampled_from(TEXTS).map(lambda text: list(text.encode())),
                st.integers(128, 255).map(lambda byte: [byte]),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return [token for piece in pieces for token in piece]


def thought(codec: Codec) -> list[int]:
    """Tokens of a turn that leave a thought open; none where the model has no reasoning channel."""
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    if codec.wire.name in THINKING:
        return tokenizer.encode(THINKING[codec.wire.name])
    return next(([pair.open] for pair in codec.dialect.pairs if pair.channel == REASONING), [])


CUTS = st.lists(st.integers(1, 400), max_size=10)


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("name", [*NAMES, "atem"])
def test_any_split_gives_the_same_reply(name: str, thinking: bool, opened: Callable[[str], Codec]) -> None:
    codec = opened(name)
    before = thought(codec) if thinking else []
    if thinking and not before:  # no reasoning channel: what other families open a thought with opens none here
        assert all(pair.channel != REASONING for pair in codec.dialect.pairs)
        openers = [*THINKING.values(), "<think>", "<think>\n", "<|think|>", "[THINK]", "<seed:think>"]
        assert {codec.start_channel(codec.tokenizer.encode(opener)) for opener in openers} == {TEXT}
        return
    assert codec.start_channel(before) == (REASONING if thinking else 0)

    @settings(max_examples=25, deadline=None, database=None)
    @given(
        streams(codec, call_of(codec)),
        CUTS,
        CUTS,
        st.booleans(),
        st.sampled_from([(), ("STOP",)]),
        st.booleans(),
        st.booleans(),
    )
    def check(
        tokens: list[int], ticks: list[int], rounds: list[int], late: bool, stop: tuple[str, ...], one: bool, none: bool
    ) -> None:
        options: dict[str, Any] = {"stop": stop, "one_call": one, "choice_none": none, "before": before}
        whole = run(codec, tokens, stream=False, **options)[0]
        plain = whole_of(whole)
        for streamed, straight in ((True, False), (True, True), (False, False)):
            reply, made = run(codec, tokens, ticks, rounds, stream=streamed, late=late, straight=straight, **options)
            same(made, plain)
            same(whole_of(reply), plain)
            assert reply.tokens == whole.tokens

    check()
