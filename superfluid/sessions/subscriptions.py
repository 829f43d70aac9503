"""Who follows which session: committed events in commit order, previews ahead of them, bounded and never blocking."""

from collections.abc import AsyncIterator
from typing import Final

import attrs
import trio

from superfluid.link.events import Event

MOST_BEHIND = 1024  # messages a subscriber may lag; past that it gets what is queued and ends

UNSUBSCRIBED: Final = "unsubscribed"
LAGGED: Final = "lagged"
PUBLISHER_CLOSED: Final = "publisher closed"
PURGED: Final = "purged"


@attrs.frozen
class Preview:
    """Text of a generation before its commit."""

    channel: int
    text: str


Message = Event | Preview


class Subscription:
    """The events of one session from a cursor on, and its previews when asked for. Iterate it; then read `reason`.

    Its owner calls `close` when it no longer reads.
    """

    def __init__(self, hub: "Subscriptions", session: int, backlog: list[Event], previews: bool) -> None:
        """Not for callers: use `Store.subscribe`."""
        self.session = session
        self.previews = previews
        self.reason: str | None = None
        self._hub = hub
        self._backlog = backlog
        self._send, self._receive = trio.open_memory_channel[Message](MOST_BEHIND)

    async def __aiter__(self) -> AsyncIterator[Message]:
        for event in self._backlog:
            yield event
        self._backlog = []
        async for message in self._receive:
            yield message

    def close(self) -> None:
        """End it as unsubscribed; what is queued can still be read."""
        self._end(UNSUBSCRIBED)

    def _offer(self, message: Message) -> None:
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            self._end(LAGGED)

    def _end(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._send.close()
            self._hub.remove(self)


class Subscriptions:
    """All subscriptions of one store, by session."""

    def __init__(self) -> None:
        self._by_session: dict[int, list[Subscription]] = {}

    def add(self, session: int, backlog: list[Event], previews: bool) -> Subscription:
        subscription = Subscription(self, session, backlog, previews)
        self._by_session.setdefault(session, []).append(subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        left = [one for one in self._by_session.get(subscription.session, ()) if one is not subscription]
        if left:
            self._by_session[subscription.session] = left
        else:
            self._by_session.pop(subscription.session, None)

    def publish(self, session: int, event: Event) -> None:
        for subscription in self._by_session.get(session, ()):
            subscription._offer(event)

    def preview(self, session: int, channel: int, text: str) -> None:
        """Send text ahead of its commit to those that asked for it."""
        followers = self._by_session.get(session)
        if followers:
            message = Preview(channel, text)
            for subscription in followers:
                if subscription.previews:
                    subscription._offer(message)

    def wants_previews(self, session: int) -> bool:
        return any(one.previews for one in self._by_session.get(session, ()))

    def end(self, session: int, reason: str) -> None:
        """End every subscription of a session."""
        for subscription in tuple(self._by_session.get(session, ())):
            subscription._end(reason)

    def close(self, reason: str = PUBLISHER_CLOSED) -> None:
        """End all subscriptions."""
        for session in tuple(self._by_session):
            self.end(session, reason)

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))
