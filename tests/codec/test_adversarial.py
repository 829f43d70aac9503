"""Hostile texts cost no more than their length: in lines that run, calls, and characters given to the tokenizer.

A doubled text may cost a little more than double; anything quadratic costs four times as much.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import InvalidMessage, nests_deeper
from superfluid.codec.stops import StopStrings
from superfluid.codec.toolcalls.typed import ToolSchemas
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import model

SIZE = 1500  # characters; and twice as many
GROWTH = 2.6  # of the cost from one to the other
FLOOR = 3000  # steps below which growth means nothing

UNITS = [
    "<", "<|im_", "<|im_end|>", "<|im_end|<|im_end", "<think>", "</think>", "<think>x</think> ", "SUPERFLUIDSTANDIN",
    "SUPERFLUIDSTANDIN0Z ", '"', "\\", "{", "[", "a", " ", "\n", "a <|im_end|>\n", "\U0001f600", "\0", "&<'>",
    '<tool_call>{"name": "f", "arguments": {', "<tool_response>", "<|eot_id|>", "</s>",
]  # fmt: skip
MODELS = ["Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "deepseek-ai-DeepSeek-V3.1", "GLM-4.6"]
CALL_UNITS = [
    "{", "[", '"', "\\", ",", ':"', '{"a":', '[{"name":"f","arguments":{', "<function=f>\n<parameter=k>\n",
    "</parameter>\n", "<arg_key>k</arg_key>", "<arg_value>", '<|"|>', "call:f{", "a:", '<atem:invoke name="f">',
    '<atem:parameter name="k">',
    "</atem:parameter>", "f(a=1, ", "```json\n", "}", "]", "to=functions.f ", "\\u", "1", "x ",
]  # fmt: skip


class Steps:
    """Lines of Python that ran, and native calls."""

    def __init__(self) -> None:
        self.count = 0

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += 1
        return self.line

    def call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            self.count += 1


@contextmanager
def counted() -> Iterator[Steps]:
    steps = Steps()
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(steps.line)
    sys.setprofile(steps.call)
    try:
        yield steps
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])


def growth(work: Callable[[str], object], unit: str) -> float:
    """What a text of the unit that is twice as long costs `work`, in costs of the shorter one. Whatever it refuses, it
    refuses in linear time too."""
    costs = []
    for size in (SIZE, 2 * SIZE):
        text = unit * (size // len(unit))
        with counted() as steps:
            work(text)
        costs.append(steps.count)
    return costs[1] / max(costs[0], FLOOR)


def test_the_count_sees_quadratic_work() -> None:
    def quadratic(text: str) -> None:
        for at in range(0, len(text), 20):
            for _ in text[:at:20]:
                text.startswith("b", at)

    assert growth(quadratic, "a") > GROWTH


def conversations(text: str) -> list[list[dict[str, Any]]]:
    user, more = {"role": "user", "content": "x"}, {"role": "user", "content": text}
    call = {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": json.dumps({"k": text})}}
    broken = {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": text}}
    return [
        [more],
        [{"role": "system", "content": text}, user],
        [user, {"role": "assistant", "content": text}, user],
        [user, {"role": "assistant", "content": "a", "reasoning_content": text}, user],
        [user, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": text}],
        [user, {"role": "assistant", "content": "", "tool_calls": [broken]}, {"role": "tool", "content": "x"}],
    ]


@pytest.mark.parametrize("dialect", ["auto", "template"])
@pytest.mark.parametrize("name", MODELS)
def test_rendering(name: str, dialect: str, templates: Callable[[str], str]) -> None:
    tokenizer = model(name, templates)
    if dialect == "template" and Codec.open(tokenizer).dialect_name == "template":
        pytest.skip("served by its template already")
    codec = Codec.open(tokenizer, dialect)
    for unit in UNITS:
        for shape in range(len(conversations(""))):
            cost = growth(lambda text, shape=shape: codec.render(conversations(text)[shape]), unit)  # type: ignore[misc]
            assert cost <= GROWTH, (unit, shape)


def test_encoding_asks_the_tokenizer_for_no_more_than_the_text(templates: Callable[[str], str]) -> None:
    tokenizer = model("Qwen-Qwen3-0.6B", templates)
    codec = Codec.open(tokenizer)
    for unit in UNITS:
        for messages in conversations(unit * (8000 // len(unit))):
            tokenizer.encoded.clear()
            codec.render(messages)
            assert sum(map(len, tokenizer.encoded)) < 4 * len(json.dumps(messages, ensure_ascii=False)) + 4000


@pytest.mark.parametrize(
    "name",
    [
        "Qwen-Qwen3-0.6B", "Qwen3-Coder", "GLM-4.6", "google-gemma-4-31B-it", "Kimi-K2-Instruct", "LFM2-8B-A1B",
        "mistralai-Mistral-Nemo-Instruct-2407", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b",
    ],
)  # fmt: skip
def test_reading_calls(name: str, templates: Callable[[str], str]) -> None:
    codec = Codec.open(model(name, templates))
    schemas = ToolSchemas([{"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "integer"}}}}])
    begun = '{"name":"f","arguments":{"k":"'
    for unit in CALL_UNITS:
        assert growth(lambda text: codec.wire.read(text, schemas), unit) <= GROWTH, unit
        assert growth(lambda text: codec.wire.read(begun + text, schemas), unit) <= GROWTH, unit
        assert growth(lambda text: read_in_pieces(codec, text), unit) <= GROWTH, unit


def read_in_pieces(codec: Codec, text: str) -> None:
    """A call's text as it streams: three characters at a time, and then the whole."""
    reader = codec.call_reader([])
    for at in range(0, len(text), 3):
        reader.feed(text[at : at + 3])
    reader.end(codec.read_call(text) or [])


def test_routing_and_stop_strings(templates: Callable[[str], str]) -> None:
    for name in ("Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "google-gemma-4-31B-it"):
        codec = Codec.open(model(name, templates))
        markers = sorted(codec.encoder.special_texts)

        def stream(text: str, codec: Codec = codec, markers: list[int] = markers) -> None:
            router = codec.router(open_tokens=codec.opener(False))
            stops = StopStrings(["a" * 200 + "b", "\n\n\n", "abab"])
            for at, byte in enumerate(text.encode()):
                token = byte if at % 3 else markers[byte % len(markers)]
                router.provisional([token])
                for run in router.commit([token]):
                    stops.feed(run.text)

        for unit in ("a", "\U0001f600", "aaab"):
            assert growth(stream, unit) <= GROWTH, (name, unit)


# -- depth


def test_deep_arguments_and_tools_exhaust_no_stack() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
    codec = Codec.open(ByteTokenizer(["</s>"], eos="</s>", templates={None: source}))
    for depth, opened, closed in ((100_000, "[", ""), (900, "[", "]"), (129, '{"a":', "1" + "}" * 129)):
        arguments = opened * depth + (closed if len(closed) > 1 else closed * depth)
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        rendered = codec.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
        assert json.dumps({"value": arguments})[1:-1] in codec.tokenizer.spell(rendered.tokens)  # type: ignore[attr-defined]
    deep: Any = {}
    for _ in range(1000):
        deep = {"properties": deep}
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidMessage, match=r"tools\[1\] nests deeper than 128 levels"):
        codec.render(user, [{"name": "a"}, {"name": "f", "parameters": deep}])
    with pytest.raises(InvalidMessage, match="chat_template_kwargs nests deeper"):
        codec.render(user, None, {"x": deep})
    assert not nests_deeper([[[1]]], 3) and nests_deeper([[[1]]], 2) and not nests_deeper("x", 0)
