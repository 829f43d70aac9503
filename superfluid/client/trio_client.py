"""The client for trio users: the operations of the blocking one, awaited."""

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import attrs
import trio

from superfluid.client import operations
from superfluid.client.address import default_home, default_socket
from superfluid.client.client import KEPT, READ_BYTES, at_rest
from superfluid.client.errors import ClientError, ConnectionLost, NothingInFlight, NotReached
from superfluid.client.frames import SocketWire
from superfluid.client.methods import runs
from superfluid.client.operations import SessionRef, Steps, Tool
from superfluid.client.turns import Chunk, FollowReader, Reply, TurnReader
from superfluid.client.web import Site
from superfluid.client.wire import Wire, answers
from superfluid.link import session_api as api
from superfluid.link.events import Event, GenParams

P = ParamSpec("P")
T = TypeVar("T")


class AsyncConnection:
    """One connection to a server."""

    def __init__(self, stream: trio.SocketStream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire
        self._ended = False

    @classmethod
    async def open(cls, path: Path) -> "AsyncConnection":
        """Over the session socket at `path`. Raises NotReached when no server is there."""
        try:
            return cls(await trio.open_unix_socket(path), SocketWire())
        except OSError as error:
            raise NotReached(f"no server answers at {path}: {error.strerror or error}") from None

    async def send(self, *requests: api.Request) -> None:
        """Ask; several are answered in order. Raises ConnectionLost, Misuse."""
        self._wire.ask(*requests)
        try:
            await self._stream.send_all(self._wire.outgoing())
        except trio.BrokenResourceError as error:
            raise ConnectionLost("the server closed the connection") from error

    async def receive(self) -> api.Response | None:
        """The next response, whatever it is; none when the server has closed the connection."""
        while True:
            response = self._wire.next()
            if response is not None or self._ended:
                return response
            try:
                if data := self._wire.outgoing():
                    await self._stream.send_all(data)
                data = bytes(await self._stream.receive_some(READ_BYTES))
            except trio.BrokenResourceError:
                data = b""
            self._ended = not data
            self._wire.feed(data)

    async def ask(self, request: api.Request) -> api.Response:
        """The answer of a request; Deltas and subscriptions' messages on the way are left out.

        Raises Refused, ConnectionLost, UnexpectedReply.
        """
        await self.send(request)
        while True:
            response = await self.receive()
            if response is None:
                name = type(request).variant_name
                raise ConnectionLost(f"the server closed the connection before it answered {name}")
            if answers(response):
                return response

    @property
    def stale(self) -> bool:
        """Whether it cannot be asked again: closed by the server, or with bytes nobody asked for."""
        return self._ended or not (self._wire.idle and at_rest(self._stream.socket.fileno()))

    async def aclose(self) -> None:
        """Let it go; a generation that runs over it is cancelled."""
        await trio.aclose_forcefully(self._stream)


def _of_client(operation: Callable[P, Steps[T]]) -> "Callable[Concatenate[AsyncClient, P], Awaitable[T]]":
    @runs(operation)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(*args, **kwargs))

    return method


class AsyncClient:
    """A running server, over its session socket, for the tasks of one trio run. As Client in all else."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_socket() if path is None else Path(path)
        self._kept: list[AsyncConnection] = []

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let the connections go; the client opens new ones when it is used again."""
        while self._kept:
            await self._kept.pop().aclose()

    async def connect(self, *, following: bool = False) -> AsyncConnection:
        """A connection of one's own; the caller closes it. `following`: one that takes subscriptions (here all do)."""
        return await AsyncConnection.open(self.path)

    async def call(self, request: api.Request) -> api.Response:
        """Any request, and its answer."""
        return await self._run(operations.call(request))

    async def session(
        self,
        sampling: GenParams | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        parent: int | None = None,
    ) -> "AsyncSession":
        """A new session; with a system text or tools (JSON objects, or their text) its prompt begins with them."""
        return await self._run(operations.new_session(self._session, sampling, system, tools, parent))

    def get(self, session: int) -> "AsyncSession":
        """A session by its id. Nothing is asked before it is used."""
        return AsyncSession(session, client=self)

    session_ids = _of_client(operations.session_ids)
    sessions = _of_client(operations.sessions)
    tree = _of_client(operations.tree)
    metrics = _of_client(operations.metrics)
    put_media = _of_client(operations.put_media)
    gc_media = _of_client(operations.gc_media)
    complete = _of_client(operations.complete)
    set_background_rate = _of_client(operations.set_background_rate)
    set_log_level = _of_client(operations.set_log_level)

    def _session(self, session: int, params: GenParams | None = None) -> "AsyncSession":
        return AsyncSession(session, params=params, client=self)

    async def _run(self, steps: Steps[T]) -> T:
        connection = await self._take()
        try:
            try:
                request = next(steps)
                while True:
                    request = steps.send(await connection.ask(request))
            except StopIteration as end:
                result: T = end.value
        except operations.KEEPS_CONNECTION:
            await self._give_back(connection)
            raise
        except BaseException:
            await connection.aclose()
            raise
        await self._give_back(connection)
        return result

    async def _take(self) -> AsyncConnection:
        while self._kept:
            connection = self._kept.pop()
            if not connection.stale:
                return connection
            await connection.aclose()
        return await self.connect()

    async def _give_back(self, connection: AsyncConnection) -> None:
        if len(self._kept) < KEPT:
            self._kept.append(connection)
        else:
            await connection.aclose()


def _awaited(
    operation: Callable[Concatenate[SessionRef, P], Steps[T]],
) -> "Callable[Concatenate[AsyncSession, P], Awaitable[T]]":
    @runs(operation)
    async def method(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._client._run(operation(self, *args, **kwargs))

    return method


def _branching(
    operation: Callable[Concatenate[SessionRef, P], Steps[int]],
) -> "Callable[Concatenate[AsyncSession, P], Awaitable[AsyncSession]]":
    @runs(operation, "AsyncSession")
    async def method(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> "AsyncSession":
        return self._client._session(await self._client._run(operation(self, *args, **kwargs)))

    return method


@attrs.define(eq=False)
class AsyncSession(SessionRef):
    """A session of the server; `id` outlives the client, the connection and the server. Made by AsyncClient."""

    _client: AsyncClient = attrs.field(kw_only=True, repr=False)

    events = _awaited(operations.events)
    messages = _awaited(operations.messages)
    inspect = _awaited(operations.inspect)
    sampling = _awaited(operations.sampling)

    append = _awaited(operations.append)
    append_block = _awaited(operations.append_block)
    append_image = _awaited(operations.append_image)
    system = _awaited(operations.system)
    user = _awaited(operations.user)
    assistant = _awaited(operations.assistant)

    open_tool_calls = _awaited(operations.open_tool_calls)
    ledger = _awaited(operations.ledger)
    tool_result = _awaited(operations.tool_result)
    tool_outcome = _awaited(operations.tool_outcome)
    request_tool_cancel = _awaited(operations.request_tool_cancel)
    request_permission = _awaited(operations.request_permission)
    respond_permission = _awaited(operations.respond_permission)

    generate = _awaited(operations.generate)
    cancel = _awaited(operations.cancel)

    fork = _branching(operations.fork)
    fork_after = _branching(operations.fork_after)
    edit = _branching(operations.edit)
    rebase = _branching(operations.rebase)
    trim = _branching(operations.trim)

    set_meta = _awaited(operations.set_meta)
    set_qos = _awaited(operations.set_qos)
    pin = _awaited(operations.pin)
    purge = _awaited(operations.purge)

    def stream(self, max_tokens: int | None = None) -> "AsyncStream":
        """Generate a turn and take its text as it is made, inside `async with session.stream() as stream`.

        Without `max_tokens` it ends when the turn does or the window is full.
        """
        return AsyncStream(self, TurnReader(self.id, max_tokens))

    def follow(self, cursor: int = 0, *, previews: bool = False) -> "AsyncFollowing":
        """The session's events from `cursor` on as they are committed, whoever causes them.

        `async with session.follow() as following: async for item in following: ...`. With `previews` also Chunks, text
        ahead of its commit: all of them together are the committed text.
        """
        return AsyncFollowing(self, FollowReader(self.id, cursor, previews))


class AsyncStream:
    """A generation as it runs: `async for` its chunks inside `async with`; `reply` is there when it has ended.

    Leaving the `async with` early cancels the generation and waits for its end.
    """

    def __init__(self, session: AsyncSession, reader: TurnReader) -> None:
        self._session = session
        self._reader = reader
        self._connection: AsyncConnection | None = None
        self._chunks: list[Chunk] = []  # that one response brought, last first
        self._begun = False

    @property
    def reply(self) -> Reply | None:
        """The whole reply; none before the end."""
        return self._reader.reply

    async def cancel(self) -> None:
        """Stop the generation; the iteration goes on to its end. Nothing happens when it has ended."""
        with contextlib.suppress(NothingInFlight):
            await self._session.cancel()

    async def aclose(self) -> None:
        """Cancel what still runs, and wait until the session can be used again. Cancelled, it does not wait."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if self._reader.reply is None:
                await self.cancel()
                while self._reader.reply is None:
                    for _ in self._reader.feed(await connection.receive()):
                        pass
        except ClientError:
            pass  # the connection is gone or the generation failed: either way it runs no more
        finally:
            await connection.aclose()

    async def __aenter__(self) -> "AsyncStream":
        if self._begun:
            raise RuntimeError("a stream is entered once; call stream again")
        self._begun = True
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        if self._connection is None and self._reader.reply is None:
            raise RuntimeError("a stream is iterated inside its `async with`")
        while not self._chunks:
            if self._reader.reply is not None or self._connection is None:
                await self.aclose()
                raise StopAsyncIteration
            try:
                self._chunks = list(self._reader.feed(await self._connection.receive()))[::-1]
            except ClientError:
                connection, self._connection = self._connection, None
                await connection.aclose()
                raise
        return self._chunks.pop()

    async def _start(self) -> None:
        self._connection = await self._session._client.connect()
        try:
            await self._connection.send(*self._reader.requests)
        except BaseException:
            await self._connection.aclose()
            raise


class AsyncFollowing:
    """A session's events as they are committed, `async for` inside `async with`. It ends when the server ends it, or
    after `stop`."""

    def __init__(self, session: AsyncSession, reader: FollowReader) -> None:
        self._session = session
        self._reader = reader
        self._connection: AsyncConnection | None = None
        self._items: list[Event | Chunk] = []  # that one response brought, last first
        self._begun = False

    @property
    def reason(self) -> str | None:
        """Why it ended: `unsubscribed`, `lagged`, `purged` or `publisher closed`; none while it goes on."""
        return self._reader.reason

    async def stop(self) -> None:
        """Ask for no more; the iteration goes on with what is under way, and ends."""
        if self._connection is not None and (request := self._reader.stop()) is not None:
            await self._connection.send(request)

    async def aclose(self) -> None:
        """Let it go at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def __aenter__(self) -> "AsyncFollowing":
        if self._begun:
            raise RuntimeError("a session is followed once; call follow again")
        self._begun = True
        self._connection = await self._session._client.connect(following=True)
        try:
            await self._connection.send(self._reader.request)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> "AsyncFollowing":
        return self

    async def __anext__(self) -> Event | Chunk:
        while not self._items:
            if self._reader.reason is not None:
                raise StopAsyncIteration
            if self._connection is None:
                raise RuntimeError("a session is followed inside the `async with`")
            self._items = list(self._reader.feed(await self._connection.receive()))[::-1]
        return self._items.pop()


class AsyncWebClient(AsyncClient):
    """A running server, at the `api-web` address that it says when it starts, for trio. Arguments as for WebClient."""

    def __init__(self, url: str, token: str | os.PathLike[str] | None = None, *, origin: str | None = None) -> None:
        super().__init__(default_home())
        self.url = url
        self._site = Site.of(url, token, origin)

    async def connect(self, *, following: bool = False) -> AsyncConnection:
        """A connection of one's own; the caller closes it. `following`: a WebSocket, which takes subscriptions."""
        wire = await trio.to_thread.run_sync(self._site.wire, following)
        address = self._site.address
        try:
            return AsyncConnection(await trio.open_tcp_stream(address.host, address.port), wire)
        except OSError as error:
            raise self._site.not_reached(error) from None
