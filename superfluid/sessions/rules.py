"""The rules of session operations: each looks at the store and says which records to commit, or refuses.

Nothing here writes. A caller stages what it gets in the same step (`Store.perform` does), so that no other operation
comes between; refusals are the SessionError classes, and carry the records that the attempt leaves behind. The turns'
own tokens are the caller's: rendering may be slow, and is another room's.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import attrs

from superfluid.link import events as ev
from superfluid.link.session_api import LedgerEntry
from superfluid.sessions import errors
from superfluid.sessions.declared import declaring
from superfluid.sessions.session import Session
from superfluid.sessions.state import OPEN_CALLS, Call, State, Tail, TurnCall
from superfluid.sessions.store import Record, Store

CHAT_ROLES = frozenset({ev.Role.SYSTEM, ev.Role.USER, ev.Role.ASSISTANT})
BLOCK_ROLES = CHAT_ROLES | {ev.Role.TOOL}
IMAGE_KIND = 7
HIGHEST_CLASS = 3
U64_MAX = (1 << 64) - 1
RECENT = 64  # events among which the last one with tokens is looked for after a restart

Span = Sequence[int]


class Dialect(Protocol):
    """What of a codec stands between turns."""

    def prologue(self, role: int | None = None) -> Span:
        """Tokens a stream begins with before a turn of `role`."""

    def separator(self) -> Span:
        """Tokens between a finished turn and the next."""

    def opener(self, after_finished: bool, thinking: bool | None = None) -> Span:
        """Tokens that open the assistant's turn; empty when the dialect has none."""


def lead(state: State, dialect: Dialect, role: int) -> list[int]:
    """The tokens that come before the own ones of a rendered turn of `role`."""
    if not state.n_tokens:
        return list(dialect.prologue(role))
    if state.tail is Tail.FINISHED_TURN:
        return list(dialect.separator())
    return []


# making sessions


def create(store: Store, parent: int | None, params: ev.GenParams) -> tuple[int, list[Record]]:
    """A new session; a parent is a link in the tree only, and must be live."""
    if parent is not None:
        store.session(parent)
        store.activity.check_not_purging(parent)
    session = store.new_session()
    return session, [(session, ev.Created(parent, params))]


def fork(store: Store, parent: int, at_event: int, params: ev.GenParams | None) -> tuple[int, list[Record]]:
    """A session that shares its parent's events below `at_event`."""
    store.activity.check_not_purging(parent)
    origin = store.session(parent)
    if not 1 <= at_event <= origin.n_events:
        raise errors.ForkPoint(parent, at_event, origin.n_events)
    child = store.new_session()
    return child, [(child, ev.Forked(parent, at_event, params or origin.params))]


# appending


def append(store: Store, session: int, text: str | None, span: Span) -> list[Record]:
    """Tokens as they are; the caller has encoded `text` when it was given no span."""
    store.activity.check_quiet(session)
    store.session(session)
    if not len(span):
        why = (
            "append carried neither text nor span" if text is None else "append had no span and its text has no tokens"
        )
        raise errors.ProtocolMisuse(why)
    return [(session, ev.Appended(text, list(span)))]


def append_message(
    store: Store, session: int, role: int, text: str, turn: Span | None, dialect: Dialect
) -> list[Record]:
    """A chat turn of role 0 to 2; `turn` none: the codec has no chat dialect."""
    store.activity.check_quiet(session)
    target = store.session(session)
    if role not in CHAT_ROLES:
        raise errors.UnknownRole(role)
    span = _after_lead(target, _chat(turn), dialect, role)
    return [(session, ev.Message(role, text, span))]


def append_system(
    store: Store, session: int, text: str | None, tools: Sequence[str], turn: Span | None, dialect: Dialect
) -> list[Record]:
    """The opening system turn, with its tools; the caller has checked each of `tools`."""
    store.activity.check_quiet(session)
    target = store.session(session)
    if text is None and not tools:
        raise errors.ProtocolMisuse("AppendSystem carried neither text nor tools")
    tokens = _chat(turn)
    if target.whole_ahead().n_tokens:
        raise errors.SystemNotFirst(session)
    said = ev.Message(ev.Role.SYSTEM, text or "", _after_lead(target, tokens, dialect, ev.Role.SYSTEM))
    return [(session, declaring(said, tools))]


def append_block(
    store: Store, session: int, role: int, kind: int, payload: str, turn: Span | None, dialect: Dialect
) -> list[Record]:
    """A block; `turn` is its visible text as a turn, empty for a block that the model does not see."""
    store.activity.check_quiet(session)
    target = store.session(session)
    if role not in BLOCK_ROLES:
        raise errors.UnknownRole(role)
    if not 1 <= kind <= IMAGE_KIND:
        raise errors.UnknownBlockKind(kind)
    tokens = _chat(turn)
    span = _after_lead(target, tokens, dialect, role) if len(tokens) else []
    return [(session, ev.Block(role, kind, payload, span))]


def tool_history(store: Store, session: int, content: str, turn: Span | None, dialect: Dialect) -> list[Record]:
    """A tool's result that answers no call of the ledger: a Message of role 3."""
    store.activity.check_quiet(session)
    span = _after_lead(store.session(session), _tool(turn), dialect, ev.Role.TOOL)
    return [(session, ev.Message(ev.Role.TOOL, content, span))]


def _after_lead(target: Session, turn: Span, dialect: Dialect, role: int) -> list[int]:
    ahead = lead(target.whole_ahead(), dialect, role)
    if isinstance(turn, array):  # a long one stays packed
        return cast("list[int]", array("I", ahead) + turn if ahead else turn)
    return [*ahead, *turn]


def _chat(turn: Span | None) -> Span:
    if turn is None:
        raise errors.ProtocolMisuse("codec has no chat dialect")
    return turn


def _tool(turn: Span | None) -> Span:
    if turn is None:
        raise errors.ProtocolMisuse("codec has no tool dialect")
    return turn


# tool calls


def tool_result(
    store: Store, session: int, call: int, content: str, turn: Span | None, dialect: Dialect, now_ms: int
) -> list[Record]:
    """The result of an open call. A late one is recorded and refused."""
    store.activity.check_quiet(session)
    target = store.session(session)
    if call < target.fork_at:
        raise errors.InheritedToolCall(call)
    entry = target.whole_ahead().ledger.get(call)
    if entry is None or entry.state == Call.SUCCEEDED:
        raise errors.UnknownToolCall(call)
    if entry.state not in OPEN_CALLS:
        note = f"late result: {len(content.encode())} bytes"
        raise _leaving(errors.ToolLateEffect(call), [(session, ev.ToolReconciliation(call, note))])
    deadline = entry.lease_deadline_unix_ms
    if deadline is not None and now_ms > deadline:
        raise _leaving(errors.ToolLeaseExpired(call), [(session, ev.ToolExpired(call, "lease expired"))])
    return [(session, ev.ToolResult(call, content, _after_lead(target, _tool(turn), dialect, ev.Role.TOOL)))]


def request_tool_cancel(store: Store, session: int, call: int) -> list[Record]:
    """Ask for an open call to be cancelled; it stays open."""
    _open_call(store.session(session), call)
    return [(session, ev.ToolCancelRequested(call))]


def tool_outcome(store: Store, session: int, call: int, outcome: int, note: str) -> list[Record]:
    """Close an open call as failed (1) or cancelled (2)."""
    target = store.session(session)
    if outcome not in (1, 2):
        raise errors.ProtocolMisuse(f"tool outcome {outcome} is neither 1 (failed) nor 2 (cancelled)")
    _open_call(target, call)
    return [(session, ev.ToolOutcome(call, outcome, note))]


def tool_calls(name: str, arguments: str, event_id: int, now_ms: int, lease_ms: int) -> list[ev.Body]:
    """A call the model made, as event `event_id`, and its lease when leases are on (`lease_ms` not 0)."""
    use: list[ev.Body] = [ev.ToolUse(name, arguments)]
    return [*use, ev.ToolLease(event_id, now_ms + lease_ms)] if lease_ms else use


def _open_call(target: Session, call: int) -> LedgerEntry:
    entry = target.whole_ahead().ledger.get(call)
    if entry is None or entry.state not in OPEN_CALLS:
        raise errors.UnknownToolCall(call)
    return entry


def _leaving(refusal: errors.SessionError, records: list[Record]) -> errors.SessionError:
    refusal.records = records
    return refusal


# permissions


def request_permission(store: Store, session: int, call: int, text: str) -> list[Record]:
    """Ask a person; generating waits for the answer. `call` 0: about no call."""
    store.activity.check_quiet(session)
    target = store.session(session)
    if call:
        _open_call(target, call)
    return [(session, ev.PermissionRequest(call, text))]


def respond_permission(store: Store, session: int, request: int, granted: bool) -> list[Record]:
    """Answer a request, once."""
    if request not in store.session(session).whole_ahead().permissions:
        raise errors.UnknownPermission(request)
    return [(session, ev.PermissionResponse(request, granted))]


# what a session says of itself


def set_meta(store: Store, session: int, expected: int, title: str | None, archived: bool | None) -> list[Record]:
    """Compare-and-set of title and archived; none leaves a field as it is."""
    version = store.session(session).ahead.meta_version
    if version != expected:
        raise errors.MetaConflict(session, version, expected)
    return [(session, ev.MetaUpdated(version + 1, title, archived))]


def set_qos(store: Store, session: int, qos_class: int, batch_invariant: bool) -> list[Record]:
    """Class 0 (most urgent) to 3."""
    store.session(session)
    if not 0 <= qos_class <= HIGHEST_CLASS:
        raise errors.ProtocolMisuse(f"QoS class {qos_class} is not one of 0 to {HIGHEST_CLASS}")
    return [(session, ev.QosSet(qos_class, batch_invariant))]


def pin(store: Store, session: int, ttl_ms: int, now_ms: int) -> list[Record]:
    """Keep the session's prefix until now + ttl; ttl 0 clears the pin."""
    store.session(session)
    return [(session, ev.Pinned(min(now_ms + ttl_ms, U64_MAX) if ttl_ms else 0))]


# generating


@attrs.frozen
class Prologue:
    """What starts a generation: records to commit, and the tokens of the opener among them (empty: the turn goes on,
    in the channel its tokens leave open). With max_tokens 0 there is nothing to do but to commit them."""

    records: list[Record]
    opener: list[int]


def begin_generation(
    store: Store,
    session: int,
    max_tokens: int,
    window: int,
    dialect: Dialect,
    fingerprint: int | None,
    now_ms: int,
    leases: bool = False,
    thinking: bool | None = None,
) -> Prologue:
    """The checks of a generation in their order, and what it commits first; then the caller marks the session busy.

    `window` in tokens, 0: no limit. `fingerprint`: the codec's, if it has one. `leases`: calls whose lease has run out
    are expired.
    """
    activity = store.activity
    activity.check_not_purging(session)
    target = store.session(session)
    state = target.whole_ahead()
    expired = expired_calls(target, now_ms) if leases else []
    try:
        if state.permissions:
            raise errors.PermissionPending(session)
        if not state.n_tokens:
            raise errors.EmptySession(session)
        _check_fits(state.n_tokens, window)
        if max_tokens == 0:
            return Prologue(expired, [])
        if session in activity.busy:
            raise errors.SessionBusy(session)
        opener = opening(state, dialect, thinking)
        _check_fits(state.n_tokens + len(opener), window)
    except errors.SessionError as refusal:
        raise _leaving(refusal, expired) from None
    records = expired
    if fingerprint is not None and fingerprint != state.fingerprint:
        records.append((session, ev.GenerationFingerprint(fingerprint)))
    if opener:
        records.append((session, ev.GenerationPrompt(opener)))
    return Prologue(records, opener)


def opening(state: State, dialect: Dialect, thinking: bool | None = None) -> list[int]:
    """The opener a generation from this state commits; empty when the turn goes on."""
    if state.tail is Tail.INPUT or state.tail is Tail.FINISHED_TURN:
        return list(dialect.opener(state.tail is Tail.FINISHED_TURN, thinking))
    return []


def cut_calls(state: State, start: int) -> list[TurnCall]:
    """The calls that were read of the tool-call run which begins at `start` in the stream, where a limit cut it."""
    return [call for call in state.turn_calls if call.place > start]


def may_expire(target: Session, call: int) -> bool:
    """Whether a call is open, or an ancestor's: a child that goes on with it notes so in its own timeline."""
    entry = target.whole_ahead().ledger.get(call)
    return entry is None or entry.state in OPEN_CALLS


def torn_call(target: Session) -> bool:
    """Whether a restart came right behind tokens of a tool call: what it was read as did not reach the disk."""
    behind: ev.Body | None = None
    for event in reversed(target.events(max(target.n_events - RECENT, 0))):
        body = event.body
        if len(getattr(body, "span", None) or ()):
            call = isinstance(body, ev.Generated) and body.channel == ev.Channel.TOOL_CALL
            return call and isinstance(behind, ev.EpochBump)
        if isinstance(body, ev.ToolUse | ev.ToolParseFailure):
            return False
        behind = body
    return False


def expired_calls(target: Session, now_ms: int) -> list[Record]:
    """ToolExpired for every open call whose lease has run out."""
    return [
        (target.id, ev.ToolExpired(call, "lease elapsed"))
        for call, entry in target.whole_ahead().open_calls.items()
        if entry.lease_deadline_unix_ms is not None and entry.lease_deadline_unix_ms <= now_ms
    ]


def _check_fits(length: int, window: int) -> None:
    if window and length > window:
        raise errors.StreamTooLong(length, window)


# purging


def purge_targets(store: Store, session: int, expected: int, mode: ev.Descendants) -> list[int]:
    """The sessions a purge ends, children before parents, the session last: what the caller fences and quiets.

    Children that are still on their way to the disk are among them: nobody may use them when they come to be.
    """
    return [target.id for target in _targets(store, session, expected, mode)]


def purge(store: Store, session: int, expected: int, mode: ev.Descendants) -> list[Record]:
    """The records of a purge; the last is its commit point."""
    targets = _targets(store, session, expected, mode)
    records: list[Record] = []
    for target in reversed(targets):
        records += [(target.id, ev.ToolExpired(call, "purged")) for call in target.whole_ahead().open_calls]
    if mode == ev.Descendants.Reroot and (children := store.children(session)):
        events = store.session(session).events(0, max(child.fork_at for child in children))
        for child in children:
            prefix = [(event.event_id, event.body) for event in events[: child.fork_at]]
            records.append((child.id, ev.Rerooted(session, prefix)))
    for target in targets:
        records.append((target.id, ev.Purged(target.ahead.generation + 1, mode)))
    return records


def _targets(store: Store, session: int, expected: int, mode: ev.Descendants) -> list[Session]:
    target = store.session(session)
    generation = target.ahead.generation
    if generation != expected:
        raise errors.GenerationConflict(session, generation, expected)
    found = [target]
    if mode == ev.Descendants.Cascade:
        for one in found:  # grows while it is walked: parents before children
            found.extend(store.children(one.id))
    return found[::-1]


def open_tool_calls(ledger: Mapping[int, LedgerEntry]) -> list[tuple[int, str, str]]:
    """(id, name, arguments) of the open ones, ascending."""
    return [(call, entry.name, entry.arguments) for call, entry in ledger.items() if entry.state in OPEN_CALLS]
