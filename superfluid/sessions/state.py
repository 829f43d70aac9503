"""What a session's records make of it: one immutable value per event, each made from the one before (pure).

`State.after` is the only place that gives a record its meaning; the log, the store and the rules go through it.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import attrs

from superfluid.link import events as ev
from superfluid.link.session_api import LedgerEntry

EMPTY: Mapping[int, Any] = MappingProxyType({})


class Call(IntEnum):
    """Where a tool call stands in the ledger."""

    OPEN = 0
    CANCEL_REQUESTED = 1
    SUCCEEDED = 2
    FAILED = 3
    CANCELLED = 4
    EXPIRED = 5
    LATE_EFFECT = 6


OPEN_CALLS = frozenset({Call.OPEN, Call.CANCEL_REQUESTED})
FINAL_NAMES = {
    Call.OPEN: "open",
    Call.CANCEL_REQUESTED: "cancel_requested",
    Call.SUCCEEDED: "closed",
    Call.FAILED: "failed",
    Call.CANCELLED: "cancelled",
    Call.EXPIRED: "expired",
    Call.LATE_EFFECT: "cancelled_with_late_effect",
}


class Tail(IntEnum):
    """What the last event with tokens was: it decides the separator, and the opener of the next turn."""

    EMPTY = 0  # no tokens yet
    RAW = 1
    INPUT = 2
    OPENER = 3
    OPEN_TURN = 4
    FINISHED_TURN = 5


@attrs.frozen
class TurnCall:
    """A call in a turn that is open: its event id, and the length of the stream when it was read. `again`: its text was
    read once more, and it expired."""

    id: int
    place: int
    name: str
    arguments: str
    again: bool = False


class State:
    """A session after some number of its events. Never changed once made; `tokens` are kept beside it.

    `turn_start` is the index in the stream where the turn that a generation would continue begins, or None; its
    first `opener_tokens` are the opener's. `turn_calls` are the calls read in it, inherited ones too, in order;
    those that were read again go with the next one.
    """

    __slots__ = (
        "archived",
        "batch_invariant",
        "epoch",
        "fingerprint",
        "generation",
        "last_finish",
        "ledger",
        "meta_version",
        "n_events",
        "n_tokens",
        "opener_tokens",
        "permissions",
        "pin_deadline",
        "purged",
        "qos_class",
        "tail",
        "title",
        "touched_ms",
        "turn_calls",
        "turn_start",
    )

    n_events: int
    n_tokens: int
    epoch: int
    generation: int
    meta_version: int
    title: str | None
    archived: bool
    qos_class: int
    batch_invariant: bool
    pin_deadline: int
    last_finish: int
    fingerprint: int | None
    tail: Tail
    turn_start: int | None
    opener_tokens: int
    turn_calls: tuple[TurnCall, ...]
    ledger: Mapping[int, LedgerEntry]
    permissions: Mapping[int, int]
    purged: ev.Descendants | None
    touched_ms: int

    def copy(self) -> "State":
        new = _new(State)
        new.n_events = self.n_events
        new.n_tokens = self.n_tokens
        new.epoch = self.epoch
        new.generation = self.generation
        new.meta_version = self.meta_version
        new.title = self.title
        new.archived = self.archived
        new.qos_class = self.qos_class
        new.batch_invariant = self.batch_invariant
        new.pin_deadline = self.pin_deadline
        new.last_finish = self.last_finish
        new.fingerprint = self.fingerprint
        new.tail = self.tail
        new.turn_start, new.opener_tokens = self.turn_start, self.opener_tokens
        new.turn_calls = self.turn_calls
        new.ledger = self.ledger
        new.permissions = self.permissions
        new.purged = self.purged
        new.touched_ms = self.touched_ms
        return new

    def after(self, event: ev.Event) -> "State":
        """The state that `event`, the session's next, leads to."""
        new = self.copy()
        new.n_events += 1
        if event.epoch > new.epoch:
            new.epoch = event.epoch
        body = event.body
        kind = type(body)
        if kind is not ev.EpochBump and event.ts_unix_ms > new.touched_ms:
            new.touched_ms = event.ts_unix_ms
        effect = EFFECTS.get(kind)
        if effect is not None:
            effect(new, event.event_id, body)
        return new

    def folded_onto(self, head: "State") -> "State":
        """This state's stream, turn and ledger with the fields of `head` that replay already knows."""
        new = head.copy()
        for name in (
            "n_tokens",
            "last_finish",
            "fingerprint",
            "tail",
            "turn_start",
            "opener_tokens",
            "turn_calls",
            "ledger",
            "permissions",
        ):
            setattr(new, name, getattr(self, name))
        return new

    @property
    def open_calls(self) -> dict[int, LedgerEntry]:
        """Calls without a terminal event, ascending by id."""
        return {call: entry for call, entry in self.ledger.items() if entry.state in OPEN_CALLS}


_new: Callable[[type[State]], State] = object.__new__


def new_state() -> State:
    """A session before its first event."""
    state = _new(State)
    state.n_events = state.n_tokens = state.generation = state.meta_version = state.pin_deadline = 0
    state.epoch = 1
    state.title = None
    state.archived = state.batch_invariant = False
    state.qos_class = 2
    state.last_finish = state.touched_ms = 0
    state.fingerprint = state.turn_start = state.purged = None
    state.opener_tokens = 0
    state.turn_calls = ()
    state.tail = Tail.EMPTY
    state.ledger = state.permissions = EMPTY
    return state


def branch(parent: State, current: State) -> State:
    """A child's state before its Forked or Rebased record: what it inherits of `parent` (the state at the fork
    point) and of `current` (the parent as it is now: class and flag)."""
    child = new_state()
    child.n_events = parent.n_events
    child.n_tokens = parent.n_tokens
    child.last_finish = parent.last_finish
    child.fingerprint = parent.fingerprint
    child.tail = parent.tail
    child.turn_start, child.opener_tokens = parent.turn_start, parent.opener_tokens
    child.turn_calls = parent.turn_calls
    child.qos_class = current.qos_class
    child.batch_invariant = current.batch_invariant
    return child


Effect = Callable[[State, int, Any], None]


def _extend(state: State, span: Any, tail: Tail) -> None:
    if len(span):
        state.n_tokens += len(span)
        state.tail = tail
        state.turn_start, state.turn_calls = None, ()


def _appended(state: State, event_id: int, body: ev.Appended) -> None:
    _extend(state, body.span, Tail.RAW)


def _input(state: State, event_id: int, body: ev.Message | ev.Block) -> None:
    _extend(state, body.span, Tail.INPUT)


def _opener(state: State, event_id: int, body: ev.GenerationPrompt) -> None:
    start = state.n_tokens
    _extend(state, body.span, Tail.OPENER)
    state.turn_start, state.opener_tokens = start, len(body.span)


def _generated(state: State, event_id: int, body: ev.Generated) -> None:
    state.last_finish = body.finish
    ended = body.finish == ev.Finish.EOS
    if state.turn_start is None:
        state.turn_start, state.opener_tokens = state.n_tokens, 0
    if len(body.span):
        state.n_tokens += len(body.span)
        state.tail = Tail.FINISHED_TURN if ended else Tail.OPEN_TURN
    if ended:
        state.turn_start, state.turn_calls = None, ()


def _fingerprint(state: State, event_id: int, body: ev.GenerationFingerprint) -> None:
    state.fingerprint = body.digest


def _tool_use(state: State, event_id: int, body: ev.ToolUse) -> None:
    entry = LedgerEntry(
        name=body.name,
        arguments=body.arguments,
        state=Call.OPEN,
        cancel_requested=False,
        lease_deadline_unix_ms=None,
        late_effects=0,
    )
    state.ledger = {**state.ledger, event_id: entry}
    if state.turn_start is not None:
        before = state.turn_calls
        if before and before[-1].place != state.n_tokens:
            before = before[:-1]  # the last of a reading was cut: this one has it again, also when a client closed it
        before = tuple(call for call in before if not call.again)
        state.turn_calls = (*before, TurnCall(event_id, state.n_tokens, body.name, body.arguments))


def _change(of: State, call: int, **changes: Any) -> None:
    entry: Any = of.ledger.get(call)
    if entry is not None:
        of.ledger = {**of.ledger, call: attrs.evolve(entry, **changes)}


def _close(of: State, call: int, to: Call) -> None:
    entry = of.ledger.get(call)
    if entry is not None and entry.state in OPEN_CALLS:
        _change(of, call, state=to)


def _tool_result(state: State, event_id: int, body: ev.ToolResult) -> None:
    _extend(state, body.span, Tail.INPUT)
    _close(state, body.call_id, Call.SUCCEEDED)


def _tool_expired(state: State, event_id: int, body: ev.ToolExpired) -> None:
    _close(state, body.call_id, Call.EXPIRED)
    if body.reason == ev.CONTINUED:
        state.turn_calls = tuple(
            attrs.evolve(call, again=True) if call.id == body.call_id else call for call in state.turn_calls
        )


def _tool_outcome(state: State, event_id: int, body: ev.ToolOutcome) -> None:
    _close(state, body.call_id, Call.FAILED if body.outcome == 1 else Call.CANCELLED)


def _tool_cancel_requested(state: State, event_id: int, body: ev.ToolCancelRequested) -> None:
    entry = state.ledger.get(body.call_id)
    if entry is not None and entry.state in OPEN_CALLS:
        _change(state, body.call_id, state=Call.CANCEL_REQUESTED, cancel_requested=True)


def _tool_reconciliation(state: State, event_id: int, body: ev.ToolReconciliation) -> None:
    entry = state.ledger.get(body.call_id)
    if entry is not None:
        late = Call.LATE_EFFECT if entry.state == Call.CANCELLED else entry.state
        _change(state, body.call_id, state=late, late_effects=entry.late_effects + 1)


def _tool_lease(state: State, event_id: int, body: ev.ToolLease) -> None:
    _change(state, body.call_id, lease_deadline_unix_ms=body.deadline_unix_ms)


def _permission_request(state: State, event_id: int, body: ev.PermissionRequest) -> None:
    state.permissions = {**state.permissions, event_id: body.call_id}


def _permission_response(state: State, event_id: int, body: ev.PermissionResponse) -> None:
    state.permissions = {request: call for request, call in state.permissions.items() if request != body.request_id}


def _meta_updated(state: State, event_id: int, body: ev.MetaUpdated) -> None:
    state.meta_version = body.version
    if body.title is not None:
        state.title = body.title
    if body.archived is not None:
        state.archived = body.archived


def _qos_set(state: State, event_id: int, body: ev.QosSet) -> None:
    state.qos_class = body.class_
    state.batch_invariant = body.batch_invariant


def _pinned(state: State, event_id: int, body: ev.Pinned) -> None:
    state.pin_deadline = body.deadline_unix_ms


def _branched(state: State, event_id: int, body: ev.Forked | ev.Rebased) -> None:
    state.ledger = state.permissions = EMPTY


def _purged(state: State, event_id: int, body: ev.Purged) -> None:
    state.generation = body.generation
    state.purged = body.descendants
    state.title = None
    state.n_tokens = 0
    state.ledger = state.permissions = EMPTY
    state.tail, state.turn_start, state.turn_calls = Tail.EMPTY, None, ()


EFFECTS: dict[type[ev.Body], Effect] = {
    ev.Appended: _appended,
    ev.Message: _input,
    ev.GenerationPrompt: _opener,
    ev.Generated: _generated,
    ev.ToolUse: _tool_use,
    ev.ToolResult: _tool_result,
    ev.GenerationFingerprint: _fingerprint,
    ev.Forked: _branched,
    ev.Rebased: _branched,
    ev.MetaUpdated: _meta_updated,
    ev.ToolExpired: _tool_expired,
    ev.Purged: _purged,
    ev.QosSet: _qos_set,
    ev.Block: _input,
    ev.PermissionRequest: _permission_request,
    ev.PermissionResponse: _permission_response,
    ev.ToolCancelRequested: _tool_cancel_requested,
    ev.ToolOutcome: _tool_outcome,
    ev.ToolReconciliation: _tool_reconciliation,
    ev.ToolLease: _tool_lease,
    ev.Pinned: _pinned,
}
