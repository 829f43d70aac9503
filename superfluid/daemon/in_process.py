"""A worker on a thread of this process, for tests and debugging: the same link over socket pairs."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

import attrs
import trio

from superfluid.daemon.host import END_GRACE

ServeInProcess = Callable[[Sequence[str], socket.socket, socket.socket], None]
"""Loads the model that a worker's arguments name and serves it on (frames, descriptors) until the link closes.

Raises what stops it. The command that starts the daemon hands this in: no daemon module imports an engine.
"""


@attrs.define
class ThreadHost:
    """One running in-process worker; started but once, because its native library may not be loaded afresh."""

    frames: trio.SocketStream
    descriptors: socket.socket
    ended: trio.Event = attrs.Factory(trio.Event)
    failure: str | None = None

    @classmethod
    def start(cls, serve: ServeInProcess, arguments: Sequence[str]) -> "ThreadHost":
        frames, their_frames = socket.socketpair()
        descriptors, their_descriptors = socket.socketpair()
        host = cls(trio.SocketStream(trio.socket.from_stdlib_socket(frames)), descriptors)
        token = trio.lowlevel.current_trio_token()

        def run() -> None:
            try:
                serve(arguments, their_frames, their_descriptors)
            except Exception as error:
                host.failure = str(error) or type(error).__name__
            their_frames.close()
            their_descriptors.close()
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(host.ended.set)

        threading.Thread(target=run, name="in-process-worker", daemon=True).start()
        return host

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    async def wait(self) -> None:
        """Return when the worker has ended."""
        await self.ended.wait()

    def describe_end(self) -> str:
        return f"in-process worker: {self.failure or 'closed its link'}"

    async def close(self) -> None:
        """Close the link and give the worker a moment to end."""
        with trio.CancelScope(shield=True):
            self.descriptors.close()
            await self.frames.aclose()
            with trio.move_on_after(END_GRACE):
                await self.ended.wait()
