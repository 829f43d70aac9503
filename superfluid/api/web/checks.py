"""Who may use the session API over the web: the token, the page's origin, the CSRF header. Pure, on raw headers."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

PROTOCOL = "superfluid.v1"
TOKEN_PROTOCOL = "superfluid.token."
TOKEN_BYTES = 32
TOKEN_FILE = "web-token"
OWNER_READS = 0o600

Headers = Iterable[tuple[bytes, bytes]]


class WebRefusal(Exception):
    """A request that is not answered: the HTTP status, and a message that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def mint_token(path: Path) -> str:
    """A new token, 64 hex digits, in `path` for its owner alone. Raises OSError.

    The file takes an older one's place whole: who holds that one open, or could read it, does not see this token.
    """
    token = secrets.token_bytes(TOKEN_BYTES).hex()
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_READS)
    with open(descriptor, "w") as file:
        os.fchmod(descriptor, OWNER_READS)  # whatever the umask
        file.write(token)
    beside.replace(path)
    return token


def values(headers: Headers, name: str) -> list[str]:
    """Every value of a header, in order; a header may come more than once."""
    wanted = name.lower().encode()
    return [value.decode("latin-1") for key, value in headers if key.lower() == wanted]


def protocols(headers: Headers) -> list[str]:
    """The subprotocols that a handshake offers."""
    offered = ",".join(values(headers, "sec-websocket-protocol")).split(",")
    return [name for one in offered if (name := one.strip())]


@attrs.frozen
class Checks:
    """The rules of one listener. Each check raises WebRefusal, in the order 401, 403, 403 or 400."""

    token: str
    origins: Sequence[str] = ()

    def request(self, headers: Headers) -> None:
        """Check a request of /web/rpc or /web/stream."""
        headers = list(headers)
        if not self._right(_bearers(headers)):
            raise WebRefusal(
                401,
                "Authorization: Bearer <token> is missing or wrong; every start makes a new one and says in which file",
            )
        self._origins(values(headers, "origin"))
        if not self._right(values(headers, "x-superfluid-csrf")):
            raise WebRefusal(403, "X-Superfluid-CSRF: <token> is missing or wrong")

    def handshake(self, headers: Headers) -> str | None:
        """Check a handshake of /web/ws; the subprotocol to accept, none when none is offered."""
        headers = list(headers)
        offered = protocols(headers)
        shown = [name.removeprefix(TOKEN_PROTOCOL) for name in offered if name.startswith(TOKEN_PROTOCOL)]
        if not self._right([*_bearers(headers), *shown]):
            raise WebRefusal(
                401, f"the token is missing or wrong: Authorization: Bearer <token>, or subprotocol {TOKEN_PROTOCOL}..."
            )
        origins = values(headers, "origin")
        if not origins:
            raise WebRefusal(
                403, "a WebSocket needs an Origin that is listed with --web-origin; /web/rpc and /web/stream need none"
            )
        self._origins(origins)
        if offered and PROTOCOL not in offered:
            raise WebRefusal(400, f"the subprotocols offered do not have {PROTOCOL}")
        return PROTOCOL if offered else None

    def _origins(self, origins: Sequence[str]) -> None:
        for origin in origins:
            if origin not in self.origins:
                raise WebRefusal(403, f"Origin {origin!r} is not listed; serve with --web-origin {origin}")

    def _right(self, shown: Sequence[str | None]) -> bool:
        """Whether there is a token, and every one is the right one; in a time that does not tell how wrong it is."""
        wanted = hashlib.sha256(self.token.encode()).digest()
        right = bool(shown)
        for one in shown:
            right &= hmac.compare_digest(hashlib.sha256((one or "").encode()).digest(), wanted)
        return right


def _bearers(headers: Headers) -> list[str | None]:
    """The credential of every Authorization header; none for one of another kind."""
    return [
        value.removeprefix("Bearer ") if value.startswith("Bearer ") else None
        for value in values(headers, "authorization")
    ]
