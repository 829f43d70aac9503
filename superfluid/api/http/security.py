"""Who may ask: Host and Origin of a request, and its credential (spec: http, Origin and Host, credentials)."""

import hashlib
import hmac
import ipaddress
import re
import socket
from urllib.parse import urlsplit

import attrs

from superfluid.api.http.errors import ApiError

HOST_SHAPE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d+)?\Z")


def host_name(value: str) -> str | None:
    """The host of a Host header or an origin's authority: lower case, no port, no trailing dot; none if malformed."""
    match = HOST_SHAPE.match(value)
    return match[1].lower().rstrip(".") if match else None


def is_loopback(host: str | None) -> bool:
    """`localhost`, `*.localhost`, 127.0.0.0/8 or `[::1]`."""
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = ip_address(host)
    return address is not None and (
        address in ipaddress.ip_network("127.0.0.0/8") or address == ipaddress.ip_address("::1")
    )


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


@attrs.frozen
class Access:
    """The rules of one listener."""

    listen_host: str
    api_key: str | None = None

    @property
    def open(self) -> bool:
        """No credential is wanted."""
        return self.api_key is None

    def check_place(self, host: str | None, origin: str | None, credential: str | None, scheme: str = "http") -> None:
        """Refuse (403 origin_refused) a Host or an Origin that a page on a foreign name would send."""
        if host is not None:
            self._check_host(host_name(host), host)
        if origin is None:
            return
        if is_loopback(host_name(_authority(origin))):
            return
        same = host is not None and _normal_origin(origin) in {
            _normal_origin(f"{scheme}://{host}"),
            _normal_origin(f"https://{host}"),
        }
        if same and not self.open and credential is not None:
            return
        raise _refused(f"Origin {origin!r} may not use this server: only pages of this machine may")

    def _check_host(self, name: str | None, sent: str) -> None:
        if is_loopback(host_name(self.listen_host) or self.listen_host):
            if is_loopback(name):
                return
            raise _refused(f"Host {sent!r} is not this machine's loopback name, on which the server listens")
        if not self.open or is_loopback(name):
            return
        if name is not None and (ip_address(name) is not None or name in _own_names()):
            return
        raise _refused(f"Host {sent!r} is not a name of this machine; serve with --api-key to answer any name")

    def check_credential(self, bearer: str | None, header: str | None) -> None:
        """Refuse (401) a request without the key; either header may carry it."""
        if self.api_key is None:
            return
        wanted = hashlib.sha256(self.api_key.encode()).digest()
        found = False
        for shown in (bearer, header):
            if shown is not None:
                found |= hmac.compare_digest(hashlib.sha256(shown.encode()).digest(), wanted)
        if not found:
            raise ApiError(401, "Invalid or missing API key", kind="authentication_error", code="invalid_api_key")


def bearer_token(authorization: str | None) -> str | None:
    """The key of an `Authorization: Bearer <key>` header (that spelling)."""
    if authorization is None or not authorization.startswith("Bearer "):
        return None
    return authorization.removeprefix("Bearer ")


def _refused(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="origin_refused")


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _normal_origin(origin: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return "", None, None
    default = {"http": 80, "https": 443}.get(parts.scheme.lower())
    return parts.scheme.lower(), parts.hostname, port or default


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    short = name.split(".", 1)[0]
    names = {name, f"{short}.local"}
    if name.endswith(".local"):
        names.add(short)
    return names
