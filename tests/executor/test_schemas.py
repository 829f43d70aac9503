"""How schemas are closed."""

from typing import Any

import pytest

from superfluid.engines.executor.schemas import WHITESPACE, close_schema, known_format

STRING = {"type": "string"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    found = close_schema(schema)
    assert found.pop("x-guidance") == {"whitespace_pattern": WHITESPACE}
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "title": "t", "description": "d", "default": {}},
        {"type": "object", "properties": {"a": STRING}, "additionalProperties": True},
        {"type": "object", "properties": {"a": STRING}, "unevaluatedProperties": STRING},
        {"type": "array"},
        {"type": "array", "items": STRING},
        {"$ref": "#/$defs/x", "properties": {"a": STRING}},
        {"const": {"a": 1}, "properties": {}},
        {"enum": [{}], "type": "object", "required": ["a"]},
        {"type": "string", "minLength": 1},
        {"allOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {},
    ],
)
def test_what_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": STRING}},
        {"type": "object", "required": ["a"]},
        {"type": ["object", "null"], "properties": {}},
        {"properties": {"a": STRING}},
        {"patternProperties": {"^a": STRING}, "title": "t"},
    ],
)
def test_objects_that_declare_are_closed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema | {"additionalProperties": False}


@pytest.mark.parametrize(
    "schema", [{"type": "array", "prefixItems": [STRING]}, {"prefixItems": [STRING]}, {"type": "array", "minItems": 2}]
)
def test_arrays_that_declare_are_closed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema | {"items": False}


OPEN = {"type": "object", "properties": {"x": STRING}}
SHUT = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$defs": {"d": OPEN}, "$ref": "#/$defs/d"}, {"$defs": {"d": SHUT}, "$ref": "#/$defs/d"}),
        ({"definitions": {"d": OPEN}}, {"definitions": {"d": SHUT}}),
        ({"properties": {"d": OPEN}}, {"properties": {"d": SHUT}, "additionalProperties": False}),
        ({"patternProperties": {"d": OPEN}}, {"patternProperties": {"d": SHUT}, "additionalProperties": False}),
        ({"prefixItems": [OPEN]}, {"prefixItems": [SHUT], "items": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": SHUT}),
        ({"anyOf": [OPEN, STRING]}, {"anyOf": [SHUT, STRING]}),
        ({"oneOf": [OPEN]}, {"oneOf": [SHUT]}),
        ({"allOf": [OPEN]}, {"allOf": [SHUT]}),
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
        ({"not": OPEN}, {"not": OPEN}),
        ({"const": {"properties": {}}}, {"const": {"properties": {}}}),
        ({"type": "object", "$defs": {"d": OPEN}}, {"type": "object", "$defs": {"d": SHUT}}),
    ],
)
def test_where_closing_reaches(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


def test_branches_of_a_declaring_parent_stay_open() -> None:
    """Closed, each would refuse what the parent declares."""
    schema = OPEN | {"anyOf": [{"required": ["x"]}, {"properties": {"y": STRING}}]}
    assert closed(schema) == schema


def test_an_own_whitespace_pattern_stays_and_no_other_guidance() -> None:
    assert close_schema({"x-guidance": {"whitespace_pattern": " ?"}})["x-guidance"] == {"whitespace_pattern": " ?"}
    assert close_schema({"x-guidance": {"coerce_one_of": True}})["x-guidance"] == {
        "whitespace_pattern": WHITESPACE,
    }


def test_true_is_any_value() -> None:
    assert closed(True) == {}  # type: ignore[arg-type]


def test_the_schema_given_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "prefixItems": [OPEN]}}}
    before = repr(schema)
    close_schema(schema)
    assert repr(schema) == before


@pytest.mark.parametrize("name", ["zork", "regex", "json-pointer", "idn-email", "", 'a"b'])
def test_a_format_that_the_compiler_does_not_know_is_an_annotation(name: str) -> None:
    assert not known_format(name)
    odd = {"type": "string", "format": name, "minLength": 1}
    plain = {"type": "string", "minLength": 1}
    assert closed(odd) == plain
    assert closed({"type": "array", "items": odd}) == {"type": "array", "items": plain}
    assert closed({"anyOf": [odd, {"allOf": [odd, odd]}]}) == {"anyOf": [plain, {"allOf": [plain, plain]}]}
    assert closed({"$defs": {"format": odd}, "$ref": "#/$defs/format"})["$defs"] == {"format": plain}


def test_formats_that_hold_and_members_of_that_name_stay() -> None:
    assert known_format("date-time") and known_format("uuid")
    dated = {"type": "string", "format": "date-time"}
    assert closed({"properties": {"format": dated, "const": STRING}})["properties"] == {
        "format": dated,
        "const": STRING,
    }
    assert closed({"const": {"format": "zork"}}) == {"const": {"format": "zork"}}
    assert closed({"enum": [{"format": "zork"}]}) == {"enum": [{"format": "zork"}]}
    assert closed({"type": "string", "format": 7}) == {"type": "string", "format": 7}  # no schema at all


def test_whole_bounds_are_integers() -> None:
    found = closed({"type": "string", "minLength": 2.0, "maxLength": 3})
    assert isinstance(found["minLength"], int)
    assert found == {"type": "string", "minLength": 2, "maxLength": 3}
    assert closed({"type": "string", "minLength": 2.5}) == {"type": "string", "minLength": 2.5}
