"""Clients that leave while their connection is not read: bytes stand behind a request that is being answered."""

import select
from typing import Protocol

import trio

LOOK = 0.4  # seconds between looks: a lane whose client has left is free within a second

ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def has_ended(descriptor: int) -> bool:
    """Whether the peer of a connection has ended it, also when bytes before its end were not read."""
    poll = select.poll()
    poll.register(descriptor, ENDED)
    return any(state & ENDED for _, state in poll.poll(0))


class Watched(Protocol):
    """A connection whose reader is busy with what it has read."""

    @property
    def descriptor(self) -> int: ...

    def leave(self) -> None:
        """The client is gone."""


class Departures:
    """Looks at the connections that are watched, now and then; those that are busy for a moment cost nothing."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._wake: trio.Event | None = None  # while nothing is watched

    def watch(self, connection: Watched) -> None:
        self._watched.add(connection)
        if self._wake is not None:
            self._wake.set()

    def forget(self, connection: Watched) -> None:
        self._watched.discard(connection)

    async def run(self) -> None:
        while True:
            if not self._watched:
                self._wake = trio.Event()
                await self._wake.wait()
                self._wake = None
            await trio.sleep(LOOK)
            for connection in list(self._watched):
                if has_ended(connection.descriptor):
                    connection.leave()
