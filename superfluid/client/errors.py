"""What a server refuses, one class each, told apart by what the message contains; and what breaks a connection."""

import re
from typing import ClassVar


class ClientError(Exception):
    """Base of everything the client raises."""


class Misuse(ClientError, ValueError):
    """What was asked cannot be sent: an argument of another type or out of its range, text that is no Unicode (half a
    surrogate pair), a request of more than 64 MiB, a token or URL that no request can carry. Nothing was sent."""


class NotReached(ClientError):
    """No server answers at the socket."""


class ConnectionLost(ClientError):
    """The server closed the connection before it answered. What was asked may have been done."""


class UnexpectedReply(ClientError):
    """The server answered with something that does not answer the request, or does not decode."""


class Throttled(ClientError):
    """Too many completions; try again after `retry_after_ms` milliseconds."""

    def __init__(self, retry_after_ms: int) -> None:
        super().__init__(f"throttled; try again in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class Refused(ClientError):
    """The server refused a request; of this class itself when its message is none of those below.

    `values` are the numbers that the message names, for example `limit` and `length` of StreamTooLong.
    """

    pattern: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        found = re.search(self.pattern, message)
        self.values = {name: int(text) for name, text in found.groupdict().items() if text} if found else {}


class UnknownSession(Refused):
    pattern = r"unknown session (?P<session>\d+)"


class Purged(Refused):
    pattern = r"session (?P<session>\d+) was purged"


class SessionBusy(Refused):
    pattern = r"session (?P<session>\d+) is generating"


class EmptySession(Refused):
    pattern = r"session (?P<session>\d+) has no content to generate from"


class NothingInFlight(Refused):
    """A Cancel found nothing to cancel."""

    pattern = r"session (?P<session>\d+) has no generation in flight"


class StreamTooLong(Refused):
    pattern = r"maximum context length is (?P<limit>\d+) tokens.*your request has (?P<length>\d+) tokens"


class PermissionPending(Refused):
    pattern = r"session (?P<session>\d+) has an open permission request"


class UnknownPermission(Refused):
    pattern = r"permission request (?P<request>\d+) is unknown or already answered"


class UnknownToolCall(Refused):
    pattern = r"tool call (?P<call>\d+) is unknown or already closed"


class InheritedToolCall(Refused):
    pattern = r"tool call (?P<call>\d+) belongs to an ancestor's timeline"


class ToolLeaseExpired(Refused):
    pattern = r"tool call (?P<call>\d+)'s executor lease expired"


class ToolLateEffect(Refused):
    pattern = r"tool call (?P<call>\d+) already reached a terminal outcome"


class UnknownRole(Refused):
    pattern = r"unknown message role (?P<role>\d+)"


class InvalidTool(Refused):
    pattern = r"tool (?P<index>\d+) is not a function declaration"


class SystemNotFirst(Refused):
    pattern = r"session (?P<session>\d+) already has a prompt; AppendSystem must come before any other turn"


class ForkPoint(Refused):
    pattern = r"fork point (?P<at>\d+) is outside session (?P<session>\d+)'s committed events \(1\.\.=(?P<limit>\d+)\)"


class RebaseSpec(Refused):
    pattern = r"rebase edit spec invalid"


class MetaConflict(Refused):
    pattern = r"session (?P<session>\d+) metadata version is (?P<actual>\d+), command expected (?P<expected>\d+)"


class GenerationConflict(Refused):
    pattern = r"session (?P<session>\d+) generation is (?P<actual>\d+), command expected (?P<expected>\d+)"


class PurgeTimeout(Refused):
    pattern = r"session (?P<session>\d+) did not quiesce for purge"


class UnknownBlockKind(Refused):
    pattern = r"unknown block kind (?P<kind>\d+)"


class UnknownMedia(Refused):
    pattern = r"media blob .* is not in the pool"


class MediaTooLarge(Refused):
    pattern = r"image expands to (?P<placeholders>\d+) placeholders"


class NoFimDialect(Refused):
    pattern = r"no FIM dialect"


class GenerationFailed(Refused):
    """An engine fault, a worker that died, a refused tick."""

    pattern = r"generation failed"


class ProtocolMisuse(Refused):
    pattern = r"protocol: "


class LogWrite(Refused):
    """The server could not read or write: most often its log."""

    pattern = r"\bio: "


# the general ones last: their words may stand inside another refusal, and a failed generation may quote one
REFUSALS: tuple[type[Refused], ...] = (
    GenerationFailed, UnknownSession, Purged, SessionBusy, EmptySession, NothingInFlight, StreamTooLong,
    PermissionPending, UnknownPermission, UnknownToolCall, InheritedToolCall, ToolLeaseExpired, ToolLateEffect,
    UnknownRole, InvalidTool, SystemNotFirst, ForkPoint, RebaseSpec, MetaConflict, GenerationConflict, PurgeTimeout,
    UnknownBlockKind, UnknownMedia, MediaTooLarge, NoFimDialect, ProtocolMisuse, LogWrite,
)  # fmt: skip


def refusal(message: str) -> Refused:
    """The typed error of an Err's message."""
    for kind in REFUSALS:
        if re.search(kind.pattern, message):
            return kind(message)
    return Refused(message)
