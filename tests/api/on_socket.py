"""What tests of the session socket share: connections, and what they read of them."""

from collections.abc import Callable
from typing import Any

import trio

from superfluid.client.trio_client import AsyncConnection, AsyncSession
from superfluid.link import session_api as api
from tests.api.serving import Server

Served = Callable[[str], Server]
SOON = 30.0  # seconds; a test that waits this long has failed


async def raw(server: Server) -> trio.SocketStream:
    return await trio.open_unix_socket(server.path)


async def read_all(stream: trio.SocketStream) -> bytes:
    """Everything until the server closes."""
    data = b""
    with trio.fail_after(SOON):
        while True:
            try:
                piece = await stream.receive_some(65536)
            except trio.BrokenResourceError:  # closed with bytes of ours unread
                return data
            if not piece:
                return data
            data += piece


async def lives(server: Server) -> None:
    async with server.client() as client:
        with trio.fail_after(SOON):
            await client.session_ids()


async def ready(server: Server, text: str = "Go.") -> AsyncSession:
    """A session that waits for a reply."""
    session = await server.client().session()
    await session.user(text)
    return session


async def receive(connection: AsyncConnection) -> api.Response:
    with trio.fail_after(SOON):
        response = await connection.receive()
    assert response is not None, "the server closed the connection"
    return response


async def receive_until(connection: AsyncConnection, kind: type[Any]) -> list[api.Response]:
    """Responses up to and with the first of a kind."""
    found: list[api.Response] = []
    while not found or not isinstance(found[-1], kind):
        found.append(await receive(connection))
    return found


async def quiet(session: AsyncSession) -> None:
    """Until nothing runs on the session: its last record may be there a little earlier."""
    with trio.fail_after(SOON):
        while (await session.inspect()).tier == api.Resident():
            pass
