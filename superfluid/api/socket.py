"""The session API on a unix socket: a u32 little-endian length, then a postcard request or response."""

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from superfluid.api.fanout import FanOut
from superfluid.api.outlet import LENGTH, Outlet
from superfluid.api.session_api import Connection
from superfluid.daemon.daemon import Daemon
from superfluid.link import postcard
from superfluid.link.session_api import MAX_FRAME, Request
from superfluid.sessions.subscriptions import Subscription

READ_BYTES = 64 * 1024
WAITING = 32  # requests read ahead of the one that is answered; beyond that the socket is not read
BACKLOG = 128
FAREWELL = 1.0  # seconds in which clients may take what is left for them when the server stops

log = logging.getLogger(__name__)


class SocketTaken(Exception):
    """The socket's path cannot be used."""


def bind(path: Path) -> trio.SocketListener:
    """Listen on `path`, mode 0600; an old socket file is replaced (the sessions lock keeps two servers apart)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = "something else is there" if error.errno == errno.EADDRINUSE else error.strerror
        raise SocketTaken(f"--socket {path}: {why}") from None
    finally:
        os.umask(mask)
    listener.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def run_socket(
    daemon: Daemon, path: Path, task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Accept until the daemon drains, and answer until cancelled; the file goes at the end.

    Cancelled, it tells those who follow a session that the server stops.
    """
    listener = bind(path)
    served = os.stat(path).st_ino
    fan_out = FanOut()
    stopping = trio.Event()
    accepting = trio.CancelScope()
    serving = trio.CancelScope(shield=True)

    async def answer(stream: trio.SocketStream) -> None:
        trio.lowlevel.current_task().name = f"session-connection:{stream.socket.fileno()}"
        await serve_connection(daemon, stream, fan_out, stopping)

    async def serve(task_status: trio.TaskStatus[list[trio.SocketListener]]) -> None:
        with serving:
            async with trio.open_nursery() as deliveries:
                deliveries.start_soon(fan_out.run, name="session-fan-out")
                async with trio.open_nursery() as connections:
                    with accepting:
                        await trio.serve_listeners(
                            answer, [listener], handler_nursery=connections, task_status=task_status
                        )
                deliveries.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            try:
                task_status.started(await nursery.start(serve, name="session-listener"))
                await daemon.drain_started.wait()
                accepting.cancel()  # those who are connected stay
                await trio.sleep_forever()
            finally:
                accepting.cancel()
                stopping.set()
                serving.deadline = trio.current_time() + FAREWELL
    finally:
        try:
            if os.stat(path).st_ino == served:  # not a successor's
                os.unlink(path)
        except FileNotFoundError:
            pass


async def serve_connection(daemon: Daemon, stream: trio.SocketStream, fan_out: FanOut, stopping: trio.Event) -> None:
    """Answer one connection's requests in order, until it ends or sends what is no request, or `stopping` is set.

    Nothing that a client does, or that goes wrong with its connection, is raised.
    """
    async with stream, trio.open_nursery() as nursery:
        requests, received = trio.open_memory_channel[Request](WAITING)
        outlet = Outlet(stream, nursery)

        async def read() -> None:
            try:
                async with requests:
                    async for request in read_requests(stream):
                        await requests.send(request)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except postcard.PostcardError as error:
                log.warning("a connection to the session socket is closed without an answer: %s", error)
            nursery.cancel_scope.cancel()  # the connection is over: so is what it generates or follows

        def carry(number: int, subscription: Subscription) -> None:
            fan_out.carry(number, subscription, outlet)

        connection = Connection(daemon, nursery, outlet.send, carry=carry)

        async def stop() -> None:
            await stopping.wait()
            await connection.stop()
            nursery.cancel_scope.cancel()

        nursery.start_soon(read, name="session-requests")
        nursery.start_soon(stop, name="session-stop")
        async for request in received:
            await connection.handle(request)


async def read_requests(stream: trio.SocketStream) -> AsyncIterator[Request]:
    """The requests of a stream. A frame too large or one that does not decode ends it (PostcardError)."""
    buffer = bytearray()
    while True:
        while len(buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer)
            if length > MAX_FRAME:
                raise postcard.PostcardError(
                    f"a frame says that it has {length} bytes, {MAX_FRAME} is the most; it begins with its length, "
                    "a little-endian u32"
                )
            if len(buffer) < LENGTH.size + length:
                break
            payload = bytes(memoryview(buffer)[LENGTH.size : LENGTH.size + length])
            del buffer[: LENGTH.size + length]
            try:
                request = postcard.decode(Request, payload)
            except postcard.PostcardError as error:
                raise postcard.PostcardError(f"a frame of {length} bytes holds no request ({error})") from error
            yield request
        data = await stream.receive_some(READ_BYTES)
        if not data:
            if buffer:
                log.info("a connection to the session socket ended inside a frame, %d bytes into it", len(buffer))
            return
        buffer += data
