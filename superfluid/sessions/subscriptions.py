"""Who follows which session: committed events in commit order, previews ahead of them, bounded and never blocking."""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import attrs
import trio

from superfluid.link.events import Channel, Event, Finish, Generated

MOST_BEHIND = 1024  # messages a subscriber may lag; past that it gets what is queued and ends

MOST_AT_ONCE = 32  # messages that are read together
CROWD = 16  # followers of one session from which on their previews are paced
PREVIEWS_PER_SECOND = 2000
"""Messages with previews that a crowd is sent: longer texts less often, so that the lane it follows keeps its share of
the machine."""

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
        async for batch in self.batches():
            for message in batch:
                yield message

    async def batches(self) -> AsyncIterator[Sequence[Message]]:
        """What there is, a few messages at a time, as soon as there is any."""
        for start in range(0, len(self._backlog), MOST_AT_ONCE):
            yield self._backlog[start : start + MOST_AT_ONCE]
        self._backlog = []
        async for message in self._receive:
            batch = [message]
            with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                while len(batch) < MOST_AT_ONCE:
                    batch.append(self._receive.receive_nowait())
            yield batch

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
    """All subscriptions of one store, by session.

    Whoever follows with previews sees the text of every committed slice before the slice: what is previewed and not
    published yet is kept for followers that come late, and what was not previewed is, when its slice is staged. What a
    crowd's pace holds back is sent with the next slice at the latest. `clock` tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._held: dict[int, list[Preview]] = {}  # counted as previewed, to be sent
        self._due: dict[int, float] = {}  # when the next previews may be sent
        self._by_session: dict[int, list[Subscription]] = {}
        self._ahead: dict[int, dict[int, str]] = {}  # previewed, not staged: by channel; while someone wants previews
        self._staged: dict[int, deque[Preview]] = {}  # staged, not published

    def add(self, session: int, backlog: list[Event], previews: bool) -> Subscription:
        self._send_held(session)
        subscription = Subscription(self, session, backlog, previews)
        self._by_session.setdefault(session, []).append(subscription)
        if previews:
            ahead = self._ahead.setdefault(session, {})
            for preview in (*self._staged.get(session, ()), *(Preview(*piece) for piece in ahead.items())):
                if preview.text and preview.channel != Channel.TOOL_CALL:
                    subscription._offer(preview)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        left = [one for one in self._by_session.get(subscription.session, ()) if one is not subscription]
        if left:
            self._by_session[subscription.session] = left
        else:
            self._by_session.pop(subscription.session, None)
        if not self.wants_previews(subscription.session):
            for previewed in (self._ahead, self._held, self._due):
                previewed.pop(subscription.session, None)

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
        self._send_held(session)
        for subscription in self._by_session.get(session, ()):
            subscription._offer(event)

    def preview(self, session: int, channel: int, text: str) -> None:
        """Send text ahead of its commit to those that asked for it; `stage` of the slices that hold it follows."""
        ahead = self._ahead.get(session)
        if ahead is None:
            return
        ahead[channel] = ahead.get(channel, "") + text
        held = self._held.setdefault(session, [])
        if held and held[-1].channel == channel:
            held[-1] = Preview(channel, held[-1].text + text)
        else:
            held.append(Preview(channel, text))
        if self._clock() >= self._due.get(session, 0.0):
            self._send_held(session)

    def _send_held(self, session: int) -> None:
        held = self._held.pop(session, ())
        if not held:
            return
        followers = [one for one in self._by_session[session] if one.previews]
        if len(followers) >= CROWD:
            self._due[session] = self._clock() + len(followers) / PREVIEWS_PER_SECOND
        for message in held:
            for subscription in followers:
                subscription._offer(message)

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
