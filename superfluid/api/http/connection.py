"""A connection of the HTTP server: it ends with its client, and a streamed answer may write to it straight."""

import contextlib
import os
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper

from superfluid.api.http.departures import Departures
from superfluid.codec.channels import Plain
from superfluid.link.relay import TextOut

READ_BYTES = 1 << 16
CONNECTION = "connection"  # of a request's ASGI state: what it came on


class Connection(TCPServer):  # type: ignore[misc]
    """A connection that ends when its client has left.

    Once the client's end of stream was read, the server would still wait out its idle timer before it closes: with
    clients that make a connection per request, descriptors would run out.

    A response in progress may be written with `write` by whoever makes it, without a pass through the event loop and
    the layers above; or by the text out that it is lent to, on a thread, until anything else is to be sent. HTTP/1
    only, and never while the layers themselves send.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: dict[str, Any],
        departures: Departures,
        stream: trio.SocketStream,
    ) -> None:
        super().__init__(app, config, context, {**state, CONNECTION: self}, stream)
        self._departures = departures
        self._handling = trio.CancelScope()
        self._left = False
        self._unsent = b""  # the end of what was written, which the socket did not take
        self._lent: TextOut | None = None

    async def _read_data(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                data = await self.stream.receive_some(READ_BYTES)
                if not await self._handle(bytes(data)) or not data:
                    break
        await self.protocol.handle(Closed())
        self._left = True
        await self.idle_task.stop()

    async def _handle(self, data: bytes) -> bool:
        """Give the layers what was read; false when the client left meanwhile.

        With bytes behind a request this takes until that is answered, and the end of the stream is not read.
        """
        self._departures.watch(self)
        try:
            with trio.CancelScope() as self._handling:
                await self.protocol.handle(RawData(data))
                return True
        finally:
            self._departures.forget(self)
        return False

    @property
    def descriptor(self) -> int:
        stream = self.stream if isinstance(self.stream, trio.SocketStream) else self.stream.transport_stream
        number: int = stream.socket.fileno()
        return number

    def leave(self) -> None:
        """End it: its client is gone, and its reader waits for an answer that nobody takes."""
        self._handling.cancel()

    async def protocol_send(self, event: Event) -> None:
        self._take_back()
        if self._left and isinstance(event, Updated):
            return  # the timer is for the next request, which will not come
        if self._unsent and isinstance(event, RawData):
            event, self._unsent = RawData(self._unsent + event.data), b""
        await super().protocol_send(event)

    async def _close(self) -> None:
        self._take_back()
        await super()._close()

    async def _initiate_server_close(self) -> None:
        self._take_back()
        await super()._initiate_server_close()

    # ---- straight to the socket

    @property
    def writable(self) -> bool:
        """Whether `write` may be called: the body of a response is due, and nothing waits to be sent."""
        http = self._http
        return (
            http is not None
            and http.our_state is h11.SEND_BODY
            and not self._unsent
            and not self.send_lock.locked()
            and isinstance(self.stream, trio.SocketStream)
        )

    def write(self, body: bytes) -> bool:
        """Send a part of the response's body; false when not all of it was taken, and `flush` sends the rest.

        That the client is gone shows in `flush`.
        """
        http = self._http
        assert http is not None
        data: bytes = http.send(h11.Data(data=body))
        self._take_back()
        if self._unsent:
            self._unsent += data
            return False
        try:
            sent = os.write(self.descriptor, data)
        except OSError:
            sent = 0
        self._unsent = data[sent:]
        return sent == len(data)

    def text_out(self, plain: Plain, lead: bytes, tail: bytes, pace: float) -> TextOut | None:
        """A text out for the response in progress, whose chunks begin and end so; none where a body has no chunks."""
        http = self._http
        if http is None or http.their_http_version != b"1.1":
            return None
        table = plain.table
        return TextOut(self.descriptor, table.data, table.offsets, plain.special, lead, tail, pace)

    def lend(self, text: TextOut) -> bool:
        """Let a text out of this response write, until anything else is to be sent; false when that is now."""
        self._take_back()
        if not self.writable:
            return False
        self._lent = text
        text.open()
        return True

    def _take_back(self) -> None:
        if self._lent is not None:
            lent, self._lent = self._lent, None
            self._unsent += lent.close()

    async def flush(self) -> None:
        """Send what `write` left over."""
        await self.protocol_send(RawData(b""))

    @property
    def _http(self) -> h11.Connection | None:
        protocol = self.protocol.protocol
        if isinstance(protocol, H11Protocol) and isinstance(protocol.connection, h11.Connection):
            return protocol.connection
        return None
