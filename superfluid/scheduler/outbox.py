"""The scheduler's way out: a tick's records are staged, and handed on in order once they are durable."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from superfluid.link.events import Body, Event, Finish, ToolExpired, ToolLease
from superfluid.scheduler.generation import Ended, Failure, TokenLogprob
from superfluid.scheduler.lanes import Ticket, raw_events
from superfluid.sessions.errors import LogClosed, LogIOError

MOST_UNSYNCED = 64
"""Ticks whose records may wait for their sync before the loop waits too: the log is slow, not broken."""


class CommitLike(Protocol):
    async def wait(self) -> list[Event]:
        """The events, once durable. Raises when the log could not be written."""


class StoreLike(Protocol):
    def stage(self, batch: list[tuple[int, Body]]) -> CommitLike:
        """Put records in the log's queue, in order; they get their ids and times now."""


@attrs.define
class Share:
    """A ticket's part of a batch: its events are [start, stop) of the commit, or `unlogged` ones; `ended` with them."""

    ticket: Ticket
    start: int
    stop: int
    logprobs: list[TokenLogprob]
    unlogged: list[Event] | None = None
    ended: Ended | None = None


@attrs.define
class Batch:
    """Records gathered over one tick, for one write and one sync."""

    records: list[tuple[int, Body]] = attrs.Factory(list)
    shares: list[Share] = attrs.Factory(list)

    def add(self, ticket: Ticket, bodies: list[Body], logprobs: list[TokenLogprob] | None = None) -> None:
        if not bodies:
            return
        session = ticket.job.session
        start = len(self.records)
        if ticket.job.logged and session is not None:
            self.records += [(session, body) for body in bodies]
            self.shares.append(Share(ticket, start, len(self.records), logprobs or []))
        else:
            self.shares.append(Share(ticket, start, start, logprobs or [], raw_events(bodies)))

    def end(self, ticket: Ticket, ended: Ended) -> None:
        """Tell the caller of what was added last its end with that."""
        assert self.shares[-1].ticket is ticket
        self.shares[-1].ended = ended


@attrs.define
class Synced:
    """A batch in the log's queue."""

    commit: CommitLike
    shares: list[Share]


@attrs.define
class End:
    ticket: Ticket
    ended: Ended


Item = Synced | Batch | End


class Outbox:
    """Delivers batches and ends in the order they were sent, each batch after its sync.

    `on_end` runs right before a caller is told the end, so that its session is free by then.
    """

    def __init__(self, store: StoreLike, on_end: Callable[[Ticket], None]) -> None:
        self._store = store
        self._on_end = on_end
        self._items: deque[Item] = deque()
        self._running = False
        self._closing = False
        self._wake = trio.Event()
        self._unsynced = 0
        self._room = trio.Event()

    async def run(self) -> None:
        """Deliver until `close` (which may come before this begins), and then what was sent before it."""
        self._running = True
        try:
            while self._items or not self._closing:
                if not self._items:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                item = self._items.popleft()
                if isinstance(item, Synced):
                    await self._deliver(item)
                else:
                    self._hand_on(item)
        finally:
            self._running = self._closing = False

    def close(self) -> None:
        self._closing = True
        self._wake.set()

    async def _deliver(self, item: Synced) -> None:
        try:
            events = await item.commit.wait()
        except Exception as error:
            fail(item.shares, error)
        else:
            hand_on(item.shares, events)
        self._unsynced -= 1
        self._room.set()

    async def room(self) -> None:
        """Wait while too many ticks' records are unsynced."""
        while self._unsynced >= MOST_UNSYNCED:
            self._room = trio.Event()
            await self._room.wait()

    def commit(self, batch: Batch) -> None:
        """Stage a batch and queue its delivery.

        Records the log refuses at once fail their ticket; those of the others are staged without them.
        """
        if not batch.shares:
            return
        if not batch.records:
            self._queue(batch)
            return
        try:
            commit = self._store.stage(batch.records)
        except Exception as error:
            if len(batch.shares) == 1:
                fail(batch.shares, error)
                return
            for share in batch.shares:
                start, stop = share.start, share.stop
                share.start, share.stop = 0, stop - start
                self.commit(Batch(batch.records[start:stop], [share]))
            return
        self._unsynced += 1
        self._queue(Synced(commit, batch.shares))

    def end(self, ticket: Ticket, ended: Ended) -> None:
        """Tell a ticket's caller its end, behind everything that was sent before."""
        if not ticket.over:
            ticket.over = True
            self._queue(End(ticket, ended))

    def _queue(self, item: Item) -> None:
        if self._running or self._items or isinstance(item, Synced):
            self._items.append(item)
            self._wake.set()
        else:
            self._hand_on(item)

    def _hand_on(self, item: Batch | End) -> None:
        if isinstance(item, Batch):
            hand_on(item.shares, [])
            return
        ticket, ended = item.ticket, item.ended
        if ticket.failure is not None:
            code, reason = ticket.failure
            ended = attrs.evolve(ended, finish=Finish.ERROR, error_code=code, reason=reason)
        self._on_end(ticket)
        ticket.generation.put_end(ended)


def fail(shares: list[Share], error: Exception) -> None:
    """Mark the tickets of a batch that is not durable: nothing of it is shown, and they end with the log's error."""
    if isinstance(error, LogClosed):
        failure = Failure.STOPPED, "generation failed: the server stopped it"
    else:  # the callers of a request are told why, not where on this machine the log lies
        failure = Failure.LOG, f"io: {error.why if isinstance(error, LogIOError) else error}"
    for share in shares:
        if share.ticket.failure is None:
            share.ticket.failure = failure


def hand_on(shares: list[Share], events: list[Event]) -> None:
    """Give each ticket its events; one that failed gets none."""
    for share in shares:
        if share.ticket.failure is not None:
            continue
        own = share.unlogged if share.unlogged is not None else events[share.start : share.stop]
        shown = [event for event in own if not isinstance(event.body, ToolLease | ToolExpired)]  # these are of the log
        share.ticket.generation.put_committed(shown, share.logprobs)
        if share.ended is not None:
            share.ticket.told = True  # first: its session is free by then
            share.ticket.generation.put_end(share.ended)
