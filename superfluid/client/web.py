"""The blocking client over `--web`: the same sessions, asked over HTTP; followed over a WebSocket."""

import os
import socket
from pathlib import Path

import attrs

from superfluid.client.address import default_home
from superfluid.client.client import Client, Connection
from superfluid.client.errors import Misuse, NotReached
from superfluid.client.http import HttpWire, WebAddress, header_value
from superfluid.client.websocket import WebSocketWire
from superfluid.client.wire import Wire

TOKEN_FILE = "web-token"


@attrs.frozen
class Site:
    """A server on the web as its clients know it."""

    address: WebAddress
    token: str | Path  # or the file it stands in
    origin: str | None

    @classmethod
    def of(cls, url: str, token: str | os.PathLike[str] | None, origin: str | None) -> "Site":
        """Raises Misuse for what is no URL of a server, and for a token or origin that no header can carry."""
        if token is None:
            token = default_home() / "sessions" / TOKEN_FILE
        elif isinstance(token, str) and os.sep in token:  # no token has one
            token = Path(token).expanduser()
        if isinstance(token, str):
            header_value("the token", token)
        if origin is not None:
            header_value("the origin", origin)
        return cls(WebAddress.of(url), token if isinstance(token, str) else Path(token), origin)

    def wire(self, following: bool) -> Wire:
        """A new connection's wire. Reads the token's file. Raises NotReached, and Misuse without an origin."""
        if not following:
            return HttpWire(self.address, self._read_token())
        if self.origin is None:
            raise Misuse("following a session on the web needs origin=..., one that the server has as --web-origin")
        return WebSocketWire(self.address, self._read_token(), self.origin)

    def _read_token(self) -> str:
        if isinstance(self.token, str):
            return self.token
        try:
            return self.token.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            usual = default_home() / "sessions" / TOKEN_FILE
            where = "its server says where it is when it starts" if self.token == usual else f"it is usually {usual}"
            raise NotReached(f"the token of {self.address.url} cannot be read: {self.token}: {why}; {where}") from None

    def not_reached(self, error: OSError) -> NotReached:
        return NotReached(f"no server answers at {self.address.url}: {error.strerror or error}")


class WebClient(Client):
    """A running server, at the `api-web` address that it says when it starts. As Client in all else.

    `token` is the token, or the file it stands in: a path, or a text with a `/`; when not given, `web-token` of the
    home's sessions. The file is read again for each connection: a server that starts again has another token.
    `origin`, one that the server has as --web-origin, is needed to follow sessions.
    """

    def __init__(self, url: str, token: str | os.PathLike[str] | None = None, *, origin: str | None = None) -> None:
        super().__init__(default_home())
        self.url = url
        self._site = Site.of(url, token, origin)

    def connect(self, *, following: bool = False) -> Connection:
        """A connection of one's own; the caller closes it. `following`: a WebSocket, which takes subscriptions."""
        wire = self._site.wire(following)
        address = self._site.address
        try:
            connected = socket.create_connection((address.host, address.port))
        except OSError as error:
            raise self._site.not_reached(error) from None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(connected, wire)
