"""The tool calls of one reply: entries as they are written for a stream, and those that were read for the whole."""

from typing import Any

import attrs
import orjson

from superfluid.codec.codec import Codec
from superfluid.codec.toolcalls.fragments import CallReader, Fragment
from superfluid.codec.toolcalls.wires import ToolCall
from superfluid.link.events import Event, ToolUse

Entry = dict[str, Any]


@attrs.define
class Calls:
    """Give it each committed text of the call channel, then what was read of it, then `over`.

    `read` are the calls of the whole reply. `broken`: a call was announced and then not read, or its arguments are
    none; a client must not run anything then. `only_one`: parallel_tool_calls false, or a demanded call.
    """

    codec: Codec
    tools: list[dict[str, Any]]
    only_one: bool = False
    read: list[Entry] = attrs.Factory(list)
    broken: bool = False
    _reader: CallReader | None = None
    _raw: list[str] = attrs.Factory(list)
    _uses: list[Event] = attrs.Factory(list)
    _before: int = 0  # calls of earlier runs

    @property
    def pending(self) -> bool:
        """Calls were read whose run is not over yet."""
        return bool(self._uses)

    def write(self, event: Event, text: str) -> list[Entry]:
        """More text of the run under way, committed by `event`."""
        if self._reader is None:
            self._reader = self.codec.call_reader(self.tools)
        self._raw.append(text)
        return [self._entry(fragment, event.event_id) for fragment in self._reader.feed(text)]

    def use(self, event: Event) -> None:
        """A call was read of the run."""
        self._uses.append(event)

    def over(self, event_id: int) -> tuple[list[Entry], str]:
        """The run is over: what a stream still has to say, and the text that was no call after all."""
        reader = self._reader or self.codec.call_reader(self.tools)
        uses = self._uses[: 1 - len(self.read)] if self.only_one else self._uses
        raw = "".join(self._raw)
        self._reader, self._raw, self._uses = None, [], []
        calls = [ToolCall(use.body.name, use.body.arguments) for use in uses if isinstance(use.body, ToolUse)]
        verdict = reader.end(calls)
        entries = []
        for fragment in verdict.fragments:
            opened = uses[fragment.call].event_id if fragment.call < len(uses) else event_id
            entries.append(self._entry(fragment, opened))
        self._before += max(reader.opened(), len(calls))
        if verdict.unread or not calls:
            self.broken |= bool(verdict.unread)
            return entries, raw
        self.read += [
            _whole(len(self.read) + n, use.event_id, call)
            for n, (use, call) in enumerate(zip(uses, calls, strict=True))
        ]
        self.broken |= any(not _is_json(call.arguments_json) for call in calls)
        return entries, ""

    def whole_text(self, text: str, event_id: int) -> list[Entry]:
        """Read a reply without call markers as calls; no entries when it is none."""
        found = self.codec.read_call(text, self.tools) or []
        calls = found[:1] if self.only_one else found
        self.read += [_whole(len(self.read) + n, event_id + n, call) for n, call in enumerate(calls)]
        return self.read[len(self.read) - len(calls) :]

    def _entry(self, fragment: Fragment, event_id: int) -> Entry:
        index = self._before + fragment.call
        if fragment.name is None:
            return {"index": index, "function": {"arguments": fragment.arguments}}
        return _whole(index, event_id, ToolCall(fragment.name, fragment.arguments))


def _whole(index: int, event_id: int, call: ToolCall) -> Entry:
    return {
        "index": index,
        "id": f"call_{event_id}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
