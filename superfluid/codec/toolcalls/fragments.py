"""Tool calls as they are being written: names and arguments handed on before a call's end (spec: codec_tools, answers).

One reader per tool-call run. What it makes does not depend on how the run's text is sliced.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import attrs

from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls.delimited import Named, Scanner
from superfluid.codec.toolcalls.repair import NotJson, strict_loads
from superfluid.codec.toolcalls.typed import ToolSchemas, typed_value
from superfluid.codec.toolcalls.wires import DelimitedWire, JsonWire, Llama3Wire, MistralWire, ToolCall, Wire

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'[^"\\]*')
_HIGH_HALF = re.compile(r"\\u[dD][89abAB]")
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F]")
REPLACED = "\\ufffd"
_BLANK = " \t\r\n"


@attrs.frozen
class Fragment:
    """More of call `call` of a run (counted from 0). `name` comes with its first fragment, which opens it; `at` is how
    many characters of the run's text had been read then, none when it opened only as the whole run was read."""

    call: int
    name: str | None
    arguments: str
    at: int | None = None


@attrs.frozen
class Verdict:
    """The end of a run: what was still missing, and the calls that had opened but were not read."""

    fragments: list[Fragment]
    unread: list[int]


class CallReader(ABC):
    """The calls of one run, while it is written: for wires whose calls are only read as a whole."""

    def feed(self, text: str) -> list[Fragment]:
        """More of the run's text; what it adds."""
        return []

    @abstractmethod
    def opened(self) -> int:
        """How many calls have opened."""

    @abstractmethod
    def end(self, calls: Sequence[ToolCall]) -> Verdict:
        """The run is over and reads as `calls` (none: it is no call)."""


def reader(wire: Wire, tools: ToolSchemas) -> CallReader:
    """A reader of one run on `wire`."""
    if isinstance(wire, DelimitedWire):
        return DelimitedReader(wire, tools)
    if isinstance(wire, JsonWire) and not isinstance(wire, MistralWire | Llama3Wire):
        return JsonReader()
    return WholeReader()


def _whole(calls: Sequence[ToolCall], start: int = 0) -> list[Fragment]:
    return [Fragment(n, call.name, call.arguments_json) for n, call in enumerate(calls[start:], start)]


class WholeReader(CallReader):
    """Wires whose calls come in one piece."""

    def opened(self) -> int:
        return 0

    def end(self, calls: Sequence[ToolCall]) -> Verdict:
        return Verdict(_whole(calls), [])


class _Expect(Enum):
    """What comes next in the call's own object."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    NOTHING = auto()  # it is over, or no object


class JsonReader(CallReader):
    """`{"name": f, "arguments": {..}}`: opens at the end of the name; the arguments are passed on as written."""

    def __init__(self) -> None:
        self._expect = _Expect.START
        self._read = 0  # characters so far
        self._closers: list[str] = []  # of the brackets that are open, the object's own first
        self._string: list[str] | None = None  # pieces of the string that is open
        self._escape = ""  # a backslash and what it escapes, as far as it has come
        self._half = ""  # the escaped first half of a surrogate pair
        self._key = ""
        self._name: str | None = None
        self._bare = False  # in a number or a literal of the object itself
        self._sending = False  # in the arguments
        self._sent: list[str] = []  # of the arguments
        self._held: list[str] = []  # a comma and the blanks behind it: nothing, if a bracket closes next
        self._complete = False  # the arguments have ended

    def opened(self) -> int:
        return int(self._name is not None)

    def feed(self, text: str) -> list[Fragment]:
        was_open = self._name is not None
        done = len(self._sent)
        opening: int | None = None
        at = 0
        while at < len(text) and self._expect is not _Expect.NOTHING:
            step = self._in_string(text, at) if self._string is not None else self._outside(text, at)
            at += step
            if self._name is not None and not was_open and opening is None:
                opening = self._read + at
        self._read += len(text)
        if self._name is None:
            return []
        if opening is not None:
            return [Fragment(0, self._name, "".join(self._sent), opening)]
        more = "".join(self._sent[done:])
        return [Fragment(0, None, more)] if more else []

    def _in_string(self, text: str, at: int) -> int:
        """Read on in the open string; characters read."""
        assert self._string is not None
        if self._escape and not (len(self._escape) > 1 and text[at] == '"'):
            self._escape += text[at]
            if len(self._escape) == 6 or (len(self._escape) == 2 and text[at] != "u"):
                self._escaped(self._escape)
                self._escape = ""
            return 1
        match = _IN_STRING.match(text, at)
        assert match is not None
        if plain := match[0]:
            self._keep(self._cut_half() + plain)
            return len(plain)
        if text[at] == "\\":
            self._escape = "\\"
            return 1
        self._keep(self._cut_half() + self._escape + '"')
        self._escape = ""
        written, self._string = "".join(self._string), None
        if len(self._closers) == 1:
            self._string_ended(written)
        return 1

    def _escaped(self, escape: str) -> None:
        """A whole escape. Half a surrogate pair is no text, and becomes what the whole call's reading makes of it."""
        low = _LOW_HALF.match(escape) is not None
        if self._half and low:
            self._keep(self._half + escape)
            self._half = ""
            return
        self._keep(self._cut_half())
        if _HIGH_HALF.match(escape):
            self._half = escape
        else:
            self._keep(REPLACED if low else escape)

    def _cut_half(self) -> str:
        """What stands for the first half of a pair whose second does not come."""
        replaced, self._half = REPLACED if self._half else "", ""
        return replaced

    def _keep(self, text: str) -> None:
        assert self._string is not None
        if self._sending:
            self._sent.append(text)
        if len(self._closers) == 1:
            self._string.append(text)

    def _string_ended(self, written: str) -> None:
        """A string of the object itself: a key, or a value."""
        try:
            value = strict_loads(written)
        except NotJson:
            self._expect = _Expect.NOTHING
            return
        if self._expect is _Expect.KEY:
            self._key = value
            self._expect = _Expect.COLON
            return
        self._expect = _Expect.COMMA
        if self._key in NAME_KEYS and self._name is None and value.strip():
            self._name = value.strip()

    def _outside(self, text: str, at: int) -> int:
        """Read one character outside of strings."""
        char = text[at]
        if self._sending:
            self._argument(char)
        elif self._expect is _Expect.START:
            if char == "{":
                self._closers.append("}")
                self._expect = _Expect.KEY
            elif char == "[":
                self._expect = _Expect.NOTHING  # an array of calls is read whole
        elif len(self._closers) > 1:
            self._bracket(char)
            if len(self._closers) == 1:
                self._expect = _Expect.COMMA
        else:
            self._member(char)
        return 1

    def _argument(self, char: str) -> None:
        """A character of the arguments, outside of strings."""
        if char == "," or (self._held and char in _BLANK):
            self._held.append(char)
            return
        if char not in "}]":
            self._sent += self._held
        self._held = []
        self._sent.append(char)
        self._bracket(char)
        if len(self._closers) == 1:
            self._sending = False
            self._complete = True
            self._expect = _Expect.COMMA

    def _bracket(self, char: str) -> None:
        if char == '"':
            self._string = []
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]" and self._closers.pop() != char:
            self._expect = _Expect.NOTHING
            self._closers.append("")  # stays inside: nothing closes it any more

    def _member(self, char: str) -> None:
        """A character between the members of the object itself, or in a bare value of it."""
        expect = self._expect
        if self._bare:
            if char not in ",}" and char not in _BLANK:
                return
            self._bare = False
            self._expect = expect = _Expect.COMMA
        if char in _BLANK:
            return
        if char == "}" and expect in (_Expect.COMMA, _Expect.KEY):
            self._expect = _Expect.NOTHING
        elif char == '"' and expect in (_Expect.KEY, _Expect.VALUE):
            self._string = ['"']
        elif char == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif char == "," and expect is _Expect.COMMA:
            self._expect = _Expect.KEY
        elif char in "{[" and expect is _Expect.VALUE:
            self._closers.append("}" if char == "{" else "]")
            if self._key in ARGUMENT_KEYS and not self._sent:
                self._sending = True
                self._sent.append(char)
        elif expect is _Expect.VALUE and char not in "}]:,":
            self._bare = True
        else:
            self._expect = _Expect.NOTHING

    def end(self, calls: Sequence[ToolCall]) -> Verdict:
        if self._name is None:
            return Verdict(_whole(calls), [])
        if not calls or calls[0].name != self._name:
            return Verdict([], [0])
        more = _whole(calls, 1)
        if not self._sent:
            return Verdict([Fragment(0, None, calls[0].arguments_json), *more], [])
        rest = ""
        if not self._complete:
            ending = self._cut_half() + '"' if self._string is not None else ""
            rest = ending + "".join(reversed(self._closers[1:]))
        try:
            same = strict_loads("".join(self._sent) + rest) == strict_loads(calls[0].arguments_json)
        except NotJson:
            same = False
        if not same:
            return Verdict([], [0])
        return Verdict([*([Fragment(0, None, rest)] if rest else []), *more], [])


@attrs.define
class _Opened:
    """A call under way: the arguments that were sent."""

    name: str
    sent: dict[str, Any] = attrs.Factory(dict)


class DelimitedReader(CallReader):
    """Learned XML: opens at the end of the name; each closed value is sent, typed."""

    def __init__(self, wire: DelimitedWire, tools: ToolSchemas) -> None:
        self._scanner = Scanner(wire)
        self._tools = tools
        self._calls: list[_Opened] = []

    def opened(self) -> int:
        return len(self._calls)

    def feed(self, text: str) -> list[Fragment]:
        out: list[Fragment] = []
        for part in self._scanner.feed(text):
            if isinstance(part, Named):
                self._calls.append(_Opened(part.name))
                out.append(Fragment(len(self._calls) - 1, part.name, "", part.at))
            elif (call := self._calls[-1]) and part.key not in call.sent:
                value = typed_value(part.text, self._tools.types(call.name, part.key))
                member = ("," if call.sent else "{") + _member(part.key, value)
                call.sent[part.key] = value
                out.append(Fragment(len(self._calls) - 1, None, member))
        return out

    def end(self, calls: Sequence[ToolCall]) -> Verdict:
        out: list[Fragment] = []
        unread: list[int] = []
        for index, opened in enumerate(self._calls):
            rest = self._rest(opened, calls[index]) if index < len(calls) else None
            if rest is None:
                unread.append(index)
            else:
                out.append(Fragment(index, None, rest))
        return Verdict(out + _whole(calls, len(self._calls)), unread)

    def _rest(self, opened: _Opened, call: ToolCall) -> str | None:
        """What is missing of an opened call; none when it was read as something else."""
        if call.name != opened.name:
            return None
        if not opened.sent:
            return call.arguments_json
        final = strict_loads(call.arguments_json)
        if not isinstance(final, Mapping) or any(
            key not in final or compact(final[key]) != compact(value) for key, value in opened.sent.items()
        ):
            return None
        missing = [f",{_member(key, value)}" for key, value in final.items() if key not in opened.sent]
        return "".join(missing) + "}"


def _member(key: str, value: Any) -> str:
    return compact({key: value})[1:-1]
