"""What a template insists on though clients may leave it out, or send it in another form: learned once, at its load."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any

import attrs

Json = Any
Message = dict[str, Json]

OUR_ID = "call_6"  # as the daemon hands ids out
SHORT_ID = "abc123def"  # the form that Mistral's templates accept: nine letters and digits
NAMELESS = "unknown"  # the name of a result of no call
_ALPHABET = digits + ascii_letters

_NAME, _DESCRIPTION = {"name": "probe"}, {"description": "probe"}
_PARAMETERS = {"parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
_USER = {"role": "user", "content": "probe"}


@attrs.frozen
class Needs:
    """What is filled in or mapped before a template sees a conversation; nothing where it takes what clients send.

    `short_ids`: ids of calls are as SHORT_ID. `result_names`: a result names its tool. `description`, `parameters`,
    `properties`: a declaration has them.
    """

    short_ids: bool = False
    result_names: bool = False
    description: bool = False
    parameters: bool = False
    properties: bool = False

    @classmethod
    def learn(cls, accepts: Callable[[Sequence[Json], Sequence[Json] | None], bool]) -> "Needs":
        """`accepts(messages, tools)`: whether the template renders them."""
        whole = _tool(**_DESCRIPTION, **_PARAMETERS)

        def loop_needs(without: list[Message], filled: list[Message]) -> bool:
            return any(not accepts(without, tools) and accepts(filled, tools) for tools in (None, [whole]))

        def tool_needs(without: Json) -> bool:
            return not accepts([_USER], [without]) and accepts([_USER], [whole])

        return cls(
            short_ids=loop_needs(_loop(OUR_ID, OUR_ID), _loop(SHORT_ID, SHORT_ID)),
            result_names=loop_needs(_loop(SHORT_ID, None), _loop(SHORT_ID, None, name="probe")),
            description=tool_needs(_tool(**_PARAMETERS)),
            parameters=tool_needs(_tool(**_DESCRIPTION)),
            properties=tool_needs(_tool(**_DESCRIPTION, parameters={"type": "object"})),
        )

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in the form that the template takes."""
        if not (self.short_ids or self.result_names):
            return messages
        made: list[Message] = []
        waiting: list[Message] = []  # calls without a result yet
        for at, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                if self.short_ids:
                    calls = [{**call, "id": short_id(call["id"] or f"{at} {n}")} for n, call in enumerate(calls)]
                    message = {**message, "tool_calls": calls}
                waiting = list(calls)
            elif message["role"] == "tool":
                message = self._result(message, waiting, at)
            made.append(message)
        return made

    def _result(self, message: Message, waiting: list[Message], at: int) -> Message:
        """A result with its call's id, and its name; one without an id is of the first call that has none yet."""
        identity = message.get("tool_call_id")
        if identity and self.short_ids:
            identity = short_id(identity)
        n = next((n for n, call in enumerate(waiting) if identity in (None, call["id"])), None)
        call = waiting.pop(n) if n is not None else None
        filled = dict(message)
        if self.short_ids:
            filled["tool_call_id"] = identity or (call["id"] if call else short_id(str(at)))
        if self.result_names and not message.get("name"):
            filled["name"] = call["function"]["name"] if call else NAMELESS
        return filled

    def tools(self, tools: Sequence[Json]) -> list[Json]:
        """The declarations with what the template reads of them."""
        return [self._declared(tool) for tool in tools]

    def _declared(self, tool: Json) -> Json:
        if not (self.description or self.parameters or self.properties):
            return tool
        function = dict(tool["function"])
        if self.description and function.get("description") is None:
            function.pop("description", None)
            function = {"name": function.pop("name", ""), "description": "", **function}
        if (self.parameters or self.properties) and function.get("parameters") is None:
            function["parameters"] = {"type": "object", "properties": {}}
        parameters = function.get("parameters")
        if self.properties and isinstance(parameters, Mapping) and parameters.get("properties") is None:
            function["parameters"] = {**parameters, "properties": {}}
        return {**tool, "function": function}


def short_id(sent: str) -> str:
    """An id of nine characters for any; one that is of nine already stays."""
    if len(sent) == len(SHORT_ID):
        return sent
    number = int.from_bytes(sha256(sent.encode(errors="replace")).digest())
    letters = []
    for _ in SHORT_ID:
        number, letter = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)


def _loop(call_id: str, result_id: str | None, **result: str) -> list[Message]:
    """A question, a call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": {}}}
    said = {} if result_id is None else {"tool_call_id": result_id}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "probe", **said, **result},
    ]


def _tool(**more: Json) -> Json:
    return {"type": "function", "function": {**_NAME, **more}}
