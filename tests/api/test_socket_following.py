"""Following sessions over the socket: previews, backlogs, ends of subscriptions, the server's end."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from superfluid.api import socket as session_socket
from superfluid.client.trio_client import AsyncConnection
from superfluid.link import events as ev, session_api as api
from superfluid.sessions.subscriptions import MOST_BEHIND
from tests.api.on_socket import SOON, Served, lives, ready, receive, receive_until
from tests.api.serving import serving

# ---- subscriptions


def text_of(events: list[ev.Event], channel: int) -> str:
    return "".join(e.body.text for e in events if isinstance(e.body, ev.Generated) and e.body.channel == channel)


@pytest.mark.parametrize("script", ["utf8", "think", "text_tool", "loop", "bad_utf8"])
async def test_previews_run_ahead_of_what_is_committed_and_equal_it(served: Served, script: str) -> None:
    server = served(script)
    session = await ready(server)
    connection = await server.connect()
    await connection.send(api.SubscribeRequest(session.id, 0, True), api.GenerateRequest(session.id, 300))
    previewed = {ev.Channel.TEXT: "", ev.Channel.REASONING: ""}
    committed = {ev.Channel.TEXT: "", ev.Channel.REASONING: ""}
    end: api.GeneratedResponse | None = None
    last = -1
    while end is None or last < end.events[-1].event_id:
        match await receive(connection):
            case api.SubProvisionalResponse(_, channel, text):
                previewed[ev.Channel(channel)] += text
            case api.SubEventResponse(_, event):
                assert event.event_id == last + 1
                last = event.event_id
                if isinstance(event.body, ev.Generated) and event.body.channel != ev.Channel.TOOL_CALL:
                    channel = ev.Channel(event.body.channel)
                    committed[channel] += event.body.text
                    assert previewed[channel].startswith(committed[channel])
            case api.GeneratedResponse() as end:
                pass
    assert previewed == committed
    for channel in committed:
        assert committed[channel] == text_of(end.events, channel)
    assert any(committed.values())
    await connection.aclose()


async def test_a_backlog_and_what_follows_it_have_no_gap(served: Served) -> None:
    """Followers that come at any moment of a running generation see every event once, in order."""
    server = served("loop")
    session = await ready(server)
    runner = await server.connect()
    await runner.send(api.GenerateRequest(session.id, 2000))
    followers: list[tuple[int, bool, AsyncConnection]] = []
    for index in range(6):
        await receive_until(runner, api.DeltaResponse)
        follower = await server.connect()
        cursor = (0, 2, 4)[index % 3]
        await follower.send(api.SubscribeRequest(session.id, cursor, index % 2 == 1))
        followers.append((cursor, index % 2 == 1, follower))
        await receive_until(follower, api.SubscribedResponse)
        if index == 5:
            await session.cancel()
    await receive_until(runner, api.GeneratedResponse)
    events = await session.events()
    shown = ""
    for cursor, wants, follower in followers:
        seen: list[ev.Event] = []
        previewed = ""
        while not seen or seen[-1].event_id < events[-1].event_id:
            response = await receive(follower)
            if isinstance(response, api.SubEventResponse):
                seen.append(response.event)
            elif isinstance(response, api.SubProvisionalResponse):
                previewed += response.text
        assert seen == events[cursor:]
        assert text_of(events, ev.Channel.TEXT).endswith(previewed)
        assert wants or not previewed
        shown += previewed
        await follower.aclose()
    assert shown  # who came last may have come behind the last preview
    await runner.aclose()


async def test_ends_of_subscriptions(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    connection, other = await server.connect(), await server.connect()
    await connection.send(api.SubscribeRequest(10**9, 0, False))
    assert await receive(connection) == api.ErrResponse(f"unknown session {10**9}")
    await connection.send(api.SubscribeRequest(session.id, 50, False), api.SubscribeRequest(session.id, 50, True))
    first, second = await receive(connection), await receive(connection)
    assert isinstance(first, api.SubscribedResponse)
    assert second == api.SubscribedResponse(first.sub + 1)
    await other.send(api.UnsubscribeRequest(first.sub))
    assert await receive(other) == api.ErrResponse(f"no subscription {first.sub} on this connection")
    await connection.send(api.UnsubscribeRequest(first.sub))
    ends = [await receive(connection), await receive(connection)]
    assert api.UnsubscribedResponse() in ends
    assert api.SubEndedResponse(first.sub, "unsubscribed") in ends
    await connection.send(api.UnsubscribeRequest(first.sub))
    assert await receive(connection) == api.ErrResponse(f"no subscription {first.sub} on this connection")
    event = await session.append("x")
    assert await receive(connection) == api.SubEventResponse(first.sub + 1, event)
    await connection.aclose()
    await other.aclose()


async def test_a_subscriber_that_lags_is_dropped_and_slows_nobody(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    laggard, runner = await server.connect(), await server.connect()
    await laggard.send(api.SubscribeRequest(session.id, 0, True))
    reply = await session.generate(2000)
    assert reply.tokens_generated == 2000
    blocks = 2 * MOST_BEHIND  # more than what may wait and what its socket holds
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.send, *[api.AppendBlockRequest(session.id, 1, 4, "x" * 1000)] * blocks)
        for _ in range(blocks):
            last = await receive(runner)
    assert isinstance(last, api.CommittedResponse)
    seen = await receive_until(laggard, api.SubEndedResponse)
    assert seen[-1] == api.SubEndedResponse(seen[0].sub, "lagged")  # type: ignore[attr-defined]
    assert reply.text == "".join(one.text for one in seen if isinstance(one, api.SubProvisionalResponse))
    events = [one.event.event_id for one in seen if isinstance(one, api.SubEventResponse)]
    assert events == list(range(len(events)))
    assert MOST_BEHIND < len(events) < last.event.event_id
    await laggard.aclose()
    await runner.aclose()


async def test_subscribers_are_forgotten_with_their_connection(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    before = len(server.model.store.subscriptions)
    connections = [await server.connect() for _ in range(10)]
    for connection in connections:
        await connection.send(api.SubscribeRequest(session.id, 0, True))
        await receive_until(connection, api.SubEventResponse)
    assert len(server.model.store.subscriptions) == before + 10
    for connection in connections:
        await connection.aclose()
    await lives(server)
    with trio.fail_after(SOON):
        while len(server.model.store.subscriptions) > before:
            await lives(server)


# ---- the server's end


async def test_a_server_that_stops_says_so_to_who_follows_and_to_who_generates(
    home: Path, scripted_gguf: Callable[[str], Path]
) -> None:
    async with serving(home, scripted_gguf("loop")) as server:
        session, idle = await ready(server), await ready(server)
        follower, runner, bystander = await server.connect(), await server.connect(), await server.connect()
        await follower.send(api.SubscribeRequest(session.id, 0, True), api.SubscribeRequest(idle.id, 0, False))
        await runner.send(api.GenerateRequest(session.id, 4000), api.ListRequest())
        seen = await receive_until(follower, api.SubProvisionalResponse)
        await receive_until(runner, api.DeltaResponse)
        await bystander.send(api.ListRequest())
        await receive(bystander)
    seen += await receive_until(follower, api.SubEndedResponse)
    seen += await receive_until(follower, api.SubEndedResponse)
    subs = [one.sub for one in seen if isinstance(one, api.SubscribedResponse)]
    ends = [one for one in seen if isinstance(one, api.SubEndedResponse)]
    assert sorted(ends, key=lambda one: one.sub) == [api.SubEndedResponse(sub, "publisher closed") for sub in subs]
    events = [one.event for one in seen if isinstance(one, api.SubEventResponse) and one.sub == subs[0]]
    assert [event.event_id for event in events] == list(range(len(events)))
    (end,) = [one for one in await rest(runner) if not isinstance(one, api.DeltaResponse)]
    assert end == api.ErrResponse("generation failed: the server stopped it")
    for connection in (follower, bystander):
        assert await rest(connection) == []


async def test_a_follower_that_reads_nothing_does_not_hold_up_the_end(
    home: Path, scripted_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_socket, "FAREWELL", 0.05)
    async with serving(home, scripted_gguf("loop")) as server:
        session = await ready(server)
        await session.append("x" * (1 << 20))  # more than a socket holds
        silent = await server.connect()
        await silent.send(api.SubscribeRequest(session.id, 0, False))
        assert await receive(silent) == api.SubscribedResponse(1)
    await silent.aclose()


async def rest(connection: AsyncConnection) -> list[api.Response]:
    """What comes until the server closes."""
    found: list[api.Response] = []
    with trio.fail_after(SOON):
        while (response := await connection.receive()) is not None:
            found.append(response)
    await connection.aclose()
    return found
