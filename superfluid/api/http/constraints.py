"""What a chat request demands of its output: the grammar that goes to the engine (spec: codec_tools).

Demands fail closed: what cannot be held is refused, never ignored.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from superfluid.api.http.errors import ApiError, invalid
from superfluid.api.http.fields import Fields
from superfluid.codec.codec import Codec
from superfluid.link.events import Channel

Json = Any
Grammar = tuple[str, str]  # ("schema" | "structural", JSON text)


@attrs.frozen
class ToolChoice:
    """`mode` is auto, none, required or function; the last with its `name`."""

    mode: str = "auto"
    name: str = ""

    @classmethod
    def read(cls, value: Json) -> "ToolChoice":
        """Any other string or object counts as auto."""
        if value in ("none", "required"):
            return cls(value)
        if isinstance(value, dict) and value.get("type") == "function":
            function = value.get("function")
            name = function.get("name") if isinstance(function, dict) else value.get("name")
            if isinstance(name, str) and name:
                return cls("function", name)
        return cls()

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "function")


def unsatisfiable(why: str, param: str) -> ApiError:
    return invalid(f"constraint unsatisfiable: {why}", param)


def check_tool_choice(choice: ToolChoice, tools: Sequence[dict[str, Json]]) -> None:
    """Raise ApiError 400 for a demanded call that no declared tool can be."""
    names = [tool["function"].get("name") for tool in tools]
    if choice.mode == "function" and choice.name not in names:
        raise unsatisfiable(
            f'tool_choice names function "{choice.name}", which is not among the declared tools', "tool_choice"
        )
    if choice.mode == "required" and not tools:
        raise unsatisfiable('tool_choice is "required", but no tools are declared', "tool_choice")


def read_response_format(fields: Fields) -> Json:
    """The JSON schema that `response_format` demands, or none. Raises ApiError 400."""
    demanded = Fields(fields.mapping("response_format"))
    kind = demanded.string("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise invalid(f"response_format.type must be text, json_object or json_schema, got {kind!r}", "response_format")
    block = demanded.raw("json_schema")
    if not isinstance(block, dict) or not block:
        raise unsatisfiable("response_format json_schema has no json_schema block", "response_format")
    schema = block.get("schema", block)
    if not isinstance(schema, dict):
        raise unsatisfiable("the schema of response_format must be a JSON object", "response_format")
    return schema


def format_grammar(codec: Codec, schema: Json, opener: Sequence[int]) -> Grammar:
    """The grammar of a `response_format`. A lane that starts inside reasoning leaves it first."""
    if codec.start_channel(opener) != Channel.REASONING:
        return "schema", orjson.dumps(schema).decode()
    closer = next((pair.close for pair in codec.dialect.pairs if pair.channel == Channel.REASONING), None)
    if closer is None:
        raise unsatisfiable("the model's reasoning has no end that a grammar could wait for", "response_format")
    after_reasoning = {
        "type": "sequence",
        "elements": [
            {"type": "any_tokens", "exclude_tokens": [closer]},
            {"type": "token", "token": closer},
            {"type": "json_schema", "json_schema": schema},
        ],
    }
    return "structural", orjson.dumps({"type": "structural_tag", "format": after_reasoning}).decode()


def forced_call(codec: Codec, choice: ToolChoice, tools: Sequence[dict[str, Json]]) -> Grammar:
    """The grammar of a demanded call. Raises ApiError 400 while none can be compiled."""
    raise unsatisfiable(
        f"no tool-call grammar could be compiled for the {codec.dialect_name} dialect of this model", "tool_choice"
    )
