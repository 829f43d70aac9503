"""Requests and responses of the session API (pure data, no I/O); rules are the daemon's.

New variants, and new fields of a variant, are only ever added at the end. A Python name that ends in `_` is the
JSON key without it.
"""

import math
from typing import Annotated

import orjson

from superfluid.link import events, ids
from superfluid.link.events import BLOCK_KINDS, CHAT_ROLES, Descendants, Edit, Event, GenParams, Role
from superfluid.link.postcard import MAY_BE_MISSING, U8, U32, U64, Bytes16, Choice, Tokens, message, to_json, variant

MAX_FRAME = 64 * 1024 * 1024

ChatRole = Annotated[int, "u32", CHAT_ROLES]
BlockRole = Annotated[int, "u32", f"{CHAT_ROLES}, {Role.TOOL} tool"]
BlockKind = Annotated[int, "u32", BLOCK_KINDS]
QosClass = Annotated[int, "u8", "0 interactive, 1 completion, 2 agent, 3 background"]
Outcome = Annotated[int, "u8", "1 failed, 2 cancelled"]


class Request(Choice):
    """What a client asks; one at a time on a connection, answered in order."""


@variant("Create")
class CreateRequest(Request):
    parent: U64 | None
    params: GenParams


@variant("Append")
class AppendRequest(Request):
    session: U64
    text: str | None
    span: Tokens


@variant("AppendMessage")
class AppendMessageRequest(Request):
    session: U64
    role: ChatRole
    text: str


@variant("Generate")
class GenerateRequest(Request):
    session: U64
    max_tokens: U32


@variant("Read")
class ReadRequest(Request):
    session: U64
    cursor: U64


@variant("AppendToolResult")
class AppendToolResultRequest(Request):
    session: U64
    call_id: U64
    content: str


@variant("OpenToolCalls")
class OpenToolCallsRequest(Request):
    session: U64


@variant("List")
class ListRequest(Request):
    pass


@variant("Cancel")
class CancelRequest(Request):
    session: U64


@variant("Subscribe")
class SubscribeRequest(Request):
    session: U64
    cursor: U64
    provisional: bool


@variant("Unsubscribe")
class UnsubscribeRequest(Request):
    sub: U64


@variant("Fork")
class ForkRequest(Request):
    session: U64
    at_event: U64
    params: GenParams | None


@variant("Tree")
class TreeRequest(Request):
    pass


@variant("Sessions")
class SessionsRequest(Request):
    include_archived: bool


@variant("SetMeta")
class SetMetaRequest(Request):
    session: U64
    expected_version: U64
    title: str | None
    archived: bool | None


@variant("Rebase")
class RebaseRequest(Request):
    session: U64
    edits: list[Edit]
    params: GenParams | None


@variant("Purge")
class PurgeRequest(Request):
    session: U64
    expected_generation: U64
    mode: Descendants


@variant("SetQos")
class SetQosRequest(Request):
    session: U64
    class_: QosClass
    batch_invariant: bool


@variant("SetBackgroundRate")
class SetBackgroundRateRequest(Request):
    divisor: U32


@variant("Inspect")
class InspectRequest(Request):
    session: U64


@variant("SetLogLevel")
class SetLogLevelRequest(Request):
    directive: str


@variant("Metrics")
class MetricsRequest(Request):
    pass


@variant("AppendBlock")
class AppendBlockRequest(Request):
    session: U64
    role: BlockRole
    kind: BlockKind
    payload: str


@variant("RequestPermission")
class RequestPermissionRequest(Request):
    session: U64
    call_id: U64
    text: str


@variant("RespondPermission")
class RespondPermissionRequest(Request):
    session: U64
    request_id: U64
    granted: bool


@variant("RequestToolCancel")
class RequestToolCancelRequest(Request):
    session: U64
    call_id: U64


@variant("AppendToolOutcome")
class AppendToolOutcomeRequest(Request):
    session: U64
    call_id: U64
    outcome: Outcome
    note: str


@variant("Ledger")
class LedgerRequest(Request):
    session: U64


@variant("PutMedia")
class PutMediaRequest(Request):
    bytes: bytes
    mime: str


@variant("AppendImage")
class AppendImageRequest(Request):
    session: U64
    role: ChatRole
    blob: str
    pre_text: str
    post_text: str


@variant("GcMedia")
class GcMediaRequest(Request):
    pass


@variant("Complete")
class CompleteRequest(Request):
    prefix: str
    suffix: str
    mode: U8
    max_tokens: U32


@variant("Trim")
class TrimRequest(Request):
    session: U64
    to_event: U64


@variant("Pin")
class PinRequest(Request):
    session: U64
    ttl_ms: U64


@variant("AppendSystem")
class AppendSystemRequest(Request):
    session: U64
    text: str | None
    tools: list[str]


@message
class Summary:
    id: U64
    parent: U64 | None
    fork_at: U64
    title: str | None
    archived: bool
    meta_version: U64
    generation: U64
    events: U64
    tokens: U64
    open_tool_calls: U64


@message
class LedgerEntry:
    """state: 0 open, 1 cancel requested, 2 succeeded, 3 failed, 4 cancelled, 5 expired, 6 cancelled, late effect."""

    name: str
    arguments: str
    state: U8
    cancel_requested: bool
    lease_deadline_unix_ms: U64 | None
    late_effects: U32


class Tier(Choice):
    """Where a session's state is: in a lane, in a park artifact, or only in the log."""


@variant("Resident")
class Resident(Tier):
    pass


@variant("Parked")
class Parked(Tier):
    covered: U64
    encoding: U8


@variant("Cold")
class Cold(Tier):
    pass


@message
class Inspection:
    """A reply that ends before `store_id` decodes with none."""

    summary: Summary
    params: GenParams
    epoch: U64
    last_finish: U32
    qos_class: U8
    batch_invariant: bool
    pin_deadline_unix_ms: U64
    behavior_fingerprint: U64 | None
    open_tool_calls: list[tuple[U64, str, str]]
    tier: Tier
    tokens: Tokens
    events: list[Event]
    wal_version: U8
    store_id: Annotated[Bytes16 | None, MAY_BE_MISSING] = None


class Response(Choice):
    """What the server answers."""


@variant("Created")
class CreatedResponse(Response):
    session: U64


@variant("Delta")
class DeltaResponse(Response):
    event: Event


@variant("Cancelling")
class CancellingResponse(Response):
    pass


@variant("Committed")
class CommittedResponse(Response):
    event: Event


@variant("Generated")
class GeneratedResponse(Response):
    events: list[Event]
    tokens_generated: U32
    finish: U32
    warm_prefix: U64


@variant("Events")
class EventsResponse(Response):
    events: list[Event]


@variant("Sessions")
class SessionsResponse(Response):
    ids: list[U64]


@variant("ToolCalls")
class ToolCallsResponse(Response):
    calls: list[tuple[U64, str, str]]


@variant("Subscribed")
class SubscribedResponse(Response):
    sub: U64


@variant("SubEvent")
class SubEventResponse(Response):
    sub: U64
    event: Event


@variant("SubProvisional")
class SubProvisionalResponse(Response):
    sub: U64
    channel: U32
    text: str


@variant("SubEnded")
class SubEndedResponse(Response):
    sub: U64
    reason: str


@variant("Unsubscribed")
class UnsubscribedResponse(Response):
    pass


@variant("Err")
class ErrResponse(Response):
    message: str


@variant("Tree")
class TreeResponse(Response):
    nodes: list[tuple[U64, U64 | None, U64]]


@variant("SessionList")
class SessionListResponse(Response):
    sessions: list[Summary]


@variant("Meta")
class MetaResponse(Response):
    version: U64


@variant("Purged")
class PurgedResponse(Response):
    sessions: list[U64]


@variant("Ack")
class AckResponse(Response):
    pass


@variant("Inspection")
class InspectionResponse(Response):
    inspection: Inspection


@variant("Text")
class TextResponse(Response):
    text: str


@variant("Ledger")
class LedgerResponse(Response):
    entries: list[tuple[U64, LedgerEntry]]


@variant("Media")
class MediaResponse(Response):
    hash: str


@variant("Gc")
class GcResponse(Response):
    kept: U64
    removed: U64


@variant("Completion")
class CompletionResponse(Response):
    text: str
    tokens: Tokens
    cached: bool
    expired: bool


@variant("Pinned")
class PinnedResponse(Response):
    deadline_unix_ms: U64


@variant("Throttled")
class ThrottledResponse(Response):
    retry_after_ms: U64


def out_of_range(request: Request) -> str | None:
    """What a request asks for that its types can hold and no session can have: the field, its range, its value."""
    if not isinstance(request, CreateRequest | ForkRequest | RebaseRequest) or request.params is None:
        return None
    params, place = request.params, f"{request.variant_name}.params"
    if not 0 <= params.temperature < math.inf:  # nor NaN
        return f"{place}.temperature: a finite number from 0 (greedy) is wanted, not {params.temperature:g}"
    for name, share in (("top_p", params.top_p), ("min_p", params.min_p)):
        if not 0 <= share <= 1:
            return f"{place}.{name}: a number from 0 to 1 is wanted, not {share:g}"
    return None


def is_long(response: Response) -> bool:
    """Whether a response takes so long to write that others should not wait for it."""
    if isinstance(response, CommittedResponse | DeltaResponse | SubEventResponse):
        return events.is_long(response.event.body)
    if isinstance(response, EventsResponse):
        return any(events.is_long(event.body) for event in response.events)
    return isinstance(response, InspectionResponse) and len(response.inspection.tokens) > events.LONG


def json_text(message: Response | Event) -> bytes:
    """The JSON text of a response or an event."""
    return orjson.dumps(to_json(message), default=ids.json_of)
