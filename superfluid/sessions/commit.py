"""Records on their way to the disk."""

from collections.abc import Callable
from typing import cast

import attrs
import trio

from superfluid.link import events as ev
from superfluid.sessions.errors import LogIOError
from superfluid.sessions.session import Session
from superfluid.sessions.state import State


@attrs.define(slots=True)
class Staged:
    """A record in line for the log, and the state of its session behind it."""

    session: Session
    event: ev.Event
    state: State
    frame: bytes | Callable[[], bytes]  # long ones are made when they are written
    size: int = 0  # of the frame, once it is written


class Commit:
    """Records on their way to the disk. `await wait()`, or `Store.flush()` and then `result()`."""

    __slots__ = ("_done", "_error", "staged")

    def __init__(self, staged: list[Staged]) -> None:
        """Not for callers: use `Store.stage`."""
        self.staged = staged
        self._done = trio.Event()
        self._error: LogIOError | None = None

    async def wait(self) -> list[ev.Event]:
        """The events, once they are durable. Raises LogIOError when they never will be."""
        await self._done.wait()
        return self.result()

    def result(self) -> list[ev.Event]:
        """The events of a finished commit. Raises LogIOError."""
        assert self._done.is_set(), "a commit has no result before its sync"
        if self._error is not None:
            raise LogIOError(self._error.path, self._error.why) from self._error
        return [one.event for one in self.staged]

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def chunks(self) -> list[bytes]:
        """What goes into the log. Long records are encoded here, by the thread that writes."""
        for one in self.staged:
            if not isinstance(one.frame, bytes):
                one.frame = one.frame()
            one.size = len(one.frame)
        return [cast(bytes, one.frame) for one in self.staged]

    def finish(self, error: LogIOError | None = None) -> None:
        self._error = error
        self._done.set()
