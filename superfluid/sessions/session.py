"""One session as the store holds it: where its records lie in the log, its state, and its token stream on demand."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from superfluid.link import events as ev
from superfluid.link.session_api import LedgerEntry, Summary
from superfluid.sessions.declared import tools_of
from superfluid.sessions.state import State, Tail, branch, new_state

if TYPE_CHECKING:
    from superfluid.sessions.store import Store

Stream = npt.NDArray[np.uint32]
FIRST_ROOM = 256  # tokens a stream has room for when it begins


class Session:
    """Made by the store only. Everything public tells what is durable; `ahead` is the state with what is staged."""

    __slots__ = (
        "_listed",
        "_params",
        "_reroot",
        "_store",
        "_stream",
        "ahead",
        "durable",
        "folded",
        "fork_at",
        "frames",
        "id",
        "parent_link",
        "rerooted",
    )

    def __init__(self, store: "Store", session: int, parent: int | None, fork_at: int, state: State) -> None:
        self._store = store
        self.id = session
        self.parent_link = parent
        self.fork_at = fork_at  # events below it are the parent's
        self.rerooted = False
        self.frames = array("Q")  # offsets of its own records in the log
        self.durable = state
        self.ahead = state
        self.folded = False  # whether the states know stream, turn, ledger and permissions
        self._listed = False  # whether they know enough for a listing
        self._params: ev.GenParams | None = None
        self._reroot: int | None = None  # offset of its Rerooted record
        self._stream: Stream | None = None

    # what is durable

    @property
    def parent(self) -> int | None:
        return None if self.rerooted else self.parent_link

    @property
    def params(self) -> ev.GenParams:
        """Sampling defaults, of the record that made the session."""
        if self._params is None:
            body = next(self._store.read_frames(self.frames[:1])).body
            assert isinstance(body, ev.Created | ev.Forked | ev.Rebased)
            self._params = body.params
        return self._params

    @property
    def state(self) -> State:
        """The durable state, whole."""
        if not self.folded:
            self._fold()
        return self.durable

    @property
    def epoch(self) -> int:
        return self.durable.epoch

    @property
    def generation(self) -> int:
        return self.durable.generation

    @property
    def meta_version(self) -> int:
        return self.durable.meta_version

    @property
    def title(self) -> str | None:
        return self.durable.title

    @property
    def archived(self) -> bool:
        return self.durable.archived

    @property
    def qos_class(self) -> int:
        return self.durable.qos_class

    @property
    def batch_invariant(self) -> bool:
        return self.durable.batch_invariant

    @property
    def pin_deadline(self) -> int:
        """Unix milliseconds; 0: no pin."""
        return self.durable.pin_deadline

    @property
    def touched_ms(self) -> int:
        """The latest time of an event that is not an EpochBump."""
        return self.durable.touched_ms

    @property
    def n_events(self) -> int:
        """Also the next event id."""
        return self.durable.n_events

    @property
    def n_tokens(self) -> int:
        return self.durable.n_tokens if self._listed else self.state.n_tokens

    @property
    def last_finish(self) -> int:
        return self.state.last_finish

    @property
    def fingerprint(self) -> int | None:
        return self.state.fingerprint

    @property
    def tail(self) -> Tail:
        return self.state.tail

    @property
    def ledger(self) -> dict[int, LedgerEntry]:
        """Every call of this session, ascending by id."""
        return dict(self.state.ledger)

    @property
    def open_calls(self) -> dict[int, LedgerEntry]:
        return self.state.open_calls

    @property
    def open_permissions(self) -> dict[int, int]:
        """Request id to call id."""
        return dict(self.state.permissions)

    def summary(self) -> Summary:
        """The session's line in a listing; decodes no record unless it has to."""
        tokens = self.n_tokens
        return Summary(
            id=self.id,
            parent=self.parent,
            fork_at=self.fork_at,
            title=self.title,
            archived=self.archived,
            meta_version=self.meta_version,
            generation=self.generation,
            events=self.n_events,
            tokens=tokens,
            open_tool_calls=len(self.durable.open_calls),
        )

    def events(self, cursor: int = 0, most: int | None = None) -> list[ev.Event]:
        """Events with ids from `cursor` on, inherited ones included, read from the log; `most` of them at most."""
        end = self.durable.n_events
        return self._read(cursor, end if most is None else min(end, cursor + most))

    def payloads(self, cursor: int, most: int) -> list[bytes] | None:
        """What `events` decodes (see `records.events`), when none of it is inherited."""
        if cursor < self.fork_at:
            return None
        end = min(self.durable.n_events, cursor + most)
        return list(self._store.read_payloads(self.frames[cursor - self.fork_at : end - self.fork_at]))

    def tokens(self) -> Stream:
        """The token stream: a read-only uint32 view that stays as it is when the session grows."""
        stream = self.stream()[: self.durable.n_tokens]
        stream.flags.writeable = False
        return stream

    def turn_tokens(self) -> Stream:
        """Tokens of the turn that a generation would continue, its opener included; empty when it opens a new one."""
        start = self.state.turn_start
        return self.tokens()[self.durable.n_tokens if start is None else start :]

    def made_tokens(self) -> int:
        """How many tokens of that turn were generated."""
        return max(len(self.turn_tokens()) - self.state.opener_tokens, 0)

    # what is staged

    def whole_ahead(self) -> State:
        """The state with what is staged, whole."""
        if not self.folded:
            self._fold()
        return self.ahead

    # for the store

    def stream(self) -> Stream:
        """The stream's buffer, its first `ahead.n_tokens` filled; loads it when it was let go."""
        if self._stream is None:
            self._fold()
            assert self._stream is not None
        self._store.touched(self)
        return self._stream

    def extend(self, span: Sequence[int]) -> None:
        """Write the tokens of a record that is being staged behind those that are there."""
        stream = self.stream()
        start, end = self.ahead.n_tokens, self.ahead.n_tokens + len(span)
        if end > len(stream):
            grown = np.empty(max(FIRST_ROOM, end + end // 2), np.uint32)
            grown[:start] = stream[:start]
            self._stream = stream = grown
        stream[start:end] = span

    def begin_stream(self, inherited: Stream | None) -> None:
        """Start the stream of a session that is being made."""
        self.folded = self._listed = True
        known = 0 if inherited is None else len(inherited)
        self._stream = np.empty(max(FIRST_ROOM, known + known // 2), np.uint32)
        if inherited is not None:
            self._stream[:known] = inherited

    def state_at(self, event_id: int) -> State:
        """The state a branch at `event_id` inherits."""
        if event_id == self.durable.n_events:
            state = self.state
        else:
            state = new_state()
            for event in self._read(0, event_id):
                state = state.after(event)
        return branch(state, self.ahead)

    def note_frame(self, offset: int, body: ev.Body) -> None:
        """A record of this session became durable at `offset`."""
        self.frames.append(offset)
        if type(body) is ev.Rerooted:
            self._reroot = offset

    def restore(self, frames: bytes, reroot: int | None, listed: bool) -> None:
        """Set what replay found, before anything is decoded. `frames` are native u64 offsets."""
        self.frames.frombytes(frames)
        self._reroot = reroot
        self._listed = listed

    @property
    def reroot(self) -> int | None:
        """Offset of its Rerooted record."""
        return self._reroot

    def relocate(self, frames: bytes, reroot: int | None) -> None:
        """Its records lie elsewhere now: a log without those of purged sessions took the place of the log."""
        self.frames = array("Q", frames)
        self._reroot = reroot

    def belongs_to(self, store: "Store") -> None:
        """The store that reads its log from now on."""
        self._store = store

    @property
    def resident(self) -> int:
        """Tokens its buffer has room for."""
        return 0 if self._stream is None else len(self._stream)

    def let_go(self) -> bool:
        """Drop the stream's buffer, unless tokens are staged that the log does not have yet."""
        if self.ahead is not self.durable:
            return False
        self._stream = None
        return True

    def forget(self) -> None:
        """Drop what a purged session knew."""
        self._stream = None
        self._params = None

    def _fold(self) -> None:
        """Decode the session: its state when it is not known, and its stream."""
        events = self._read(0, self.durable.n_events)
        if not self.folded:
            state = new_state()
            for event in events:
                state = state.after(event)
            self.durable = self.ahead = state.folded_onto(self.durable)
            self.folded = self._listed = True
        spans = [span for event in events if (span := getattr(event.body, "span", None))]
        length = sum(map(len, spans))
        stream = np.empty(length + max(FIRST_ROOM, length // 2), np.uint32)
        at = 0
        for span in spans:
            stream[at : at + len(span)] = span
            at += len(span)
        self._stream = stream
        self._store.touched(self)

    def declared(self) -> tuple[int, tuple[str, ...]]:
        """The tools that its system turn declared, each as it was given, and the event id of that turn.

        It is the first event with tokens, of this session or of the one it inherits that from; (0, ()) without tools.
        """
        start = 0
        for session, upto in reversed(self._chain(0, self.durable.n_events)):
            first = max(start, session.fork_at)
            frames = session.frames[first - session.fork_at : upto - session.fork_at]
            for event_id, payload in enumerate(self._store.read_payloads(frames), first):
                body, tools = tools_of(payload, self._store.version)
                if tools:
                    return event_id, tools
                if getattr(body, "span", None):
                    return 0, ()
            start = upto
        return 0, ()

    def _chain(self, start: int, end: int) -> list[tuple["Session", int]]:
        """This session and the ancestors that have events of [start, end), each with the id that its own end before."""
        chain: list[Session] = [self]
        ends = [end]
        while min(ends[-1], chain[-1].fork_at) > start:
            ends.append(min(ends[-1], chain[-1].fork_at))
            parent = None if chain[-1].parent_link is None else self._store.any_session(chain[-1].parent_link)
            if parent is None:
                break
            chain.append(parent)
        return list(zip(chain, ends, strict=False))

    def _read(self, start: int, end: int) -> list[ev.Event]:
        """Events with ids in [start, end): own ones, and those of ancestors up to where each was forked from.

        An ancestor whose records are gone is answered for by the Rerooted record of the session below it.
        """
        events: list[ev.Event] = []
        for session, upto in reversed(self._chain(start, end)):
            below = min(upto, session.fork_at)
            if below > start and (len(events) != below - start or not _consecutive(events, start)):
                events = session.rerooted_prefix()[start:below]
            first, last = max(start, session.fork_at) - session.fork_at, upto - session.fork_at
            if first < last:
                events += self._store.read_frames(session.frames[first:last])
        return events

    def rerooted_prefix(self) -> list[ev.Event]:
        """Inherited events that its Rerooted record carries."""
        if self._reroot is None:
            return []
        body = next(self._store.read_frames([self._reroot])).body
        assert isinstance(body, ev.Rerooted)
        return [ev.Event(event_id, 0, 0, inner) for event_id, inner in body.prefix]


def _consecutive(events: list[ev.Event], start: int) -> bool:
    return events[0].event_id == start and all(b.event_id == a.event_id + 1 for a, b in pairwise(events))
