"""An ASGI app around the app: what a request owns while it is answered, and how its connection ends."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import trio
from quart import request

LINGER = 5.0  # seconds in which a refused request's body is still taken, so that its client gets to read the refusal

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def on_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the current request is over, however it ends; latest first."""
    request.scope["state"]["ends"].callback(callback)


class Requests:
    """Counts and names requests, and sends the message that ends a response whole.

    After that message the server tells the app that the client is gone and then closes the connection; the app
    answers the disconnect by cancelling the very task that is inside that close, which would never send the FIN.
    `answering` is held while a request is answered.
    """

    def __init__(self, app: App, answering: Callable[[], AbstractContextManager[None]]) -> None:
        self._app = app
        self._answering = answering
        self._seen = 0
        self._running = 0
        self._none = trio.Event()

    async def none(self) -> None:
        """Wait until no request is being answered."""
        while self._running:
            self._none = trio.Event()
            await self._none.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # nothing here speaks it: 403
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._seen += 1
        trio.lowlevel.current_task().name = f"request:{self._seen} {scope['method']} {scope['path']}"
        with self.running(), self._answering(), ExitStack() as ends:
            scope["state"]["ends"] = ends
            await Exchange(receive, send).run(self._app, scope)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Held by whoever `none` waits for."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none.set()


class Exchange:
    """One request and its response."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._taken = trio.Event()  # the body is here, or nothing more of it will come
        self._refused = False

    async def run(self, app: App, scope: Scope) -> None:
        await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._taken.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._refused = 400 <= message["status"] != 408
        elif not message.get("more_body", False):
            with trio.CancelScope(shield=True):
                if self._refused:  # to close over what the client still sends would reset the connection
                    with trio.move_on_after(LINGER):
                        await self._taken.wait()
                await self._send(message)
            return
        await self._send(message)
