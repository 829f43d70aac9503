"""What goes to the engine for tools and response formats: exact texts, and that it compiles, holds and reads back."""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.codec.toolcalls.constraints import Constraint, ConstraintUnsatisfiable, ToolChoice
from superfluid.codec.toolcalls.parsers import UnknownParser
from superfluid.codec.toolcalls.wires import DelimitedWire
from superfluid.engines.executor.grammar import GrammarCompiler, Matcher
from superfluid.engines.primitives import Vocabulary
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer
from tests.codec.template_models import NAMES, model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"]},
                "exact": {"type": "boolean"},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "days"],
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"lat": {"type": "integer"}},
                    "required": ["lat"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]
REQUIRED, NAMED = ToolChoice("required"), ToolChoice("function", "get_weather")
UNFORCED = {"raw", "pythonic"}


def compiler(tokenizer: ByteTokenizer) -> GrammarCompiler:
    marks = [b"\xff" + text.encode() for text in tokenizer.specials]
    tokens = [bytes([i]) for i in range(256)] + marks
    controls = frozenset(range(256, len(tokens)))
    return GrammarCompiler(Vocabulary(tokens, controls, tokenizer.stop_ids, encode=lambda text: list(text.encode())))


def start(grammars: GrammarCompiler, constraint: Constraint) -> Matcher:
    first = constraint.attempts[0]
    grammar = grammars.structural(first.text) if first.kind == "structural" else grammars.schema(first.text)
    return grammar.matcher()


def walk(matcher: Matcher, stops: frozenset[int], rng: random.Random, closer: str) -> list[int] | None:
    """Tokens of one way through a grammar, letters and endings first; none when it does not end soon. `closer` ends a
    value that may be any text."""
    tokens: list[int] = []
    spelling: list[int] = []
    for _ in range(600):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.nonzero(bits)[0].tolist()
        assert allowed, f"nothing may follow {tokens}"
        if stops.intersection(allowed) and (len(tokens) > 8 or len(allowed) == 1):
            return tokens
        markers = [token for token in allowed if token > 255 and token not in stops]
        plain = [token for token in allowed if 33 <= token < 127 and chr(token) in 'abc019"}]>:,{/<']
        if not spelling and rng.random() < 0.1:
            spelling = list(closer.encode())
        if spelling and spelling[0] in allowed:
            choice = spelling.pop(0)
        else:
            spelling = []
            choice = rng.choice(markers) if markers and rng.random() < 0.3 else rng.choice(plain or allowed)
        assert matcher.consume(choice)
        tokens.append(choice)
    return None


@pytest.fixture(scope="module")
def opened(templates: Callable[[str], str]) -> Callable[[str], Codec]:
    codecs: dict[str, Codec] = {}

    def codec(name: str) -> Codec:
        if name not in codecs:
            tokenizer = model(name, templates)
            if name == "openai-gpt-oss-120b":
                tokenizer.stop_ids = frozenset([tokenizer.ids["<|return|>"], tokenizer.ids["<|call|>"]])
            codecs[name] = Codec.open(tokenizer)
        return codecs[name]

    return codec


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
def test_demanded_calls_hold_and_read_back(name: str, choice: ToolChoice, opened: Callable[[str], Codec]) -> None:
    """Whatever the grammar of a demanded call lets through is read as a call of a declared tool, with its types."""
    codec = opened(name)
    if codec.wire.name in UNFORCED:
        with pytest.raises(ConstraintUnsatisfiable, match="no tool-call grammar could be compiled") as refusal:
            codec.constraint(TOOLS, choice)
        assert ("this model's template has no tool calls" in str(refusal.value)) is not codec.calls_tools
        return
    assert codec.calls_tools
    constraint = codec.constraint(TOOLS, choice)
    assert constraint.refusal is not None
    assert constraint.one_call
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    grammar = start(compiler(tokenizer), constraint)
    closer = codec.wire.val_close if isinstance(codec.wire, DelimitedWire) else ""
    ends = 0
    for seed in range(12):
        tokens = walk(grammar.fork(), tokenizer.stop_ids, random.Random(seed), closer)
        if tokens is None:
            continue
        ends += 1
        router = codec.forced_router()
        runs = router.commit(tokens, True)
        raw = "".join(run.text for run in runs if run.channel == 2) or "".join(run.text for run in runs)
        calls = codec.read_call(raw, TOOLS)
        assert calls is not None, raw
        assert len(calls) == 1, raw
        expected = {"get_weather"} if choice is NAMED else {"get_weather", "clock"}
        assert calls[0].name in expected
        if codec.wire.name not in ("gemma",):  # holds only what is required, whatever its type is
            arguments = json.loads(calls[0].arguments_json)
            parameters = next(t["function"] for t in TOOLS if t["function"]["name"] == calls[0].name)["parameters"]
            if codec.wire.name in ("delimited", "glm"):
                arguments = {key: value for key, value in arguments.items() if key in parameters["properties"]}
            jsonschema.validate(arguments, parameters)
    assert ends >= 2


@pytest.mark.parametrize("name", NAMES)
def test_free_choice_is_held_only_where_it_can_be(name: str, opened: Callable[[str], Codec]) -> None:
    codec = opened(name)
    constraint = codec.constraint(TOOLS)
    assert bool(constraint.attempts) == codec.wire.auto_held
    assert constraint.refusal is None
    if constraint.attempts:
        assert isinstance(codec.tokenizer, ByteTokenizer)
        matcher = start(compiler(codec.tokenizer), constraint)
        if codec.wire.name != "harmony":
            for token in b"Hello, [1] {2} <3>":
                assert matcher.consume(token)
        assert matcher.accepting or codec.wire.name == "harmony"


def text_of(constraint: Constraint) -> Any:
    return json.loads(constraint.attempts[0].text)


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"enum": ["x", 1, None]}, "c": {"type": "integer"}},
    "required": ["a"],
}
ONE = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


def test_the_json_tag_is_exact() -> None:
    codec = Codec.open(chatml_tokenizer())
    call = (
        '{"type":"object","properties":{"name":{"const":"f"},"arguments":'
        + json.dumps(PARAMETERS, separators=(",", ":"))
        + '},"required":["name","arguments"],"additionalProperties":false}'
    )
    tag = (
        '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<tool_call>"],"tags":[{"type":"tag",'
        '"begin":"<tool_call>","content":{"type":"json_schema","json_schema":%s},"end":"</tool_call>"}],'
        '"at_least_one":%s,"stop_after_first":%s}}'
    )
    assert codec.constraint(ONE).attempts[0].text == tag % (call, "false", "false")
    assert codec.constraint(ONE, parallel=False).attempts[0].text == tag % (call, "false", "true")
    forced = codec.constraint(ONE, REQUIRED).attempts
    assert [(attempt.kind, attempt.text) for attempt in forced] == [
        ("structural", tag % (call, "true", "true")),
        ("schema", call),
    ]
    assert json.loads(codec.constraint(TOOLS, REQUIRED).attempts[1].text).keys() == {"anyOf"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def test_tags_of_other_wires(opened: Callable[[str], Codec]) -> None:
    def content(name: str) -> Any:
        made = text_of(opened(name).constraint(ONE, REQUIRED))["format"]
        return made["tags"][0]["content"]

    values = {"type": "or", "elements": [const("x"), const("1"), const("null")]}
    integer = {"type": "json_schema", "json_schema": {"type": "integer"}}

    def delimited(key: str, value: Any) -> Any:
        return {"type": "tag", "begin": f"parameter={key}>\n", "content": value, "end": "\n</parameter>\n<"}

    assert content("Qwen3-Coder") == {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": r"\s*"},
            const("<function=f>\n<"),
            delimited("a", {"type": "any_text"}),
            {"type": "optional", "content": delimited("b", values)},
            {"type": "optional", "content": delimited("c", integer)},
            {"type": "any_text"},
        ],
    }

    def glm(key: str, value: Any) -> Any:
        tag = {"type": "tag", "begin": "<arg_value>", "content": value, "end": "</arg_value>"}
        return {"type": "sequence", "elements": [const(f"<arg_key>{key}</arg_key>"), tag]}

    assert content("GLM-4.6") == {
        "type": "sequence",
        "elements": [
            const("f"),
            glm("a", {"type": "any_text"}),
            {"type": "optional", "content": glm("b", values)},
            {"type": "optional", "content": glm("c", integer)},
        ],
    }
    body = {"type": "json_schema", "json_schema": PARAMETERS}
    assert content("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B") == {
        "type": "sequence",
        "elements": [const("function<｜tool▁sep｜>f\n```json\n"), body, const("\n```")],
    }
    text = {"type": "regex", "pattern": "[A-Za-z0-9_.:/=@+-][A-Za-z0-9 _.:/=@+-]*"}
    assert content("google-gemma-4-31B-it") == {
        "type": "sequence",
        "elements": [const("call:f{"), {"type": "sequence", "elements": [const("a:"), text]}, const("}")],
    }


def test_the_harmony_tag_is_exact(opened: Callable[[str], Codec]) -> None:
    codec = opened("openai-gpt-oss-120b")
    assert isinstance(codec.tokenizer, ByteTokenizer)
    ids = codec.tokenizer.ids
    names = ["start", "channel", "message", "end", "return", "call", "constrain"]
    start_, channel, message, end, _, _, constrain = (
        {"type": "token", "token": ids[f"<|{name}|>"]} for name in names
    )  # fmt: skip
    markers = [ids[f"<|{name}|>"] for name in names]

    def sequence(*elements: Any) -> Any:
        return {"type": "sequence", "elements": list(elements)}

    def optional(content: Any) -> Any:
        return {"type": "optional", "content": content}

    kind = optional(
        {"type": "or", "elements": [sequence(optional(const(" ")), constrain, const("json")), const(" json")]}
    )
    free = {"type": "any_tokens", "exclude_tokens": markers}
    body = {"type": "tag", "begin": message, "content": free, "end": end}
    analysis = optional(sequence(channel, const("analysis"), body, start_, const("assistant")))
    json_body = {"type": "json_schema", "json_schema": PARAMETERS}
    call = sequence(channel, const("commentary to=functions.f"), kind, message, json_body)
    assert text_of(codec.constraint(ONE, REQUIRED)) == {"type": "structural_tag", "format": sequence(analysis, call)}
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    answer = sequence(
        analysis, channel, const("final"), kind, message, {"type": "json_schema", "json_schema": {"type": "integer"}}
    )
    assert text_of(codec.constraint(response_format=wanted)) == {"type": "structural_tag", "format": answer}


HARMONY_REPLIES = [
    "<|channel|>final<|message|>Hello",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":"x"}',
    ' to=functions.f<|channel|>commentary json<|message|>{"a":"x"}',
    "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>commentary<|message|>2<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.f<|message|>{"a":"x"}',
]


@pytest.mark.parametrize("text", HARMONY_REPLIES)
def test_harmony_holds_its_own_forms(text: str, opened: Callable[[str], Codec]) -> None:
    codec = opened("openai-gpt-oss-120b")
    assert isinstance(codec.tokenizer, ByteTokenizer)
    matcher = start(compiler(codec.tokenizer), codec.constraint(ONE))
    for token in codec.tokenizer.encode(text):
        assert matcher.consume(token), codec.tokenizer.spell([token])
    assert matcher.accepting
    assert not matcher.fork().consume(codec.tokenizer.ids["<|channel|>"])


# ---- the order of a chat request


def refused(codec: Codec, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConstraintUnsatisfiable) as caught:
        codec.constraint(*arguments, **named)
    return str(caught.value)


def test_demands_that_nothing_could_meet() -> None:
    codec = Codec.open(chatml_tokenizer())
    missing = 'constraint unsatisfiable: tool_choice names function "g", which is not among the declared tools'
    assert refused(codec, ONE, ToolChoice("function", "g")) == missing
    assert refused(codec, [], ToolChoice("function", "g")) == missing
    assert refused(codec, [], REQUIRED).startswith("constraint unsatisfiable: tool_choice is")
    assert "no json_schema block" in refused(codec, response_format={"type": "json_schema"})
    schemas: list[Any] = [[], "x", 1, None]
    for schema in schemas:
        bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        assert "must be an object" in refused(codec, response_format=bad)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ToolChoice()), ("auto", ToolChoice()), ("any", ToolChoice()), ({}, ToolChoice()), (7, ToolChoice()),
        ("none", ToolChoice("none")), ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("function", "f")),
        ({"type": "function", "name": "f"}, ToolChoice("function", "f")),
        ({"type": "allowed_tools"}, ToolChoice()),
    ],
)  # fmt: skip
def test_tool_choice(value: Any, expected: ToolChoice) -> None:
    assert ToolChoice.read(value) == expected


def test_response_format_stands_where_no_tool_grammar_does(opened: Callable[[str], Codec]) -> None:
    wanted = {"type": "json_object"}
    codec = Codec.open(chatml_tokenizer())
    schema = ("schema", '{"type":"object"}', False)
    assert [attrs_of(a) for a in codec.constraint(response_format=wanted).attempts] == [schema]
    held = codec.constraint(ONE, response_format=wanted).attempts
    assert [a.holds_calls for a in held] == [True, False]  # the second only if the first does not compile
    withheld = codec.constraint(ONE, ToolChoice("none"), response_format=wanted).attempts
    assert [attrs_of(a) for a in withheld] == [schema]
    free = opened("Qwen3-Coder").constraint(ONE, response_format=wanted).attempts
    assert [attrs_of(a) for a in free] == [schema]
    forced = codec.constraint(ONE, REQUIRED, response_format=wanted).attempts
    assert all(a.holds_calls for a in forced)
    bare = {"type": "json_schema", "json_schema": {"type": "integer"}}
    assert codec.constraint(response_format=bare).attempts[0].text == '{"type":"integer"}'
    assert codec.constraint(response_format={"type": "text"}).attempts == ()


def attrs_of(attempt: Any) -> tuple[str, str, bool]:
    return attempt.kind, attempt.text, attempt.holds_calls


def test_a_lane_that_starts_in_reasoning_leaves_it_before_the_answer() -> None:
    tokenizer = chatml_tokenizer()
    codec = Codec.open(tokenizer)
    opener = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    constraint = codec.constraint(response_format={"type": "json_object"}, opener=opener)
    close = tokenizer.ids["</think>"]
    assert text_of(constraint)["format"]["elements"] == [
        {"type": "any_tokens", "exclude_tokens": [close]},
        {"type": "token", "token": close},
        {"type": "json_schema", "json_schema": {"type": "object"}},
    ]
    matcher = start(compiler(tokenizer), constraint)
    for token in tokenizer.encode('Hm, {"a" or\n</think>\n\n{"a":1}'):
        assert matcher.consume(token)
    assert matcher.accepting


def test_references_of_parameters_lead_into_the_call() -> None:
    codec = Codec.open(chatml_tokenizer())
    grammars = compiler(chatml_tokenizer())
    structural, schema = codec.constraint(TOOLS, REQUIRED).attempts
    grammars.structural(structural.text)
    matcher = grammars.schema(schema.text).matcher()
    for token in b'{"name":"get_weather","arguments":{"city":"x","days":3,"place":{"lat":':
        assert matcher.consume(token)
    assert not matcher.fork().consume(ord('"'))


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "title", "$ref", "properties", "$defs"])
def test_references_of_properties_that_are_named_as_keywords_are(name: str) -> None:
    point = {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}
    parameters = {"type": "object", "properties": {name: {"$ref": "#/$defs/p"}}, "$defs": {"p": point}}
    parameters |= {"required": [name], "default": {"$ref": "#/no/schema"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for tools, place in (([tool], "#"), ([tool, tool], "#/anyOf/1")):
        structural, schema = Codec.open(chatml_tokenizer()).constraint(tools, REQUIRED).attempts
        moved = json.loads(schema.text)
        arguments = (moved["anyOf"][-1] if len(tools) > 1 else moved)["properties"]["arguments"]
        assert arguments["properties"] == {name: {"$ref": f"{place}/properties/arguments/$defs/p"}}
        assert arguments["default"] == {"$ref": "#/no/schema"}
        grammars = compiler(chatml_tokenizer())
        grammars.structural(structural.text)
        matcher = grammars.schema(schema.text).matcher()
        for token in f'{{"name":"f","arguments":{{"{name}":{{"x":'.encode():
            assert matcher.consume(token)
        assert not matcher.fork().consume(ord("1"))


# ---- --tool-call-parser


def test_parsers(opened: Callable[[str], Codec], templates: Callable[[str], str]) -> None:
    tokenizer = model("Qwen-Qwen3-0.6B", templates)
    assert Codec.open(tokenizer, parser="json").wire.name == "json"
    with pytest.raises(DialectRefused, match=r"--tool-call-parser harmony refused: .* wire json, not harmony"):
        Codec.open(tokenizer, parser="harmony")
    with pytest.raises(DialectRefused, match=r"parser glm refused: .* on the wire json, not glm"):
        Codec.open(tokenizer, parser="glm")
    with pytest.raises(DialectRefused, match=r"parser json refused: .* on the wire glm, not json"):
        Codec.open(model("GLM-4.6", templates), parser="json")
    words = r"unknown --tool-call-parser 'x' \(have: auto, json, atem, gemma, harmony, glm\)"
    with pytest.raises(UnknownParser, match=words):
        Codec.open(tokenizer, parser="x")
    marked = chatml_tokenizer("{# <arg_key> <arg_value> #}" + CHATML)
    codec = Codec.open(marked, parser="glm")
    assert codec.wire.name == "glm"
    assert "<arg_key>a</arg_key>" in codec.constraint(ONE, REQUIRED).attempts[0].text
    assert not codec.constraint(ONE).attempts  # a wire that is not held runs free
    call = "f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>c</arg_key><arg_value>7</arg_value>"
    router = codec.router()
    (run,) = (r for r in router.commit(marked.encode(f"Well.<tool_call>{call}</tool_call>"), True) if r.channel == 2)
    (read,) = codec.read_call(run.text, ONE) or []
    assert (read.name, read.arguments_json) == ("f", '{"a":"x","c":7}')
    assert codec.read_call('{"name": "f", "arguments": {"a": "x"}}', ONE) is None  # never two wires at once


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    codec = Codec.open(chatml_tokenizer())
    assert "nested too deep" in refused(codec, response_format={"type": "json_schema", "json_schema": schema})
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert "nested too deep" in refused(codec, [tool])
