import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.channels import TOOL_CALL
from superfluid.codec.codec import Codec
from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.codec.framing import Encoder
from superfluid.codec.template import ChatTemplate
from superfluid.codec.toolcalls import wires
from superfluid.codec.toolcalls.learn import learn
from superfluid.codec.toolcalls.repair import close, closing, readings, without_trailing_commas
from superfluid.codec.toolcalls.typed import ToolSchemas, typed_value
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer
from tests.codec.template_models import NAMES, model

WIRES = {
    "json": [
        "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "ibm-granite-granite-4.0", "Apertus-8B-Instruct",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    ],
    "llama3": ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"],
    "glm": ["GLM-4.6", "poolside-Laguna-S-2.1"],
    "delimited": ["Qwen3-Coder", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ByteDance-Seed-OSS", "MiniMax-M2"],
    "named": [
        "Mistral-Small-3.2-24B-Instruct-2506", "deepseek-ai-DeepSeek-V3.1", "Kimi-K2-Instruct",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    ],
    "mistral": ["mistralai-Mistral-Nemo-Instruct-2407"],
    "gemma": ["google-gemma-4-31B-it"],
    "harmony": ["openai-gpt-oss-120b"],
    "raw": ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B"],
    "pythonic": ["LFM2-8B-A1B"],
}  # fmt: skip
EXPECTED = {name: wire for wire, names in WIRES.items() for name in names}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "n": {"type": "integer"},
                "flag": {"type": "boolean"},
                "tags": {"type": "array"},
                "note": {"type": "string"},
                "port": {"type": "string"},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {
    "city": "Paris",
    "n": 3,
    "flag": True,
    "tags": ["a", {"b": 1}],
    "note": "line 1\nline 2 & more, x: y",
    "port": "8080",
}


@pytest.mark.parametrize("name", NAMES)
def test_wires_learned_from_published_templates(name: str, templates: Callable[[str], str]) -> None:
    tokenizer = model(name, templates)
    source = tokenizer.templates[None]
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    assert learn(Encoder(tokenizer, source), template).wire.name == EXPECTED[name]


def test_delimiters(templates: Callable[[str], str]) -> None:
    def learned(name: str) -> wires.Wire:
        tokenizer = model(name, templates)
        source = tokenizer.templates[None]
        return learn(Encoder(tokenizer, source), ChatTemplate(source)).wire

    assert learned("Qwen3-Coder") == wires.DelimitedWire("<function=", ">\n<", "parameter=", ">\n", "\n</parameter>\n<")
    assert learned("MiniMax-M2") == wires.DelimitedWire(
        '<invoke name="', '">\n<', 'parameter name="', '">', "</parameter>\n<"
    )


@pytest.mark.parametrize("name", [n for n in NAMES if EXPECTED[n] not in ("raw", "llama3", "harmony", "pythonic")])
@pytest.mark.parametrize("dialect", ["auto", "template"])
def test_what_a_template_renders_is_read_back(name: str, dialect: str, templates: Callable[[str], str]) -> None:
    try:
        codec = Codec.open(model(name, templates), dialect)
    except DialectRefused:
        pytest.skip("it renders only with tools")
    if not codec.can_chat:
        pytest.skip("it renders only with tools")
    arguments = dict(ARGUMENTS)
    if name == "ByteDance-Seed-OSS":
        del arguments["tags"]  # its template writes lists as Python does
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    call = {"id": "abc123def", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tokens = codec.render(messages, [TOOL]).tokens
    before = codec.render(messages[:1], [TOOL]).tokens
    shared = next((i for i, (a, b) in enumerate(zip(tokens, before, strict=False)) if a != b), len(before))
    opened = max(i for i, token in enumerate(tokens[: shared + 1]) if token > 255)
    router = codec.router()
    runs = [run for run in router.commit(tokens[opened:]) if run.channel == TOOL_CALL]
    assert runs, name
    # a wire without a closer runs to the end of the stream
    text = runs[0].text if runs[0].closes else runs[0].text.rstrip("\n")
    read = codec.read_call(text, [TOOL])
    assert read is not None and read[0].name == "get_weather"
    assert json.loads(read[0].arguments_json) == arguments


NO_TOOLS = ToolSchemas()


def json_call(text: str, tools: ToolSchemas = NO_TOOLS) -> list[tuple[str, Any]] | None:
    calls = wires.JsonWire().read(text, tools)
    return None if calls is None else [(call.name, json.loads(call.arguments_json)) for call in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ('```json\n{"name": "f", "arguments": {}}\n```', [("f", {})]),
        ('Sure: {"name": " f ", "parameters": {"a": 1}} ok?', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": {"a": [1, 2,], }, }', [("f", {"a": [1, 2]})]),
        ('{"name": "f", "arguments": {"a": "cut', [("f", {"a": "cut"})]),
        ('{"name": "f", "arguments": {"a": "cut behind ', [("f", {"a": "cut behind "})]),
        ('{"name": "f", "arguments": {"a": 1,', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": {"a": "x\\', [("f", {"a": "x"})]),
        ('{"name": "f"}', [("f", {})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": "no json"}', None),
        ('{"type": "function", "function": {"name": "f", "input": {"a": 1}}}', [("f", {"a": 1})]),
        ('[{"name": "f"}, {"tool_name": "g", "parameters": {"x": 2}}]', [("f", {}), ("g", {"x": 2})]),
        ('{"name": "", "tool_name": " g ", "args": {}}', [("g", {})]),
        ('{"name": null, "tool_name": "g"}', [("g", {})]),
        ('[{"name": "f"}, {"no": 1, "call": 2}]', [("f", {})]),
        ('{"name": "", "arguments": {}}', None),
        ('{"name": "f", "arguments": {"a": ', None),
        ('{"name": "f"}}', [("f", {})]),
        ("plain text", None),
        ('{"get_weather": {"city": "P"}}', None),
        ('{"name": "f", "arguments": {"a": NaN}}', None),
        ("[" * 100_000, None),
    ],
)
def test_json_calls(text: str, expected: object) -> None:
    assert json_call(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f', None),  # it may be half a name
        ('{"name": "f"', None),
        ('{"name": "f", ', None),
        ('{"name": "f", "argum', None),
        ('{"name": "f", "arguments": ', None),
        ('{"name": "f", "arguments": {', [("f", {})]),
        ('{"name": "f", "arguments": {"a": "cut', [("f", {"a": "cut"})]),
        ('{"arguments": {"a": 1}, "name": "f', [("f", {"a": 1})]),
        ('{"name": "f"}', [("f", {})]),
        ('{"name": "f"} and', [("f", {})]),
        ('[{"name": "f"}, {"name": "g"', [("f", {})]),
        ('[{"name": "f"}, {"name": "g", "arguments": {"a": 1', [("f", {}), ("g", {"a": 1})]),
    ],
)
def test_a_call_that_a_limit_cut_before_its_arguments_is_none(text: str, expected: object) -> None:
    for wire in (wires.JsonWire(), wires.MistralWire(), wires.Llama3Wire(), wires.RawWire()):
        calls = wire.read_cut(text, NO_TOOLS)
        read = None if calls is None else [(call.name, json.loads(call.arguments_json)) for call in calls]
        assert read == expected


def test_one_key_that_is_a_declared_tool_is_a_call() -> None:
    assert json_call('{"get_weather": {"city": "P"}}', ToolSchemas([TOOL])) == [("get_weather", {"city": "P"})]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(json_values, st.integers(0, 100))
def test_a_cut_document_closes(value: Any, cut: int) -> None:
    text = json.dumps({"v": value})
    assert next(readings(text)) == ({"v": value}, False)
    short = text[: min(cut, len(text))]
    ending = closing(short)
    assert ending is not None
    closed = close(short)
    assert closed is not None and closed.endswith(ending)
    assert closing(closed) == ""


@given(st.text(alphabet='{}[],:" \\a1\n', max_size=30))
def test_repairs_never_fail_otherwise_than_by_giving_nothing(text: str) -> None:
    list(readings(text))
    assert len(without_trailing_commas(text)) <= len(text)


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("8080", {"string"}, "8080"),
        ("8080", {"integer"}, 8080),
        ("four", {"integer"}, "four"),
        (" 8 ", set(), 8),
        ('"quoted"', set(), '"quoted"'),
        (" text ", set(), " text "),
        ("True", {"boolean"}, True),
        ("True", {"integer"}, "True"),
        ("None", {"null", "integer"}, None),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("[1]", {"integer"}, [1]),
        ("null", {"string", "null"}, "null"),
    ],
)
def test_values_written_as_text(text: str, types: set[str], expected: object) -> None:
    assert typed_value(text, frozenset(types)) == expected


def test_glm_prefers_another_declared_type() -> None:
    types = frozenset(["string", "integer"])
    assert typed_value("8", types, strict_strings=False) == 8
    assert typed_value(" 8", types, strict_strings=False) == " 8"
    assert typed_value("true", types, strict_strings=False) == "true"


def test_types_are_collected_through_references() -> None:
    schema = {
        "$ref": "#/$defs/args",
        "$defs": {
            "args": {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": None}]}, "b": {"enum": [1, "x"]}}},
            "n": {"type": ["number", "array"]},
            "loop": {"$ref": "#/$defs/loop"},
        },
    }
    schemas = ToolSchemas([{"function": {"name": "f", "parameters": schema}}])
    assert schemas.types("f", "a") == {"number", "array", "null"}
    assert schemas.types("f", "b") == {"integer", "string"}
    assert schemas.types("f", "z") == schemas.types("g", "a") == frozenset()


def test_delimited_values_and_several_calls() -> None:
    wire = wires.DelimitedWire("<function=", ">\n<", "parameter=", ">\n", "\n</parameter>\n<")
    text = (
        "\n<function=get_weather>\n<parameter=city>\n Paris\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n"
        "<function=g>\n<parameter=x>\ncut"
    )
    calls = wire.read(text, ToolSchemas([TOOL]))
    assert calls == [
        wires.ToolCall("get_weather", '{"city":" Paris","n":3}'),
        wires.ToolCall("g", '{"x":"cut"}'),
    ]
    assert wire.read("<function=a b>\n<parameter=x>\n1", NO_TOOLS) is None
    assert wire.read('{"name": "f"}', NO_TOOLS) == [wires.ToolCall("f", "{}")]
    loose = "<function=f>\n<parameter=x>\n1</parameter></function>"
    assert wire.read(loose, NO_TOOLS) == [wires.ToolCall("f", '{"x":1}')]


def test_glm_is_strict() -> None:
    wire, schemas = wires.GlmWire(), ToolSchemas([TOOL])
    pair = "<arg_key>city</arg_key>\n<arg_value>8</arg_value>"
    assert wire.read(f"get_weather\n{pair}\n", schemas) == [wires.ToolCall("get_weather", '{"city":"8"}')]
    assert wire.read("<tool_call>now</tool_call>", NO_TOOLS) == [wires.ToolCall("now", "{}")]
    for broken in (f"get_weather{pair}x", f"get_weather{pair[:-3]}", "get weather", "get_weather", ""):
        assert wire.read(broken, schemas) is None, broken


def test_gemma_values() -> None:
    wire = wires.GemmaWire()
    text = '<|tool_call>call:f{a:<|"|>x, {y}<|"|>,b:{c:[1,true,two words]},d:-1.5,e:one, two,g:null}<tool_call|>'
    (call,) = wire.read(text, NO_TOOLS) or []
    expected = {"a": "x, {y}", "b": {"c": [1, True, "two words"]}, "d": -1.5, "e": "one, two", "g": None}
    assert (call.name, json.loads(call.arguments_json)) == ("f", expected)
    assert wire.read('call:f{a:<|"|>cut', NO_TOOLS) == [wires.ToolCall("f", '{"a":"cut"}')]
    assert wire.read("call:f", NO_TOOLS) is None
    assert wire.read("call:f{a:" + "[" * 100_000, NO_TOOLS) is not None


def test_named_wires() -> None:
    schemas = NO_TOOLS
    mistral = wires.NamedWire("", "[CALL_ID]abc123def[ARGS]", "[CALL_ID]")
    assert mistral.read('f[CALL_ID]zzz[ARGS]{"a": 1}', schemas) == [wires.ToolCall("f", '{"a":1}')]
    kimi = wires.NamedWire("functions.", ":0<|arg|>", "<|arg|>", kimi=True)
    assert kimi.read('functions.f:12<|arg|>{"a": 1}', schemas) == [wires.ToolCall("f", '{"a":1}')]
    distill = wires.NamedWire("function<|sep|>", "\n```json\n", "\n", "\n```")
    assert distill.read('function<|sep|>f\n```json\n{"a": 1}\n```', schemas) == [wires.ToolCall("f", '{"a":1}')]
    assert kimi.read("functions.f:1", schemas) is None


def test_other_wires() -> None:
    pythonic = wires.PythonicWire()
    assert pythonic.read('[f(a=1, b="x"), g()]', NO_TOOLS) == [
        wires.ToolCall("f", '{"a":1,"b":"x"}'),
        wires.ToolCall("g", "{}"),
    ]
    assert pythonic.read("[f(a=open('x'))]", NO_TOOLS) is None
    assert pythonic.read("[f(1)]", NO_TOOLS) is None
    harmony = wires.HarmonyWire()
    assert harmony.read('commentary to=functions.f json{"a": 1}', NO_TOOLS) == [wires.ToolCall("f", '{"a":1}')]
    (broken,) = harmony.read("commentary to=functions.f json{oops", NO_TOOLS) or []
    assert broken.broken and broken.arguments_json == "{oops"
    atem = wires.AtemWire()
    text = '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>'
    assert atem.read(text, NO_TOOLS) == [wires.ToolCall("f", '{"a":1}')]
    assert atem.read('<atem:invoke name="f">\n<atem:parameter name="a">1', NO_TOOLS) is None


def test_a_chatml_model_with_another_wire_renders_its_own_calls(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer(templates("Qwen3-Coder")))
    assert codec.dialect_name == "chatml" and codec.dialect.wire.name == "delimited"
    arguments = json.dumps({"a": "x </tool_call> y", "b": 2})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Look.", "tool_calls": [call]},
    ]
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    tokens = codec.render(messages).tokens
    assert (
        "assistant\nLook.\n<tool_call>\n<function=f>\n<parameter=a>\nx </tool_call> y\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    ) in tokenizer.spell(tokens)
    assert tokens.count(tokenizer.ids["</tool_call>"]) == 1


def test_scripted_replies_are_read(scripted: Callable[[str], Codec]) -> None:
    codec = scripted("broken_tool")
    assert codec.read_call('\n{"name": "get_weather", "arguments": {"city": ') is None
    (call,) = codec.read_call('\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n') or []
    assert (call.name, call.arguments_json) == ("get_weather", '{"city":"Paris"}')


def test_separators_of_a_chatml_models_calls_are_text(templates: Callable[[str], str]) -> None:
    """A ChatML model that writes calls as GLM does: its argument markers are special tokens without bytes."""
    marks = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    base = chatml_tokenizer()
    tokenizer = ByteTokenizer(
        [*base.specials, *marks], silent=["<|im_end|>", *marks], eos="<|im_end|>", templates={None: source}
    )
    codec = Codec.open(tokenizer)
    assert (codec.dialect_name, codec.wire.name) == ("chatml", "glm")
    text = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
    (run,) = codec.router().commit(tokenizer.encode(text))
    assert [(c.name, c.arguments_json) for c in codec.read_call(run.text, [TOOL]) or []] == [
        ("get_weather", '{"city":"Paris"}')
    ]
