"""Conversations: what clients send, as turns, and turns as the message objects that templates read."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from superfluid.codec.json_text import mended
from superfluid.codec.media import Medium

Json = Any

MAX_NESTING = 128  # levels of lists and objects in tools and arguments: deeper ones exhaust the interpreter's stack

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class InvalidMessage(ValueError):
    """A message of a request that is not one; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@attrs.frozen
class Part:
    """A part of a message with media: `kind` text, image or audio; `payload` is the client's object for media, and
    `medium` what it became."""

    kind: str
    text: str = ""
    payload: Json = None
    medium: Medium | None = None


@attrs.frozen
class Call:
    """A past tool call; `arguments` is the text the client sent (compact JSON when it sent a value)."""

    name: str
    arguments: str
    id: str = ""

    def arguments_object(self) -> dict[str, Json]:
        """The arguments as templates read them: always an object."""
        text = self.arguments.strip()
        if not text:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {"value": self.arguments}
        if value is None:
            return {}
        if nests_deeper(value):
            return {"value": self.arguments}
        value = mended(value, text)
        return value if isinstance(value, dict) else {"value": value}


@attrs.frozen
class Turn:
    """One message of a conversation. `parts` is set only when it has media; `text` is its text parts joined."""

    role: str
    text: str = ""
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""

    def message(self) -> dict[str, Json]:
        """The object that templates read; keys are there only when they apply."""
        made: dict[str, Json] = {"role": self.role}
        if self.parts:
            made["content"] = [
                {"type": p.kind, "text": p.text} if p.kind == "text" else {"type": p.kind} for p in self.parts
            ]
        else:
            made["content"] = self.text
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
            made["thinking"] = self.reasoning
        if self.calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_object()},
                }
                for call in self.calls
            ]
        if self.call_id:
            made["tool_call_id"] = self.call_id
        if self.name:
            made["name"] = self.name
        return made

    def media_turns(self) -> list[tuple[str, Medium, str]]:
        """Each medium with the text before it and, for the last, the text after."""
        found: list[tuple[str, Medium, str]] = []
        text = ""
        for part in self.parts:
            if part.medium is None:
                text += part.text
            else:
                found.append((text, part.medium, ""))
                text = ""
        if found:
            found[-1] = (*found[-1][:2], text)
        return found

    def client_texts(self) -> list[str]:
        """Every text of the turn that a client wrote, calls left out."""
        return [p.text for p in self.parts if p.kind == "text"] if self.parts else [self.text]

    def texts(self) -> Iterable[str]:
        """Every string of the turn."""
        yield from self.client_texts()
        yield self.reasoning
        yield self.call_id
        yield self.name
        for call in self.calls:
            yield from (call.name, call.id)
            yield from strings_of(call.arguments_object())

    def with_texts(self, texts: Sequence[str]) -> "Turn":
        """The turn with its client texts replaced, in the order of `client_texts`."""
        if not self.parts:
            return attrs.evolve(self, text=texts[0])
        following = iter(texts)
        parts = tuple(attrs.evolve(p, text=next(following)) if p.kind == "text" else p for p in self.parts)
        return attrs.evolve(self, parts=parts, text="".join(p.text for p in parts))


def compact(value: Json) -> str:
    """JSON as the daemon writes it: no spaces, key order kept, non-ASCII raw."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def turns_of(messages: Iterable[Mapping[str, Json]]) -> list[Turn]:
    """The turns of an OpenAI messages array. Raises InvalidMessage."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def with_media(turns: Sequence[Turn], media: Iterable[Medium]) -> list[Turn]:
    """The turns, their media parts given in order what they became. Raises ValueError when that is not as many."""
    following = iter(media)
    made: list[Turn] = []
    for turn in turns:
        parts = tuple(p if p.kind == "text" else attrs.evolve(p, medium=next(following, None)) for p in turn.parts)
        if any(part.kind != "text" and part.medium is None for part in parts):
            raise ValueError("a conversation with more media than were probed for it")
        made.append(attrs.evolve(turn, parts=parts))
    if next(following, None) is not None:
        raise ValueError("a conversation with fewer media than were probed for it")
    return made


def _turn(message: Mapping[str, Json], where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise InvalidMessage(f"{where} must be an object", where)
    role = ROLES.get(str(message.get("role")), "user")
    text, parts = _content(message.get("content"), f"{where}.content")
    turn = Turn(role, text, parts)
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls")
        turn = attrs.evolve(
            turn,
            reasoning=reasoning.strip() if isinstance(reasoning, str) else "",
            calls=tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls or ())),
        )
    elif role == "tool":
        turn = attrs.evolve(turn, call_id=_text(message.get("tool_call_id")), name=_text(message.get("name")))
    return turn


def _content(value: Json, where: str) -> tuple[str, tuple[Part, ...]]:
    if value is None:
        return "", ()
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, Sequence):
        raise InvalidMessage(f"{where} must be a string, null or an array of parts", where)
    parts: list[Part] = []
    for i, part in enumerate(value):
        if isinstance(part, str):
            parts.append(Part("text", part))
            continue
        if not isinstance(part, Mapping):
            raise InvalidMessage(f"{where}[{i}] must be an object", where)
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            parts.append(Part("text", part["text"]))
        elif kind == "image_url":
            parts.append(Part("image", payload=part.get("image_url")))
        elif kind == "input_audio":
            parts.append(Part("audio", payload=part.get("input_audio")))
    text = "".join(p.text for p in parts)
    return text, tuple(parts) if any(p.kind != "text" for p in parts) else ()


def _call(value: Json, where: str) -> Call:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidMessage(f"{where} must be an object with a function that has a name", where)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    return Call(
        function["name"], arguments if isinstance(arguments, str) else compact(arguments), _text(value.get("id"))
    )


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def normalized_tools(tools: Iterable[Json] | None) -> list[dict[str, Json]]:
    """Tool declarations as `{"type": "function", "function": {..}}`, key order kept."""
    return [tool for declared in tools or () if (tool := normalized_tool(declared)) is not None]


def normalized_tool(tool: Json) -> dict[str, Json] | None:
    """One declaration in the form templates read: OpenAI's, a bare function, or Anthropic's; None when it is none."""
    if not isinstance(tool, Mapping):
        return None
    if "function" in tool:
        return dict(tool) if isinstance(tool["function"], Mapping) else None
    if "input_schema" in tool:
        function = {
            ("parameters" if key == "input_schema" else key): value for key, value in tool.items() if key != "type"
        }
        if "description" not in function:
            function = {
                "name": function.pop("name", ""), "description": "", **function
            }  # fmt: skip
        return {"type": "function", "function": function}
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def nests_deeper(value: Json, levels: int = MAX_NESTING) -> bool:
    """Whether a JSON value holds lists and objects more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        inner = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, (Mapping, list, tuple))]
        if not inner:
            return False
        level = [member for members in inner for member in members]
    return True


def require_shallow(value: Json, where: str) -> None:
    """Raises InvalidMessage for a value that nests deeper than templates are given."""
    if nests_deeper(value):
        raise InvalidMessage(f"{where} nests deeper than {MAX_NESTING} levels", where)


def map_strings(value: Json, change: Callable[[str], str]) -> Json:
    """A JSON value with `change` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(member, change) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(member, change) for member in value]
    return value


def strings_of(value: Json) -> Iterable[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield key
            yield from strings_of(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from strings_of(member)
