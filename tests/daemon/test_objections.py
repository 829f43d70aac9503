"""The words for a schema that is no grammar: which keyword, and where."""

import json
from typing import Any

import pytest

from superfluid.daemon.objections import CLOSED, objection
from superfluid.engines.engine import EngineError
from superfluid.engines.executor.grammar import GrammarCompiler
from superfluid.engines.primitives import Vocabulary

TOKENS = [*(bytes([i]) for i in range(256)), b"\xff<end>"]
COMPILER = GrammarCompiler(Vocabulary(TOKENS, frozenset([256]), frozenset([256])))
STRING = {"type": "string"}


def refused(schema: Any) -> str:
    """What is said of a schema that the worker's compiler does refuse."""
    with pytest.raises(EngineError):
        COMPILER.schema(json.dumps(schema))
    return objection([("", schema)])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": STRING}, 'unsupported keyword "not" at #'),
        ({"anyOf": [STRING, {"items": {"contains": {}}}]}, 'unsupported keyword "contains" at #/anyOf/1/items'),
        ({"properties": {"not": {"if": {}, "then": {}}}}, 'unsupported keywords "if", "then" at #/properties/not'),
        ({"$defs": {"~/": {"uniqueItems": True}}, "$ref": "#/$defs/~0~1"},
         'unsupported keyword "uniqueItems" at #/$defs/~0~1'),
        ({"const": {"not": 1}, "propertyNames": {}}, 'unsupported keyword "propertyNames" at #'),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "array", "items": {"$ref": "#/$defs/none"}}, "/$defs/none"),
        ({"type": "array", "items": {"$ref": "http://localhost:1/x"}}, "http://localhost:1/x"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "#"}, 'no value satisfies it: "$ref": "#" leads back to itself'),
        ({"type": "string", "pattern": "a", "format": "zork", "not": {}}, "unsupported keyword"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": "x"}, "minLength"),
        ({"type": "array", "minItems": 2}, CLOSED),
    ],
)  # fmt: skip
def test_the_reason_is_named(schema: Any, words: str) -> None:
    said = refused(schema)
    assert words in said
    assert "\n" not in said
    assert "format" not in said


def test_a_tool_is_named_and_the_first_objection_counts() -> None:
    good, bad = ('tool "f"', {"type": "object"}), ('tool "g"', {"properties": {"k": {"not": {}}}})
    assert objection([good, bad, bad]) == 'tool "g": unsupported keyword "not" at #/properties/k'
    assert objection([good]) == CLOSED


def test_hostile_schemas_are_answered() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    assert objection([("", deep)]).startswith("it is nested deeper than")
    assert objection([("", {"type": "x" * 100_000})]).startswith("Invalid type: xxx")
    assert len(objection([("", {"type": "x" * 100_000})])) < 400
    assert objection([("", {"const": "\ud800", "not": {}})])
    assert objection([("", 7)])


def test_what_would_end_the_process_never_reaches_the_compiler() -> None:
    least = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
    assert objection([('tool "f"', {"properties": {"n": least}})]) == (
        'tool "f": "maximum": -9223372036854775808 at #/properties/n cannot be held exactly (integers beyond 2^53)'
    )
    chain: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(3000)}
    assert "counted through $ref" in objection([("", {"$defs": chain, "$ref": "#/$defs/d0"})])
