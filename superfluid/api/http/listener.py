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
import hypercorn.trio
import trio

IDLE = 30.0  # seconds for a request's head, and for an idle kept-alive connection
UNREAD = 60.0  # seconds a client may take no byte of its answer
BACKLOG = 1024
MOST_HEAD = 64 * 1024  # bytes of a request's head
GRACE = 1.0  # seconds for the server's own end, once no request is left
DESCRIPTORS = "/dev/fd"  # this process's open descriptors, on Linux and macOS


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose accepted connections drop a client that takes no byte for `UNREAD` seconds.

    Raises OSError when the address cannot be bound.
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
    except BaseException:
        listener.close()
        raise
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


def server_config(listener: Listener) -> hypercorn.config.Config:
    """Hypercorn's settings. A running response has no limit: `read_timeout` would cut a stream, so it stays unset."""
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.descriptor}"]
    config.keep_alive_timeout = IDLE
    config.keep_alive_max_requests = sys.maxsize
    config.graceful_timeout = GRACE
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
) -> None:
    """Answer requests on `listener` until `shutdown`; connections that are idle then are closed."""

    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(hypercorn.trio.serve, app, server_config(listener), shutdown_trigger=shutdown.wait, mode="asgi")
        )
        os.set_inheritable(listener.descriptor, False)  # the server made it inheritable: no worker may keep the port
        task_status.started()
