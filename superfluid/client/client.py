"""The blocking client: sessions of a running server, over its socket."""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import attrs

from superfluid.client import operations
from superfluid.client.address import default_socket
from superfluid.client.errors import ClientError, ConnectionLost, NothingInFlight, NotReached
from superfluid.client.frames import SocketWire
from superfluid.client.methods import runs
from superfluid.client.operations import SessionRef, Steps, Tool
from superfluid.client.turns import Chunk, FollowReader, Reply, TurnReader
from superfluid.client.wire import Wire, answers
from superfluid.link import session_api as api
from superfluid.link.events import Event, GenParams

READ_BYTES = 64 * 1024
KEPT = 4  # connections that wait for the next request

P = ParamSpec("P")
T = TypeVar("T")


class Connection:
    """One connection to a server, blocking."""

    def __init__(self, connected: socket.socket, wire: Wire) -> None:
        self._socket = connected
        self._wire = wire
        self._ended = False

    @classmethod
    def open(cls, path: Path) -> "Connection":
        """Over the session socket at `path`. Raises NotReached when no server is there."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(os.fspath(path))
        except OSError as error:
            connected.close()
            raise NotReached(f"no server answers at {path}: {error.strerror or error}") from None
        return cls(connected, SocketWire())

    def send(self, *requests: api.Request) -> None:
        """Ask; several are answered in order. Raises ConnectionLost, Misuse."""
        self._wire.ask(*requests)
        try:
            self._socket.sendall(self._wire.outgoing())
        except OSError as error:
            raise ConnectionLost(f"the server closed the connection: {error.strerror or error}") from error

    def receive(self) -> api.Response | None:
        """The next response, whatever it is; none when the server has closed the connection."""
        while True:
            response = self._wire.next()
            if response is not None or self._ended:
                return response
            try:
                self._socket.sendall(self._wire.outgoing())
                data = self._socket.recv(READ_BYTES)
            except ConnectionError:
                data = b""
            self._ended = not data
            self._wire.feed(data)

    def ask(self, request: api.Request) -> api.Response:
        """The answer of a request; Deltas and subscriptions' messages on the way are left out.

        Raises Refused, ConnectionLost, UnexpectedReply.
        """
        self.send(request)
        while True:
            response = self.receive()
            if response is None:
                raise ConnectionLost(f"the server closed the connection before it answered {_name(request)}")
            if answers(response):
                return response

    @property
    def stale(self) -> bool:
        """Whether it cannot be asked again: closed by the server, or with bytes nobody asked for."""
        return self._ended or not (self._wire.idle and at_rest(self._socket.fileno()))

    def close(self) -> None:
        """Let it go; a generation that runs over it is cancelled."""
        self._socket.close()


def at_rest(descriptor: int) -> bool:
    """Whether a connected socket is open and has nothing to read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)


def _name(request: api.Request) -> str:
    return type(request).variant_name


def _of_client(operation: Callable[P, Steps[T]]) -> "Callable[Concatenate[Client, P], T]":
    @runs(operation)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(*args, **kwargs))

    return method


class Client:
    """A running server, over its session socket (`default_socket()` when none is named). Threads may share it.

    Every call takes a connection of its own for as long as it lasts, so that one can cancel what another runs.
    Everything raises ClientError: NotReached, ConnectionLost, UnexpectedReply, the Refused of what was asked, or
    Misuse (a ValueError too) for what cannot be sent: nothing was sent then, and the client goes on.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_socket() if path is None else Path(path)
        self._kept: list[Connection] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go; the client opens new ones when it is used again."""
        while self._kept:
            self._kept.pop().close()

    def connect(self, *, following: bool = False) -> Connection:
        """A connection of one's own; the caller closes it. `following`: one that takes subscriptions (here all do)."""
        return Connection.open(self.path)

    def call(self, request: api.Request) -> api.Response:
        """Any request, and its answer."""
        return self._run(operations.call(request))

    def session(
        self,
        sampling: GenParams | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        parent: int | None = None,
    ) -> "Session":
        """A new session; with a system text or tools (JSON objects, or their text) its prompt begins with them."""
        return self._run(operations.new_session(self._session, sampling, system, tools, parent))

    def get(self, session: int) -> "Session":
        """A session by its id. Nothing is asked before it is used."""
        return Session(session, client=self)

    session_ids = _of_client(operations.session_ids)
    sessions = _of_client(operations.sessions)
    tree = _of_client(operations.tree)
    metrics = _of_client(operations.metrics)
    put_media = _of_client(operations.put_media)
    gc_media = _of_client(operations.gc_media)
    complete = _of_client(operations.complete)
    set_background_rate = _of_client(operations.set_background_rate)
    set_log_level = _of_client(operations.set_log_level)

    def _session(self, session: int, params: GenParams | None = None) -> "Session":
        return Session(session, params=params, client=self)

    def _run(self, steps: Steps[T]) -> T:
        connection = self._take()
        try:
            try:
                request = next(steps)
                while True:
                    request = steps.send(connection.ask(request))
            except StopIteration as end:
                result: T = end.value
        except operations.KEEPS_CONNECTION:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> Connection:
        while self._kept:
            connection = self._kept.pop()
            if not connection.stale:
                return connection
            connection.close()
        return self.connect()

    def _give_back(self, connection: Connection) -> None:
        if len(self._kept) < KEPT:
            self._kept.append(connection)
        else:
            connection.close()


def _blocking(operation: Callable[Concatenate[SessionRef, P], Steps[T]]) -> "Callable[Concatenate[Session, P], T]":
    @runs(operation)
    def method(self: "Session", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client._run(operation(self, *args, **kwargs))

    return method


def _branching(
    operation: Callable[Concatenate[SessionRef, P], Steps[int]],
) -> "Callable[Concatenate[Session, P], Session]":
    @runs(operation, "Session")
    def method(self: "Session", /, *args: P.args, **kwargs: P.kwargs) -> "Session":
        return self._client._session(self._client._run(operation(self, *args, **kwargs)))

    return method


@attrs.define(eq=False)
class Session(SessionRef):
    """A session of the server; `id` outlives the client, the connection and the server. Made by Client."""

    _client: Client = attrs.field(kw_only=True, repr=False)

    events = _blocking(operations.events)
    messages = _blocking(operations.messages)
    inspect = _blocking(operations.inspect)
    sampling = _blocking(operations.sampling)

    append = _blocking(operations.append)
    append_block = _blocking(operations.append_block)
    append_image = _blocking(operations.append_image)
    system = _blocking(operations.system)
    user = _blocking(operations.user)
    assistant = _blocking(operations.assistant)

    open_tool_calls = _blocking(operations.open_tool_calls)
    ledger = _blocking(operations.ledger)
    tool_result = _blocking(operations.tool_result)
    tool_outcome = _blocking(operations.tool_outcome)
    request_tool_cancel = _blocking(operations.request_tool_cancel)
    request_permission = _blocking(operations.request_permission)
    respond_permission = _blocking(operations.respond_permission)

    generate = _blocking(operations.generate)
    cancel = _blocking(operations.cancel)

    fork = _branching(operations.fork)
    fork_after = _branching(operations.fork_after)
    edit = _branching(operations.edit)
    rebase = _branching(operations.rebase)
    trim = _branching(operations.trim)

    set_meta = _blocking(operations.set_meta)
    set_qos = _blocking(operations.set_qos)
    pin = _blocking(operations.pin)
    purge = _blocking(operations.purge)

    def stream(self, max_tokens: int | None = None) -> "Stream":
        """Generate a turn and take its text as it is made: `for chunk in session.stream(): ...`.

        Without `max_tokens` it ends when the turn does or the window is full.
        """
        return Stream(self, TurnReader(self.id, max_tokens))

    def follow(self, cursor: int = 0, *, previews: bool = False) -> "Following":
        """The session's events from `cursor` on as they are committed, whoever causes them: `for item in ...`.

        With `previews` also Chunks, text ahead of its commit: all of them together are the committed text.
        """
        return Following(self, FollowReader(self.id, cursor, previews))


class Stream:
    """A generation as it runs: iterate it once for its chunks; `reply` is there when it has ended.

    Leaving the loop early, or `close`, cancels the generation and waits for its end.
    """

    def __init__(self, session: Session, reader: TurnReader) -> None:
        self._session = session
        self._reader = reader
        self._connection: Connection | None = None
        self._begun = False

    @property
    def reply(self) -> Reply | None:
        """The whole reply; none before the end. After `cancel` and an early end it holds what was committed."""
        return self._reader.reply

    def cancel(self) -> None:
        """Stop the generation; the iteration goes on to its end. Nothing happens when it has ended."""
        with contextlib.suppress(NothingInFlight):
            self._session.cancel()

    def close(self) -> None:
        """Cancel what still runs, and wait until the session can be used again."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if self._reader.reply is None:
                self.cancel()
                while self._reader.reply is None:
                    for _ in self._reader.feed(connection.receive()):
                        pass
        except ClientError:
            pass  # the connection is gone or the generation failed: either way it runs no more
        finally:
            connection.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        if self._begun:
            raise RuntimeError("a stream is iterated once; call stream again")
        self._begun = True
        self._connection = connection = self._session._client.connect()
        try:
            connection.send(*self._reader.requests)
            while self._reader.reply is None:
                yield from self._reader.feed(connection.receive())
        except ClientError:
            connection.close()
            self._connection = None
            raise
        finally:
            self.close()


class Following:
    """A session's events as they are committed: iterate it once. It ends when the server ends it, or after `stop`."""

    def __init__(self, session: Session, reader: FollowReader) -> None:
        self._session = session
        self._reader = reader
        self._connection: Connection | None = None
        self._begun = False

    @property
    def reason(self) -> str | None:
        """Why it ended: `unsubscribed`, `lagged`, `purged` or `publisher closed`; none while it goes on."""
        return self._reader.reason

    def stop(self) -> None:
        """Ask for no more, inside the loop; the iteration goes on with what is under way, and ends."""
        if self._connection is not None and (request := self._reader.stop()) is not None:
            self._connection.send(request)

    def close(self) -> None:
        """Let it go at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> "Following":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event | Chunk]:
        if self._begun:
            raise RuntimeError("a session is followed once; call follow again")
        self._begun = True
        self._connection = connection = self._session._client.connect(following=True)
        try:
            connection.send(self._reader.request)
            while self._reader.reason is None:
                yield from self._reader.feed(connection.receive())
        finally:
            self.close()
