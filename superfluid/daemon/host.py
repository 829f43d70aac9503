"""EngineHost: a worker process, started with its two socket ends, waited for, and ended.

The worker gets its socket ends as descriptors 3 and 4 and nothing else of the daemon's, a process group of its own
(a terminal's Ctrl-C reaches only the daemon), and no credential variables.
"""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import trio

BUSY_TRIES = 100  # a program file that is being written ("text file busy") is tried again this often,
BUSY_PAUSE = 0.01  # seconds apart
FIRST_FREE = 16  # socket ends are moved to this number or above, out of the way of the targets 3 and 4
LAST_WORDS = 3  # lines of stderr that an error quotes
KEPT_LINES = 40  # lines of stderr kept for last words
SOCKET_BUFFER = 1 << 20  # asked of the link, so that a daemon busy for a moment holds no tick
END_GRACE = 2.0  # seconds a worker has to end by itself when its link closes, before SIGKILL

CREDENTIAL_ENDINGS = (
    "TOKEN", "SECRET", "SECRET_KEY", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "ACCESS_KEY", "PRIVATE_KEY",
    "CREDENTIALS",
)  # fmt: skip


class WorkerStartError(Exception):
    """A worker program could not be started, or ended before it served; the message says why."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables whose names say that they hold a credential."""
    return {name: value for name, value in environment.items() if not name.upper().endswith(CREDENTIAL_ENDINGS)}


def last_words(stderr: str | Sequence[str]) -> str:
    """The last non-blank lines a program wrote, joined by ` / `."""
    lines = stderr.splitlines() if isinstance(stderr, str) else stderr
    return " / ".join([line.strip() for line in lines if line.strip()][-LAST_WORDS:])


class Host(Protocol):
    """A started worker. Its owner runs `wait` in a task while it lives, and `close` when it is done with it."""

    @property
    def frames(self) -> trio.SocketStream: ...

    @property
    def descriptors(self) -> socket.socket: ...

    @property
    def ended(self) -> trio.Event: ...

    @property
    def running(self) -> bool: ...

    async def wait(self) -> None:
        """Return when the worker has ended."""

    def describe_end(self) -> str:
        """How it ended, with its last words."""

    async def close(self) -> None:
        """Close the link and end the worker; returns when it is gone."""


@attrs.define
class EngineHost:
    """One running worker process.

    `frames` and `descriptors` are the daemon's ends of the link. The owner runs `wait` in a task for as long as the
    process lives and calls `close` when it is done with it.
    """

    pid: int
    frames: trio.SocketStream
    descriptors: socket.socket
    pidfd: int
    stderr: int
    lines: deque[str]
    status: int | None = None
    ended: trio.Event = attrs.Factory(trio.Event)

    @classmethod
    async def spawn(cls, command: Sequence[str], environment: Mapping[str, str] | None = None) -> "EngineHost":
        """Start `command` (program and arguments, without the descriptor flags).

        Raises WorkerStartError when the program cannot be started.
        """
        frames_ours, frames_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds_ours, fds_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (frames_ours, frames_theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        err_read, err_write = os.pipe()
        moved = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
            for fd in (frames_theirs.fileno(), fds_theirs.fileno(), err_write)
        ]
        argv = [*command, "--frames-fd", "3", "--fd-channel-fd", "4"]
        try:
            pid = await cls._start(argv, clean_environment(environment or os.environ), moved)
        except BaseException:
            frames_ours.close()
            fds_ours.close()
            os.close(err_read)
            raise
        finally:
            frames_theirs.close()
            fds_theirs.close()
            for fd in (*moved, err_write):
                os.close(fd)
        os.set_blocking(err_read, False)
        return cls(
            pid=pid,
            frames=trio.SocketStream(trio.socket.from_stdlib_socket(frames_ours)),
            descriptors=fds_ours,
            pidfd=os.pidfd_open(pid),
            stderr=err_read,
            lines=deque(maxlen=KEPT_LINES),
        )

    @staticmethod
    async def _start(argv: list[str], environment: dict[str, str], moved: Sequence[int]) -> int:
        frames, descriptors, stderr = moved
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
            (os.POSIX_SPAWN_DUP2, frames, 3),
            (os.POSIX_SPAWN_DUP2, descriptors, 4),
        ]
        for attempt in range(BUSY_TRIES):
            try:
                return os.posix_spawn(  # noqa: ASYNC221 (returns as soon as the child exists)
                    argv[0], argv, environment, file_actions=actions, setpgroup=0, setsigmask=[],
                    setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
                )  # fmt: skip
            except OSError as error:
                if error.errno != errno.ETXTBSY or attempt == BUSY_TRIES - 1:
                    raise WorkerStartError(f"{argv[0]} could not be started: {error.strerror}") from error
            await trio.sleep(BUSY_PAUSE)
        raise AssertionError("unreachable")

    @property
    def running(self) -> bool:
        return self.status is None

    async def wait(self) -> None:
        """Copy the worker's stderr to ours until it ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copy_stderr, name=f"worker-stderr:{self.pid}")
            await trio.lowlevel.wait_readable(self.pidfd)
            self.reap()
            with trio.move_on_after(1):  # what it wrote last; a grandchild may hold the pipe open
                await self._drained.wait()
            nursery.cancel_scope.cancel()
        self.ended.set()

    _drained: trio.Event = attrs.field(factory=trio.Event, alias="drained")

    async def _copy_stderr(self) -> None:
        partial = b""
        try:
            while True:
                await trio.lowlevel.wait_readable(self.stderr)
                try:
                    data = os.read(self.stderr, 65536)
                except BlockingIOError:
                    continue
                if not data:
                    break
                # whoever reads our stderr may be slow: that holds up the worker, never the event loop
                await trio.to_thread.run_sync(_write_stderr, data, abandon_on_cancel=True)
                *whole, partial = (partial + data).split(b"\n")
                self.lines.extend(line.decode(errors="replace") for line in whole)
        finally:
            if partial:
                self.lines.append(partial.decode(errors="replace"))
            self._drained.set()

    def reap(self) -> None:
        """Collect the exit status if the process has ended (no zombie stays)."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.status is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    @property
    def words(self) -> str:
        """What it said last on stderr, for an error message; empty when nothing."""
        return last_words(list(self.lines))

    def describe_end(self) -> str:
        """How the process ended, with its last words."""
        if self.status is None:
            end = "closed its link"
        elif self.status < 0:
            end = f"was killed by {signal.Signals(-self.status).name}"
        else:
            end = f"exited with {self.status}"
        return f"worker {end}: {self.words}" if self.words else f"worker {end}"

    async def close(self) -> None:
        """Close the link, give the worker a moment to end, then kill it; returns when it is gone."""
        self.descriptors.close()
        with trio.CancelScope(shield=True):
            await self.frames.aclose()
            if self.status is None:
                with trio.move_on_after(END_GRACE):
                    await trio.lowlevel.wait_readable(self.pidfd)
                self.reap()
            if self.status is None:
                self.kill()
                await trio.lowlevel.wait_readable(self.pidfd)
                self.reap()
        os.close(self.pidfd)
        os.close(self.stderr)


def _write_stderr(data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed: nobody is told
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


def module_command(module: str) -> list[str]:
    """A command that runs a module of this package with this interpreter.

    `-P`: not with what lies in the working directory, which may be anybody's, or a checkout that is not built.
    """
    return [sys.executable, "-P", "-m", module]


def executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
