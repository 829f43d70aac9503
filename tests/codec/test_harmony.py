from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.channels import REASONING, TEXT, TOOL_CALL, Router
from superfluid.codec.codec import Codec
from superfluid.codec.harmony import CONSTRAIN, NEEDED, HarmonySplitter
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import model

tokenizer = ByteTokenizer([*NEEDED, CONSTRAIN], silent=[*NEEDED, CONSTRAIN])


def router() -> Router:
    return Router(lambda: HarmonySplitter(tokenizer.table, tokenizer.ids))


def read(text: str) -> list[tuple[int, str, bool]]:
    return [(run.channel, run.text, run.closes) for run in router().commit(tokenizer.encode(text))]


def test_channels_are_named_by_headers() -> None:
    reply = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>pre<|end|>"
        "<|start|>assistant<|channel|>final<|message|>so<|return|>"
    )
    assert read(reply) == [(REASONING, "why", True), (TEXT, "pre", True), (TEXT, "so", True)]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json", "commentary to=functions.f "),
        (" to=functions.f<|channel|>commentary json", "commentary jsonto=functions.f"),
        ("<|channel|>analysis to=functions.f", "analysis to=functions.f"),
    ],
)
def test_a_recipient_before_or_after_the_channel_is_a_call(header: str, text: str) -> None:
    assert read(header + '<|message|>{"a": 1}<|call|>rest')[0] == (TOOL_CALL, text + '{"a": 1}', True)


def test_a_marker_inside_a_body_ends_it_unclosed() -> None:
    assert read("<|channel|>final<|message|>a<|message|>b<|channel|>analysis<|message|>c") == [
        (TEXT, "ab", False),
        (REASONING, "c", False),
    ]


alphabet = st.sampled_from([*tokenizer.ids.values(), *b"a", *b" to=f", *tokenizer.encode("analysis")])


@settings(max_examples=200)
@given(st.lists(alphabet, max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_slices_do_not_matter(tokens: list[int], cuts: list[int]) -> None:
    def flat(runs: list[tuple[int, str]]) -> list[tuple[int, str]]:
        merged: list[tuple[int, str]] = []
        for channel, text in runs:
            if text and merged and merged[-1][0] == channel:
                merged[-1] = (channel, merged[-1][1] + text)
            elif text:
                merged.append((channel, text))
        return merged

    whole = router().commit(tokens)
    edges = sorted({0, len(tokens), *(min(c, len(tokens)) for c in cuts)})
    lane = router()
    runs = [run for a, b in pairwise(edges) for run in lane.commit(tokens[a:b])]
    assert [t for run in runs for t in run.span] == tokens
    assert flat([(r.channel, r.text) for r in runs]) == flat([(r.channel, r.text) for r in whole])


def test_a_published_model(templates: Callable[[str], str]) -> None:
    codec = Codec.open(model("openai-gpt-oss-120b", templates))
    ids = codec.encoder.specials
    assert codec.dialect_name == "template" and codec.dialect.wire.name == "harmony"
    assert codec.terminators == {ids["<|return|>"], ids["<|call|>"]}
    assert codec.effort.levels == ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    assert codec.codec_id.endswith("/effort1:none,minimal,low,medium,high,xhigh,max")
    opener = codec.render([{"role": "user", "content": "hi"}]).opener
    lane = codec.router(open_tokens=opener)
    reply = codec.tokenizer.encode('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>x')
    assert lane.provisional(reply) == [(TOOL_CALL, 'commentary to=functions.f {"a": 1}', True)]
    (run,) = lane.commit(reply, last=True)[:1]
    assert lane.ended and run.closes and run.channel == TOOL_CALL
    (call,) = codec.read_call(run.text) or []
    assert (call.name, call.arguments_json) == ("f", '{"a":1}')
