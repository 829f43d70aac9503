"""Schemas as the compiler holds them: what is refused, and that no reply to what is not violates the schema."""

import json
import random
import re
from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from superfluid.codec.held_schemas import MAX_OPTIONAL, REACH, SchemaRefused, held


class Bytes:
    """A tokenizer of bytes and one stop token."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([i]) for i in range(256)), b"\xff<eos>"]
    special_token_ids = [256]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), 257, [256], None)


def compiled(schema: Any) -> Any:
    return LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(json.dumps(held(schema))), log_level=0)


def takes(grammar: Any, text: str) -> bool:
    matcher = grammar.deep_copy()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def chain(links: int, link: str) -> dict[str, Any]:
    """A schema that refers `links` times to the next."""
    refs = [{"$ref": f"#/$defs/d{n}"} for n in range(links + 1)]
    each = refs if link == "ref" else [{"type": "array", "items": ref} for ref in refs]
    return {"$defs": {f"d{n}": each[n + 1] for n in range(links)} | {f"d{links}": {"type": "null"}}, **refs[0]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, r'"maximum": -9223372036854775808 at # '),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e25}, r'"maximum": -1e\+25 at # '),
        ({"items": {"type": "integer", "minimum": 2**53 + 1}}, r'"minimum": 9007199254740993 at #/items '),
        ({"maximum": 2**60}, r'"maximum": 1152921504606846976 at # '),
        ({"const": 2**53 + 1}, r"integer 9007199254740993 at #/const "),
        ({"enum": [1, {"a": [10**400]}]}, r"integer 10{39} at #/enum "),
        ({"type": "number", "minimum": float("nan")}, "no number of JSON"),
        (chain(3000, "ref"), r"counted through \$ref"),
        (chain(3000, "items"), r"counted through \$ref"),
        ({"pattern": r'^(\x00|[^"])$'}, "U\\+0000"),
        ({"const": {"type": "integer"}, "$ref": "#/const"}, "points into const"),
        ({"properties": {f"p{n}": {} for n in range(MAX_OPTIONAL + 1)}}, "1001 optional properties"),
        (
            {"allOf": [{"properties": {f"{side}{n}": {} for n in range(600)}} for side in "ab"]},
            "1200 optional properties",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(SchemaRefused, match=words):
        held(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^" + "a?" * 1000 + "$"},
        {"type": "string", "pattern": "^(a?){1,1000}a{1000}$"},
        {"type": "string", "pattern": "^(a{100,200}){10}$"},
        {"type": "object", "properties": {"a": {"items": {"pattern": "^(a{100,200}){10}$"}}}},
        {"type": "object", "patternProperties": {"^(a{100,200}){10}$": {}}},
    ],
)
def test_a_pattern_that_no_lane_could_follow_is_refused(schema: Any) -> None:
    """It compiles, and the first mask over it fails."""
    with pytest.raises(SchemaRefused, match=r"the pattern '\^.*' takes too much to be held"):
        held(schema)


def test_many_large_patterns_are_refused_before_they_are_tried() -> None:
    large = {f"p{n}": {"pattern": f"^(a{{20}}b){{{n + 5}}}$"} for n in range(60)}
    with pytest.raises(SchemaRefused, match="more than 50 patterns of over 100 states"):
        held({"properties": large})


def test_what_can_be_held_is_not_refused() -> None:
    assert not compiled(chain(300, "ref")).is_error()
    names = [f"p{n}" for n in range(2 * MAX_OPTIONAL)]
    held({"properties": {name: {} for name in names}, "required": names[:MAX_OPTIONAL]})
    tree = {"$defs": {"t": {"properties": {"left": {"$ref": "#/$defs/t"}, "up": {"$ref": "#"}}}}, "$ref": "#/$defs/t"}
    assert held(tree) == tree
    named = {"properties": {"const": {"type": "null"}, "b": {"$ref": "#/properties/const"}}}
    assert held(named) == named


def test_integers_of_64_bits() -> None:
    grammar = compiled({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1})
    assert takes(grammar, str(REACH)) and takes(grammar, str(-REACH))
    assert not takes(grammar, str(REACH + 1)) and not takes(grammar, str(-REACH - 1))
    even = compiled({"const": 2**53 + 2})
    assert takes(even, str(2**53 + 2)) and not takes(even, str(2**53 + 1))


def test_bounds_of_numbers_are_held() -> None:
    edges = [None, "-100.5", "-12.5", "-2", "-1.5", "-1", "-0.5", "0", "0.05", "0.5", "1", "1.5", "10", "10.25", "100"]
    numbers = [
        f"{sign}{n}{tail}" for sign, n, tail in product(["", "-"], [0, 1, 2, 10, 12, 100], ["", ".0", ".3", ".5"])
    ]
    numbers += ["0.01", "-0.01", "0.05", "0.051", "10.25", "10.26", "9.9", "99.9", "1.01", "-1.01", "100.01"]
    for low, high, past_low, past_high in product(edges, edges, [False, True], [False, True]):
        schema: dict[str, Any] = {"type": "number"}
        if low is not None:
            schema["exclusiveMinimum" if past_low else "minimum"] = json.loads(low)
        if high is not None:
            schema["exclusiveMaximum" if past_high else "maximum"] = json.loads(high)
        grammar = compiled(schema)
        if grammar.is_error():
            assert low is not None and high is not None and Decimal(low) >= Decimal(high)
            continue
        for number in numbers:
            value = Decimal(number)
            above = low is None or value > Decimal(low) or (value == Decimal(low) and not past_low)
            below = high is None or value < Decimal(high) or (value == Decimal(high) and not past_high)
            assert (above and below) or not takes(grammar, number), (schema, number)
    assert takes(compiled({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}), "0.001")
    apart = compiled({"allOf": [{"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.5}]})
    assert takes(apart, "1.001") and not takes(apart, "1") and not takes(apart, "1.0")


@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]{2}$',
        r"^[^\\]{2}$",
        r'^[^"\\]+$',
        r"^[\x00-\x1f!]{2}$",
        "^[\n\t\u0000-\u001f]{3}$",
        r'^[^\]"]{2}$',
        r'^([^"]|[\x00-\x04])+$',
    ],
)
def test_classes_without_a_quote_do_not_let_its_escape_pass(pattern: str) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    for seed in range(60):
        draw, matcher, text = random.Random(seed), grammar.deep_copy(), bytearray()
        while not matcher.is_stopped() and len(text) < 100:
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
            if not allowed:
                break  # what is left is the end
            special = [byte for byte in allowed if byte in b'"\\']
            text.append(draw.choice(special if special and draw.random() < 0.4 else allowed))
            matcher.consume_token(text[-1])
        if matcher.is_accepting() or matcher.is_stopped():
            assert re.search(pattern, json.loads(text)), bytes(text)


def test_properties_of_characters() -> None:
    grammar = compiled({"type": "string", "pattern": r'^[^\p{L}"]$'})
    assert takes(grammar, '"1"') and not takes(grammar, r'"\""') and not takes(grammar, '"a"')
    greek = compiled({"type": "string", "pattern": r"^\p{Script=Greek}\P{L}\p{Cc}$"})
    assert takes(greek, '"\u03b1\\"\\n"') and takes(greek, '"\u03b1!\\n"')
    assert not takes(greek, '"a!\\n"') and not takes(greek, '"\u03b1b\\n"') and not takes(greek, '"\u03b1!\\""')


def test_two_ways_of_saying_a_pattern_both_hold() -> None:
    schema = {"type": "object", "patternProperties": {r"^\d$": {"type": "integer"}, "^[0-9]$": {"minimum": 5}}}
    made = held(schema)
    assert made["patternProperties"] == {"^[0-9]$": {"allOf": [{"type": "integer"}, {"minimum": 5}]}}


def test_guidance_is_whitespace_alone() -> None:
    given = {
        "x-guidance": {"coerce_one_of": True, "whitespace_pattern": " ?"},
        "items": {"x-guidance": {"lenient": True}},
    }
    assert held(given) == {"items": {}, "x-guidance": {"whitespace_pattern": " ?"}}
    assert held({"x-guidance": 5}) == {}
    assert held({"properties": {"x-guidance": {}}}) == {"properties": {"x-guidance": {}}}


# ---- schemas that lead back to themselves

ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        (ITSELF, "#"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}, "#/$defs/A"),
        ({"allOf": [ITSELF]}, "#"),
        ({"oneOf": [ITSELF]}, "#"),
        ({"anyOf": [ITSELF, {"allOf": [ITSELF, {"type": "null"}]}]}, "#"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}, "#/properties/a"),
        ({"type": "object", "properties": {"a": ITSELF}, "required": ["a"]}, "#"),
        ({"type": "object", "additionalProperties": ITSELF, "required": ["a"]}, "#"),
        ({"type": "array", "items": ITSELF, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2}, "#"),
        ({"$anchor": "a", "$ref": "#a"}, "#a"),
        ({"$id": "http://localhost/a", "$ref": "http://localhost/a"}, "http://localhost/a"),
    ],
)
def test_what_leads_back_to_itself_is_refused(schema: Any, reference: str) -> None:
    with pytest.raises(SchemaRefused, match=f'no value satisfies it: "\\$ref": "{re.escape(reference)}" leads back'):
        held(schema)


@pytest.mark.parametrize(
    ("schema", "reply"),
    [
        ({"anyOf": [{"type": "null"}, ITSELF]}, "null"),
        ({"type": "object", "additionalProperties": ITSELF}, '{"a":{"b":{}}}'),
        ({"type": "array", "items": ITSELF}, "[[],[[]]]"),
        ({"type": "array", "prefixItems": [{"type": "null"}, ITSELF], "items": False}, "[null,[null]]"),
        ({"properties": {"a": ITSELF}, "required": ["a"]}, '{"a":{"a":1}}'),  # a value need not be an object
        ({"type": ["object", "null"], "properties": {"a": ITSELF}, "required": ["a"]}, '{"a":{"a":null}}'),
    ],
)
def test_what_ends_somewhere_is_held(schema: Any, reply: str) -> None:
    assert takes(compiled(schema), reply)


def test_a_property_that_nothing_satisfies_cannot_be_begun() -> None:
    endless = {"$ref": "#/$defs/x"}
    schema = {
        "type": "object",
        "properties": {"a": endless, "b": {"anyOf": [{"type": "null"}, {"type": "array", "items": endless}]}},
        "$defs": {"x": {"allOf": [endless]}},
        "additionalProperties": False,
    }
    grammar = compiled(schema)
    assert takes(grammar, '{"b":null}') and takes(grammar, '{"b":[]}')
    assert grammar.deep_copy().try_consume_tokens(list(b'{"a')) == len(b'{"')
    assert grammar.deep_copy().try_consume_tokens(list(b'{"b":[[')) == len(b'{"b":[')


def test_the_search_for_what_is_endless_takes_linear_time() -> None:
    """Also where every schema waits for the one before it, which waits for it."""
    for links in (50, 100):
        back = {
            f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"allOf": [{"$ref": f"#/$defs/d{max(n - 1, 0)}"}]}]}
            for n in range(links)
        }
        schema = {"$defs": back | {f"d{links}": {"type": "null"}}, "$ref": "#/$defs/d0"}
        assert held(schema) == schema
