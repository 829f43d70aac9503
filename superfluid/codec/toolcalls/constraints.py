"""What a request's tools and response format ask of the engine: grammars to try, in order, and what a failure means.

Nothing here compiles: the daemon has the worker try (spec: codec_tools, what reaches the engine).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls.tags import HarmonyTags, Node, call_schema, call_tag, reasoned_answer, tools_of
from superfluid.codec.toolcalls.wires import Llama3Wire, RawWire, Wire

Json = Any

NO_GRAMMAR = "no tool-call grammar could be compiled for this model"
NO_CALLS = "this model's template has no tool calls"
CHOICE, FORMAT = "tool_choice", "response_format"  # the fields of a request that demand something
NO_FORMAT = "the response_format could not be compiled to a grammar for this model"


class ConstraintUnsatisfiable(Exception):
    """A request's template arguments or constraints cannot be met (400); `param` is the field that asks for it."""

    def __init__(self, words: str, param: str | None = None) -> None:
        super().__init__(f"constraint unsatisfiable: {words}")
        self.param = param


@attrs.frozen
class ToolChoice:
    """Whether calls are withheld, free, or demanded (any tool, or the one named)."""

    mode: Literal["none", "auto", "required", "function"] = "auto"
    name: str = ""

    @classmethod
    def read(cls, value: Json) -> "ToolChoice":
        """OpenAI's `tool_choice`; what it does not know counts as auto."""
        if value == "none" or value == "required":
            return cls(value)
        if isinstance(value, Mapping) and value.get("type") == "function":
            function = value.get("function")
            name = (function if isinstance(function, Mapping) else value).get("name")
            if isinstance(name, str):
                return cls("function", name)
        return cls()

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "function")

    @property
    def withheld(self) -> bool:
        return self.mode == "none"


FREE = ToolChoice()


@attrs.frozen
class Attempt:
    """A grammar to compile: `kind` structural or schema. `holds_calls`: it is a tool grammar."""

    kind: Literal["structural", "schema"]
    text: str
    holds_calls: bool = False


@attrs.frozen
class Constraint:
    """The grammars of a request: the first attempt that compiles is in force. When none does, `refusal` says why the
    request is refused; without it the lane runs free. `schemas` are what the client wrote of them, each with a name
    (may be empty). `one_call`: at most one call is wanted."""

    choice: ToolChoice = FREE
    attempts: tuple[Attempt, ...] = ()
    refusal: str | None = None
    schemas: tuple[tuple[str, Json], ...] = ()
    one_call: bool = False
    whole_reply: bool = False  # a reply without call markers may be a call

    @property
    def param(self) -> str:
        """The field that a refusal is about."""
        return CHOICE if self.forced else FORMAT

    @property
    def forced(self) -> bool:
        return self.choice.forced


@attrs.frozen
class Lane:
    """Where a request's lane stands: its dialect's wire, the markers around a call, harmony's grammars, and the marker
    that closes the reasoning it starts in (none: it does not)."""

    wire: Wire
    frame: tuple[str, str] | None
    harmony: HarmonyTags | None
    reasoning_close: int | None

    @property
    def calls(self) -> bool:
        """Whether the model has a way of writing calls."""
        return self.frame is not None or not isinstance(self.wire, RawWire)


def plan(
    lane: Lane, tools: Sequence[Mapping[str, Json]], choice: ToolChoice, parallel: bool, response_format: Json
) -> Constraint:
    """The constraint of a chat request. Raises ConstraintUnsatisfiable for what no engine could hold."""
    declared = tools_of(tools)
    if choice.mode == "function":
        declared = [tool for tool in declared if tool.name == choice.name]
        if not declared:
            raise ConstraintUnsatisfiable(
                f'tool_choice names function "{choice.name}", which is not among the declared tools', CHOICE
            )
    elif choice.mode == "required" and not declared:
        raise ConstraintUnsatisfiable('tool_choice is "required", but no tools are declared', CHOICE)
    attempts: list[Attempt] = []
    forced = choice.forced
    if declared and not choice.withheld and (forced or lane.wire.auto_held):
        if lane.harmony is not None:
            tag: Node | None = lane.harmony.forced(declared) if forced else lane.harmony.auto(declared)
        else:
            tag = call_tag(lane.wire, lane.frame, declared, forced=forced, first_only=not parallel)
        if tag is not None:
            attempts.append(Attempt("structural", compact(tag), holds_calls=True))
    if forced:
        schema = call_schema(lane.wire, declared)
        if schema is not None:
            attempts.append(Attempt("schema", compact(schema), holds_calls=True))
        refused = (
            f"{NO_GRAMMAR} (it writes calls on the wire {lane.wire.name})"
            if lane.calls
            else f"{NO_CALLS}; {NO_GRAMMAR}"
        )
        if not lane.wire.forceable or not attempts:
            raise ConstraintUnsatisfiable(refused, CHOICE)
        refusal: str | None = refused
        schemas: list[tuple[str, Json]] = [(f'tool "{tool.name}"', tool.parameters) for tool in declared]
    else:
        wanted = _schema(response_format)
        refusal, schemas = None, []
        if wanted is not None:
            attempts.append(_answer(lane, wanted))
            refusal, schemas = NO_FORMAT, [("", wanted)]
    return Constraint(
        choice,
        tuple(attempts),
        refusal,
        tuple(schemas),
        one_call=not parallel or forced,
        whole_reply=forced or (isinstance(lane.wire, Llama3Wire) and bool(declared) and not choice.withheld),
    )


def _answer(lane: Lane, schema: Json) -> Attempt:
    """The grammar of an answer that `schema` holds."""
    if lane.harmony is not None:
        return Attempt("structural", compact(lane.harmony.answer(schema)))
    if lane.reasoning_close is not None:
        return Attempt("structural", compact(reasoned_answer(lane.reasoning_close, schema)))
    return Attempt("schema", compact(schema))


def _schema(response_format: Json) -> Json:
    """The schema of a response format; none for text."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ConstraintUnsatisfiable("response_format must be an object", FORMAT)
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ConstraintUnsatisfiable(
            f"response_format type {kind!r} is none of text, json_object, json_schema", FORMAT
        )
    block = response_format.get("json_schema")
    if block is None:
        raise ConstraintUnsatisfiable("response_format json_schema has no json_schema block", FORMAT)
    schema = block.get("schema", block) if isinstance(block, Mapping) else block
    if not isinstance(schema, Mapping):
        raise ConstraintUnsatisfiable(
            f"the schema of response_format must be an object, got {str(schema)[:80]}", FORMAT
        )
    return schema
