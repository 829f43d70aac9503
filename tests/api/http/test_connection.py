"""Writing a response past the server's layers: over real sockets, with an app that does nothing else."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio

from superfluid.api.http.connection import CONNECTION, Connection
from superfluid.api.http.listener import Listener, listen, serve
from superfluid.codec.channels import Plain
from superfluid.codec.tokenizer import TokenBytes
from superfluid.link.relay import TextOut

HOST = "127.0.0.1"
LIMIT = 60.0
HEAD = {"type": "http.response.start", "status": 200, "headers": []}

Send = Callable[[dict[str, Any]], Awaitable[None]]
Answer = Callable[[Connection, Send], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """The port of a server that answers every request so."""

    async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        if scope["type"] == "http":
            await answer(scope["state"][CONNECTION], send)
        else:
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})

    listener = Listener(listen(HOST, 0))
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, app, listener, shutdown)
        with trio.fail_after(LIMIT):
            yield listener.port
        shutdown.set()


async def connect(port: int, receive_buffer: int | None = None) -> trio.SocketStream:
    wire = trio.socket.socket()
    if receive_buffer is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await wire.connect((HOST, port))
    return trio.SocketStream(wire)


async def body_of(wire: trio.SocketStream, client: h11.Connection) -> bytes:
    """The body of the next response, read as a client does that checks all framing."""
    body = b""
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await wire.receive_some(65536))
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body
        else:
            assert isinstance(event, h11.Response), event


async def ask(wire: trio.SocketStream, client: h11.Connection) -> None:
    request = h11.Request(method="POST", target="/", headers=[("Host", "localhost"), ("Content-Length", "0")])
    await wire.send_all((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))


async def test_what_is_written_stands_in_order_with_what_is_sent() -> None:
    async def answer(connection: Connection, send: Send) -> None:
        assert not connection.writable  # no body is due yet
        await send(HEAD)
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        assert connection.writable
        assert connection.write(b"two ")
        assert connection.write(b"three ")
        await send({"type": "http.response.body", "body": b"four", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not connection.writable

    async with serving(answer) as port, await connect(port) as wire:
        client = h11.Connection(h11.CLIENT)
        for _ in range(2):  # the connection is kept, and fit for the next request
            await ask(wire, client)
            assert await body_of(wire, client) == b"one two three four"
            client.start_next_cycle()


@pytest.mark.parametrize("flushed", [True, False])
async def test_what_a_full_socket_does_not_take_goes_first(flushed: bool) -> None:
    """With a flush, or with what the layers send next."""
    piece = bytes(range(256)) * 256
    counted = 0

    async def answer(connection: Connection, send: Send) -> None:
        nonlocal counted
        await send(HEAD)
        counted = 1
        while connection.write(piece):
            counted += 1
        assert not connection.writable
        reading.set()
        if flushed:
            await connection.flush()
            assert connection.writable
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    reading = trio.Event()
    async with serving(answer) as port, await connect(port, receive_buffer=4096) as wire:
        client = h11.Connection(h11.CLIENT)
        await ask(wire, client)
        await reading.wait()
        assert await body_of(wire, client) == counted * piece + b"end"


async def test_a_client_that_is_gone_shows_in_the_flush() -> None:
    gone, over = trio.Event(), trio.Event()

    async def answer(connection: Connection, send: Send) -> None:
        await send(HEAD)
        await gone.wait()
        while connection.write(b"x" * 65536):  # the first is taken, the reset comes back for it
            await trio.lowlevel.checkpoint()
        await connection.flush()
        over.set()

    async with serving(answer) as port:
        async with await connect(port) as wire:
            await ask(wire, h11.Connection(h11.CLIENT))
            await wire.receive_some(65536)
        gone.set()
        await over.wait()
        async with await connect(port) as other:  # the server goes on
            over = trio.Event()
            await ask(other, client := h11.Connection(h11.CLIENT))
            client.receive_data(await other.receive_some(65536))
            assert isinstance(client.next_event(), h11.Response)


PLAIN = Plain(0, frozenset({1}), TokenBytes([b"a", b"<", b"b" * 30_000]))


async def test_a_text_out_writes_until_anything_else_does() -> None:
    lent: list[TextOut] = []

    async def answer(connection: Connection, send: Send) -> None:
        await send(HEAD)
        text = connection.text_out(PLAIN, b"<", b">", 60.0)
        assert text is not None
        lent.append(text)
        assert connection.lend(text)
        assert text.put([0], 0.0)
        assert text.put([0], 1.0)  # kept back for a minute, unless something comes behind it
        await send({"type": "http.response.body", "body": b"sent ", "more_body": True})
        assert not text.put([0])
        assert connection.lend(text)
        assert text.put([0], 2.0)
        assert connection.write(b"written ")
        assert not text.put([0])
        assert connection.lend(text)
        assert text.put([0, 0], 3.0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not text.put([0])
        assert not connection.lend(text)  # no body is due
        assert text.take() == [0] * 5

    async with serving(answer) as port, await connect(port) as wire:
        client = h11.Connection(h11.CLIENT)
        for _ in range(2):
            await ask(wire, client)
            assert await body_of(wire, client) == b"<a><a>sent <a>written <aa>"
            client.start_next_cycle()
    assert len(lent) == 2


@pytest.mark.parametrize("written", [True, False])
async def test_what_a_text_out_cannot_write_goes_first(written: bool) -> None:
    counted = 0

    async def answer(connection: Connection, send: Send) -> None:
        nonlocal counted
        await send(HEAD)
        text = connection.text_out(PLAIN, b"", b"", 0.0)
        assert text is not None
        assert connection.lend(text)
        while text.put([2]):
            counted += 1
        assert not connection.lend(text)
        if written:
            assert not connection.writable
        reading.set()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    reading = trio.Event()
    async with serving(answer) as port, await connect(port, receive_buffer=4096) as wire:
        client = h11.Connection(h11.CLIENT)
        await ask(wire, client)
        await reading.wait()
        assert await body_of(wire, client) == b"b" * 30_000 * counted + b"end"


async def test_a_connection_that_closes_takes_its_text_out_back() -> None:
    lent: list[TextOut] = []

    async def answer(connection: Connection, send: Send) -> None:
        await send(HEAD)
        text = connection.text_out(PLAIN, b"", b"", 0.0)
        assert text is not None
        assert connection.lend(text)
        lent.append(text)
        raise RuntimeError("half an answer")

    async with serving(answer) as port, await connect(port) as wire:
        await ask(wire, h11.Connection(h11.CLIENT))
        while await wire.receive_some(65536):
            pass
        assert not lent[0].put([0])


async def test_http_1_0_has_no_text_out() -> None:
    seen: list[TextOut | None] = []

    async def answer(connection: Connection, send: Send) -> None:
        await send(HEAD)
        seen.append(connection.text_out(PLAIN, b"", b"", 0.0))
        await send({"type": "http.response.body", "body": b"plain", "more_body": False})

    async with serving(answer) as port, await connect(port) as wire:
        await wire.send_all(b"GET / HTTP/1.0\r\n\r\n")
        body = b""
        while more := await wire.receive_some(65536):
            body += more
    assert body.endswith(b"plain")
    assert seen == [None]


async def test_nothing_is_written_to_http_2() -> None:
    seen: list[bool] = []

    async def answer(connection: Connection, send: Send) -> None:
        await send(HEAD)
        seen.append(connection.writable)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(answer) as port, await connect(port) as wire:
        # prior knowledge: preface, empty settings, and a GET / as headers from the static table
        await wire.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        headers = bytes.fromhex("828684") + b"\x41\x09localhost"
        await wire.send_all(len(headers).to_bytes(3, "big") + bytes.fromhex("010500000001") + headers)
        while not seen:
            assert await wire.receive_some(65536)
    assert seen == [False]
