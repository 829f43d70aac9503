"""Grammars over a small vocabulary: what they allow, where they may end, what does not compile."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.grammar import SPELLED, GrammarCompiler, Matcher
from superfluid.engines.primitives import Vocabulary

MARKERS = [
    "<|end|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|channel|>", "<|message|>",
    "<tool_call>2",
]  # fmt: skip
WORDS = [b'{"', b'":', b'"}', b'"name"', b"hello", b" world", b"\n\n", b"12", b"</"]
TOKENS = [bytes([i]) for i in range(256)] + WORDS + [b"\xff" + text.encode() for text in MARKERS] + [b""] * 7
IDS = {text: 256 + len(WORDS) + i for i, text in enumerate(MARKERS)}
END, IM_END = IDS["<|end|>"], IDS["<|im_end|>"]
STOPS = frozenset({END, IM_END})
COMPILER = GrammarCompiler(Vocabulary(TOKENS, frozenset(IDS.values()), STOPS, encode=lambda text: list(text.encode())))
LONGEST = GrammarCompiler(Vocabulary(TOKENS, frozenset(IDS.values()), STOPS))


def spell(text: str) -> list[int]:
    """Ids of a text: bytes, and markers for themselves."""
    ids: list[int] = []
    while text:
        marker = next((m for m in sorted(MARKERS, key=len, reverse=True) if text.startswith(m)), None)
        ids += [IDS[marker]] if marker else list(text[0].encode())
        text = text[len(marker or " ") :]
    return ids


def spell_longest(text: str) -> list[int]:
    """Ids of a text without markers, longest tokens first."""
    data, ids = text.encode(), []
    while data:
        token = max((t for t in TOKENS[: 256 + len(WORDS)] if data.startswith(t)), key=len)
        ids.append(TOKENS.index(token))
        data = data[len(token) :]
    return ids


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def follow(matcher: Matcher, text: str) -> Matcher:
    for at, token in enumerate(spell(text)):
        assert token in allowed(matcher), f"{TOKENS[token]!r} is refused at {at} of {text!r}"
        assert matcher.consume(token)
    return matcher


def refused_at(matcher: Matcher, text: str) -> int | None:
    """Index of the first token refused, and that the mask knew it."""
    for at, token in enumerate(spell(text)):
        if token not in allowed(matcher):
            assert not matcher.fork().consume(token)
            return at
        assert matcher.consume(token)
    return None


def structural(form: dict[str, Any]) -> Matcher:
    return COMPILER.structural(json.dumps({"type": "structural_tag", "format": form})).matcher()


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def wrapped(how: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": how, "content": content}


# ---- schemas

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["name"],
}


def test_a_schema_ends_itself() -> None:
    matcher = COMPILER.schema(json.dumps(SCHEMA)).matcher()
    follow(matcher, '{"name": "a", "n": 3')
    assert not matcher.accepting and not matcher.finished
    follow(matcher, "}")
    assert matcher.accepting and matcher.finished
    assert allowed(matcher) == STOPS


def test_where_a_schema_may_end_every_stop_id_is_allowed_too() -> None:
    matcher = COMPILER.schema('{"type":"integer"}').matcher()
    assert not STOPS & allowed(matcher)
    follow(matcher, "1")
    assert matcher.accepting and not matcher.finished
    assert allowed(matcher) >= STOPS | {ord("2")}
    assert matcher.consume(IM_END)
    assert allowed(matcher) == set()
    assert not matcher.consume(ord("2"))


def test_undeclared_members_are_refused() -> None:
    matcher = COMPILER.schema(json.dumps(SCHEMA)).matcher()
    assert refused_at(matcher, '{"name":"a","other":1}') == len('{"name":"a","')
    assert refused_at(COMPILER.schema('{"type":"object"}').matcher(), '{"other":[1,{}]}') is None


def test_whitespace_is_bounded() -> None:
    matcher = COMPILER.schema(json.dumps(SCHEMA)).matcher()
    assert refused_at(matcher, "{" + " \t\r\n" * 17) == 65
    own = SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}
    assert refused_at(COMPILER.schema(json.dumps(own)).matcher(), "{  ") == 2


def test_a_refused_token_leaves_nothing_allowed() -> None:
    matcher = COMPILER.schema(json.dumps(SCHEMA)).matcher()
    assert not matcher.consume(ord("x"))
    assert allowed(matcher) == set()
    assert not matcher.accepting and not matcher.finished


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = COMPILER.schema(json.dumps(SCHEMA))
    first, second = grammar.matcher(), grammar.matcher()
    follow(first, '{"name":')
    forked = first.fork()
    follow(first, ' "ab"}')
    follow(forked, '"c"')
    assert first.finished and not forked.finished
    assert allowed(second) == {ord("{"), TOKENS.index(b'{"')}


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', '{"type":"strange"}', '{"$ref":"#/nowhere"}'])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(EngineError) as caught:
        COMPILER.schema(text)
    assert caught.value.status == Status.RejectBadStruct


def test_without_a_vocabulary_there_are_no_grammars() -> None:
    for vocabulary in (None, Vocabulary(TOKENS, frozenset(), frozenset())):
        compiler = GrammarCompiler(vocabulary)
        for compiled in (compiler.schema, compiler.structural):
            with pytest.raises(EngineError) as caught:
                compiled("{}")
            assert caught.value.status == Status.Unsupported


def test_forced_text_is_spelled_as_the_vocabulary_spells_it() -> None:
    schema = json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    by_bytes = COMPILER.schema(schema).matcher()
    longest = LONGEST.schema(schema).matcher()
    for matcher, ids in ((by_bytes, list(b'{"name":"a"}')), (longest, spell_longest('{"name":"a"}'))):
        for token in ids:
            assert token in allowed(matcher), TOKENS[token]
            assert matcher.consume(token)
        assert matcher.finished
    assert TOKENS.index(b'{"') in spell_longest('{"name"')


@pytest.mark.parametrize("kind", ["schema", "structural"])
def test_a_very_long_constant_is_spelled_piece_by_piece(kind: str) -> None:
    """A mask asks for the spelling of all that is forced; what follows the next tokens is not spelled every time."""
    asked: list[int] = []

    def spell_words(text: str) -> list[int]:
        asked.append(len(text))
        return spell_longest(text)

    compiler = GrammarCompiler(Vocabulary(TOKENS, frozenset(IDS.values()), STOPS, encode=spell_words))
    compiler.prepare()
    asked.clear()
    text = "hello world 12 \u00e9 " * 10_000
    forced = json.dumps(text, ensure_ascii=False) if kind == "schema" else text
    if kind == "schema":
        matcher = compiler.schema(json.dumps({"const": text})).matcher()
    else:
        matcher = compiler.structural(json.dumps(const(text))).matcher()
    written = b""
    for _ in range(60):
        (token,) = allowed(matcher)
        assert matcher.consume(token)
        written += TOKENS[token]
    assert forced.encode().startswith(written)
    assert len(written) > 120  # words, where the vocabulary has them
    assert 60 <= len(asked) <= 120
    assert max(asked) == SPELLED


def test_the_index_is_built_before_the_first_grammar() -> None:
    compiler = GrammarCompiler(Vocabulary(TOKENS, frozenset(IDS.values()), STOPS))
    compiler.prepare()
    index = compiler.__dict__["_index"]
    compiler.schema("{}")
    assert compiler.__dict__["_index"] is index
    for none in (None, Vocabulary(TOKENS, frozenset(), frozenset())):
        GrammarCompiler(none).prepare()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-999, 999)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x7f")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}, "required": ["a"]},
    {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}]},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
     "required": ["next"]}}, "$ref": "#/$defs/n"},
]  # fmt: skip


@given(values)
@settings(max_examples=60, deadline=None)
def test_any_object_is_allowed_when_nothing_is_declared(value: Any) -> None:
    document = json.dumps({"v": value}, ensure_ascii=False)
    matcher = COMPILER.schema('{"type":"object"}').matcher()
    for token in document.encode():
        assert matcher.consume(token), document
    assert matcher.finished


@pytest.mark.parametrize("schema", SCHEMAS)
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_what_a_random_walk_writes_is_valid(schema: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    matcher = COMPILER.schema(json.dumps(schema)).matcher()
    written = b""
    for step in range(400):
        choices = sorted(allowed(matcher))
        assert choices
        closing = [token for token in choices if token in STOPS or TOKENS[token] in (b"}", b"]", b'"', b"1", b"null")]
        token = int(rng.choice(closing if closing and step > 60 else choices))
        if token in STOPS:
            break
        written += TOKENS[token]
        assert matcher.consume(token)
        if matcher.finished:
            break
    else:
        return  # a walk that padded to the end says nothing
    jsonschema.validate(json.loads(written), schema)


# ---- structural tags


def tool(name: str) -> dict[str, Any]:
    inner = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    content = {"type": "json_schema", "json_schema": inner}
    return {"type": "tag", "begin": "<tool_call>", "content": content, "end": "</tool_call>"}


def tools(at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [tool("f"), tool("g")],
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL_G = '<tool_call>{"name":"g","arguments":{}}</tool_call>'


@pytest.mark.parametrize(
    ("at_least_one", "stop_after_first", "text", "refused", "ends"),
    [
        (False, False, "hi", None, True),
        (False, False, f"hi {CALL_F} and {CALL_G}{CALL_F} bye", None, True),
        (True, False, "hi", 0, False),
        (True, False, f"{CALL_F} and {CALL_G}", None, True),
        (True, False, f"{CALL_F} bye", None, True),
        (False, True, "hi", None, True),
        (False, True, f"hi {CALL_F}", None, True),
        (False, True, f"{CALL_G} more", len(spell(CALL_G)), True),
        (True, True, CALL_G, None, True),
        (True, True, f"{CALL_G}{CALL_G}", len(spell(CALL_G)), True),
    ],
)
def test_triggered_tags(at_least_one: bool, stop_after_first: bool, text: str, refused: int | None, ends: bool) -> None:
    matcher = structural(tools(at_least_one, stop_after_first))
    assert refused_at(matcher, text) == refused
    assert matcher.accepting == ends
    assert allowed(matcher) >= STOPS if ends else not STOPS & allowed(matcher)
    assert not matcher.finished  # a structural one never ends by itself


def test_a_call_is_held_to_its_tool() -> None:
    matcher = structural(tools(False, False))
    assert refused_at(matcher, '<tool_call>{"name":"h') == len(spell('<tool_call>{"name":"'))


def test_whitespace_around_a_json_body_is_bounded() -> None:
    assert refused_at(structural(tool("f")), "<tool_call>" + " " * 5) == 5
    matcher = follow(structural(tool("f")), '<tool_call>{"name":"f","arguments":{}}')
    assert refused_at(matcher, " \n\t\r ") == 4
    # between several schemas the whitespace between JSON tokens counts too
    several = refused_at(structural(tools(False, False)), "<tool_call>" + " " * 80)
    assert several is not None


def test_other_markers_are_free_text() -> None:
    assert follow(structural(tools(False, False)), "<think>so</think>").accepting


def test_markers_inside_strings_are_their_tokens_longest_first() -> None:
    matcher = structural(const("a<tool_call>2b<tool_call>"))
    follow(matcher, "a")
    assert allowed(matcher) == {IDS["<tool_call>2"]}
    assert matcher.consume(IDS["<tool_call>2"])
    assert matcher.consume(ord("b"))
    assert allowed(matcher) == {IDS["<tool_call>"]}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const("ab"), ["ab"], ["aa", "b"]),
        (sequence(const("a"), const(""), const("b")), ["ab"], ["b"]),
        (one_of(const("a"), const("bc")), ["a", "bc"], ["c"]),
        (sequence(one_of(const("a"), const("")), const("b")), ["ab", "b"], ["aa"]),
        (sequence(wrapped("optional", const("a")), const("b")), ["ab", "b"], ["aab"]),
        (sequence(wrapped("star", const("a")), const("b")), ["b", "aab"], ["c"]),
        (sequence(wrapped("plus", const("a")), const("b")), ["ab", "aaab"], ["b"]),
        ({"type": "regex", "pattern": r"-?[0-9]+/\d"}, ["-12/3", "1/2"], ["a", "1/x"]),
        (sequence({"type": "regex", "pattern": r"\s*"}, const("x")), ["x", "\n  x"], ["y"]),
        ({"type": "token", "token": "<think>"}, ["<think>"], ["<", "</think>"]),
        ({"type": "token", "token": IDS["<think>"]}, ["<think>"], ["a"]),
        (const('"quoted" \\ back\nline'), ['"quoted" \\ back\nline'], ["q"]),
        (const("né"), ["né"], ["ne"]),
    ],
)
def test_nodes(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert follow(structural(form), text).accepting, text
    for text in bad:
        assert refused_at(structural(form), text) is not None, text


def test_any_tokens_excludes_the_stop_set_what_it_is_told_and_the_end() -> None:
    body = {"type": "any_tokens", "exclude_tokens": ["<|channel|>", IDS["<think>"]]}
    form = {"type": "tag", "begin": {"type": "token", "token": "<|message|>"}, "content": body, "end": "</think>"}
    matcher = follow(structural(form), "<|message|>")
    excluded = {IDS["<|channel|>"], IDS["<think>"], *STOPS}
    assert allowed(matcher) == set(range(len(TOKENS))) - excluded
    follow(matcher, "hello <tool_call> </think>")
    assert allowed(matcher) == STOPS


def test_an_end_that_is_a_stop_token() -> None:
    form = {
        "type": "tag",
        "begin": "a",
        "content": {"type": "any_tokens", "exclude_tokens": []},
        "end": {"type": "token", "token": "<|end|>"},
    }
    matcher = follow(structural(form), "axyz")
    assert not matcher.accepting
    assert IM_END not in allowed(matcher)
    follow(matcher, "<|end|>")
    assert matcher.accepting


def parameter(name: str, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<parameter={name}>\n", "content": {"type": "any_text"}, "end": end}


def test_any_text_ends_at_the_first_match_of_a_plain_end() -> None:
    form = sequence(parameter("a", "\n</parameter>\n"), parameter("b", "\n</parameter>\n"))
    text = "<parameter=a>\nx < y\n</param\n\n</parameter>\n<parameter=b>\n1\n</parameter>\n"
    assert follow(structural(form), text).accepting
    matcher = follow(structural(form), "<parameter=a>\nx\n</parameter>\n")
    assert allowed(matcher) == {ord("<")}
    assert not set(IDS.values()) & allowed(follow(structural(form), "<parameter=a>\nx"))


def test_any_text_at_the_end_of_a_frame_stops_at_its_marker() -> None:
    content = sequence({"type": "regex", "pattern": r"\s*"}, const("<function=f>\n"), {"type": "any_text"})
    form = {"type": "tag", "begin": "<tool_call>", "content": content, "end": "</tool_call>"}
    matcher = follow(structural(form), "<tool_call>\n<function=f>\nwhat</tool ever")
    assert allowed(matcher) & set(IDS.values()) == {IDS["</tool_call>"]}
    assert follow(matcher, "</tool_call>").accepting


def test_any_text_before_an_end_of_text_and_marker() -> None:
    form = {"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": "\n/</tool_call>"}
    matcher = follow(structural(form), "<tool_call>a\nb")
    assert IDS["</tool_call>"] not in allowed(matcher)
    assert follow(matcher, "\n/</tool_call>").accepting


def test_a_format_may_come_without_its_envelope() -> None:
    assert follow(COMPILER.structural(json.dumps(const("ab"))).matcher(), "ab").accepting


def test_reasoning_first_then_json() -> None:
    form = sequence(
        {"type": "any_tokens", "exclude_tokens": ["</think>"]},
        {"type": "token", "token": "</think>"},
        {"type": "json_schema", "json_schema": SCHEMA},
    )
    matcher = follow(structural(form), "let me see <|channel|>")
    assert not STOPS & allowed(matcher)
    assert follow(matcher, '</think>\n\n{"name":"a"}\n').accepting


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"type": "qwen_xml"}, Status.Unsupported),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, Status.Unsupported),
        ({"type": "triggered_tags", "triggers": ["call:"], "tags": [tool("f")]}, Status.Unsupported),
        ({"type": "token", "token": "<nowhere>"}, Status.Unsupported),
        ({"type": "const_string"}, Status.RejectBadStruct),
        ({"type": "or", "elements": []}, Status.RejectBadStruct),
        ({"type": "tag", "begin": "a", "content": const("b")}, Status.RejectBadStruct),
        ({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": []}, Status.RejectBadStruct),
        ({"type": "triggered_tags", "triggers": ["<think>"], "tags": [tool("f")]}, Status.RejectBadStruct),
        ({"type": "regex", "pattern": "(a"}, Status.RejectBadStruct),
        ({"type": "json_schema", "json_schema": {"type": "strange"}}, Status.RejectBadStruct),
        (sequence(const("a"), 7), Status.RejectBadStruct),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_compile(form: dict[str, Any], status: Status) -> None:
    with pytest.raises(EngineError) as caught:
        COMPILER.structural(json.dumps(form))
    assert caught.value.status == status
