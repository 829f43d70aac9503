"""Who follows which session: committed events in commit order, previews ahead of them, bounded and never blocking.

Followers of the same session that want the same are kept as one feed: its messages are held once, and each follower
is a place in it.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

import attrs
import trio

from superfluid.link.events import Channel, Event, Finish, Generated

MOST_BEHIND = 1024  # messages a subscriber may lag; past that it gets what is queued and ends

MOST_AT_ONCE = 32  # messages that are read together
LOOK_EVERY = 64  # messages after which a feed looks for what everyone has

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


class Courier(Protocol):
    """Takes what is new to many followers at once, so that none of their own tasks runs for it."""

    def news(self, feed: "Feed") -> None:
        """There is something that `feed.waiting(self)` may not have: `feed.since` tells what; who gets it has its
        `position` moved on."""

    def forget(self, subscription: "Subscription") -> None:
        """It has ended: what it did not get is its own reader's."""


class Subscription:
    """The events of one session from a cursor on, and its previews when asked for. Iterate it; then read `reason`.

    Its owner calls `close` when it no longer reads.
    """

    def __init__(self, hub: "Subscriptions", feed: "Feed", backlog: list[Message]) -> None:
        """Not for callers: use `Store.subscribe`."""
        self.session = feed.session
        self.previews = feed.previews
        self.reason: str | None = None
        self.position = feed.end  # of the feed's messages: the next that it gets
        self.waits = False  # its reader has everything up to `position`, and waits
        self.courier: Courier | None = None
        self._hub = hub
        self._feed = feed
        self._own = deque(backlog)  # to be read before the feed goes on; at the end, what is left of it
        self._wake = trio.Event()

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for batch in self.batches():
            for message in batch:
                yield message

    async def batches(self) -> AsyncIterator[Sequence[Message]]:
        """What there is, a few messages at a time, as soon as there is any. What a courier takes does not come here."""
        while True:
            if self._own:
                yield [self._own.popleft() for _ in range(min(len(self._own), MOST_AT_ONCE))]
            elif self.reason is not None:
                return
            elif batch := self._feed.take(self, MOST_AT_ONCE):
                yield batch
            else:
                self._wake = trio.Event()
                self.waits = True
                self._feed.idle(self)
                await self._wake.wait()

    def carry(self, courier: Courier) -> None:
        """From now on, until it ends, `courier` may take what comes while the reader waits."""
        self.courier = courier
        self._feed.carried.setdefault(courier, {})[self] = None

    def wake(self) -> None:
        """Have its reader take what is new."""
        self.waits = False
        self._wake.set()

    def close(self) -> None:
        """End it as unsubscribed; what is queued can still be read."""
        self.end(UNSUBSCRIBED)

    def end(self, reason: str) -> None:
        """No more comes than what is queued, and that is bounded."""
        if self.reason is None:
            self.reason = reason
            self._own += self._feed.since(self.position)[:MOST_BEHIND]
            self._feed.remove(self)
            self._hub.remove(self._feed)
            if self.courier is not None:
                self.courier.forget(self)
            self.wake()


class Feed:
    """The last messages of a session, for followers that want the same of them.

    A preview that nobody has taken yet grows by what follows it.
    """

    def __init__(self, session: int, previews: bool) -> None:
        self.session = session
        self.previews = previews
        self.followers: dict[Subscription, None] = {}
        self.carried: dict[Courier, dict[Subscription, None]] = {}
        self._messages: list[Message] = []
        self._first = 0  # number of the first of them
        self._sealed = 0  # messages before this one were taken, or are somebody's past
        self._look_at = LOOK_EVERY
        self._idle: list[Subscription] = []  # those who wait and have no courier

    @property
    def end(self) -> int:
        """The number of the next message."""
        return self._first + len(self._messages)

    def join(self, subscription: Subscription) -> None:
        self.followers[subscription] = None
        self._sealed = self.end

    def remove(self, subscription: Subscription) -> None:
        self.followers.pop(subscription, None)
        if subscription.courier is not None and subscription.courier in self.carried:
            self.carried[subscription.courier].pop(subscription, None)
            if not self.carried[subscription.courier]:
                del self.carried[subscription.courier]

    def idle(self, subscription: Subscription) -> None:
        if subscription.courier is None:
            self._idle.append(subscription)

    def waiting(self, courier: Courier) -> list[Subscription]:
        """Those of a courier's who wait and do not have everything, in the order in which they came."""
        end = self.end
        return [one for one in self.carried.get(courier, ()) if one.waits and one.position < end]

    def add(self, message: Message) -> None:
        """A message for all."""
        last = self._messages[-1] if self.end > self._sealed else None
        if isinstance(message, Preview) and isinstance(last, Preview) and last.channel == message.channel:
            self._messages[-1] = Preview(last.channel, last.text + message.text)
        else:
            self._messages.append(message)
            if self.end >= self._look_at:
                self._look()
        for courier in self.carried:
            courier.news(self)
        woken, self._idle = self._idle, []
        for subscription in woken:
            subscription.wake()

    def since(self, position: int) -> list[Message]:
        """The messages from a follower's position on; they stay as they are from now on."""
        self._sealed = self.end
        return self._messages[position - self._first :]

    def take(self, subscription: Subscription, most: int) -> list[Message]:
        """The next messages of a follower, which it has from now on."""
        batch = self.since(subscription.position)[:most]
        subscription.position += len(batch)
        return batch

    def _look(self) -> None:
        """End those who lag, and forget what all others have."""
        for subscription in [one for one in self.followers if self.end - one.position > MOST_BEHIND]:
            subscription.end(LAGGED)
        oldest = min((one.position for one in self.followers), default=self.end)
        del self._messages[: oldest - self._first]
        self._first = oldest
        self._look_at = min(self.end + LOOK_EVERY, oldest + MOST_BEHIND + 1)


class Subscriptions:
    """All subscriptions of one store, by session.

    Whoever follows with previews sees the text of every committed slice before the slice: what is previewed and not
    published yet is kept for followers that come late, and what was not previewed is, when its slice is staged.
    """

    def __init__(self) -> None:
        self._feeds: dict[int, dict[bool, Feed]] = {}  # of a session, by whether they have previews
        self._ahead: dict[int, dict[int, str]] = {}  # previewed, not staged: by channel; while someone wants previews
        self._staged: dict[int, deque[Preview]] = {}  # staged, not published

    def add(self, session: int, backlog: Sequence[Event], previews: bool) -> Subscription:
        own: list[Message] = list(backlog)
        if previews:
            ahead = self._ahead.setdefault(session, {})
            early = (*self._staged.get(session, ()), *(Preview(*piece) for piece in ahead.items()))
            own += [preview for preview in early if preview.text and preview.channel != Channel.TOOL_CALL]
        feeds = self._feeds.setdefault(session, {})
        feed = feeds.get(previews)
        if feed is None:
            feed = feeds[previews] = Feed(session, previews)
        subscription = Subscription(self, feed, own)
        feed.join(subscription)
        return subscription

    def remove(self, feed: Feed) -> None:
        """Forget a feed that nobody follows any more."""
        if feed.followers:
            return
        feeds = self._feeds.get(feed.session, {})
        feeds.pop(feed.previews, None)
        if feed.previews:
            self._ahead.pop(feed.session, None)
        if not feeds:
            self._feeds.pop(feed.session, None)

    def stage(self, session: int, body: Generated) -> None:
        """A slice is in line for the log, behind the previews of its text."""
        if session in self._ahead:
            self._complete(session, body)
        self._staged.setdefault(session, deque()).append(Preview(body.channel, body.text))

    def take_back(self, session: int) -> None:
        """What was staged will not be published."""
        self._staged.pop(session, None)

    def publish(self, session: int, event: Event) -> None:
        if isinstance(event.body, Generated) and (staged := self._staged.get(session)):
            staged.popleft()
            if not staged:
                del self._staged[session]
        for feed in tuple(self._feeds.get(session, {}).values()):
            feed.add(event)

    def preview(self, session: int, channel: int, text: str) -> None:
        """Send text ahead of its commit to those that asked for it; `stage` of the slices that hold it follows."""
        ahead = self._ahead.get(session)
        if ahead is not None:
            ahead[channel] = ahead.get(channel, "") + text
            self._feeds[session][True].add(Preview(channel, text))

    def _complete(self, session: int, body: Generated) -> None:
        """Preview what of a slice was not yet, and forget its previews."""
        ahead = self._ahead[session]
        if body.channel != Channel.TOOL_CALL:
            shown = ahead.get(body.channel, "")
            if not shown.startswith(body.text):
                # an unfinished character that the end completed; text made before anyone wanted previews
                self.preview(session, body.channel, body.text.removeprefix(shown))
                shown = body.text
            if session not in self._ahead:  # the last who wanted them lagged just now
                return
            ahead[body.channel] = shown[len(body.text) :]
        if body.finish != Finish.NONE:
            ahead.clear()

    def wants_previews(self, session: int) -> bool:
        return session in self._ahead

    def end(self, session: int, reason: str) -> None:
        """End every subscription of a session."""
        for feed in tuple(self._feeds.get(session, {}).values()):
            for subscription in tuple(feed.followers):
                subscription.end(reason)

    def close(self, reason: str = PUBLISHER_CLOSED) -> None:
        """End all subscriptions."""
        for session in tuple(self._feeds):
            self.end(session, reason)

    def __len__(self) -> int:
        return sum(len(feed.followers) for feeds in self._feeds.values() for feed in feeds.values())
