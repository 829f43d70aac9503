"""Session events: the bodies of log records, which the session API carries unchanged (pure data, no I/O)."""

from enum import IntEnum
from typing import Annotated

from superfluid.link.postcard import F32, U8, U32, U64, Choice, Tokens, message, variant


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3


CHAT_ROLES = ", ".join(f"{role} {role.name.lower()}" for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT))
BLOCK_KINDS = "1 diff, 2 artifact, 3 citation, 4 progress, 5 diagnostic, 6 file reference, 7 image"


class Channel(IntEnum):
    TEXT = 0
    REASONING = 1
    TOOL_CALL = 2


class Finish(IntEnum):
    """How a generation, or a lane's emit, ended. NONE: more to come, or stopped at the caller's max_tokens."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    GRAMMAR = 3
    CANCELLED = 4
    ERROR = 5


class Descendants(IntEnum):
    Cascade = 0
    Reroot = 1


@message
class GenParams:
    """A session's sampling defaults; `seed` is where its draw positions count from."""

    temperature: F32 = 0.0
    top_p: F32 = 1.0
    min_p: F32 = 0.0
    top_k: U32 = 0
    seed: U64 = 0


class Edit(Choice):
    """One change of a rebase, over the half-open event range [from_, to)."""


@variant("Drop")
class Drop(Edit):
    from_: U64
    to: U64


@variant("Replace")
class Replace(Edit):
    from_: U64
    to: U64
    role: Annotated[int, "u32", CHAT_ROLES]
    text: str


class Body(Choice):
    """A record's body; variant order is the log's and the session API's."""


@variant("Created")
class Created(Body):
    parent: U64 | None
    params: GenParams


@variant("Appended")
class Appended(Body):
    text: str | None
    span: Tokens


@variant("Message")
class Message(Body):
    role: U32
    text: str
    span: Tokens


@variant("GenerationPrompt")
class GenerationPrompt(Body):
    span: Tokens


@variant("Generated")
class Generated(Body):
    span: Tokens
    text: str
    channel: U32
    finish: U32


@variant("ToolUse")
class ToolUse(Body):
    name: str
    arguments: str


@variant("ToolResult")
class ToolResult(Body):
    call_id: U64
    content: str
    span: Tokens


@variant("EpochBump")
class EpochBump(Body):
    pass


@variant("GenerationFingerprint")
class GenerationFingerprint(Body):
    digest: U64


@variant("ToolParseFailure")
class ToolParseFailure(Body):
    raw: str


@variant("Forked")
class Forked(Body):
    parent: U64
    fork_at: U64
    params: GenParams


@variant("MetaUpdated")
class MetaUpdated(Body):
    version: U64
    title: str | None
    archived: bool | None


@variant("Rebased")
class Rebased(Body):
    parent: U64
    fork_at: U64
    params: GenParams
    edits: list[Edit]


CONTINUED = "continued"
"""Why a call expired that a limit had cut: the generation went on, and its text was read again, as another call."""


@variant("ToolExpired")
class ToolExpired(Body):
    call_id: U64
    reason: str


@variant("Purged")
class Purged(Body):
    generation: U64
    descendants: Descendants


@variant("Rerooted")
class Rerooted(Body):
    purged_parent: U64
    prefix: list[tuple[U64, Body]]


@variant("QosSet")
class QosSet(Body):
    """JSON key `class`."""

    class_: U8
    batch_invariant: bool


@variant("Block")
class Block(Body):
    role: U32
    kind: U32
    payload: str
    span: Tokens
    visibility_version: U32 = 2


@variant("PermissionRequest")
class PermissionRequest(Body):
    call_id: U64
    text: str


@variant("PermissionResponse")
class PermissionResponse(Body):
    request_id: U64
    granted: bool


@variant("ToolCancelRequested")
class ToolCancelRequested(Body):
    call_id: U64


@variant("ToolOutcome")
class ToolOutcome(Body):
    call_id: U64
    outcome: U8
    note: str


@variant("ToolReconciliation")
class ToolReconciliation(Body):
    call_id: U64
    note: str


@variant("ToolLease")
class ToolLease(Body):
    call_id: U64
    deadline_unix_ms: U64


@variant("Pinned")
class Pinned(Body):
    deadline_unix_ms: U64


@message
class Event:
    """One committed event of a session; `event_id` is its position in the session's list."""

    event_id: U64
    epoch: U64
    ts_unix_ms: U64
    body: Body


LONG = 1 << 16  # tokens or characters of a record: to read or write more takes milliseconds


def is_long(body: Body) -> bool:
    """Whether a record takes so long to read or write that others should not wait for it."""
    return any(len(getattr(body, name, None) or ()) > LONG for name in ("span", "text", "content", "payload"))
