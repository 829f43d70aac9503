"""Structural tags and call schemas: what the engine is asked to hold a tool call to, per wire (spec: codec_tools)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from superfluid.codec import harmony
from superfluid.codec.schema_tree import BY_NAME, VALUES, is_pointer
from superfluid.codec.toolcalls.typed import resolved, types_of
from superfluid.codec.toolcalls.wires import (
    AtemWire,
    DelimitedWire,
    GemmaWire,
    GlmWire,
    JsonWire,
    Llama3Wire,
    MistralWire,
    NamedWire,
    RawWire,
    Wire,
)

Json = Any
Node = dict[str, Json]

MAX_FREE_MESSAGES = 3  # harmony: messages before the final one or a call, under auto
MAX_FIXED_DEPTH = 16  # of nested choices of fixed values
ATEM_FRAME = "<atem:function_calls>", "</atem:function_calls>"

GEMMA_TEXT = "[A-Za-z0-9_.:/=@+-][A-Za-z0-9 _.:/=@+-]*"
ATEM_TEXT = r"[A-Za-z0-9_.:/=@+,(){}\[\]!?'-][A-Za-z0-9 _.:/=@+,(){}\[\]!?'-]*"
_PATTERNS = {
    "integer": "-?[0-9]+",
    "number": r"-?[0-9]+(\.[0-9]+)?",
    "array": r"\[[^{}\[\]\n]*\]",
    "object": r"\{[^{}\n]*\}",
}


@attrs.frozen
class Tool:
    """A declared function: its name and the schema of its parameters."""

    name: str
    parameters: Mapping[str, Json]

    @property
    def properties(self) -> Mapping[str, Json]:
        found = resolved(self.parameters, self.parameters).get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> list[str]:
        found = resolved(self.parameters, self.parameters).get("required")
        return [key for key in found if isinstance(key, str)] if isinstance(found, Sequence) else []


def tools_of(declared: Sequence[Mapping[str, Json]]) -> list[Tool]:
    """The functions of a request's tools, as `{"type": "function", "function": ..}` or bare; the nameless left out."""
    found = []
    for tool in declared:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        name = function.get("name")
        parameters = function.get("parameters", function.get("input_schema"))
        if isinstance(name, str) and name:
            found.append(Tool(name, parameters if isinstance(parameters, Mapping) else {"type": "object"}))
    return found


# ---- nodes


def const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Node]) -> Node:
    """One of several; the one alone when there is but one."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Node) -> Node:
    return {"type": "optional", "content": content}


def token(value: int) -> Node:
    return {"type": "token", "token": value}


def any_tokens(excluded: Sequence[int]) -> Node:
    return {"type": "any_tokens", "exclude_tokens": list(excluded)}


def json_node(schema: Json) -> Node:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: Json, content: Node, end: Json) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY_TEXT: Node = {"type": "any_text"}


def structural(content: Node) -> Node:
    return {"type": "structural_tag", "format": content}


# ---- calls


def call_tag(
    wire: Wire, frame: tuple[str, str] | None, tools: Sequence[Tool], *, forced: bool, first_only: bool
) -> Node | None:
    """The structural tag of a wire but harmony's, or None where it has none. `frame` is the text of the markers around
    a call (the second empty where calls run to the turn's end)."""
    if isinstance(wire, AtemWire):
        frame = ATEM_FRAME
    if not tools or frame is None:
        return None
    contents = [_content(wire, tool) for tool in tools]
    begin, end = frame
    tags = [tag(begin, content, end) for content in contents if content is not None]
    if len(tags) < len(tools):
        return None
    return structural(
        {
            "type": "triggered_tags",
            "triggers": [begin],
            "tags": tags,
            "at_least_one": forced,
            "stop_after_first": forced or first_only,
        }
    )


def call_schema(wire: Wire, tools: Sequence[Tool]) -> Node | None:
    """The plain JSON schema of a call, for the wires whose calls are JSON."""
    if not tools or not isinstance(wire, JsonWire) or isinstance(wire, RawWire):
        return None
    if len(tools) == 1:
        return _call_object(tools[0])
    return {"anyOf": [_call_object(tool, f"#/anyOf/{index}") for index, tool in enumerate(tools)]}


def _call_object(tool: Tool, place: str = "#") -> Node:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": _moved(tool.parameters, f"{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Json, place: str) -> Json:
    """A schema that stands at `place` of another document: its local references lead there."""
    if isinstance(schema, list):
        return [_moved(member, place) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: Node = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and is_pointer(value):
            moved[key] = place + value[1:]
        elif key in BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(found, place) for name, found in value.items()}
        else:
            moved[key] = value if key in VALUES else _moved(value, place)
    return moved


def _content(wire: Wire, tool: Tool) -> Node | None:
    """What stands between the markers of a call of `tool`."""
    match wire:
        case MistralWire() | Llama3Wire() | RawWire():
            return None
        case JsonWire():
            return json_node(_call_object(tool))
        case GlmWire():
            pairs = [_maybe(_glm_pair(tool, key, schema), key, tool) for key, schema in tool.properties.items()]
            pairs += [_glm_pair(tool, key, {}) for key in tool.required if key not in tool.properties]
            return sequence(const(tool.name), *pairs)
        case DelimitedWire():
            members = [
                _maybe(_delimited_member(wire, tool, key, schema), key, tool) for key, schema in tool.properties.items()
            ]
            return sequence(regex(r"\s*"), const(wire.name_open + tool.name + wire.name_close), *members, ANY_TEXT)
        case NamedWire():
            body = [const(wire.before + tool.name + wire.separator), json_node(tool.parameters)]
            return sequence(*body, *([const(wire.after)] if wire.after else []))
        case GemmaWire():
            elements = [const(f"call:{tool.name}{{")]
            for index, key in enumerate(sorted(tool.required)):
                if index:
                    elements.append(const(","))
                written = _written(tool.properties.get(key), tool.parameters, GEMMA_TEXT)
                elements.append(sequence(const(f"{key}:"), written))
            return sequence(*elements, const("}"))
        case AtemWire():
            members = [
                _maybe(
                    sequence(
                        const(f'<atem:parameter name="{key}">'),
                        _written(schema, tool.parameters, ATEM_TEXT),
                        const("</atem:parameter>\n"),
                    ),
                    key,
                    tool,
                )
                for key, schema in tool.properties.items()
            ]
            return sequence(const(f'\n<atem:invoke name="{tool.name}">\n'), *members, const("</atem:invoke>\n"))
    return None


def _maybe(node: Node, key: str, tool: Tool) -> Node:
    return node if key in tool.required else optional(node)


def _glm_pair(tool: Tool, key: str, schema: Json) -> Node:
    return sequence(
        const(f"<arg_key>{key}</arg_key>"), tag("<arg_value>", _value(schema, tool.parameters), "</arg_value>")
    )


def _delimited_member(wire: DelimitedWire, tool: Tool, key: str, schema: Json) -> Node:
    opening = wire.key_open + key + wire.key_close
    if not wire.val_close:
        return sequence(const(opening), _written(schema, tool.parameters, ATEM_TEXT))
    return tag(opening, _value(schema, tool.parameters), wire.val_close)


# ---- values


def _value(schema: Json, root: Mapping[str, Json]) -> Node:
    """V: a value that any text may be, up to what closes it."""
    if not isinstance(schema, Mapping):
        return ANY_TEXT
    fixed = _fixed(schema, root, 0)
    if fixed:
        return either([const(text) for text in fixed])
    types = types_of(schema, root)
    if not types or "string" in types:
        return ANY_TEXT
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root and name not in schema}
    return json_node({**schema, **shared})


def _written(schema: Json, root: Mapping[str, Json], text: str) -> Node:
    """W: a value on a wire without a way to close any text; `text` is its pattern of a string."""
    schema = resolved(schema, root) if isinstance(schema, Mapping) else {}
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return either([const(_spelled(value)) for value in values])
    declared = schema.get("type", "string")
    if isinstance(declared, list):
        declared = "string" if "string" in declared else next((kind for kind in declared if kind != "null"), "string")
    if declared == "boolean":
        return either([const("true"), const("false")])
    return regex(_PATTERNS.get(declared, text) if isinstance(declared, str) else text)


def _fixed(schema: Mapping[str, Json], root: Mapping[str, Json], depth: int) -> list[str] | None:
    """The texts of a schema whose values are all listed, each once; None when they are not."""
    schema = resolved(schema, root)
    if depth > MAX_FIXED_DEPTH:
        return None
    if "const" in schema:
        return [_spelled(schema["const"])]
    if isinstance(values := schema.get("enum"), list) and values:
        return list(dict.fromkeys(_spelled(value) for value in values))
    for combination in ("anyOf", "oneOf"):
        members = schema.get(combination)
        if isinstance(members, list) and members:
            found: list[str] = []
            for member in members:
                texts = _fixed(member, root, depth + 1) if isinstance(member, Mapping) else None
                if texts is None:
                    return None
                found += texts
            return list(dict.fromkeys(found))
    return None


def _spelled(value: Json) -> str:
    """A fixed value as a model writes it: a string as it is, others as spaced JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- harmony


class HarmonyTags:
    """The structural tags of harmony; a lane starts after `<|start|>assistant`."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        markers = [harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.RETURN, harmony.CALL]
        self._start, self._channel, self._message, self._end, *_ = (token(ids[name]) for name in markers)
        constrain = ids.get(harmony.CONSTRAIN)
        self._markers = [ids[name] for name in markers] + ([constrain] if constrain is not None else [])
        typed = const(" json")
        if constrain is not None:
            typed = either([sequence(optional(const(" ")), token(constrain), const("json")), typed])
        self._type = optional(typed)
        body = tag(self._message, any_tokens(self._markers), self._end)
        self._body_then_next = body, self._start, const("assistant")
        self._analysis = optional(sequence(self._channel, const("analysis"), *self._body_then_next))

    def forced(self, tools: Sequence[Tool]) -> Node:
        """A demanded call, after thinking or at once."""
        calls = [
            sequence(
                self._channel,
                const(f"commentary to=functions.{tool.name}"),
                self._type,
                self._message,
                json_node(tool.parameters),
            )
            for tool in tools
        ]
        return structural(sequence(self._analysis, either(calls)))

    def auto(self, tools: Sequence[Tool]) -> Node:
        """Some free messages, then an answer or a call."""
        free = sequence(
            self._channel, either([const("analysis"), const("commentary")]), self._type, *self._body_then_next
        )
        lead = optional(free)
        for _ in range(MAX_FREE_MESSAGES - 1):
            lead = optional(sequence(free, lead))
        answer = sequence(self._channel, const("final"), self._type, self._message, any_tokens(self._markers))
        return structural(sequence(lead, either([answer, *map(self._call, tools)])))

    def _call(self, tool: Tool) -> Node:
        recipient = const(f" to=functions.{tool.name}")
        channels = either([const("commentary"), const("analysis")])
        header = either([sequence(self._channel, channels, recipient), sequence(recipient, self._channel, channels)])
        return sequence(
            header, self._type, self._message, json_node(tool.parameters), {"type": "star", "content": const(" ")}
        )

    def answer(self, schema: Json) -> Node:
        """A response format, in the final channel."""
        return structural(
            sequence(self._analysis, self._channel, const("final"), self._type, self._message, json_node(schema))
        )


def reasoned_answer(close: int, schema: Json) -> Node:
    """A response format of a lane that starts in reasoning: the thought, its close marker, the answer."""
    return structural(sequence(any_tokens([close]), token(close), json_node(schema)))
