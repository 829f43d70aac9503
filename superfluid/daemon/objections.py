"""Why a schema does not become a grammar, for the words of a refusal.

The worker says no more than that it does not compile; the compiler that workers use is asked again here, about each
schema as the client wrote it. Blocks, and takes as long as compiling does: run it in a thread.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from superfluid.codec.held_schemas import SchemaRefused, held, on_deep_stack
from superfluid.codec.panics import is_panic

Json = Any

LONGEST = 300  # characters of the compiler's words
UNIMPLEMENTED = "Unimplemented keys: "
CLOSED = (
    "closed as grammars are, it may allow nothing: an object takes only the properties it declares unless "
    "additionalProperties says otherwise, an array only the items it declares"
)
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords that hold values, not schemas
_BY_NAME = frozenset({"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"})


def objection(schemas: Iterable[tuple[str, Json]]) -> str:
    """The first thing the compiler has against one of `schemas`, each given with a name for it (may be empty)."""
    found = CLOSED
    for name, schema in schemas:
        words = _words(schema)
        if words is not None:
            found = f"{name}: {words}" if name else words
            break
    return found


def _words(schema: Json) -> str | None:
    """What the compiler has against a schema; None when it takes it."""
    from llguidance import LLMatcher  # 10 MB that a daemon without refusals never loads

    try:
        text = json.dumps(_without_formats(held(schema)))  # nor may the compiler end this process
        grammar = LLMatcher.grammar_from_json_schema(text)
        failed, said = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    except RecursionError:
        return "it is nested too deep"
    except SchemaRefused as refused:
        return str(refused)[:LONGEST]
    except BaseException as error:
        if not (is_panic(error) or isinstance(error, ValueError)):
            raise
        failed, said = True, [str(error)]
    if not failed:
        return None
    words = " ".join(" ".join(said).split())
    if words.startswith(UNIMPLEMENTED):
        keywords = json.loads(words.removeprefix(UNIMPLEMENTED))
        return _unsupported(schema, keywords)
    return words[:LONGEST]


def _unsupported(schema: Json, keywords: Sequence[str]) -> str:
    names = ", ".join(f'"{keyword}"' for keyword in keywords)
    place = next((place for place, node in _nodes(schema, "#") if all(word in node for word in keywords)), None)
    return f"unsupported keyword{'s' if len(keywords) > 1 else ''} {names}" + (f" at {place}" if place else "")


def _nodes(schema: Json, place: str) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Every schema within a schema, and where it stands as a JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        here = f"{place}/{_escaped(key)}"
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _nodes(inner, f"{here}/{_escaped(name)}")
        elif isinstance(value, list) and key not in _VALUES:
            for index, inner in enumerate(value):
                yield from _nodes(inner, f"{here}/{index}")
        elif key not in _VALUES:
            yield from _nodes(value, here)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _without_formats(schema: Json) -> Json:
    """A schema without its formats: one that is not known is an annotation, and never the reason."""
    if isinstance(schema, list):
        return [_without_formats(member) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Json] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str):
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _without_formats(inner) for name, inner in value.items()}
        else:
            made[key] = value if key in _VALUES else _without_formats(value)
    return made
