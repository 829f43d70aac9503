"""Arguments that a wire writes as bare text, typed by the tool's schema."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from superfluid.codec.toolcalls.repair import NotJson, strict_loads

Json = Any

MAX_DEPTH = 16  # of nested combinations
MAX_HOPS = 16  # of references
PYTHON_LITERALS: dict[str, tuple[str, Json]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}


class ToolSchemas:
    """The parameters schemas of a request's tools, by name."""

    def __init__(self, tools: Iterable[Mapping[str, Json]] | None = None) -> None:
        self._schemas: dict[str, Mapping[str, Json]] = {}
        for tool in tools or ():
            function = tool.get("function")
            declared = function if isinstance(function, Mapping) else tool
            name = declared.get("name")
            schema = declared.get("parameters", declared.get("input_schema"))
            if isinstance(name, str):
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def required(self, name: str) -> list[str]:
        """The arguments that a call must have."""
        schema = self._schemas.get(name, {})
        required = resolved(schema, schema).get("required")
        return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []

    def types(self, name: str, argument: str) -> frozenset[str]:
        """The JSON types that an argument may have; empty when nothing is known."""
        root = self._schemas.get(name)
        if root is None:
            return frozenset()
        properties = resolved(root, root).get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return types_of(schema, root) if isinstance(schema, Mapping) else frozenset()


def resolved(schema: Mapping[str, Json], root: Mapping[str, Json]) -> Mapping[str, Json]:
    """A schema with its local references followed, what stands beside each merged in."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Json = root
        if reference != "#":
            if not reference.startswith("#/"):
                return schema
            for step in reference[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return schema
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def types_of(schema: Mapping[str, Json], root: Mapping[str, Json]) -> frozenset[str]:
    """The JSON types that a schema allows; empty when it names none."""
    return frozenset(_types(schema, root, 0))


def _types(schema: Mapping[str, Json], root: Mapping[str, Json], depth: int) -> set[str]:
    if depth > MAX_DEPTH:
        return set()
    schema = resolved(schema, root)
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, Sequence):
        found.update(kind for kind in declared if isinstance(kind, str))
    for combination in ("anyOf", "oneOf", "allOf"):
        for member in schema.get(combination) or ():
            if isinstance(member, Mapping):
                found |= _types(member, root, depth + 1)
    values = schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str):
        found.update(json_type(value) for value in values)
    if "const" in schema:
        found.add(json_type(schema["const"]))
    return found


def json_type(value: Json) -> str:
    """The schema type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, Sequence) else "object"


def typed_value(text: str, types: frozenset[str], *, strict_strings: bool = True) -> Json:
    """The value of an argument written as bare text.

    `strict_strings`: a type that may be a string is always the text itself; else (glm) another declared type that
    the whole text parses as comes first.
    """
    trimmed = text.strip()
    try:
        value = strict_loads(trimmed)
        parsed = True
    except NotJson:
        value, parsed = None, False
    if not types:
        return value if parsed and not isinstance(value, str) else text
    if "string" in types:
        other = parsed and not strict_strings and text == trimmed and json_type(value) != "string"
        return value if other and _is_declared(value, types) else text
    if not parsed and trimmed in PYTHON_LITERALS:
        kind, literal = PYTHON_LITERALS[trimmed]
        return literal if kind in types else text
    return value if parsed else text


def _is_declared(value: Json, types: frozenset[str]) -> bool:
    kind = json_type(value)
    return kind in types or (kind == "integer" and "number" in types)
