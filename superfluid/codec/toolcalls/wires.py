"""The wires on which models write tool calls, and how a call's text is read on each. Never an invented call: what
does not parse is None and goes back as text."""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls.repair import NotJson, readings, strict_loads
from superfluid.codec.toolcalls.typed import ToolSchemas, typed_value

Json = Any

GEMMA_DEPTH = 128
GEMMA_QUOTE = '<|"|>'
_FORBIDDEN_IN_NAMES = re.compile(r'[\s{}<>"]')


@attrs.frozen
class ToolCall:
    """A call that was read; `arguments_json` is compact JSON, or as written when it is broken (harmony)."""

    name: str
    arguments_json: str
    broken: bool = False


class Wire(ABC):
    """One way of writing calls.

    `auto_held`: under tool_choice auto a grammar holds a call once it begins. `forceable`: a demanded call can be held.
    """

    name: ClassVar[str]
    auto_held: ClassVar[bool] = False
    forceable: ClassVar[bool] = True

    @abstractmethod
    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        """The calls of one tool-call run's text, or None when it is none."""

    def read_cut(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        """The calls of a run that a limit cut."""
        return self.read(raw, tools)


def json_calls(raw: str, tools: ToolSchemas, cut: bool = False) -> list[ToolCall] | None:
    """The first reading of a text that is a call, or an array of calls; `cut`: a limit ended the text."""
    for value, closed in readings(raw):
        if isinstance(value, list) and value:
            last = len(value) - 1 if cut and closed else -1
            calls = [_call_of(member, tools, index == last) for index, member in enumerate(value)]
            if all(calls):
                return [call for call in calls if call is not None]
        elif (call := _call_of(value, tools, cut and closed)) is not None:
            return [call]
    return None


def _call_of(value: Json, tools: ToolSchemas, cut: bool) -> ToolCall | None:
    """The call that a value is. One that was `cut` before its arguments is none: a call without arguments would be an
    invention, and its name may be half a name."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):
        value = value["function"]
    arguments: Json = {}
    named = value.get("name", value.get("tool_name"))
    if isinstance(named, str) and named.strip():
        given = next((k for k in ("arguments", "parameters", "args", "input") if k in value), None)
        if given is not None:
            arguments = value[given]
        elif cut:
            return None
        name = named.strip()
    elif len(value) == 1 and (name := next(iter(value))) in tools:
        arguments = value[name]
    else:
        return None
    if isinstance(arguments, str):
        try:
            arguments = strict_loads(arguments)
        except NotJson:
            return None
    return ToolCall(name, compact({} if arguments is None else arguments))


class JsonWire(Wire):
    """`{"name": f, "arguments": {..}}` between the markers."""

    name = "json"
    auto_held = True

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        return json_calls(raw, tools)

    def read_cut(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        return json_calls(raw, tools, cut=True)


class MistralWire(JsonWire):
    """A JSON array of calls, to the end of the turn."""

    name = "mistral"
    auto_held = False


class Llama3Wire(JsonWire):
    """Bare JSON with `parameters`, the whole reply."""

    name = "llama3"
    auto_held = False


class RawWire(JsonWire):
    """No wire is known: what reads as JSON is a call."""

    name = "raw"
    auto_held = False
    forceable = False


@attrs.frozen
class DelimitedWire(Wire):
    """Learned XML: `<function=f>` with `<parameter=k>` v `</parameter>` inside, and kin."""

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    val_close: str
    name: ClassVar[str] = "delimited"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        at = raw.find(self.name_open)
        while at >= 0:
            at += len(self.name_open)
            end = raw.find(self.name_close, at)
            name = raw[at:end].strip() if end >= 0 else ""
            if not name or "<" in name or re.search(r"\s", name):
                calls = []
                break
            upto = raw.find(self.name_open, end)
            arguments = self._arguments(raw[end + len(self.name_close) : upto if upto >= 0 else None], name, tools)
            calls.append(ToolCall(name, compact(arguments)))
            at = upto
        return calls or json_calls(raw, tools)

    def _arguments(self, body: str, name: str, tools: ToolSchemas) -> dict[str, Json]:
        arguments: dict[str, Json] = {}
        at = body.find(self.key_open)
        while at >= 0:
            at += len(self.key_open)
            key_end = body.find(self.key_close, at)
            if key_end < 0:
                break
            key = body[at:key_end].strip()
            start = key_end + len(self.key_close)
            end, at = self._value_end(body, start)
            arguments.setdefault(key, typed_value(body[start:end], tools.types(name, key)))
            at = body.find(self.key_open, at)
        return arguments

    def _value_end(self, body: str, start: int) -> tuple[int, int]:
        """(end of the value, where the search goes on). A closer whose white space differs closes too."""
        if not self.val_close:
            following = body.find(self.key_open, start)
            end = following if following >= 0 else len(body)
            return end, end
        end = body.find(self.val_close, start)
        if end >= 0:
            return end, end + len(self.val_close)
        last = self.val_close.removesuffix("<").rstrip()  # what follows the last value of a call may begin otherwise
        for closer in (last, last.strip()):
            end = body.find(closer, start) if closer else -1
            if end >= 0:
                return end, end + len(closer)
        return len(body), len(body)


class GlmWire(Wire):
    """`f<arg_key>k</arg_key><arg_value>v</arg_value>`, strictly."""

    name = "glm"

    _PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        text = raw.strip()
        if text.startswith("<tool_call>"):
            text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        at = text.find("<arg_key>")
        name = (text if at < 0 else text[:at]).strip()
        if not name or _FORBIDDEN_IN_NAMES.search(name):
            return None
        arguments: dict[str, Json] = {}
        at = len(text) if at < 0 else at
        while (pair := self._PAIR.match(text, at)) is not None:
            key = pair[1].strip()
            arguments[key] = typed_value(pair[2], tools.types(name, key), strict_strings=False)
            at = pair.end()
        if text[at:].strip():
            return None
        if any(key not in arguments for key in tools.required(name)):
            return None
        return [ToolCall(name, compact(arguments))]


@attrs.frozen
class NamedWire(Wire):
    """A name, a separator, an object: the texts before and after the name are learned. `name_end` is the part of the
    separator that ends a name: what follows it may be an id."""

    before: str
    separator: str
    name_end: str
    after: str = ""
    kimi: bool = False  # the name is written `functions.f:0`
    name: ClassVar[str] = "named"
    auto_held: ClassVar[bool] = True

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        head, brace, _ = raw.partition("{")
        if not brace:
            return None
        body = raw[len(head) :]
        lead = self.before.strip()
        named = (head.partition(lead)[2] if lead and lead in head else head).lstrip()
        name = named.partition(self.name_end)[0].strip() if self.name_end else named.strip()
        if self.kimi:
            name = re.sub(r":\d+$", "", name.removeprefix("functions."))
        if not name or _FORBIDDEN_IN_NAMES.search(name):
            return None
        arguments = object_of(body)
        return None if arguments is None else [ToolCall(name, compact(arguments))]


def object_of(body: str) -> dict[str, Json] | None:
    """The first reading of a text that is an object."""
    return next((value for value, _ in readings(body) if isinstance(value, dict)), None)


class PythonicWire(Wire):
    """`[f(a=1, b="x"), g()]`, with literal arguments only."""

    name = "pythonic"
    forceable = False

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        try:
            tree = ast.parse(raw.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls: list[ToolCall] = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                return None
            try:
                name = ast.unparse(node.func)
                arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
                written = compact(arguments)
                strict_loads(written)
            except (ValueError, TypeError, RecursionError):
                return None
            if not re.fullmatch(r"[\w.]+", name):
                return None
            calls.append(ToolCall(name, written))
        return calls or None


class GemmaWire(Wire):
    """`call:f{k:v,..}` with `<|"|>` as quotes."""

    name = "gemma"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        text = raw.rpartition("<|tool_call>")[2].partition("<tool_call|>")[0]
        head, found, _ = text.partition("{")
        name = head.strip().removeprefix("call:").strip()
        if not found or not head.strip().startswith("call:") or not name or _FORBIDDEN_IN_NAMES.search(name):
            return None
        reader = _GemmaReader(text, text.index("{"))
        value = reader.value(0)
        return [ToolCall(name, compact(value))] if isinstance(value, dict) else None


class _GemmaReader:
    """A cursor over a gemma body; a cut body gives what is there."""

    QUOTE = GEMMA_QUOTE
    _NEXT_KEY = re.compile(r",\s*[^\s,:{}\[\]]+\s*:|\}")

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def _blank(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def value(self, depth: int, *, in_array: bool = False) -> Json:
        self._blank()
        text = self.text
        if depth > GEMMA_DEPTH:
            self.at = len(text)
            return None
        if text.startswith(self.QUOTE, self.at):
            start = self.at + len(self.QUOTE)
            end = text.find(self.QUOTE, start)
            self.at = len(text) if end < 0 else end + len(self.QUOTE)
            return text[start : end if end >= 0 else None]
        if text.startswith("{", self.at):
            return self._object(depth)
        if text.startswith("[", self.at):
            return self._array(depth)
        return self._bare(in_array)

    def _object(self, depth: int) -> dict[str, Json]:
        self.at += 1
        made: dict[str, Json] = {}
        while self.at < len(self.text):
            self._blank()
            if self.text.startswith(("}", ","), self.at):
                self.at += 1
                if self.text[self.at - 1] == "}":
                    break
                continue
            colon = self.text.find(":", self.at)
            if colon < 0:
                self.at = len(self.text)
                break
            key = self.text[self.at : colon].strip().removeprefix(self.QUOTE).removesuffix(self.QUOTE)
            self.at = colon + 1
            self._blank()
            if self.at >= len(self.text):
                break
            made[key] = self.value(depth + 1)
        return made

    def _array(self, depth: int) -> list[Json]:
        self.at += 1
        made: list[Json] = []
        while self.at < len(self.text):
            self._blank()
            if self.text.startswith(("]", ","), self.at):
                self.at += 1
                if self.text[self.at - 1] == "]":
                    break
                continue
            if self.at < len(self.text):
                made.append(self.value(depth + 1, in_array=True))
        return made

    def _bare(self, in_array: bool) -> Json:
        if in_array:
            ends = [i for i in (self.text.find(",", self.at), self.text.find("]", self.at)) if i >= 0]
            end = min(ends, default=len(self.text))
        else:
            match = self._NEXT_KEY.search(self.text, self.at)
            end = match.start() if match else len(self.text)
        literal = self.text[self.at : end].strip()
        self.at = max(end, self.at + 1) if end == self.at else end
        if literal in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[literal]
        if re.fullmatch(r"-?\d+", literal):
            return int(literal) if len(literal) < 4000 else literal
        if re.fullmatch(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", literal):
            number = float(literal)
            return number if abs(number) != float("inf") else literal
        return literal


class HarmonyWire(Wire):
    """A header `to=functions.f` and a JSON body."""

    name = "harmony"
    auto_held = True

    _RECIPIENT = re.compile(r"to=([^\s<{]*)")

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        match = self._RECIPIENT.search(raw)
        name = match[1].removeprefix("functions.") if match else ""
        if match is None or not name:
            return None
        brace = raw.find("{", match.end())
        body = raw[brace:] if brace >= 0 else ""
        arguments = object_of(body)
        if arguments is None:
            return [ToolCall(name, body or raw[match.end() :].strip(), broken=True)]
        return [ToolCall(name, compact(arguments))]


class AtemWire(Wire):
    """`<atem:invoke name="f">` with `<atem:parameter name="k">` v `</atem:parameter>` inside."""

    name = "atem"
    auto_held = True

    _INVOKE = re.compile(r'<atem:invoke name="([^"]*)">(.*?)(?=<atem:invoke name="|\Z)', re.DOTALL)
    _PARAMETER = re.compile(r'<atem:parameter name="([^"]*)">')
    _END = "</atem:parameter>"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        for invoke in self._INVOKE.finditer(raw):
            name, body = invoke[1], invoke[2]
            arguments: dict[str, Json] = {}
            at = 0
            while (parameter := self._PARAMETER.search(body, at)) is not None:
                end = body.find(self._END, parameter.end())
                if end < 0:
                    return None
                key = parameter[1]
                arguments[key] = typed_value(body[parameter.end() : end], tools.types(name, key))
                at = end + len(self._END)
            if not name.strip():
                return None
            calls.append(ToolCall(name, compact(arguments)))
        return calls or None


def written_call(name: str, arguments: Json) -> str:
    """A call as content, for choices that withhold calls."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))
