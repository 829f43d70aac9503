"""The wires on which models write tool calls, and how a call's text is read on each. Never an invented call: what
does not parse is None and goes back as text."""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls import gemma
from superfluid.codec.toolcalls.delimited import Delimiters, Named, Scanner, any_of
from superfluid.codec.toolcalls.repair import (
    NotJson,
    later_objects,
    object_end,
    readings,
    strict_loads,
    without_fence,
)
from superfluid.codec.toolcalls.typed import ToolSchemas, typed_value

Json = Any

_ARGUMENTS = ("arguments", "parameters", "args", "input")
_CALL_KEYS = frozenset({"function", *_ARGUMENTS})
PROBE_ID = "abc123def"  # the id of the call that templates are asked to render: it stands in what is learned
_FORBIDDEN_IN_NAMES = re.compile(r'[\s{}<>"]')
_BLANKS = re.compile(r"\s*")


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
    """The first reading of a text that is a call, or an array of calls, and the calls behind it; `cut`: a limit ended
    the text."""
    for value, closed in readings(raw):
        if isinstance(value, list) and value:
            last = len(value) - 1 if cut and closed else -1
            calls = [_call_of(member, tools, index == last) for index, member in enumerate(value)]
            if all(calls):
                return [call for call in calls if call is not None]
        elif (call := _call_of(value, tools, cut and closed)) is not None:
            return [call, *_more_calls(raw, tools, cut)]
    return None


def _more_calls(raw: str, tools: ToolSchemas, cut: bool) -> list[ToolCall]:
    """The calls behind the first object of a text, or of an array that is none as a whole. An object that has a name
    and nothing else of a call is one only if a tool has that name."""
    calls: list[ToolCall] = []
    for text in later_objects(without_fence(raw)):
        for value, closed in readings(text):
            call = _call_of(value, tools, cut and closed)
            if call is not None and (call.name in tools or not _CALL_KEYS.isdisjoint(value)):
                calls.append(call)
                break
    return calls


def _call_of(value: Json, tools: ToolSchemas, cut: bool) -> ToolCall | None:
    """The call that a value is. One that was `cut` before its arguments is none: a call without arguments would be an
    invention, and its name may be half a name."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):
        value = value["function"]
    arguments: Json = {}
    names = (value.get("name"), value.get("tool_name"))
    named = next((name.strip() for name in names if isinstance(name, str) and name.strip()), None)
    if named is not None:
        given = next((k for k in _ARGUMENTS if k in value), None)
        if given is not None:
            arguments = value[given]
        elif cut:
            return None
        name = named
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
class DelimitedWire(Delimiters, Wire):
    """Learned XML: `<function=f>` with `<parameter=k>` v `</parameter>` inside, and kin."""

    name: ClassVar[str] = "delimited"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        calls: list[tuple[str, dict[str, Json]]] = []
        scanner = Scanner(self)
        for part in scanner.read(raw):
            if isinstance(part, Named):
                calls.append((part.name, {}))
            else:
                name, arguments = calls[-1]
                arguments.setdefault(part.key, typed_value(part.text, tools.types(name, part.key)))
        if not scanner.named:
            return json_calls(raw, tools)
        return None if scanner.failed else [ToolCall(name, compact(arguments)) for name, arguments in calls]


class GlmWire(Wire):
    """`f<arg_key>k</arg_key><arg_value>v</arg_value>`, strictly."""

    name = "glm"

    _KEY, _KEY_END = "<arg_key>", "</arg_key>"
    _VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        text = raw.strip()
        if text.startswith("<tool_call>"):
            text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        at = text.find(self._KEY)
        name = (text if at < 0 else text[:at]).strip()
        if not name or _FORBIDDEN_IN_NAMES.search(name):
            return None
        arguments: dict[str, Json] = {}
        at = len(text) if at < 0 else at
        while at < len(text):
            key = _between(text, at, self._KEY, self._KEY_END)
            value = _between(text, key[1], self._VALUE, self._VALUE_END) if key is not None else None
            if key is None or value is None:
                return None
            argument = key[0].strip()
            arguments[argument] = typed_value(value[0], tools.types(name, argument), strict_strings=False)
            at = _past_blanks(text, value[1])
        if any(key not in arguments for key in tools.required(name)):
            return None
        return [ToolCall(name, compact(arguments))]


def _between(text: str, at: int, opener: str, closer: str) -> tuple[str, int] | None:
    """(what stands between a pair that begins at `at`, blanks aside, and the first closer; where it ends)."""
    at = _past_blanks(text, at)
    if not text.startswith(opener, at):
        return None
    at += len(opener)
    end = text.find(closer, at)
    return None if end < 0 else (text[at:end], end + len(closer))


def _past_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match is not None else at


@attrs.frozen
class NamedWire(Wire):
    """A name, a separator, an object: the texts before and after the name are learned. `name_end` is the part of the
    separator that ends a name: what follows it may be an id, and what follows the id ends a name too."""

    before: str
    separator: str
    name_end: str
    after: str = ""
    kimi: bool = False  # the name is written `functions.f:0`
    name: ClassVar[str] = "named"
    auto_held: ClassVar[bool] = True

    _NUMBER: ClassVar[re.Pattern[str]] = re.compile(r":[0-9]+\Z")

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        """Calls that follow one another, where the marker between them left no text; all of them, or none."""
        calls: list[ToolCall] = []
        ends = [end for end in (self.name_end, self.separator.partition(PROBE_ID)[2]) if end]
        marks = [mark for end in ends if (mark := end.strip())] or [self.before.strip()]
        announced = any_of(marks)
        at = 0
        while not calls or (at < len(raw) and announced.search(raw, at)):
            brace = raw.find("{", at)
            if brace < 0:
                return None
            name = self._name(raw[at:brace], ends)
            after = object_end(raw, brace)
            arguments = object_of(raw[brace:after])
            if not name or _FORBIDDEN_IN_NAMES.search(name) or arguments is None:
                return None
            calls.append(ToolCall(name, compact(arguments)))
            at = len(raw) if after is None else after
            if self.after and raw.startswith(self.after, at):
                at += len(self.after)
        return calls

    def _name(self, head: str, ends: Sequence[str]) -> str:
        lead = self.before.strip()
        named = (head.partition(lead)[2] if lead and lead in head else head).lstrip()
        for end in ends:
            named = named.partition(end)[0]
        named = named.strip()
        return self._NUMBER.sub("", named.removeprefix("functions.")) if self.kimi else named


def object_of(body: str) -> dict[str, Json] | None:
    """The first reading of a text that is an object."""
    return next((value for value, _ in readings(body) if isinstance(value, dict)), None)


class PythonicWire(Wire):
    """`[f(a=1, b="x"), g()]`, with literal arguments only."""

    name = "pythonic"
    forceable = False

    _NAME = re.compile(r"[\w.]+")

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
            if not self._NAME.fullmatch(name):
                return None
            calls.append(ToolCall(name, written))
        return calls or None


class GemmaWire(Wire):
    """`call:f{k:v,..}` with `<|"|>` as quotes."""

    name = "gemma"

    _CALL = "call:"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        """Calls that follow one another; all of them, or none."""
        calls: list[ToolCall] = []
        at = 0
        while not calls or raw.startswith(self._CALL, at):
            brace = raw.find("{", at)
            if brace < 0:
                return None
            head = raw[at:brace].rpartition(gemma.OPENER)[2].strip()
            name = head.removeprefix(self._CALL).strip()
            if not head.startswith(self._CALL) or not name or _FORBIDDEN_IN_NAMES.search(name):
                return None
            body = gemma.Body(raw, brace)
            calls.append(ToolCall(name, compact(body.read())))
            for marker in (gemma.CLOSER, gemma.OPENER, ""):
                body.blanks()
                body.at += len(marker) if raw.startswith(marker, body.at) else 0
            at = body.at
        return calls


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

    _PART = re.compile(r'<atem:(invoke|parameter) name="([^"]*)">')
    _END = "</atem:parameter>"

    def read(self, raw: str, tools: ToolSchemas) -> list[ToolCall] | None:
        calls: list[tuple[str, dict[str, Json]]] = []
        at = 0
        while (part := self._PART.search(raw, at)) is not None:
            kind, name = part.groups()
            at = part.end()
            if kind == "invoke":
                if not name.strip():
                    return None
                calls.append((name, {}))
                continue
            end = raw.find(self._END, at)
            if end < 0:
                return None
            if calls:
                invoked, arguments = calls[-1]
                arguments[name] = typed_value(raw[at:end], tools.types(invoked, name))
            at = end + len(self._END)
        return [ToolCall(name, compact(arguments)) for name, arguments in calls] or None


def written_call(name: str, arguments: Json) -> str:
    """A call as content, for choices that withhold calls."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))
