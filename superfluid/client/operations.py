"""What a client does with sessions, without any I/O: generators that yield requests and are sent the answers.

The blocking client and the one for trio run the same generators over their connections. A refusal is raised by who
runs them, so an operation sees only answers.
"""

import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import orjson

from superfluid.client.errors import Misuse, Refused, Throttled, UnexpectedReply
from superfluid.client.turns import WHOLE_WINDOW, ChatMessage, Reply, ToolCall, conversation
from superfluid.client.wire import payload
from superfluid.link import events as ev, session_api as api

OF_REPLY = (ev.GenerationPrompt, ev.Generated, ev.ToolUse, ev.ToolParseFailure)
OF_INPUT = (ev.Message, ev.ToolResult, ev.Block, ev.Appended)

R = TypeVar("R", bound=api.Response)
T = TypeVar("T")
Steps = Generator[api.Request, api.Response, T]
Tool = str | Mapping[str, Any]

COMPLETION_TOKENS = 64
PREFIX_FIRST = 0  # mode of a completion
OUTCOME_FAILED, OUTCOME_CANCELLED = 1, 2

KEEPS_CONNECTION = (
    Refused,
    Throttled,
    Misuse,
)  # errors after which the connection goes on; after others it is in no known state


@attrs.define(eq=False)
class SessionRef:
    """A session as a client knows it: its id, and what of it cannot change behind its back."""

    id: int
    _seen: int = 0  # events that are known to be there
    _params: ev.GenParams | None = None


def ask(request: api.Request, kind: type[R]) -> Steps[R]:
    """One request and its answer of that class. Raises UnexpectedReply for another."""
    reply = yield request
    if not isinstance(reply, kind):
        raise UnexpectedReply(f"{type(reply).variant_name} does not answer {type(request).variant_name}")
    return reply


def call(request: api.Request) -> Steps[api.Response]:
    """Any one request, and its answer (of Generate the last; its Deltas are left out)."""
    return (yield request)


# ---- sessions


def new_session(
    make: Callable[[int, ev.GenParams], T],
    sampling: ev.GenParams | None,
    system: str | None,
    tools: Sequence[Tool],
    parent: int | None,
) -> Steps[T]:
    params = ev.GenParams() if sampling is None else sampling
    prompt = api.AppendSystemRequest(0, system, [_json(tool) for tool in _listed(tools, "tools")])
    payload(prompt)  # what cannot be sent is found before there is a session
    created = yield from ask(api.CreateRequest(parent, params), api.CreatedResponse)
    if system is not None or prompt.tools:
        prompt.session = created.session
        yield from ask(prompt, api.CommittedResponse)
    return make(created.session, params)


def _listed(values: Iterable[T], what: str) -> list[T]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise Misuse(f"a list of {what} is wanted, not {values!r:.60}")
    return list(values)


def _json(value: str | Mapping[str, Any]) -> str:
    try:
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    except (TypeError, ValueError) as error:
        raise Misuse(f"it is no JSON: {error}") from error


def _object(value: str | Mapping[str, Any]) -> str:
    """The JSON text of an object. Raises Misuse."""
    text = _json(value)
    try:
        fits = isinstance(orjson.loads(text), dict)
    except ValueError as error:
        raise Misuse(f"a payload is an object or its JSON text, not {value!r:.60} ({error})") from None
    if not fits:
        raise Misuse(f"a payload is an object or its JSON text, not {value!r:.60}")
    return text


def session_ids() -> Steps[list[int]]:
    """Ids of the live sessions, ascending, archived ones too."""
    return (yield from ask(api.ListRequest(), api.SessionsResponse)).ids


def sessions(include_archived: bool = False) -> Steps[list[api.Summary]]:
    """A line about each live session, ascending."""
    return (yield from ask(api.SessionsRequest(include_archived), api.SessionListResponse)).sessions


def tree() -> Steps[list[tuple[int, int | None, int]]]:
    """(id, parent, fork point) of each session that is not archived, ascending."""
    return (yield from ask(api.TreeRequest(), api.TreeResponse)).nodes


def metrics() -> Steps[str]:
    """The server's Prometheus page."""
    return (yield from ask(api.MetricsRequest(), api.TextResponse)).text


def set_background_rate(divisor: int) -> Steps[None]:
    """Let agents and background work (classes 2 and 3) decode in every `divisor`-th tick only; 1 is every tick."""
    yield from ask(api.SetBackgroundRateRequest(divisor), api.AckResponse)


def set_log_level(directive: str) -> Steps[None]:
    """The server's log filter from now on, such as `info,superfluid.scheduler=debug`."""
    yield from ask(api.SetLogLevelRequest(directive), api.AckResponse)


def put_media(data: bytes, mime: str = "") -> Steps[str]:
    """Store an image's bytes; the hash that names them. Storing the same bytes twice is one blob."""
    return (yield from ask(api.PutMediaRequest(data, mime), api.MediaResponse)).hash


def gc_media() -> Steps[tuple[int, int]]:
    """Delete stored media that no live session names; how many files stay and how many went."""
    done = yield from ask(api.GcMediaRequest(), api.GcResponse)
    return done.kept, done.removed


def complete(
    prefix: str, suffix: str = "", max_tokens: int = COMPLETION_TOKENS, mode: int = PREFIX_FIRST
) -> Steps[api.CompletionResponse]:
    """What belongs between two texts, greedily; no session is made. Raises NoFimDialect, Throttled.

    `mode` 1 shows the model the suffix first. The answer's `expired`: the deadline came before the end.
    """
    return (yield from ask(api.CompleteRequest(prefix, suffix, mode, max_tokens), api.CompletionResponse))


# ---- reading


def events(session: SessionRef, cursor: int = 0) -> Steps[list[ev.Event]]:
    """The committed events with ids from `cursor` on."""
    found = (yield from ask(api.ReadRequest(session.id, cursor), api.EventsResponse)).events
    if found:
        session._seen = max(session._seen, found[-1].event_id + 1)
    return found


def messages(session: SessionRef) -> Steps[list[ChatMessage]]:
    """The conversation so far."""
    return conversation((yield from events(session)))


def inspect(session: SessionRef) -> Steps[api.Inspection]:
    """All there is to know of a session, its events and tokens included."""
    return (yield from ask(api.InspectRequest(session.id), api.InspectionResponse)).inspection


def sampling(session: SessionRef) -> Steps[ev.GenParams]:
    """The sampling parameters the session was made with."""
    if session._params is None:
        for event in reversed((yield from events(session))):
            if isinstance(event.body, ev.Created | ev.Forked | ev.Rebased):
                session._params = event.body.params
                break
    return session._params or ev.GenParams()


# ---- appending


def append(session: SessionRef, text: str | None = None, span: Sequence[int] = ()) -> Steps[ev.Event]:
    """Tokens as they are, or the encoding of a text; no turn is made of them."""
    return (yield from _committed(api.AppendRequest(session.id, text, _listed(span, "token ids"))))


def system(session: SessionRef, text: str) -> Steps[ev.Event]:
    """Append a system turn."""
    return (yield from _committed(api.AppendMessageRequest(session.id, ev.Role.SYSTEM, text)))


def user(session: SessionRef, text: str) -> Steps[ev.Event]:
    """Append a user turn."""
    return (yield from _committed(api.AppendMessageRequest(session.id, ev.Role.USER, text)))


def assistant(session: SessionRef, text: str) -> Steps[ev.Event]:
    """Append an assistant turn that no model generated."""
    return (yield from _committed(api.AppendMessageRequest(session.id, ev.Role.ASSISTANT, text)))


def append_block(
    session: SessionRef, kind: int, payload: str | Mapping[str, Any], role: int = ev.Role.USER
) -> Steps[ev.Event]:
    """Append a block with its payload, an object or its JSON text; the model sees these fields of it as a turn.

    1 diff {path, diff}, 2 artifact {title, content}, 3 citation {title, url, quote}, 4 progress (nothing), 5 diagnostic
    {severity, message, path, line}, 6 file reference {path}. Raises Misuse for a text that is no JSON object, which the
    server would take for an object without fields.
    """
    return (yield from _committed(api.AppendBlockRequest(session.id, role, kind, _object(payload))))


def append_image(
    session: SessionRef, blob: str, pre_text: str = "", post_text: str = "", role: int = ev.Role.USER
) -> Steps[ev.Event]:
    """Append a turn with an image that `put_media` stored, between two texts. Raises UnknownMedia, MediaTooLarge."""
    return (yield from _committed(api.AppendImageRequest(session.id, role, blob, pre_text, post_text)))


def _committed(request: api.Request) -> Steps[ev.Event]:
    return (yield from ask(request, api.CommittedResponse)).event


# ---- tool calls


def open_tool_calls(session: SessionRef) -> Steps[list[ToolCall]]:
    """Calls that wait for a result, ascending by id."""
    found = yield from ask(api.OpenToolCallsRequest(session.id), api.ToolCallsResponse)
    return [ToolCall(*entry) for entry in found.calls]


def ledger(session: SessionRef) -> Steps[dict[int, api.LedgerEntry]]:
    """Every call of this session by id, ascending: what became of it, and until when its executor has it."""
    return dict((yield from ask(api.LedgerRequest(session.id), api.LedgerResponse)).entries)


def tool_result(session: SessionRef, tool_call: ToolCall | int, content: str) -> Steps[ev.Event]:
    """Append the result of an open tool call."""
    return (yield from _committed(api.AppendToolResultRequest(session.id, _call(tool_call), content)))


def tool_outcome(
    session: SessionRef, tool_call: ToolCall | int, *, cancelled: bool = False, note: str = ""
) -> Steps[ev.Event]:
    """Close an open tool call that has no result: it failed, or was cancelled. The model does not see it."""
    outcome = OUTCOME_CANCELLED if cancelled else OUTCOME_FAILED
    return (yield from _committed(api.AppendToolOutcomeRequest(session.id, _call(tool_call), outcome, note)))


def request_tool_cancel(session: SessionRef, tool_call: ToolCall | int) -> Steps[ev.Event]:
    """Ask whoever runs an open tool call to stop; it stays open until its result or outcome comes."""
    return (yield from _committed(api.RequestToolCancelRequest(session.id, _call(tool_call))))


def request_permission(session: SessionRef, tool_call: ToolCall | int, text: str) -> Steps[ev.Event]:
    """Ask for leave to run an open tool call (0: for anything). Its event names the request.

    Until `respond_permission` answers it, nothing is generated on the session; a result of the call is no answer.
    """
    return (yield from _committed(api.RequestPermissionRequest(session.id, _call(tool_call), text)))


def respond_permission(session: SessionRef, request: ev.Event | int, granted: bool) -> Steps[ev.Event]:
    """Answer a request for permission, named by its event."""
    return (yield from _committed(api.RespondPermissionRequest(session.id, _number(request), granted)))


def _call(tool_call: ToolCall | int) -> int:
    return _id(tool_call.id if isinstance(tool_call, ToolCall) else tool_call, "a tool call")


# ---- generating


def generate(session: SessionRef, max_tokens: int | None = None) -> Steps[Reply]:
    """Generate a whole turn; without `max_tokens` until it ends or the window is full."""
    limit = WHOLE_WINDOW if max_tokens is None else max_tokens
    return Reply.of((yield from ask(api.GenerateRequest(session.id, limit), api.GeneratedResponse)))


def cancel(session: SessionRef) -> Steps[None]:
    """Stop the generation that runs on the session, whoever started it. Raises NothingInFlight."""
    yield from ask(api.CancelRequest(session.id), api.CancellingResponse)


# ---- branching


def fork(session: SessionRef, at: int | None = None, seed: int | None = None) -> Steps[int]:
    """A session that shares this one's events below `at` (all of them), with another seed when one is given."""
    params = yield from _reseeded(session, seed)
    if at is None:
        yield from events(session, session._seen)
        at = session._seen
    return (yield from _created(api.ForkRequest(session.id, at, params)))


def fork_after(session: SessionRef, event: ev.Event | int, seed: int | None = None) -> Steps[int]:
    """A session that shares this one's events up to and with `event`."""
    return (yield from fork(session, _number(event) + 1, seed))


def edit(session: SessionRef, event: ev.Event | int, text: str) -> Steps[int]:
    """A branch in which that turn has another text; what follows it stays (`trim` cuts it).

    Any event of a reply names the whole of it, its opener and calls included.
    """
    number = _number(event)
    body = event.body if isinstance(event, ev.Event) else None
    if isinstance(body, ev.Message):
        return (yield from rebase(session, [ev.Replace(number, number + 1, body.role, text)]))
    start, end, role = _turn(number, (yield from events(session)))
    return (yield from rebase(session, [ev.Replace(start, end, role, text)]))


def _turn(number: int, found: Sequence[ev.Event]) -> tuple[int, int, int]:
    """The range of the events that make a turn with that one in it, and its role."""
    at = next((index for index, event in enumerate(found) if event.event_id == number), None)
    named = None if at is None else found[at].body
    if at is None or not isinstance(named, OF_REPLY):
        return number, number + 1, named.role if isinstance(named, ev.Message) else ev.Role.ASSISTANT
    first = last = at
    for index in range(at, -1, -1):
        if isinstance(found[index].body, OF_INPUT):
            break
        if isinstance(found[index].body, OF_REPLY):
            first = index
        if isinstance(found[index].body, ev.GenerationPrompt):
            break
    for index in range(at + 1, len(found)):
        if isinstance(found[index].body, (*OF_INPUT, ev.GenerationPrompt)):
            break
        if isinstance(found[index].body, OF_REPLY):
            last = index
    return found[first].event_id, found[last].event_id + 1, ev.Role.ASSISTANT


def rebase(session: SessionRef, edits: Sequence[ev.Edit], seed: int | None = None) -> Steps[int]:
    """A branch with ranges of events dropped or replaced; this session stays as it is."""
    params = yield from _reseeded(session, seed)
    return (yield from _created(api.RebaseRequest(session.id, _listed(edits, "edits"), params)))


def trim(session: SessionRef, to: ev.Event | int) -> Steps[int]:
    """A branch that keeps the events below `to`."""
    return (yield from _created(api.TrimRequest(session.id, _number(to))))


def _reseeded(session: SessionRef, seed: int | None) -> Steps[ev.GenParams | None]:
    """The session's sampling with another seed; none: a branch takes its parent's."""
    if seed is None:
        return None
    own = yield from sampling(session)
    return ev.GenParams(own.temperature, own.top_p, own.min_p, own.top_k, seed)


def _number(event: ev.Event | int) -> int:
    return _id(event.event_id if isinstance(event, ev.Event) else event, "an event")


def _id(value: int, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise Misuse(f"{what}, or its id, is wanted, not {value!r:.60}") from None


def _created(request: api.Request) -> Steps[int]:
    return (yield from ask(request, api.CreatedResponse)).session


# ---- what a session says of itself


def set_meta(
    session: SessionRef, title: str | None = None, archived: bool | None = None, expected_version: int = 0
) -> Steps[int]:
    """Set the title, or hide it from listings; none leaves it. The new version. Raises MetaConflict."""
    request = api.SetMetaRequest(session.id, expected_version, title, archived)
    return (yield from ask(request, api.MetaResponse)).version


def set_qos(session: SessionRef, qos_class: int, batch_invariant: bool = False) -> Steps[ev.Event]:
    """The session's class, 0 (most urgent) to 3."""
    return (yield from _committed(api.SetQosRequest(session.id, qos_class, batch_invariant)))


def pin(session: SessionRef, ttl_ms: int) -> Steps[int]:
    """Keep the session's prefix in the cache for that long; 0 lets it go. The deadline in Unix milliseconds."""
    return (yield from ask(api.PinRequest(session.id, ttl_ms), api.PinnedResponse)).deadline_unix_ms


def purge(
    session: SessionRef, expected_generation: int = 0, mode: ev.Descendants = ev.Descendants.Reroot
) -> Steps[list[int]]:
    """Erase the session, with Cascade its descendants too; the ids that are gone."""
    return (yield from ask(api.PurgeRequest(session.id, expected_generation, mode), api.PurgedResponse)).sessions
