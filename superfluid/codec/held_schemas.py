"""JSON schemas in words the grammar compiler holds to exactly, or a refusal that names what it could not hold.

The compiler reads numbers as doubles, and recurses once for every schema within a schema, also through `$ref`. What it
would round, overflow on, or take too long over is stated otherwise here, or refused, before it sees it.
"""

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from superfluid.codec.held_patterns import restated
from superfluid.codec.inhabited import Endless
from superfluid.codec.schema_tree import (
    BY_NAME,
    GUIDANCE,
    MAX_NAMED_REFS,
    VALUES,
    SchemaRefused as SchemaRefused,
    escaped,
    inner,
    is_pointer,
    target,
)
from superfluid.codec.tried_patterns import LARGE, MOST_LARGE, try_string

Json = Any
T = TypeVar("T")

MAX_DEPTH = 400
"""Schemas within schemas, counted through references: far below what a native stack of 8 MB holds."""
MAX_OPTIONAL = 1000
"""Optional properties of one object: any of them may come next, and a mask over more takes over a third of a second."""
EXACT = 2**53  # up to here every integer is a double
REACH = 2**63 - 1024  # the last double that is a 64-bit integer, on both sides of zero
DIGITS = 15  # of a decimal that a double tells from its neighbours
NEAREST = 1e-30  # what stands for "beyond zero": the compiler nests once for every zero of it

STACK = 256 << 20  # bytes, of address space only
_STACK_LOCK = threading.Lock()  # the size of stacks is the process's

WHITESPACE = "whitespace_pattern"  # all of the compiler's own options that a client may set

_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


def held(schema: Json) -> Json:
    """A schema that allows nothing `schema` does not. Raises SchemaRefused."""
    try:
        _Reach(schema).of(schema, 0)
        endless = Endless(schema)
        if schema in endless:
            raise SchemaRefused(f'no value satisfies it: "$ref": "{endless.reference()[:80]}" leads back to itself')
        made = _Restating(endless).of(schema, "#")
    except RecursionError:
        raise SchemaRefused("it is nested too deep") from None
    guidance = schema.get(GUIDANCE) if isinstance(schema, Mapping) else None
    if isinstance(guidance, Mapping) and isinstance(guidance.get(WHITESPACE), str):
        made[GUIDANCE] = {WHITESPACE: guidance[WHITESPACE]}
    return made


def on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` gives or raises, on a thread of `STACK` bytes: for the compiler recurses natively, and to overflow
    ends the process. Blocks."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_LOCK:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="compiling", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


class _Reach:
    """How deep the schemas of a document go, and how many optional properties come together in one object."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._known: dict[int, tuple[int, int]] = {}
        self._named = 0

    def of(self, schema: Json, depth: int) -> tuple[int, int]:
        if not isinstance(schema, Mapping):
            return 0, 0
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = 0, 0  # what comes back to itself is compiled once
            known = self._known[id(schema)] = self._measured(schema, depth)
        if depth + known[0] > MAX_DEPTH:
            raise SchemaRefused(f"it is nested deeper than {MAX_DEPTH} schemas, counted through $ref")
        return known

    def _measured(self, schema: Mapping[str, Json], depth: int) -> tuple[int, int]:
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"it is nested deeper than {MAX_DEPTH} schemas, counted through $ref")
        required = schema.get("required")
        names = set(required) if isinstance(required, list) and all(isinstance(n, str) for n in required) else set()
        properties = schema.get("properties")
        optional = len(properties.keys() - names) if isinstance(properties, Mapping) else 0
        below = 0
        for key, found in inner(schema):
            height, theirs = self.of(found, depth + 1)
            below = max(below, height)
            optional += theirs if key == "allOf" else 0
        reference = schema.get("$ref")
        if isinstance(reference, str):
            height, theirs = self.of(self._target(reference), depth + 1)
            below = max(below, height)
            optional += theirs
        if optional > MAX_OPTIONAL:
            raise SchemaRefused(f"an object of {optional} optional properties: at most {MAX_OPTIONAL} can be held")
        return below + 1, optional

    def _target(self, reference: str) -> Json:
        if is_pointer(reference):
            return target(self._root, reference)
        self._named += 1
        if self._named > MAX_NAMED_REFS:
            raise SchemaRefused(f"more than {MAX_NAMED_REFS} $refs that are no JSON pointers into it")
        return None


class _Restating:
    """A document in the words of the compiler."""

    def __init__(self, endless: Endless) -> None:
        self._endless = endless
        self._large = 0  # patterns that were tried

    def of(self, schema: Json, place: str) -> Json:
        if isinstance(schema, list):
            return [self.of(member, f"{place}/{index}") for index, member in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        if schema in self._endless:
            return False
        made: dict[str, Json] = {}
        for key, value in schema.items():
            here = f"{place}/{escaped(key)}"
            if key == GUIDANCE:
                continue
            if key in BY_NAME and isinstance(value, Mapping):
                named = {name: self.of(found, f"{here}/{escaped(name)}") for name, found in value.items()}
                made[key] = self._by_pattern(named) if key == "patternProperties" else named
            elif key in VALUES:
                if key in ("const", "enum"):
                    _spellable(value, here)
                made[key] = value
            elif key == "pattern" and isinstance(value, str):
                made[key] = self._pattern(value, schema)
            else:
                made[key] = self.of(value, here)
        _bound(made, place)
        return made

    def _pattern(self, pattern: str, beside: Mapping[str, Json]) -> str:
        made = restated(pattern)
        if made.weight > LARGE:
            self._large += 1
            if self._large > MOST_LARGE:
                raise SchemaRefused(f"more than {MOST_LARGE} patterns of over {LARGE} states")
            try_string({**beside, "pattern": made.text}, pattern)
        return made.text

    def _by_pattern(self, schemas: Mapping[str, Json]) -> dict[str, Json]:
        """Schemas by restated patterns; those of one that was said in several ways all hold."""
        made: dict[str, Json] = {}
        for pattern, schema in schemas.items():
            text = self._pattern(pattern, {})
            made[text] = {"allOf": [made[text], schema]} if text in made else schema
        return made


def _spellable(value: Json, place: str) -> None:
    """Refuse a value with an integer that would be rounded."""
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > REACH or float(value) != value:
            raise SchemaRefused(f"the integer {str(value)[:40]} at {place} cannot be held exactly: it is no double")
    elif isinstance(value, list):
        for inner in value:
            _spellable(inner, place)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _spellable(inner, place)


def _bound(schema: dict[str, Json], place: str) -> None:
    """State the bounds of numbers so that they are exact."""
    kinds = schema.get("type")
    whole = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    bounds = {key: schema[key] for side in _SIDES for key in side[:2] if _is_number(schema.get(key))}
    for key, value in bounds.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SchemaRefused(f'"{key}": {value} at {place} is no number of JSON')
        if not whole and abs(value) > EXACT:
            raise SchemaRefused(f'"{key}": {value} at {place} cannot be held exactly (numbers beyond 2^53)')
    if whole:
        _bound_integers(schema, bounds, place)
    else:
        _bound_reals(schema, bounds)


def _bound_integers(schema: dict[str, Json], bounds: Mapping[str, float], place: str) -> None:
    for inclusive, exclusive, sign in _SIDES:
        least = {key: math.ceil(sign * bounds[key]) for key in (inclusive,) if key in bounds}
        least |= {key: math.floor(sign * bounds[key]) + 1 for key in (exclusive,) if key in bounds}
        if not least:
            continue
        key = max(least, key=lambda name: least[name])
        bound = max(least[key], -REACH)  # integers of more than 64 bits are not written
        if bound > REACH or float(bound) != bound:
            raise SchemaRefused(f'"{key}": {bounds[key]} at {place} cannot be held exactly (integers beyond 2^53)')
        schema.pop(exclusive, None)
        schema[inclusive] = sign * bound


def _bound_reals(schema: dict[str, Json], bounds: Mapping[str, float]) -> None:
    """An integer that is excluded passes the compiler where the other bound, which an allOf may bring, is further from
    zero and has the same whole part, as 0 does between 0 and 0.5: so the nearest number beyond it that the compiler
    tells from it is the bound."""
    for inclusive, exclusive, sign in _SIDES:
        out = sign * bounds.get(exclusive, math.nan)
        if math.isnan(out) or out != int(out) or out < 0:
            continue
        near = out + 10.0 ** (len(str(int(out))) - DIGITS) if out else NEAREST
        del schema[exclusive]
        schema[inclusive] = sign * max(near, sign * bounds.get(inclusive, sign * near))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
