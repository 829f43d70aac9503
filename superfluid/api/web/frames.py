"""WebSocket frames below the requests: a client that breaks the protocol is told with a close code (RFC 6455, 7.4.1).

The server under us ends such a connection without a close frame, and keeps one open whose message is too big.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import hypercorn.protocol.h11
import trio
from hypercorn.protocol.events import Body, Data, Event, Request, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, WSStream
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping, TextMessage
from wsproto.frame_protocol import CloseReason

MOST_FRAME = 16 * 1024 * 1024  # bytes of one frame; a longer message comes in several
PIECE = 1 << 20  # characters of one frame that is sent
QUIET = 0.25  # seconds without a byte after which a refused client has heard, and its connection ends
LINGER = 5.0  # seconds that one may go on sending: closed before, the system would take our close frame back

Put = Callable[[Any], Awaitable[None]]


class Stream(WSStream):  # type: ignore[misc]
    """One WebSocket. Once it is refused, its application is over and what still comes is dropped."""

    app_put: Any  # a Put, once there is an application

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refused = self._over = self._heard = False
        self._frame = self._message = 0  # bytes so far
        self._puts: set[trio.CancelScope] = set()

    async def handle(self, event: Event) -> None:
        if self._refused and isinstance(event, Body | Data):
            self._heard = True
            return
        await super().handle(event)
        if isinstance(event, Request):
            put: Put | None = self.app_put
            self.app_put = None if put is None else partial(self._put, put)

    async def _put(self, put: Put, message: Any) -> None:
        """Hand a message to the application; one that has ended takes none, and is not waited for."""
        if self._over:
            return
        with trio.CancelScope() as scope:
            self._puts.add(scope)
            try:
                await put(message)
            finally:
                self._puts.discard(scope)

    async def app_send(self, message: Any) -> None:
        if message is None:
            self._over = True
            for scope in self._puts:
                scope.cancel()
        if self._refused:
            return
        if (
            message is not None
            and len(message.get("text") or "") > PIECE
            and self.state is ASGIWebsocketState.CONNECTED
        ):
            await self._send_in_pieces(message["text"])
        else:
            await super().app_send(message)

    async def _send_in_pieces(self, text: str) -> None:
        """A long message as several frames, so that other connections have their turns between them."""
        for at in range(0, len(text), PIECE):
            if self.closed or self._refused:
                return
            piece = TextMessage(text[at : at + PIECE], message_finished=at + PIECE >= len(text))
            await self._send_wsproto_event(piece)

    async def _handle_events(self) -> None:
        for event in self.connection.events():
            if isinstance(event, Message):
                size = size_of(event)
                self._frame += size
                self._message += size
                if self._frame > MOST_FRAME:
                    await self._refuse(CloseReason.MESSAGE_TOO_BIG, f"a frame has at most {MOST_FRAME} bytes")
                    return
                if self._message > self.buffer.max_length:
                    why = f"a message has at most {self.buffer.max_length} bytes"
                    await self._refuse(CloseReason.MESSAGE_TOO_BIG, why)
                    return
                self.buffer.extend(event)
                if event.frame_finished:
                    self._frame = 0
                if event.message_finished:
                    self._message = 0
                    message = self.buffer.to_message()
                    self.buffer.clear()
                    await self.app_put(message)
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                if self.connection.state is ConnectionState.OPEN:  # no close came, but what no frame may be
                    await self._refuse(event.code, event.reason)
                    return
                if self.connection.state is ConnectionState.REMOTE_CLOSING:
                    await self._send_wsproto_event(event.response())
                await self.send(StreamClosed(stream_id=self.stream_id))

    async def _refuse(self, code: int, reason: str | None) -> None:
        self._refused = True
        self.buffer.clear()
        await self._send_wsproto_event(CloseConnection(code=code, reason=reason))
        self.task_group.spawn(self._end)
        await self.app_put({"type": "websocket.disconnect", "code": code})

    async def _end(self) -> None:
        """End the connection once the client has had the time to read why."""
        with trio.move_on_after(LINGER):
            self._heard = True
            while self._heard and not self.closed:
                self._heard = False
                await trio.sleep(QUIET)
        if not self.closed:
            await self.send(StreamClosed(stream_id=self.stream_id))


def size_of(event: Message[Any]) -> int:
    """Bytes of a piece of a message."""
    data = event.data
    return len(data.encode()) if isinstance(event, TextMessage) and not data.isascii() else len(data)


def answer_violations() -> None:
    """Have the server make its WebSockets of `Stream`; it knows their class by a name alone."""
    hypercorn.protocol.h11.WSStream = Stream
