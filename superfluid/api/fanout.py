"""Deliveries to many followers of a session, in turns: what is new to all of them goes to all of them at once.

Over the session socket it is written to their sockets in one go. A follower's own task sends the backlog, and whatever
its socket does not take at once; while it has everything and waits, its socket is written to from here. A delivery then
costs little more than one system call a follower. Over the web their own tasks send it, a few at a time.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import attrs
import trio

from superfluid._native import ffi, lib
from superfluid.api.outlet import Outlet
from superfluid.api.session_api import followed
from superfluid.link import postcard
from superfluid.link.events import Event, is_long
from superfluid.sessions.subscriptions import MOST_BEHIND, Feed, Message, Subscription

SHARE = 0.01
"""Of one core: what deliveries to all feeds may take. What is new meanwhile goes out with the next one.

A delivery costs about 20 us to one follower and 5 us to each of many: eight sessions with a follower each are brought
up to date every 15 ms, a hundred followers of one session every 20 to 50 ms, a thousand every 0.3 to 0.5 s.
"""

LONGEST = 0.5  # seconds between two deliveries at most, whatever they cost
AT_ONCE = 128  # sockets written to before others have their turn, a lane's tick among them: about 0.3 ms
MOST_BYTES = 64 * 1024  # of a delivery's frames; larger ones each follower's own task sends, as its socket takes them
BEFORE_BODY = 15  # bytes of a frame at most: length, variant, number

MOST_HELD = MOST_BEHIND // 4
"""Messages that end a pause: nobody may come to lag by it."""

WEB_SHARE = 0.1  # as SHARE; a message costs fifty times as much there, most of it in the server below
WEB_LONGEST = 1.0
WEB_AT_ONCE = 16  # tasks woken before others have their turn: about 1 ms
WEB_LOOK = 0.002  # seconds between looks whether those woken have sent it


class Turns(ABC):
    """Delivers to the followers of every feed that it carries, feed by feed.

    A delivery that cost more is followed by a longer pause of its feed, measured by the CPU time of this thread.
    """

    share, longest = SHARE, LONGEST

    def __init__(self) -> None:
        self._news: dict[Feed, None] = {}
        self._due: dict[Feed, float] = {}  # of those in their pause: when it ends
        self._given: dict[Feed, int] = {}  # of the same: the messages that had been delivered
        self._wake = trio.Event()

    def news(self, feed: Feed) -> None:
        hurries = feed in self._due and feed.end - self._given[feed] >= MOST_HELD
        if hurries:
            del self._due[feed]
        if hurries or feed not in self._news:
            self._news[feed] = None
            self._wake.set()

    @abstractmethod
    def forget(self, subscription: Subscription) -> None:
        """A subscription has ended."""

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            feed = min(self._news, key=lambda one: self._due.get(one, 0.0), default=None)
            at = float("inf") if feed is None else self._due.get(feed, 0.0)
            if feed is None or at > trio.current_time():
                self._wake = trio.Event()
                with trio.move_on_at(at):
                    await self._wake.wait()
            else:
                del self._news[feed]
                given = feed.end
                self._pause(feed, given, await self._deliver(feed))
                await trio.lowlevel.checkpoint()  # many feeds of few followers are as much work as one of many

    def _pause(self, feed: Feed, given: int, spent: float) -> None:
        now = trio.current_time()
        self._due = {other: at for other, at in self._due.items() if at > now}
        self._given = {other: self._given[other] for other in self._due} | {feed: given}
        self._due[feed] = now + min(spent * (1 + len(self._due)) / self.share, self.longest)

    @abstractmethod
    async def _deliver(self, feed: Feed) -> float:
        """Bring all who wait up to date; the seconds of CPU that it took."""


class Wakes(Turns):
    """Has the followers' own tasks deliver."""

    share, longest = WEB_SHARE, WEB_LONGEST

    def carry(self, number: int, subscription: Subscription) -> None:
        """Have a subscription sent what it waits for when it is its feed's turn, until it ends."""
        if subscription.reason is None:
            subscription.carry(self)

    def forget(self, subscription: Subscription) -> None:
        """Nothing of it is kept here."""

    async def _deliver(self, feed: Feed) -> float:
        """As above, and all that the thread did meanwhile."""
        began = time.thread_time()
        woken = feed.waiting(self)
        for start in range(0, len(woken), WEB_AT_ONCE):
            for subscription in woken[start : start + WEB_AT_ONCE]:
                if subscription.waits:
                    subscription.wake()
            await trio.lowlevel.checkpoint()
        busy, longest = True, trio.current_time() + self.longest  # and nobody waits longer for one who does not read
        while busy and trio.current_time() < longest and any(not one.waits and one.reason is None for one in woken):
            before = time.thread_time()
            await trio.sleep(WEB_LOOK)
            busy = time.thread_time() - before > WEB_LOOK / 4  # else the rest wait for who reads them
        return time.thread_time() - began


class Frames:
    """The frames of some messages, but for the number of the subscription that each follower has in them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        made = [postcard.encode(followed(0, message)) for message in messages]
        variants, bodies = bytes(one[0] for one in made), [one[2:] for one in made]  # the number 0 is one byte
        ends, end = [], 0
        for body in bodies:
            end += len(body)
            ends.append(end)
        self.most_bytes = end + BEFORE_BODY * len(made)
        self._frames = b"".join(bodies), ffi.new("uint32_t[]", ends), variants, len(made)
        self._out = ffi.new("uint8_t[]", self.most_bytes)

    def of(self, number: int) -> bytes:
        """The frames of one follower."""
        return bytes(ffi.buffer(self._out, lib.sf_fanout_frames(number, *self._frames, self._out)))

    def send(self, descriptors: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """Send each follower its frames without waiting: the bytes left of each, -1 where nothing went."""
        left = ffi.new("int64_t[]", len(descriptors))
        fds, ids = ffi.new("int32_t[]", descriptors), ffi.new("uint64_t[]", numbers)
        if lib.sf_fanout_send(fds, ids, len(numbers), *self._frames, self._out, left) == len(numbers):
            return []
        return list(left)


@attrs.frozen(eq=False)
class Line:
    """Where a subscription's messages go: its number on that connection."""

    number: int
    outlet: Outlet


class FanOut(Turns):
    """Writes straight to the followers' sockets."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[Subscription, Line] = {}

    def carry(self, number: int, subscription: Subscription, outlet: Outlet) -> None:
        """Send what a subscription waits for, until it ends."""
        if subscription.reason is None:
            self._lines[subscription] = Line(number, outlet)
            subscription.carry(self)

    def forget(self, subscription: Subscription) -> None:
        self._lines.pop(subscription, None)

    async def _deliver(self, feed: Feed) -> float:
        began = time.thread_time()
        spent = 0.0
        by_position: dict[int, list[Subscription]] = {}
        for subscription in feed.waiting(self):
            by_position.setdefault(subscription.position, []).append(subscription)
        sent = 0
        for position, followers in by_position.items():
            messages = feed.since(position)
            if any(isinstance(one, Event) and is_long(one.body) for one in messages):
                for one in followers:  # what takes long to encode is for their own tasks, which do it in a thread
                    if one.waits:
                        one.wake()
                continue
            frames = Frames(messages)
            for start in range(0, len(followers), AT_ONCE):
                if sent >= AT_ONCE:
                    spent += time.thread_time() - began
                    await trio.lowlevel.checkpoint()
                    began = time.thread_time()
                    sent = 0
                some = followers[start : start + AT_ONCE]
                sent += len(some)
                self._send(frames, [one for one in some if one.waits and one.position == position], len(messages))
        return spent + time.thread_time() - began

    def _send(self, frames: Frames, followers: list[Subscription], messages: int) -> None:
        """Send frames that hold that many messages; who cannot take them now gets them from its own task."""
        ready: list[Subscription] = []
        lines: list[Line] = []
        for subscription in followers:
            line = self._lines[subscription]
            if line.outlet.free and frames.most_bytes <= MOST_BYTES:
                ready.append(subscription)
                lines.append(line)
            else:
                subscription.wake()
        left = frames.send([line.outlet.descriptor for line in lines], [line.number for line in lines])
        for subscription, line, rest in zip(ready, lines, left or [0] * len(lines), strict=True):
            if rest < 0:
                subscription.wake()
                continue
            subscription.position += messages
            if rest:
                line.outlet.finish(frames.of(line.number)[-rest:])
