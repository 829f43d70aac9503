"""What a store and its sessions refuse, one class each; the texts are how clients tell them apart."""

from pathlib import Path
from typing import ClassVar

from superfluid.link.events import BLOCK_KINDS, CHAT_ROLES, Body, Role


class StoreError(Exception):
    """The store cannot be opened or written."""

    code: ClassVar[str] = "store"


class LogDamaged(StoreError):
    """A log record that was whole once is not any more. The file is as it was found."""

    code = "log_damaged"

    def __init__(self, path: Path, offset: int, why: str) -> None:
        self.path, self.offset, self.why = path, offset, why
        super().__init__(
            f"{path} is damaged at byte {offset}: {why}. Nothing was changed. Move the file aside to start without "
            "its sessions, or start with --sessions-cache, which does that for you"
        )


class StoreLocked(StoreError):
    """Another process, or another store of this one, holds the log."""

    code = "store_locked"

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is already open in another process; stop that one or use another --sessions directory"
        )


class StoreIdCorrupt(StoreError):
    """The file that names the store does not hold a store id."""

    code = "store_id_corrupt"

    def __init__(self, path: Path, why: str) -> None:
        self.path = path
        super().__init__(f"{path}: the store's id file is corrupt ({why}); delete it and a new id is minted")


class LogIOError(StoreError):
    """The log could not be written. Nothing of what was refused is, or will be, shown as committed."""

    code = "io"

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"io: {path}: {why}")


class LogClosed(LogIOError):
    """The store is closed: the server is stopping."""

    code = "closed"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "the log is closed, the server is stopping")


class SessionError(Exception):
    """A session operation that is refused. `records` are to be committed nevertheless: what the attempt leaves."""

    code: ClassVar[str] = "session"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.records: list[tuple[int, Body]] = []


class UnknownSession(SessionError):
    code = "unknown_session"

    def __init__(self, session: int) -> None:
        super().__init__(f"unknown session {session}")


class PurgedSession(SessionError):
    code = "purged"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} was purged")


class SessionBusy(SessionError):
    code = "session_busy"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} is generating; wait until it ends, or cancel it")


class EmptySession(SessionError):
    code = "empty_session"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} has no content to generate from")


class StreamTooLong(SessionError):
    code = "stream_too_long"

    def __init__(self, length: int, limit: int) -> None:
        self.length, self.limit = length, limit
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but your request has {length} tokens; "
            "shorten it or leave out earlier turns"
        )


class PermissionPending(SessionError):
    code = "permission_pending"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} has an open permission request; answer it before generating")


class UnknownPermission(SessionError):
    code = "unknown_permission"

    def __init__(self, request: int) -> None:
        super().__init__(f"permission request {request} is unknown or already answered")


class UnknownToolCall(SessionError):
    code = "unknown_tool_call"

    def __init__(self, call: int) -> None:
        super().__init__(f"tool call {call} is unknown or already closed")


class InheritedToolCall(SessionError):
    code = "inherited_tool_call"

    def __init__(self, call: int) -> None:
        super().__init__(f"tool call {call} belongs to an ancestor's timeline; only that session can close it")


class ToolLeaseExpired(SessionError):
    code = "tool_lease_expired"

    def __init__(self, call: int) -> None:
        super().__init__(f"tool call {call}'s executor lease expired; its result was recorded as expired, not applied")


class ToolLateEffect(SessionError):
    code = "tool_late_effect"

    def __init__(self, call: int) -> None:
        super().__init__(
            f"tool call {call} already reached a terminal outcome; the late result was recorded as a reconciliation"
        )


class UnknownRole(SessionError):
    code = "unknown_role"

    def __init__(self, role: int) -> None:
        super().__init__(f"unknown message role {role} (known: {CHAT_ROLES}, and in blocks {Role.TOOL} tool)")


class InvalidTool(SessionError):
    code = "invalid_tool"

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"tool {index} is not a function declaration: {why}")


class SystemNotFirst(SessionError):
    code = "system_not_first"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} already has a prompt; AppendSystem must come before any other turn")


class ForkPoint(SessionError):
    code = "fork_point"

    def __init__(self, session: int, at: int, limit: int) -> None:
        super().__init__(f"fork point {at} is outside session {session}'s committed events (1..={limit})")


class RebaseSpec(SessionError):
    code = "rebase_spec"

    def __init__(self, why: str) -> None:
        super().__init__(f"rebase edit spec invalid: {why}")


class MetaConflict(SessionError):
    code = "meta_conflict"

    def __init__(self, session: int, actual: int, expected: int) -> None:
        super().__init__(f"session {session} metadata version is {actual}, command expected {expected}")


class GenerationConflict(SessionError):
    code = "generation_conflict"

    def __init__(self, session: int, actual: int, expected: int) -> None:
        super().__init__(f"session {session} generation is {actual}, command expected {expected}")


class PurgeTimeout(SessionError):
    code = "purge_timeout"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} did not quiesce for purge; its lane is still running")


class UnknownBlockKind(SessionError):
    code = "unknown_block_kind"

    def __init__(self, kind: int) -> None:
        super().__init__(f"unknown block kind {kind} (known: {BLOCK_KINDS})")


class UnknownMedia(SessionError):
    code = "unknown_media"

    def __init__(self, blob: str) -> None:
        super().__init__(f"media blob {blob} is not in the pool; put it there first")


class MediaTooLarge(SessionError):
    code = "media_too_large"

    def __init__(self, placeholders: int) -> None:
        super().__init__(f"image expands to {placeholders} placeholders; 1 to 4096 fit one prefill")


class NoFimDialect(SessionError):
    code = "no_fim_dialect"

    def __init__(self) -> None:
        super().__init__("this model has no FIM dialect")


class GenerationFailed(SessionError):
    code = "generation_failed"

    def __init__(self, why: str) -> None:
        super().__init__(f"generation failed: {why}")


class NothingInFlight(SessionError):
    code = "nothing_in_flight"

    def __init__(self, session: int) -> None:
        super().__init__(f"session {session} has no generation in flight")


class ProtocolMisuse(SessionError):
    code = "protocol"

    def __init__(self, why: str) -> None:
        super().__init__(f"protocol: {why}")
