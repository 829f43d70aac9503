"""Hostile texts cost no more than their length: in lines that run, calls, and characters given to the tokenizer.

A doubled text may cost a little more than double; anything quadratic costs four times as much.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import InvalidMessage, nests_deeper
from superfluid.codec.stops import StopStrings
from superfluid.codec.toolcalls import delimited, fragments, gemma, repair, wires
from superfluid.codec.toolcalls.typed import ToolSchemas
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.metering import Metered, MeteredPattern, counted, meter_patterns
from tests.codec.template_models import model

SIZE = 1500  # characters; and twice as many
CALL_SIZE = 400
GROWTH = 2.6  # of the cost from one to the other
FLOOR = 3000  # steps below which growth means nothing

UNITS = [
    "<", "<|im_", "<|im_end|>", "<|im_end|<|im_end", "<think>", "</think>", "<think>x</think> ", "SUPERFLUIDSTANDIN",
    "SUPERFLUIDSTANDIN0Z ", '"', "\\", "{", "[", "a", " ", "\n", "a <|im_end|>\n", "\U0001f600", "\0", "&<'>",
    '<tool_call>{"name": "f", "arguments": {', "<tool_response>", "<|eot_id|>", "</s>",
]  # fmt: skip
MODELS = ["Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "deepseek-ai-DeepSeek-V3.1", "GLM-4.6"]


def growth(work: Callable[[str], object], unit: str, least: int = SIZE) -> float:
    """What a text of the unit that is twice as long costs `work`, in costs of the shorter one. Whatever it refuses, it
    refuses in linear time too."""
    costs = []
    for size in (least, 2 * least):
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


def test_the_count_sees_what_is_quadratic_in_native_code() -> None:
    def searching(text: str) -> None:
        text = Metered(text)
        for at in range(0, len(text), 20):
            text.find("b", at)

    def cutting(text: str) -> None:
        text = Metered(text)
        while text:
            text = text[20:]

    pair = MeteredPattern(re.compile(r"\s*<k>(.*?)</k>\s*<v>(.*?)</v>", re.DOTALL))
    once = MeteredPattern(re.compile(r",\s*[^\s,:]+\s*:|\}"))
    assert growth(searching, "a") > GROWTH and growth(cutting, "a") > GROWTH
    assert growth(lambda text: pair.match("<k>" + text), "</k><v>", CALL_SIZE) > GROWTH
    assert growth(once.search, ", a") <= GROWTH and growth(once.search, "a") <= GROWTH


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


@pytest.mark.parametrize("name", MODELS)
def test_rendering(name: str, templates: Callable[[str], str]) -> None:
    """On the dialect that the model is served with, and on its template where that is another."""
    tokenizer = model(name, templates)
    for dialect in {Codec.open(tokenizer).dialect_name, "template"}:
        codec = Codec.open(tokenizer, dialect)
        for unit in UNITS:
            for shape in range(len(conversations(""))):
                cost = growth(lambda text, codec=codec, shape=shape: codec.render(conversations(text)[shape]), unit)  # type: ignore[misc]
                assert cost <= GROWTH, (dialect, unit, shape)


def test_encoding_asks_the_tokenizer_for_no_more_than_the_text(templates: Callable[[str], str]) -> None:
    tokenizer = model("Qwen-Qwen3-0.6B", templates)
    codec = Codec.open(tokenizer)
    for unit in UNITS:
        for messages in conversations(unit * (8000 // len(unit))):
            tokenizer.encoded.clear()
            codec.render(messages)
            assert sum(map(len, tokenizer.encoded)) < 4 * len(json.dumps(messages, ensure_ascii=False)) + 4000


DELIMITED = [
    "<function=", "<function=f>\n<", "<function=f>\n<parameter=a>\n", "parameter=", "\n</parameter>\n<", ">\n",
    '<invoke name="f">\n<', 'parameter name="', '">', "</parameter>\n<", "</parameter>", "parameter=a>\n1</parameter>",
    "parameter=a>\n1\n</parameter>\n<", "\n", "<f=f><k=a>", "<k=a>",
]  # fmt: skip
JSON = ['{"a":', '[{"name":"f"},', '{"name":"f","arguments":{}}', '"', "\\", '\\"', ",", ", ", "}", "]", "```json\n"]
WIRES: list[tuple[wires.Wire, list[str], list[str]]] = [  # a wire, how calls begin on it, and what may follow
    (wires.JsonWire(), ["", '{"name":"f","arguments":{"k":', '{"name":"f","arguments":{"k":"', '[{"name":"f"'], JSON),
    (wires.MistralWire(), ["", '[{"name":"f","arguments":{'], JSON),
    (
        wires.GlmWire(),
        ["", "f<arg_key>", "f<arg_key>a", "f<arg_key>a</arg_key><arg_value>"],
        [
            "<arg_key>", "</arg_key>", "</arg_key><arg_value>", "</arg_key> ", "<arg_value>", "</arg_value><arg_key>",
            "<arg_key>a</arg_key><arg_value>1</arg_value>", "<tool_call>",
        ],
    ),
    (
        wires.GemmaWire(),
        ["", "call:f{", "call:f{a:", "call:f{a:[", 'call:f{a:<|"|>'],
        [
            "call:f{", "call:f{}", "1,", "a:1,", "{a:", "[1,", '<|"|>', '<|"|>,', ",", ", a", ":", "}", "]", "-", "1",
            "<tool_call|>", "<|tool_call>",
        ],
    ),
    (wires.HarmonyWire(), ["", "to=f ", "to=f {"], ["to=", "to=f{", "{", "functions.", '"', "}"]),
    (
        wires.AtemWire(),
        ["", '<atem:invoke name="f">', '<atem:invoke name="f"><atem:parameter name="a">'],
        [
            '<atem:invoke name="f">', '<atem:invoke name="', '<atem:parameter name="a">', '<atem:parameter name="',
            '<atem:parameter name="a">1</atem:parameter>', "</atem:parameter>", '"', ">",
        ],
    ),
    (wires.PythonicWire(), ["", "[f(a="], ["f(a=1),", "[", "f(", "(", "-", "a.", "lambda:", "f()"]),
    *(
        (wire, ["", "f[ARGS]", 'f[ARGS]{"a":', "functions."], ["[ARGS]", "[CALL_ID]", "f[ARGS]{}", ":0", "{", "}"])
        for wire in (
            wires.NamedWire("", "[CALL_ID]abc123def[ARGS]", "[CALL_ID]"),
            wires.NamedWire("functions.", ":0[ARGS]", "[ARGS]", kimi=True),
            wires.NamedWire("function[ARGS]", "\n```json\n", "\n", "\n```"),
        )
    ),
    *(
        (wire, ["", wire.name_open + "f" + wire.name_close + wire.key_open + "a" + wire.key_close], DELIMITED)
        for wire in (
            wires.DelimitedWire("<function=", ">\n<", "parameter=", ">\n", "\n</parameter>\n<"),
            wires.DelimitedWire('<invoke name="', '">\n<', 'parameter name="', '">', "</parameter>\n<"),
            wires.DelimitedWire("<f=", ">", "<k=", ">", ""),
        )
    ),
]  # fmt: skip
COMMON = ["<", " ", "\n", "a", "\\u"]


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions of the wires count."""
    assert meter_patterns(monkeypatch, delimited, fragments, gemma, repair, wires) > 8
    plain = delimited.any_of
    for module in (delimited, wires):
        monkeypatch.setattr(module, "any_of", lambda words: MeteredPattern(plain(words)))


@pytest.mark.usefixtures("metered")
@pytest.mark.parametrize(("wire", "begins", "units"), WIRES, ids=lambda value: getattr(value, "name", ""))
def test_reading_calls(wire: wires.Wire, begins: list[str], units: list[str]) -> None:
    for name in ("openings", "closers"):
        vars(wire).pop(name, None)  # made again, counting
    for begun, unit in product(begins, [*units, *COMMON]):
        for reading in (read_whole, read_in_pieces, read_at_once):
            assert growth(partial(reading, wire, begun), unit, CALL_SIZE) <= GROWTH, (begun, unit, reading)


SCHEMAS = ToolSchemas([{"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "integer"}}}}])


def read_whole(wire: wires.Wire, begun: str, text: str) -> None:
    wire.read(Metered(begun + text), SCHEMAS)


def read_in_pieces(wire: wires.Wire, begun: str, text: str) -> None:
    """A call's text as it streams: three characters at a time, and then the whole."""
    text = Metered(begun + text)
    reader = fragments.reader(wire, SCHEMAS)
    for at in range(0, len(text), 3):
        reader.feed(text[at : at + 3])
    reader.end(wire.read_cut(text, SCHEMAS) or [])


def read_at_once(wire: wires.Wire, begun: str, text: str) -> None:
    fragments.reader(wire, SCHEMAS).feed(Metered(begun + text))


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


def test_what_stop_strings_hold_back_is_not_copied_for_every_token() -> None:
    def stream(text: str) -> None:
        stops = StopStrings([text + "b", "x" * len(text)])
        for at in range(0, 2 * len(text), 2):
            stops.feed(Metered(text[at % len(text) : at % len(text) + 2]))
        stops.flush()

    for unit in ("a", "ab", "aab"):
        assert growth(stream, unit) <= GROWTH, unit


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
