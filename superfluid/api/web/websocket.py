"""GET /web/ws: a connection of the session API whose requests and replies are JSON frames."""

from collections import OrderedDict, deque
from collections.abc import Callable

import orjson
import trio

from superfluid.api.http.requests import Message, Receive, Scope, Send
from superfluid.api.session_api import Carry, Connection
from superfluid.api.web.checks import Checks, WebRefusal
from superfluid.daemon.daemon import Daemon
from superfluid.link import postcard, session_api as api
from superfluid.link.events import Event

MOST_WAITING = 32  # requests that wait for their turn
MOST_WAITING_BYTES = 64 * 1024 * 1024  # of those requests; a single one passes alone
MOST_UNSENT = 16 * 1024 * 1024  # bytes of replies on their way; a single larger one passes alone
REMEMBERED = 64  # events whose JSON is kept: a commit brings a few
LOOK = 1.0  # seconds between looks whether a client that is not read is still there
GOING_AWAY = 1001  # close code

Asked = api.Request | str


class Queue:
    """Things in order, up to a number and a number of bytes; whoever puts in more waits. One that is larger than all
    the room passes alone. What is taken out counts until it is `done`."""

    def __init__(self, most: int | None, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._items: deque[tuple[Asked, int]] = deque()
        self._count = self._bytes = 0
        self._turn = trio.Lock()
        self._changed = trio.Event()

    def full(self, size: int) -> bool:
        """Whether `size` bytes more have no room."""
        return self._count > 0 and (
            (self._most is not None and self._count >= self._most) or self._bytes + size > self._most_bytes
        )

    async def put(self, item: Asked, size: int) -> None:
        async with self._turn:
            while self.full(size):
                await self._changed.wait()
            self._items.append((item, size))
            self._count += 1
            self._bytes += size
            self._change()

    async def get(self) -> tuple[Asked, int]:
        while not self._items:
            await self._changed.wait()
        return self._items.popleft()

    async def empty(self) -> None:
        """Wait until everything that was put in is done."""
        while self._count:
            await self._changed.wait()

    def done(self, size: int) -> None:
        self._count -= 1
        self._bytes -= size
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Events:
    """The JSON of events that many subscriptions are sent at about the same time: made once."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, tuple[Event, str]] = OrderedDict()  # an event held here keeps its id its own

    def text(self, event: Event) -> str:
        found = self._texts.get(id(event))
        if found is None:
            found = self._texts[id(event)] = event, api.json_text(event).decode()
            if len(self._texts) > REMEMBERED:
                self._texts.popitem(last=False)
        return found[1]

    async def reply(self, response: api.Response) -> str:
        """The text frame of a response; of a long one it is made off the event loop."""
        if api.is_long(response):
            return await trio.to_thread.run_sync(lambda: api.json_text(response).decode())
        if isinstance(response, api.SubEventResponse):
            return f'{{"SubEvent":{{"sub":{response.sub},"event":{self.text(response.event)}}}}}'
        return api.json_text(response).decode()


async def refuse(send: Send, error: WebRefusal) -> None:
    """Answer a handshake with a refusal."""
    body = orjson.dumps({"Err": {"message": error.message}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def serve_websocket(
    daemon: Daemon,
    checks: Checks,
    events: Events,
    carry: Carry,
    stopping: trio.Event,
    gone: Callable[[], bool],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Check a handshake and answer the connection's requests in order, until it ends or `stopping` is set.

    `carry` gives its subscriptions their turns. `gone` tells whether the client has left, for when the connection is
    not read.
    """
    await receive()  # websocket.connect
    try:
        protocol = checks.handshake(scope["headers"])
    except WebRefusal as error:
        await refuse(send, error)
        return
    # as a header: of several such headers the server looks at the last only, and refuses to echo another's
    headers = [] if protocol is None else [(b"Sec-WebSocket-Protocol", protocol.encode())]
    await send({"type": "websocket.accept", "headers": headers})
    requests = Queue(MOST_WAITING, MOST_WAITING_BYTES)
    replies = Queue(None, MOST_UNSENT)

    async with trio.open_nursery() as nursery:

        async def reply(*responses: api.Response) -> None:
            for response in responses:
                text = await events.reply(response)
                await replies.put(text, len(text))

        async def read() -> None:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    break
                asked, size = read_frame(message)
                with trio.CancelScope() as waiting:
                    while not waiting.cancel_called:
                        with trio.move_on_after(LOOK):
                            await requests.put(asked, size)
                            break
                        if gone():
                            waiting.cancel()
                if waiting.cancel_called:
                    break
            nursery.cancel_scope.cancel()  # so is what it generates or follows

        async def write() -> None:
            while True:
                text, size = await replies.get()
                await send({"type": "websocket.send", "text": text})
                replies.done(size)

        async def stop() -> None:
            await stopping.wait()
            await connection.stop()
            await replies.empty()
            await send({"type": "websocket.close", "code": GOING_AWAY, "reason": "the server stops"})
            nursery.cancel_scope.cancel()

        connection = Connection(daemon, nursery, reply, carry=carry)
        nursery.start_soon(read, name="web-requests")
        nursery.start_soon(write, name="web-replies")
        nursery.start_soon(stop, name="web-stop")
        while True:
            asked, size = await requests.get()
            if isinstance(asked, str):
                await reply(api.ErrResponse(asked))
            else:
                await connection.handle(asked)
            requests.done(size)


def read_frame(message: Message) -> tuple[Asked, int]:
    """The request of a frame, or why it is none, and its size in bytes."""
    data = message["bytes"] if message.get("bytes") is not None else message["text"].encode()
    try:
        return postcard.from_json(api.Request, orjson.loads(data)), len(data)
    except ValueError as error:
        return f"invalid request frame: {error}", len(data)
