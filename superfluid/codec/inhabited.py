"""Which schemas no finite value satisfies because they lead back to themselves.

The compiler takes such a schema, and the reply that comes to it finds nothing it may write.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from superfluid.codec.schema_tree import inner, is_pointer, target

Json = Any


class Endless:
    """The schemas of a document that are satisfied by nothing, as every value of theirs would hold another. What is
    `false` in so many words is not among them: the compiler tells of that. Raises SchemaRefused like `target`."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._named = _named(root)
        schemas = list(self._reached(root))
        waiting = {id(schema): [group for group in self._groups(schema) if _open(group)] for schema in schemas}
        unmet = {schema: len(groups) for schema, groups in waiting.items()}
        asked_by: dict[int, list[tuple[int, int]]] = {}
        for schema, groups in waiting.items():
            for n, group in enumerate(groups):
                for member in group:
                    asked_by.setdefault(id(member), []).append((schema, n))
        met: set[tuple[int, int]] = set()
        ended = [schema for schema, count in unmet.items() if not count]
        while ended:
            for asking in asked_by.get(ended.pop(), ()):
                if asking not in met:
                    met.add(asking)
                    unmet[asking[0]] -= 1
                    ended += [] if unmet[asking[0]] else [asking[0]]
        self._endless = {schema for schema, count in unmet.items() if count}
        self._schemas = schemas

    def __contains__(self, schema: Json) -> bool:
        return id(schema) in self._endless

    def reference(self) -> str:
        """A reference that leads back to itself; empty when there is none."""
        found = (schema.get("$ref") for schema in self._schemas if schema in self)
        return next((reference for reference in found if isinstance(reference, str)), "")

    def _reached(self, root: Json) -> Iterator[Mapping[str, Json]]:
        """Every schema that can be reached, once."""
        seen: set[int] = set()
        stack = [root]
        while stack:
            schema = stack.pop()
            if isinstance(schema, Mapping) and id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                stack += [found for _, found in inner(schema)]
                stack.append(self._target(schema))

    def _target(self, schema: Mapping[str, Json]) -> Json:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        return target(self._root, reference) if is_pointer(reference) else self._named.get(reference)

    def _groups(self, schema: Mapping[str, Json]) -> Iterator[list[Json]]:
        """What a value of a schema takes: of each group, a value of one of its schemas."""
        yield [self._target(schema)]
        yield from ([member] for member in _list(schema, "allOf"))
        yield from (some for key in ("anyOf", "oneOf") if (some := _list(schema, key)))
        yield from ([member] for member in self._needed(schema))

    def _needed(self, schema: Mapping[str, Json]) -> Iterator[Json]:
        """The schemas that a value's members must satisfy."""
        kinds = schema.get("type")
        if "const" in schema or "enum" in schema:
            return
        if kinds in ("object", ["object"]):
            properties = schema.get("properties")
            for name in _list(schema, "required"):
                if isinstance(properties, Mapping) and isinstance(name, str) and name in properties:
                    yield properties[name]
                elif not schema.get("patternProperties"):
                    yield schema.get("additionalProperties")
        elif kinds in ("array", ["array"]):
            least = schema.get("minItems", 0)
            first = _list(schema, "prefixItems")
            if isinstance(least, int | float):
                yield from (member for n, member in enumerate(first) if n < least)
                if least > len(first):
                    yield schema.get("items")


def _open(group: list[Json]) -> bool:
    """Whether a group asks for anything that is not known to be there."""
    return all(isinstance(member, Mapping) for member in group)


def _list(schema: Mapping[str, Json], key: str) -> list[Json]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _named(root: Json) -> dict[str, Json]:
    """Schemas by the references that name them: their own `$id`, their anchor. One that two have is left out."""
    found: dict[str, Json] = {}
    twice: set[str] = set()
    seen: set[int] = set()
    stack = [root]
    while stack:
        schema = stack.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        names = [f"#{schema['$anchor']}"] if isinstance(schema.get("$anchor"), str) else []
        names += [schema["$id"]] if isinstance(schema.get("$id"), str) else []
        for name in names:
            if name in found:
                twice.add(name)
            found[name] = schema
        stack += [member for _, member in inner(schema)]
    return {name: schema for name, schema in found.items() if name not in twice}
