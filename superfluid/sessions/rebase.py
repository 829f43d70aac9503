"""Branches that change history: the parent's events committed again, edited, under a session of their own (pure)."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import orjson

from superfluid.link import events as ev
from superfluid.sessions import errors
from superfluid.sessions.declared import declaring
from superfluid.sessions.rules import CHAT_ROLES, IMAGE_KIND, Dialect, Span, fork, lead
from superfluid.sessions.session import Session
from superfluid.sessions.state import State, new_state
from superfluid.sessions.store import Record, Store

Render = Callable[[ev.Replace, Sequence[ev.Body]], Span]

CARRIED = (
    ev.Appended,
    ev.Message,
    ev.GenerationPrompt,
    ev.Generated,
    ev.ToolUse,
    ev.ToolResult,
    ev.ToolParseFailure,
    ev.Block,
)


def rebase(
    store: Store,
    parent: int,
    edits: Sequence[ev.Edit],
    params: ev.GenParams | None,
    render: Render | None = None,
    dialect: Dialect | None = None,
) -> tuple[int, list[Record]]:
    """A branch with some ranges of events dropped or replaced; the rest keeps its recorded tokens.

    `render(edit, before)` gives a replacement's own tokens (a message's, or the text's encoding) behind the branch's
    bodies `before` it, from event 0 on; it and `dialect` are needed by Replace only. Raises RebaseSpec, UnknownRole and
    what a fork does.
    """
    origin, first = editable(store, parent, edits)
    bodies = replayed(origin.events(), edits, render, dialect, origin.declared())
    child = store.new_session()
    head = ev.Rebased(parent, first, params or origin.params, list(edits))
    return child, [(child, body) for body in [head, *bodies]]


def editable(store: Store, parent: int, edits: Sequence[ev.Edit]) -> tuple[Session, int]:
    """The session that a rebase is of, and the first event that changes. Raises what `rebase` does."""
    store.activity.check_not_purging(parent)
    origin = store.session(parent)
    if not edits:
        raise errors.RebaseSpec("no edits")
    return origin, check_edits(edits, origin.n_events)


def trim(store: Store, session: int, to_event: int) -> tuple[int, list[Record]]:
    """A branch that keeps the events below `to_event`. Raises ForkPoint and what a fork does."""
    store.activity.check_not_purging(session)
    limit = store.session(session).n_events
    if not 1 <= to_event <= limit:
        raise errors.ForkPoint(session, to_event, limit)
    if to_event == limit:
        return fork(store, session, to_event, None)
    return rebase(store, session, [ev.Drop(to_event, limit)], None)


def check_edits(edits: Iterable[ev.Edit], limit: int) -> int:
    """The first event that changes. Raises RebaseSpec, and UnknownRole for a replacement's role."""
    first = last = 0
    for edit in edits:
        assert isinstance(edit, ev.Drop | ev.Replace)
        if edit.from_ == 0:
            raise errors.RebaseSpec("event 0 made the session and stays")
        if edit.from_ >= edit.to:
            raise errors.RebaseSpec(f"range {edit.from_}..{edit.to} is empty")
        if edit.to > limit:
            raise errors.RebaseSpec(f"range {edit.from_}..{edit.to} goes beyond the {limit} committed events")
        if edit.from_ < last:
            raise errors.RebaseSpec(f"range {edit.from_}..{edit.to} overlaps the one before or is out of order")
        if isinstance(edit, ev.Replace) and edit.role not in CHAT_ROLES:
            raise errors.UnknownRole(edit.role)
        first = first or edit.from_
        last = edit.to
    return first


def replayed(
    events: Sequence[ev.Event],
    edits: Sequence[Any],
    render: Render | None,
    dialect: Dialect | None,
    declared: tuple[int, Sequence[str]] = (0, ()),
) -> list[ev.Body]:
    """The bodies that follow the Rebased record, which is the event of the child where the first edit begins.

    `declared`: the parent's turn that declared tools, and these; they go where that turn goes.
    """
    first = edits[0].from_
    dropped = {event_id for edit in edits for event_id in range(edit.from_, edit.to)}
    replacing = {edit.from_: edit for edit in edits if isinstance(edit, ev.Replace)}
    state = new_state()  # of the child, as far as it is known
    moves = _Moves()
    for event in events[:first]:
        moves.keep(state, state, event.body)
        state = state.after(event)
    old = state
    branched = ev.Forked(0, first, ev.GenParams())
    state = state.after(ev.Event(first, 1, 0, branched))
    before: list[ev.Body] = [*(event.body for event in events[:first]), branched]
    calls: dict[int, int] = {}
    bodies: list[ev.Body] = []
    again = _read_again(events[first:], dropped)
    for event in events[first:]:
        edit = replacing.get(event.event_id)
        body: ev.Body | None = None
        if edit is not None:
            assert render is not None and dialect is not None
            tokens = render(edit, before)
            body = ev.Message(edit.role, edit.text, [*lead(state, dialect, edit.role), *tokens])
        elif event.event_id not in dropped and event.event_id not in again and isinstance(event.body, CARRIED):
            moves.keep(old, state, event.body)
            body = _carried(event.body, calls, moves)
        old = old.after(event)
        if body is not None:
            if isinstance(body, ev.ToolUse):
                calls[event.event_id] = state.n_events
            tools = declared[1] if edit is None and event.event_id == declared[0] else ()
            bodies.append(declaring(body, tools))
            before.append(body)
            state = state.after(ev.Event(state.n_events, 1, 0, body))
    return bodies


def _read_again(events: Sequence[ev.Event], dropped: Container[int]) -> set[int]:
    """The calls that a limit cut, of those whose rest is carried too: that is read as another call."""
    again: set[int] = set()
    waiting: list[int] = []
    for event in events:
        if isinstance(event.body, ev.ToolExpired) and event.body.reason == ev.CONTINUED:
            waiting.append(event.body.call_id)
        elif isinstance(event.body, ev.Generated):
            if event.event_id not in dropped:
                again.update(waiting)
            waiting.clear()
    return again


def _carried(body: ev.Body, calls: dict[int, int], moves: "_Moves") -> ev.Body | None:
    if isinstance(body, ev.ToolResult):
        call = calls.get(body.call_id)
        if call is None:
            return ev.Message(ev.Role.TOOL, body.content, body.span)
        return ev.ToolResult(call, body.content, body.span)
    if isinstance(body, ev.Block) and body.kind == IMAGE_KIND:
        payload = moves.corrected(body.payload)
        return None if payload is None else ev.Block(body.role, IMAGE_KIND, payload, body.span, body.visibility_version)
    return body


class _Moves:
    """Where tokens of the parent's stream lie in the child's."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int, int]] = []  # parent's start and end, child's start

    def keep(self, old: State, new: State, body: ev.Body) -> None:
        length = len(getattr(body, "span", ()))
        if length:
            self.kept.append((old.n_tokens, old.n_tokens + length, new.n_tokens))

    def corrected(self, payload: str) -> str | None:
        """An image block's payload with its `offset` in the child's stream; none when its tokens were dropped."""
        try:
            fields = orjson.loads(payload)
            offset = fields["offset"]
        except (ValueError, TypeError, KeyError):
            return payload
        for start, end, new in reversed(self.kept):
            if start <= offset < end:
                if new == start:
                    return payload
                fields["offset"] = offset - start + new
                return orjson.dumps(fields).decode()
        return None
