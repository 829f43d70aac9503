"""The session API over a WebSocket, without the connection: every request, subscriptions too, as JSON frames."""

from collections import deque

import orjson
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Message,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import RemoteProtocolError

from superfluid.client.errors import UnexpectedReply
from superfluid.client.http import WebAddress, header_value, json_of, response
from superfluid.client.wire import Wire
from superfluid.link import session_api as api

PATH = "/web/ws"
PROTOCOL = "superfluid.v1"
FRAME = 4 << 20  # bytes of a longer message's frames; the server takes up to 16 MiB


class WebSocketWire(Wire):
    """One WebSocket from its handshake on. `origin` is one that the server lists with --web-origin."""

    def __init__(self, address: WebAddress, token: str, origin: str) -> None:
        self._address = address
        self._socket = WSConnection(ConnectionType.CLIENT)
        header_value("the token", token)
        header_value("the origin", origin)
        headers = [(b"Authorization", f"Bearer {token}".encode()), (b"Origin", origin.encode())]
        handshake = Request(
            host=address.authority, target=PATH, extra_headers=headers, subprotocols=[PROTOCOL], extensions=[]
        )
        self._out = bytearray(self._socket.send(handshake))
        self._accepted = False
        self._asked: deque[bytes] = deque()
        self._answers: deque[api.Response] = deque()
        self._message: list[bytes] = []
        self._refused = bytearray()
        self._status = 0
        self._ended = False

    def ask(self, *requests: api.Request) -> None:
        self._asked += [json_of(request) for request in requests]

    def outgoing(self) -> bytes:
        while self._accepted and self._asked:
            data = self._asked.popleft()
            for at in range(0, len(data), FRAME):
                whole = at + FRAME >= len(data)
                self._out += self._socket.send(BytesMessage(data[at : at + FRAME], message_finished=whole))
        data = bytes(self._out)
        self._out.clear()
        return data

    def feed(self, data: bytes) -> None:
        if self._ended:
            return
        self._ended = not data
        try:
            self._socket.receive_data(data or None)
            self._take()
        except RemoteProtocolError as error:
            if not self._ended:
                raise UnexpectedReply(f"{self._address.url} does not speak WebSocket: {error}") from error

    def next(self) -> api.Response | None:
        return self._answers.popleft() if self._answers else None

    @property
    def idle(self) -> bool:
        return self._accepted and not (self._asked or self._out or self._answers or self._message or self._ended)

    def _take(self) -> None:
        for event in self._socket.events():
            match event:
                case AcceptConnection():
                    self._accepted = True
                case RejectConnection():
                    self._status = event.status_code
                    if not event.has_body:
                        self._reject()
                case RejectData():
                    self._refused += event.data
                    if event.body_finished:
                        self._reject()
                case Message():
                    piece = event.data
                    self._message.append(piece.encode() if isinstance(piece, str) else bytes(piece))
                    if event.message_finished:
                        self._answers.append(self._read(b"".join(self._message)))
                        self._message = []
                case Ping():
                    self._out += self._socket.send(event.response())
                case CloseConnection():
                    if self._socket.state is ConnectionState.REMOTE_CLOSING:
                        self._out += self._socket.send(event.response())
                    self._ended = True

    def _reject(self) -> None:
        self._answers.append(self._read(bytes(self._refused)))
        self._ended = True

    def _read(self, data: bytes) -> api.Response:
        try:
            return response(orjson.loads(data), self._address.url)
        except ValueError as error:
            status = f" {self._status}" if self._status else ""
            raise UnexpectedReply(
                f"{self._address.url} answered{status} without JSON; is it the --web address?"
            ) from error
