"""A server in this process whose session API is on the web too, and small clients that say exactly what they mean."""

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from superfluid.api.web.checks import TOKEN_FILE
from superfluid.api.web.server import run_web
from tests.api.serving import Server, ServerThread, serving

HOST = "127.0.0.1"
ORIGIN = "http://editor.example:3000"
LIMIT = 60.0  # seconds after which what a test waits for will not come


@attrs.frozen
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What each `data:` line holds; [DONE] as a string."""
        found: list[Any] = []
        for line in self.body.decode().split("\n"):
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                found.append(text if text == "[DONE]" else json.loads(text))
        return found


@attrs.frozen
class Site:
    server: Server
    port: int
    token_file: Path

    @property
    def token(self) -> str:
        return self.token_file.read_text()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.token}",
            "X-Superfluid-CSRF": self.token,
            "Content-Type": "application/json",
        }

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        """One request; `body` is JSON unless it is bytes. With the right headers unless others are given."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, self.headers if headers is None else headers)
        return answer(asked)

    def get(self, path: str) -> Reply:
        return answer(urllib.request.Request(self.url + path))

    def rpc(self, body: Any) -> Any:
        reply = self.post("/web/rpc", body)
        assert reply.status == 200, reply
        return reply.json

    def session(self, text: str | None = "Go.") -> int:
        """A session that waits for a reply."""
        params = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 1}
        number: int = self.rpc({"Create": {"params": params}})["Created"]["session"]
        if text is not None:
            assert "Committed" in self.rpc({"AppendMessage": {"session": number, "role": 1, "text": text}})
        return number

    def websocket(
        self, headers: list[tuple[bytes, bytes]] | None = None, protocols: list[str] | None = None
    ) -> "WebSocket":
        """Open one; with the right credentials unless others are given."""
        if headers is None:
            headers = [(b"authorization", b"Bearer " + self.token.encode()), (b"origin", ORIGIN.encode())]
        return WebSocket(self.port, headers, ["superfluid.v1"] if protocols is None else protocols)


def answer(asked: urllib.request.Request) -> Reply:
    try:
        with urllib.request.urlopen(asked, timeout=LIMIT) as reply:
            return Reply(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


class WebSocket:
    """A blocking WebSocket client on the wsproto package. `refused` is the status of a handshake that was not taken."""

    def __init__(self, port: int, headers: list[tuple[bytes, bytes]], protocols: list[str]) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=LIMIT)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._text = ""
        self.refused: int | None = None
        self.refusal = b""
        request = Request(
            host=f"{HOST}:{port}", target="/web/ws", extra_headers=headers, subprotocols=protocols, extensions=[]
        )
        self.socket.sendall(self._connection.send(request))
        self._events = self._read()
        first = next(self._events)
        self.protocol = first.subprotocol if isinstance(first, AcceptConnection) else None
        if isinstance(first, RejectConnection):
            self.refused = first.status_code
            for event in self._events:
                if isinstance(event, RejectData):
                    self.refusal += event.data
                    if event.body_finished:
                        break

    def _read(self) -> Iterator[Event]:
        while True:
            yield from self._connection.events()
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                return
            if not data:
                return
            self._connection.receive_data(data)

    def send(self, *values: Any) -> None:
        """Requests as JSON text frames; bytes go as they are."""
        events = [BytesMessage(v) if isinstance(v, bytes) else TextMessage(json.dumps(v)) for v in values]
        self.socket.sendall(b"".join(map(self._connection.send, events)))

    def receive(self) -> Any:
        """The next reply; none when the server has closed."""
        for event in self._events:
            if isinstance(event, Message):
                assert isinstance(event, TextMessage)
                self._text += event.data
                if event.message_finished:
                    text, self._text = self._text, ""
                    return json.loads(text)
            elif isinstance(event, CloseConnection):
                return None
        return None

    def until(self, name: str) -> list[Any]:
        """Replies up to and with the first of that name."""
        found: list[Any] = []
        while not found or name not in found[-1]:
            found.append(self.receive())
            assert found[-1] is not None, f"closed before {name}"
        return found

    def ask(self, value: Any) -> Any:
        self.send(value)
        return self.receive()

    def close(self) -> int | None:
        """Close, and the code of the answering close."""
        self.socket.sendall(self._connection.send(CloseConnection(code=1000)))
        return self.closed()

    def closed(self) -> int | None:
        """The code of the server's close."""
        for event in self._events:
            if isinstance(event, CloseConnection):
                return event.code
        return None


@asynccontextmanager
async def on_web(home: Path, model: Path, **wishes: Any) -> AsyncIterator[Site]:
    """Serve `model`; its sessions, token and socket are in `home`."""
    async with serving(home, model, **wishes) as server, trio.open_nursery() as nursery:
        token_file = home / "sessions" / TOKEN_FILE
        port = await nursery.start(run_web, server.daemon, HOST, 0, token_file, [ORIGIN])
        yield Site(server, port, token_file)
        nursery.cancel_scope.cancel()


class SiteThread(ServerThread):
    """A site on a trio loop of its own, for blocking clients."""

    site: Site

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with on_web(self._home, self._model) as self.site:
            self.server = self.site.server
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Site:
        self.start()
        return self.site

    def __exit__(self, *error: object) -> None:
        self.stop()


def mode(path: Path) -> int:
    return os.stat(path).st_mode & 0o777
