"""Deliveries to many followers of a session, on real sockets: who gets what, and what one that is slow, full or gone
does to the others."""

import itertools
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, strategies as st
from superfluid._native import ffi, lib

from superfluid.api import fanout
from superfluid.api.fanout import FanOut, Frames, Wakes
from superfluid.api.outlet import frame
from superfluid.api.session_api import followed
from superfluid.api.socket import serve_connection
from superfluid.client.frames import SocketWire
from superfluid.client.trio_client import AsyncConnection
from superfluid.daemon.daemon import Daemon
from superfluid.link import events as ev, session_api as api
from superfluid.observe.metrics import Metrics
from superfluid.sessions.subscriptions import MOST_BEHIND, PURGED, Message, Preview, Subscription, Subscriptions

SESSION = 7
SMALLEST = 1  # bytes of a socket's buffer: the kernel takes its least
SOON = 30.0
U64 = st.integers(0, 2**64 - 1)


def event(number: int, text: str = "again") -> ev.Event:
    return ev.Event(number, 0, 0, ev.Generated([number], text, 0, 0))


class Crowd:
    """Session connections whose server side is real but for the daemon; `hub` publishes."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.hub = Subscriptions()
        self.fan_out = FanOut()
        self.followed: list[Subscription] = []
        self._numbers = itertools.count(1)
        self.nursery = nursery
        sessions = SimpleNamespace(
            subscribe=self._subscribe,
            unfollow=Subscription.close,
            session_ids=lambda: [SESSION],
            check_not_purged=lambda session: None,
        )
        model: Any = SimpleNamespace(sessions=sessions)
        self._daemon = Daemon(Path(), [model], Metrics("test"))
        nursery.start_soon(self.fan_out.run)

    def _subscribe(self, session: int, cursor: int, provisional: bool) -> tuple[int, Subscription]:
        subscription = self.hub.add(session, [event(number) for number in range(cursor)], provisional)
        self.followed.append(subscription)
        return next(self._numbers), subscription

    def connect(
        self, buffer: int | None = None, pair: tuple[socket.socket, socket.socket] | None = None
    ) -> AsyncConnection:
        """A connection, whose server side has that buffer; of that pair of sockets when there is one."""
        ours, theirs = pair or socket.socketpair()
        if buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        self.nursery.start_soon(serve_connection, self._daemon, stream, self.fan_out, trio.Event())
        return AsyncConnection(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), SocketWire())

    async def follower(self, provisional: bool = False, buffer: int | None = None) -> tuple[AsyncConnection, int]:
        """A connection that follows the session, and its subscription's number."""
        connection = self.connect(buffer)
        return connection, await follow(connection, provisional)

    def publish(self, first: int, count: int, text: str = "again") -> list[ev.Event]:
        events = [event(number, text) for number in range(first, first + count)]
        for one in events:
            self.hub.publish(SESSION, one)
        return events


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            yield Crowd(nursery)
            nursery.cancel_scope.cancel()


async def follow(connection: AsyncConnection, provisional: bool = False) -> int:
    await connection.send(api.SubscribeRequest(SESSION, 0, provisional))
    answer = await connection.receive()
    assert isinstance(answer, api.SubscribedResponse)
    return answer.sub


async def receive(connection: AsyncConnection, count: int) -> list[api.Response]:
    found: list[api.Response] = []
    for _ in range(count):
        response = await connection.receive()
        assert response is not None, "the server closed the connection"
        found.append(response)
    return found


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delivery is also the last."""
    monkeypatch.setattr(FanOut, "share", 1e-12)
    monkeypatch.setattr(FanOut, "longest", 1e6)


# ---- frames


MESSAGES = st.builds(lambda number, text: event(number, text), st.integers(0, 2**32 - 1), st.text()) | st.builds(
    Preview, st.integers(0, 2**32 - 1), st.text()
)


@given(messages=st.lists(MESSAGES, max_size=4), number=U64)
def test_the_frames_are_those_of_the_responses(messages: list[Message], number: int) -> None:
    frames = Frames(messages)
    assert frames.of(number) == b"".join(frame(followed(number, message)) for message in messages)
    assert len(frames.of(number)) <= frames.most_bytes


def test_nothing_goes_to_a_socket_behind_a_frame_that_was_cut() -> None:
    """Whoever is on the same socket later in a delivery waits, even when it could take more by then."""
    ours, theirs = socket.socketpair()
    other, others = socket.socketpair()
    with ours, theirs, other, others:
        for one in (theirs, others):
            one.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALLEST)
        frames = Frames([event(0, "x" * 60_000)])
        full, free = theirs.fileno(), others.fileno()
        left = frames.send([full, free, full, full], [1, 2, 3, 4])
        assert 0 < left[0] < len(frames.of(1))
        assert left[1:] == [0, -1, -1]
        assert ours.recv(1 << 17) == frames.of(1)[: -left[0]]
        assert other.recv(1 << 17) == frames.of(2)
        closed = others.fileno()
    assert frames.send([closed, -1], [1, 2]) == [-1, -1]


def test_frames_in_c_have_room() -> None:
    """The most that a frame has before its body is what is set aside for it."""
    out = ffi.new("uint8_t[]", fanout.BEFORE_BODY)
    size = lib.sf_fanout_frames(2**64 - 1, b"", ffi.new("uint32_t[]", [0]), b"\x09", 1, out)
    assert size == fanout.BEFORE_BODY


# ---- deliveries


async def test_every_follower_gets_all_of_it_and_only_the_fan_out_works(crowd: Crowd) -> None:
    count = 2 * fanout.AT_ONCE + 3
    followers = [await crowd.follower(provisional=index % 2 == 1) for index in range(count)]
    await trio.testing.wait_all_tasks_blocked()
    assert all(one.waits for one in crowd.followed)
    seen: list[list[api.Response]] = [[] for _ in followers]
    for number in range(5):
        crowd.hub.preview(SESSION, 0, f"text {number}")
        (said,) = crowd.publish(number, 1)
        for index, (connection, _) in enumerate(followers):
            seen[index] += await receive(connection, 1 + index % 2)
        assert all(one.waits for one in crowd.followed), "a follower's own task was woken"
    for index, (_, sub) in enumerate(followers):
        events = [one for one in seen[index] if isinstance(one, api.SubEventResponse)]
        assert events == [api.SubEventResponse(sub, event(number)) for number in range(5)]
        previews = [one for one in seen[index] if isinstance(one, api.SubProvisionalResponse)]
        assert previews == [api.SubProvisionalResponse(sub, 0, f"text {n}") for n in range(5)] * (index % 2)
    assert said.event_id == 4


async def test_a_pause_gathers_what_comes_and_loses_none_of_it(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Previews grow together while they wait; what ends a subscription meanwhile comes behind them."""
    connection, sub = await crowd.follower(provisional=True)
    await trio.testing.wait_all_tasks_blocked()
    for_ever(monkeypatch)
    crowd.publish(0, 1)
    assert await receive(connection, 1) == [api.SubEventResponse(sub, event(0))]
    for text in ("ag", "ai", "n"):
        crowd.hub.preview(SESSION, 0, text)
    crowd.publish(1, 1)
    crowd.hub.preview(SESSION, 1, "why")
    await trio.testing.wait_all_tasks_blocked()
    crowd.hub.end(SESSION, PURGED)
    assert await receive(connection, 4) == [
        api.SubProvisionalResponse(sub, 0, "again"),
        api.SubEventResponse(sub, event(1)),
        api.SubProvisionalResponse(sub, 1, "why"),
        api.SubEndedResponse(sub, PURGED),
    ]
    assert len(crowd.hub) == 0


async def test_who_unsubscribes_in_a_pause_gets_what_was_queued(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, sub = await crowd.follower()
    await trio.testing.wait_all_tasks_blocked()
    for_ever(monkeypatch)
    crowd.publish(0, 1)
    await receive(connection, 1)
    crowd.publish(1, 2)
    await connection.send(api.UnsubscribeRequest(sub))
    found = await receive(connection, 4)
    assert api.UnsubscribedResponse() in found
    found.remove(api.UnsubscribedResponse())
    assert found == [
        *(api.SubEventResponse(sub, event(number)) for number in (1, 2)),
        api.SubEndedResponse(sub, "unsubscribed"),
    ]


async def test_a_pause_ends_before_anyone_lags_by_it(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, sub = await crowd.follower()
    await trio.testing.wait_all_tasks_blocked()
    for_ever(monkeypatch)
    count = fanout.MOST_HELD + 1
    crowd.publish(0, 1)
    assert await receive(connection, 1) == [api.SubEventResponse(sub, event(0))]
    crowd.publish(1, fanout.MOST_HELD)
    assert await receive(connection, count - 1) == [api.SubEventResponse(sub, event(n)) for n in range(1, count)]
    crowd.publish(count, MOST_BEHIND)
    assert crowd.followed[0].reason is None


async def test_a_feed_pauses_as_long_as_its_deliveries_cost(mock_clock: trio.testing.MockClock) -> None:
    fan_out, hub = FanOut(), Subscriptions()
    small, large = (hub.add(session, [], False) for session in (1, 2))
    cost = FanOut.share / 100
    fan_out._pause(small._feed, 0, cost)
    assert fan_out._due[small._feed] == pytest.approx(trio.current_time() + 0.01)
    fan_out._pause(large._feed, 0, cost)  # two share what one has alone
    assert fan_out._due[large._feed] == pytest.approx(trio.current_time() + 0.02)
    mock_clock.jump(0.015)
    fan_out._pause(small._feed, 0, 1.0)
    assert fan_out._due[small._feed] == pytest.approx(trio.current_time() + FanOut.longest)
    mock_clock.jump(1.0)
    fan_out._pause(large._feed, 0, cost)
    assert fan_out._due == {large._feed: pytest.approx(trio.current_time() + 0.01)}


# ---- the slow, the full and the gone


async def test_one_that_reads_nothing_holds_up_nobody_and_ends_as_lagged(crowd: Crowd) -> None:
    laggard, lagging = await crowd.follower(buffer=SMALLEST)
    reader, sub = await crowd.follower()
    got: list[api.Response] = []
    total = 3 * MOST_BEHIND
    for first in range(0, total, 64):
        crowd.publish(first, 64)
        got += await receive(reader, 64)
    assert got == [api.SubEventResponse(sub, event(number)) for number in range(total)]
    found = await receive_until_end(laggard)
    assert found[-1] == api.SubEndedResponse(lagging, "lagged")
    assert found[:-1] == [api.SubEventResponse(lagging, event(number)) for number in range(len(found) - 1)]
    assert MOST_BEHIND <= len(found) - 1 < total
    await laggard.send(api.ListRequest())  # its connection goes on
    assert await laggard.receive() == api.SessionsResponse([SESSION])
    assert len(crowd.hub) == 1


async def receive_until_end(connection: AsyncConnection) -> list[api.Response]:
    found: list[api.Response] = []
    while not found or not isinstance(found[-1], api.SubEndedResponse):
        found += await receive(connection, 1)
    return found


@pytest.mark.parametrize("text", ["x" * 700, "x" * 20_000, "x" * (fanout.MOST_BYTES + 1)])
async def test_frames_stay_whole_on_a_full_connection_with_many_subscriptions(crowd: Crowd, text: str) -> None:
    """Replies, deliveries that are cut and what own tasks send share a socket that takes little at once."""
    connection = crowd.connect(SMALLEST)
    subs = [await follow(connection, provisional=index % 2 == 1) for index in range(6)]
    seen: dict[int, list[int]] = {sub: [] for sub in subs}
    lists = 0
    for number in range(30):
        crowd.publish(number, 1, text)
        if number % 5 == 0:
            await connection.send(api.ListRequest())
        if number % 3 == 0:
            await trio.testing.wait_all_tasks_blocked()  # everyone is full
            for response in await receive(connection, 4):
                lists += tell(response, seen, text)
    while lists < 6 or any(len(ids) < 30 for ids in seen.values()):
        lists += tell((await receive(connection, 1))[0], seen, text)
    assert seen == {sub: list(range(30)) for sub in subs}


def tell(response: api.Response, seen: dict[int, list[int]], text: str) -> bool:
    """Note an event; true for the answer of a List."""
    if isinstance(response, api.SessionsResponse):
        return True
    assert isinstance(response, api.SubEventResponse)
    assert response.event == event(response.event.event_id, text)
    seen[response.sub].append(response.event.event_id)
    return False


async def test_one_that_closes_in_the_midst_of_a_delivery_and_whose_descriptor_is_taken_anew(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new connection gets nothing that was the old one's, and the others get everything."""
    monkeypatch.setattr(fanout, "AT_ONCE", 1)
    followers = [await crowd.follower() for _ in range(40)]
    await trio.testing.wait_all_tasks_blocked()
    lines = list(crowd.fan_out._lines.values())
    (leaving, _), old = followers[-1], lines[-1].outlet.descriptor
    mine, spare = socket.socketpair()
    newcomers: list[AsyncConnection] = []
    send = FanOut._send
    passed: list[int] = []

    async def replace() -> None:
        await leaving.aclose()
        while is_open(old):
            await trio.lowlevel.checkpoint()
        with spare:
            newcomers.append(crowd.connect(pair=(mine, socket.socket(fileno=os.dup2(spare.fileno(), old)))))

    def sending(self: FanOut, frames: Frames, some: list[Subscription], messages: int) -> None:
        passed.append(len(some))
        if len(passed) == 1:
            crowd.nursery.start_soon(replace)
        send(self, frames, some, messages)

    monkeypatch.setattr(FanOut, "_send", sending)
    crowd.publish(0, 1)
    for connection, sub in followers[:-1]:
        assert await receive(connection, 1) == [api.SubEventResponse(sub, event(0))]
    while len(passed) < len(followers):
        await trio.lowlevel.checkpoint()
    assert passed == [1] * 39 + [0], "it was gone before its turn"
    (newcomer,) = newcomers
    sub = await follow(newcomer)  # nothing came before the answer
    await trio.testing.wait_all_tasks_blocked()
    assert list(crowd.fan_out._lines.values())[-1].outlet.descriptor == old
    crowd.publish(1, 1)
    assert await receive(newcomer, 1) == [api.SubEventResponse(sub, event(1))]


async def test_one_whose_other_end_is_gone_is_forgotten(crowd: Crowd) -> None:
    followers = [await crowd.follower() for _ in range(4)]
    await trio.testing.wait_all_tasks_blocked()
    for connection, _ in followers[::2]:
        await connection.aclose()
    crowd.publish(0, 1)  # before anyone has noticed
    for connection, sub in followers[1::2]:
        assert await receive(connection, 1) == [api.SubEventResponse(sub, event(0))]
    while len(crowd.hub) > 2:
        await trio.lowlevel.checkpoint()
    assert len(crowd.fan_out._lines) == 2


async def test_a_backlog_and_what_comes_while_it_is_sent(crowd: Crowd) -> None:
    connection = crowd.connect(SMALLEST)
    await connection.send(api.SubscribeRequest(SESSION, 500, True))
    (subscribed,) = await receive(connection, 1)
    assert isinstance(subscribed, api.SubscribedResponse)
    crowd.publish(500, 100)
    assert await receive(connection, 600) == [api.SubEventResponse(subscribed.sub, event(n)) for n in range(600)]
    await trio.testing.wait_all_tasks_blocked()
    crowd.publish(600, 1)
    assert await receive(connection, 1) == [api.SubEventResponse(subscribed.sub, event(600))]
    assert crowd.followed[0].waits


# ---- followers whose own tasks send


async def test_those_who_send_by_themselves_are_woken_in_turns_and_wait_for_no_laggard(
    autojump_clock: trio.testing.MockClock,
) -> None:
    hub, wakes = Subscriptions(), Wakes()
    count = 3 * fanout.WEB_AT_ONCE
    seen: list[list[int]] = [[] for _ in range(count)]

    async def read(index: int, subscription: Subscription) -> None:
        wakes.carry(index, subscription)
        async for batch in subscription.batches():
            seen[index] += [one.event_id for one in batch if isinstance(one, ev.Event)]
            if index == 0:
                await trio.sleep_forever()  # nobody reads what it sends

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wakes.run)
        subscriptions = [hub.add(SESSION, [], False) for _ in range(count)]
        for index, subscription in enumerate(subscriptions):
            nursery.start_soon(read, index, subscription)
        await trio.testing.wait_all_tasks_blocked()
        hub.publish(SESSION, event(0))
        for most in range(fanout.WEB_AT_ONCE, count + 1, fanout.WEB_AT_ONCE):
            await trio.lowlevel.checkpoint()
            assert sum(not one.waits or one.position > 0 for one in subscriptions) <= most
        await trio.sleep(2 * fanout.WEB_LOOK)
        for number in range(1, MOST_BEHIND + 2):
            hub.publish(SESSION, event(number))
            if number % fanout.MOST_HELD == 0:
                await trio.sleep(2 * fanout.WEB_LOOK)  # far less than a pause
        await trio.sleep(2 * wakes.longest)
        assert seen == [[0]] + [list(range(MOST_BEHIND + 2))] * (count - 1)
        assert [one.reason for one in subscriptions] == ["lagged"] + [None] * (count - 1)
        nursery.cancel_scope.cancel()


async def test_one_who_does_not_read_holds_up_the_others_for_a_pause_at_most(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that delivers may be busy all the time, with lanes and requests."""
    hub, wakes = Subscriptions(), Wakes()
    seen: list[float] = []

    def always_busy() -> float:
        return trio.current_time()

    monkeypatch.setattr(fanout.time, "thread_time", always_busy)

    async def stuck(subscription: Subscription) -> None:
        async for _ in subscription.batches():
            await trio.sleep_forever()

    async def read(subscription: Subscription) -> None:
        async for batch in subscription.batches():
            seen.extend(trio.current_time() for _ in batch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wakes.run)
        for index, (session, reader) in enumerate(((1, stuck), (1, read), (2, read))):
            subscription = hub.add(session, [], False)
            wakes.carry(index, subscription)
            nursery.start_soon(reader, subscription)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        for number in range(2):
            hub.publish(1, event(number))
            hub.publish(2, event(number))
        await trio.sleep(10 * wakes.longest)
        assert len(seen) == 4
        assert max(seen) - began <= 4 * wakes.longest
        nursery.cancel_scope.cancel()
