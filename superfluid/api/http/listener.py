"""The listening socket and the server on it: hypercorn on trio, with what it leaves open closed from outside."""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import hypercorn.config
import trio
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from superfluid.api.http.connection import Connection
from superfluid.api.http.departures import Departures, has_ended

IDLE = 30.0  # seconds for a request's head, and for an idle kept-alive connection
UNREAD = 60.0  # seconds a client may take no byte of its answer
BACKLOG = 1024
MOST_HEAD = 64 * 1024  # bytes of a request's head
GRACE = 1.0  # seconds for the server's own end, once no request is left
DESCRIPTORS = "/dev/fd"  # this process's open descriptors, on Linux and macOS


class CannotListen(OSError):
    """An address cannot be bound; the message names it and says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose accepted connections drop a client that takes no byte for `UNREAD` seconds.

    Raises CannotListen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"{host}:{port}: {error.strerror or error}") from None
    return listener


class Listener:
    """A listening socket that a server takes over; it can stop listening while the server goes on.

    Made of a listening socket, which it takes over. `descriptor` is the server's to close.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self.descriptor = listening.detach()

    def stop(self) -> None:
        """Take no new connections; those that are open go on.

        The server cannot be told this, so the socket goes and an idle one takes its number: the server waits on it
        until it ends.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as idle:
            os.dup2(idle.fileno(), self.descriptor, inheritable=False)

    def drop_connections(self) -> None:
        """End every connection at once. The server shields its writes: a client that reads nothing would outlive a
        cancel by `UNREAD` seconds."""
        for connection in self._connections():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def gone(self, peer: tuple[str, int]) -> bool:
        """Whether the client of that address has ended its connection, also when nobody reads it."""
        for connection in self._connections():
            if connection.getpeername()[:2] == peer[:2]:
                return has_ended(connection.fileno())
        return True

    def _connections(self) -> Iterator[socket.socket]:
        for name in os.listdir(DESCRIPTORS):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == self.port:
                        copy.getpeername()  # raises for what is not a connection
                        yield copy
            except (OSError, ValueError):
                continue


def server_config() -> hypercorn.config.Config:
    """Hypercorn's settings. A running response has no limit: `read_timeout` would cut a stream, so it stays unset."""
    config = hypercorn.config.Config()
    config.keep_alive_timeout = IDLE
    config.keep_alive_max_requests = sys.maxsize
    config.h11_max_incomplete_size = MOST_HEAD
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    return config


async def serve(
    app: Any,
    listener: Listener,
    shutdown: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    config: hypercorn.config.Config | None = None,
) -> None:
    """Answer requests on `listener` until `shutdown`; connections that are idle then are closed."""
    config = config or server_config()
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    state: dict[str, Any] = {}
    lifespan = Lifespan(wrapped, config, state)
    context = WorkerContext(None)
    accepting = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=listener.descriptor)))
    departures = Departures()
    connection = partial(Connection, wrapped, config, context, ConnectionState(state), departures)
    async with trio.open_nursery() as whole:
        await whole.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        whole.start_soon(departures.run, name="departures")
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accept:
                accept.start_soon(
                    partial(trio.serve_listeners, connection, [accepting], handler_nursery=connections), name="accept"
                )
                task_status.started()
                await shutdown.wait()
                accept.cancel_scope.cancel()
            await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + GRACE
        await lifespan.wait_for_shutdown()
        whole.cancel_scope.cancel()
