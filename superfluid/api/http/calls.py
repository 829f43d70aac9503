"""The tool calls of one reply: entries as they are written for a stream, and those that were read for the whole."""

from bisect import bisect_left
from collections import Counter, deque
from typing import Any

import attrs
import orjson

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls.fragments import CallReader, Fragment
from superfluid.codec.toolcalls.wires import ToolCall
from superfluid.link.events import Event, ToolUse

Entry = dict[str, Any]


@attrs.define
class _Run:
    """A stretch of the call channel, which may hold several calls. Lengths are in characters."""

    reader: CallReader
    text: list[str] = attrs.Factory(list)  # committed
    read: int = 0  # given to the reader
    committed: int = 0
    closed_ahead: bool = False  # its end was seen before its commit
    records: list[tuple[int, int]] = attrs.Factory(list)  # (where in the text a record ends, its event)
    uses: list[Event] = attrs.Factory(list)
    failed: bool = False
    waiting: deque[Fragment] = attrs.Factory(deque)  # behind a call whose record is not committed yet
    indexes: dict[int, int] = attrs.Factory(dict)  # of its calls, in the reply

    @property
    def judged(self) -> bool:
        """It was said what it reads as."""
        return self.failed or bool(self.uses)

    @property
    def complete(self) -> bool:
        """All of it is committed; one of blanks alone is not judged."""
        return self.judged or (self.closed_ahead and self.committed >= self.read and not "".join(self.text).strip())


@attrs.define
class Calls:
    """Give it the text of the call channel, ahead of its commit (or not) and as it is committed; what was read of it;
    and `over` when other records follow.

    A call's id is that of the record in which it opened, so an entry that runs ahead waits for its call's record.
    `read` are the calls of the whole reply. `broken`: a call was announced and then not read, or its arguments are
    none; a client must not run anything then. `only_one`: all but the first call are ignored. `forced`: a call was
    demanded, and a text without markers may be it whatever it names. `withheld`: no calls are wanted (tool_choice
    none), what comes all the same is text. `choice` is the reply's index: each has a session of its own, so ids of
    events are distinct only within one.
    """

    codec: Codec
    tools: list[dict[str, Any]]
    only_one: bool = False
    forced: bool = False
    withheld: bool = False
    choice: int = 0
    read: list[Entry] = attrs.Factory(list)
    broken: bool = False
    _runs: deque[_Run] = attrs.Factory(deque)
    _next: int = 0  # index of the next call
    _ids: Counter[str] = attrs.Factory(Counter)  # how many calls opened in a record

    @property
    def due(self) -> bool:
        """Text of a run was shown ahead whose end is not committed yet."""
        return bool(self._runs)

    def ahead(self, text: str, closes: bool) -> list[Entry]:
        """Text of the call channel before its commit; `closes`: a run ends with it."""
        run = self._runs[-1] if self._runs else None
        if run is None or run.closed_ahead:
            run = self._begin()
        self._feed(run, text)
        run.closed_ahead = closes
        return self._release(run)

    def write(self, event: Event, text: str) -> list[Entry]:
        """Committed text of the call channel."""
        if not text and not self._runs:
            return []  # the closing marker of a run of blanks
        run = self._runs[0] if self._runs else self._begin()
        known = run.read - run.committed
        if known < len(text):
            self._feed(run, text[known:])
        run.text.append(text)
        run.committed += len(text)
        run.records.append((run.committed, event.event_id))
        return self._release(run)

    def use(self, event: Event) -> None:
        """A call was read of the committed run."""
        (self._runs[0] if self._runs else self._begin()).uses.append(event)

    def fail(self) -> None:
        """The committed run is no call."""
        (self._runs[0] if self._runs else self._begin()).failed = True

    def over(self) -> tuple[list[Entry], str]:
        """Other records follow: what a stream still has to say of a run that is complete, and its text if it was no
        call after all."""
        if not self._runs or not self._runs[0].complete:
            return [], ""
        run = self._runs.popleft()
        if not run.judged or self._has_one:
            return [], ""
        if self.withheld:
            written = [_written(use.body) for use in run.uses if isinstance(use.body, ToolUse)]
            return [], "".join(written or run.text)
        calls = [ToolCall(use.body.name, use.body.arguments) for use in run.uses if isinstance(use.body, ToolUse)]
        verdict = run.reader.end(calls)
        run.waiting += verdict.fragments
        entries = self._release(run, run.uses)
        unread = 0 in verdict.unread if self.only_one else bool(verdict.unread)
        self.broken |= unread
        if unread or not calls:
            return entries, "".join(run.text)
        for use, call in list(zip(run.uses, calls, strict=True))[: 1 if self.only_one else None]:
            self.broken |= not _is_json(call.arguments_json)
            self.read.append(_entry(len(self.read), self._of_event(use.event_id), call.name, call.arguments_json))
        return entries, ""

    def cut(self) -> None:
        """The lane is over: a call that was announced and never read is broken."""
        self.broken |= not self.withheld and any(run.reader.opened() for run in self._runs)

    def whole_text(self, text: str, event_id: int, cut: bool) -> list[Entry]:
        """Read a reply without call markers as calls; no entries when it is none. `cut`: a limit ended it."""
        found = self.codec.read_call(text, self.tools, cut=cut) or []
        declared = {tool["function"].get("name") for tool in self.tools}
        if not self.forced and any(call.name not in declared for call in found):
            return []
        for call in found[:1] if self.only_one or self.forced else found:
            self.read.append(_entry(len(self.read), self._id(event_id), call.name, call.arguments_json))
        return self.read

    @property
    def _has_one(self) -> bool:
        return self.only_one and bool(self.read)

    def _begin(self) -> _Run:
        run = _Run(self.codec.call_reader(self.tools))
        self._runs.append(run)
        return run

    def _feed(self, run: _Run, text: str) -> None:
        run.waiting += run.reader.feed(text)
        run.read += len(text)

    def _release(self, run: _Run, uses: list[Event] | None = None) -> list[Entry]:
        """The fragments of a run that need not wait any more; with `uses`, all of them."""
        entries: list[Entry] = []
        if self.withheld:
            run.waiting.clear()
        while run.waiting:
            fragment = run.waiting[0]
            if self._has_one or (self.only_one and fragment.call):
                run.waiting.popleft()
                continue
            if fragment.name is None:
                entries.append({"index": run.indexes[fragment.call], "function": {"arguments": fragment.arguments}})
            else:
                if fragment.at is not None and fragment.at > run.committed:
                    break
                if fragment.at is None:
                    event_id = (uses or run.uses)[fragment.call].event_id
                else:
                    event_id = run.records[bisect_left(run.records, (fragment.at, 0))][1]
                run.indexes[fragment.call] = self._next
                entries.append(_entry(self._next, self._id(event_id), fragment.name, fragment.arguments))
                self._next += 1
            run.waiting.popleft()
        return entries

    def _id(self, event_id: int) -> str:
        """A call's id; calls that opened in one record are told apart."""
        first = self._of_event(event_id)
        n = self._ids[first]
        self._ids[first] += 1
        return f"{first}_{n}" if n else first

    def _of_event(self, event_id: int) -> str:
        return f"call_{event_id}-{self.choice}" if self.choice else f"call_{event_id}"


def _entry(index: int, identity: str, name: str, arguments: str) -> Entry:
    return {"index": index, "id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _written(call: ToolUse) -> str:
    """A call as content."""
    return f'{{"name":{compact(call.name)},"arguments":{call.arguments}}}'


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
