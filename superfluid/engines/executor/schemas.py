"""JSON schemas as the compiler takes them: closed, and without what is no constraint.

What declares its members allows no others, unless it says so: a model that may add any property to an object wanders
off, and other engines close schemas the same way, so a schema constrains alike everywhere. A `format` that the
compiler does not know is an annotation, as the JSON Schema standard has it, and a bound may be written 2.0.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from superfluid.codec.held_schemas import held

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"  # between JSON tokens; a bound, so that a model cannot pad for ever

ANNOTATIONS = frozenset(
    {"title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)
_NOT_DECLARING = ANNOTATIONS | {"type", "$defs", "definitions", "$id", "x-guidance"}
_NAMED = ("$defs", "definitions", "properties", "patternProperties")  # schemas by name
_LISTED = ("prefixItems", "anyOf", "oneOf")
_FIXED = frozenset({"$ref", "const", "enum"})  # beside these nothing is closed
_COMBINED = frozenset({"anyOf", "oneOf", "allOf"})
_OBJECT_KEYS = frozenset({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"})
_ARRAY_KEYS = frozenset({"items", "prefixItems", "unevaluatedItems"})
_VALUES = ANNOTATIONS | {"const", "enum", "x-guidance"}  # keywords that hold no schemas
_BY_NAME = frozenset(_NAMED) | {"dependentSchemas"}
_BOUNDS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def close_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """The schema with every declaring object and array closed, and whitespace bounded unless it bounds it itself.
    Raises SchemaRefused for what the compiler could not hold."""
    closed = _close(_plain(held(schema))) if isinstance(schema, dict) else ({} if schema else {"not": {}})
    closed["x-guidance"] = {"whitespace_pattern": WHITESPACE} | closed.get("x-guidance", {})
    return closed


@lru_cache(maxsize=256)
def known_format(name: str) -> bool:
    """Whether the compiler holds a string to the format `name`."""
    asked = json.dumps({"type": "string", "format": name})
    failed, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(asked))
    return not failed


def _plain(schema: Any) -> Any:
    """A copy without unknown formats, and with whole bounds as integers, wherever a schema stands."""
    if isinstance(schema, list):
        return [_plain(member) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and not known_format(value):
            continue
        if key in _BOUNDS and isinstance(value, float) and value.is_integer():
            made[key] = int(value)
        elif key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _plain(inner) for name, inner in value.items()}
        else:
            made[key] = value if key in _VALUES else _plain(value)
    return made


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    branches_stand_alone = "properties" not in schema  # else closing a branch refuses what the parent declares
    for key in _NAMED:
        if isinstance(found := closed.get(key), dict):
            closed[key] = {name: _close(inner) for name, inner in found.items()}
    for key in _LISTED:
        if isinstance(found := closed.get(key), list) and (key not in _COMBINED or branches_stand_alone):
            closed[key] = [_close(inner) for inner in found]
    if isinstance(found := closed.get("allOf"), list) and len(found) == 1 and branches_stand_alone:
        closed["allOf"] = [_close(found[0])]
    if "items" in closed:
        closed["items"] = _close(closed["items"])
    if not _FIXED & closed.keys() and not _COMBINED & closed.keys():
        _close_members(closed)
    return closed


def _close_members(schema: dict[str, Any]) -> None:
    if not schema.keys() - _NOT_DECLARING:
        return  # {"type": "object"} stays any object
    if _is(schema, "object", _OBJECT_KEYS) and not {"additionalProperties", "unevaluatedProperties"} & schema.keys():
        schema["additionalProperties"] = False
    if _is(schema, "array", _ARRAY_KEYS) and not {"items", "unevaluatedItems"} & schema.keys():
        schema["items"] = False


def _is(schema: dict[str, Any], kind: str, keys: frozenset[str]) -> bool:
    """Whether a schema is of objects (or arrays): by its type, or without one by its keywords."""
    declared = schema.get("type")
    if declared is None:
        return bool(keys & schema.keys())
    return declared == kind or (isinstance(declared, list) and kind in declared)
