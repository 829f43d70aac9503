"""A JSON schema as a tree of schemas: which keywords hold schemas, and where references lead."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Json = Any

MAX_NAMED_REFS = 400  # references by $id or anchor, which are not followed here: so no chain of them is deeper

VALUES = frozenset(
    {"const", "enum", "default", "examples", "title", "description", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords that hold no schemas."""
BY_NAME = frozenset({"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"})
"""Keywords that hold schemas by names of the client's choice."""
GUIDANCE = "x-guidance"


class SchemaRefused(ValueError):
    """A schema the compiler could not hold a reply to; its words say what and where (a JSON pointer)."""


def inner(schema: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """The schemas right within a schema, each with the keyword it stands under."""
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            yield from ((key, found) for found in value.values())
        elif isinstance(value, list) and key not in VALUES:
            yield from ((key, found) for found in value)
        elif key not in VALUES and key != GUIDANCE:
            yield key, value


def is_pointer(reference: str) -> bool:
    """Whether a `$ref` is a JSON pointer into its own document."""
    return reference == "#" or reference.startswith("#/")


def target(root: Json, reference: str) -> Json:
    """What a JSON pointer leads to; None for nothing. Raises SchemaRefused when it leads into a value."""
    found, by_name = root, False
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
            continue
        if not by_name and step in VALUES:
            raise SchemaRefused(f'"$ref": "{reference[:80]}" points into {step}, which holds no schema')
        found = found.get(step) if isinstance(found, Mapping) else None
        by_name = not by_name and step in BY_NAME
    return found


def escaped(key: str) -> str:
    """A key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
