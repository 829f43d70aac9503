"""/web/ws: every request on one connection, in order, with subscriptions beside."""

import json
from collections.abc import Callable
from pathlib import Path
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any

import pytest
import trio

from superfluid.api.web import server, websocket
from tests.api.web.serving import LIMIT, Site, WebSocket, on_web
from tests.api.web.test_stream import wait_until_free


def test_requests_are_answered_in_order(endless: Site) -> None:
    session = endless.session()
    socket = endless.websocket()
    socket.send({"Generate": {"session": session, "max_tokens": 10}}, "List", json.dumps("Tree").encode())
    replies = socket.until("Tree")
    names = [next(iter(reply)) for reply in replies]
    assert names[:-3] == ["Delta"] * (len(names) - 3)
    assert names[-3:] == ["Generated", "Sessions", "Tree"]
    done = replies[-3]["Generated"]
    assert done["events"] == [reply["Delta"]["event"] for reply in replies[:-3]]
    assert done["tokens_generated"] == 10


@pytest.mark.parametrize("frame", [b"{", b"", b"7", b'{"Nothing":{}}', b"\xff", b'{"Read":{"session":1}}', b"[" * 5000])
def test_a_frame_that_is_no_request_is_answered_in_its_place(site: Site, frame: bytes) -> None:
    socket = site.websocket()
    socket.send("List", frame, "Tree")
    replies = [socket.receive() for _ in range(3)]
    assert [next(iter(reply)) for reply in replies] == ["Sessions", "Err", "Tree"]
    assert replies[1]["Err"]["message"].startswith("invalid request frame: ")


def test_a_subscription_beside_a_generation(endless: Site) -> None:
    session = endless.session()
    socket = endless.websocket()
    number = socket.ask({"Subscribe": {"session": session, "cursor": 0, "provisional": True}})["Subscribed"]["sub"]
    socket.send({"Generate": {"session": session, "max_tokens": 30}})
    seen: list[Any] = []
    preview = said = ""
    while not seen or seen[-1]["event_id"] < 3 or "Generated" not in seen[-1]["body"] or len(said) < len(preview):
        reply = socket.receive()
        if "SubEvent" in reply:
            assert reply["SubEvent"]["sub"] == number
            seen.append(reply["SubEvent"]["event"])
            said += seen[-1]["body"].get("Generated", {}).get("text", "")
            assert preview.startswith(said)
        elif "SubProvisional" in reply:
            preview += reply["SubProvisional"]["text"]
    ids = [event["event_id"] for event in seen]
    assert ids == list(range(len(ids)))
    socket.send({"Unsubscribe": {"sub": number}})
    replies = socket.until("SubEnded")
    assert replies[-1]["SubEnded"] == {"sub": number, "reason": "unsubscribed"}


def test_a_subscription_of_another_connection(site: Site) -> None:
    first, second = site.websocket(), site.websocket()
    asked = {"Subscribe": {"session": site.session(), "cursor": 0, "provisional": False}}
    number = first.ask(asked)["Subscribed"]["sub"]
    refused = second.ask({"Unsubscribe": {"sub": number}})
    assert refused == {"Err": {"message": f"no subscription {number} on this connection"}}


def test_a_close_is_answered_with_a_close(site: Site) -> None:
    socket = site.websocket()
    assert socket.close() == 1000


@pytest.mark.parametrize("pipelined", [0, 200])
def test_a_connection_that_ends_cancels_what_it_runs(
    endless: Site, pipelined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is not read, because too many requests wait behind the generation."""
    monkeypatch.setattr(websocket, "LOOK", 0.001)
    session = endless.session()
    socket = endless.websocket()
    socket.send({"Generate": {"session": session, "max_tokens": 3500}}, *["List"] * pipelined)
    socket.until("Delta")
    socket.socket.close()
    found = wait_until_free(endless, session)
    assert found["last_finish"] == 4
    assert "Sessions" in endless.rpc("List")


def test_requests_past_the_limit_wait_and_none_is_dropped(endless: Site) -> None:
    session = endless.session()
    socket = endless.websocket()
    socket.send({"Generate": {"session": session, "max_tokens": 200}}, *["List"] * 300, "Tree")
    names = [next(iter(reply)) for reply in socket.until("Tree")]
    assert names.count("Sessions") == 300
    assert names.index("Generated") < names.index("Sessions")


def test_a_large_message(site: Site) -> None:
    session = site.session(None)
    socket = site.websocket()
    text = "é" * (1 << 20)
    reply = socket.ask({"Append": {"session": session, "text": text, "span": [7]}})
    assert reply["Committed"]["event"]["body"]["Appended"]["text"] == text


def test_one_that_is_read_again_after_a_while_has_lost_nothing(endless: Site) -> None:
    """Replies wait for a client that does not read."""
    socket = endless.websocket()
    session = endless.session("x" * 2000)
    asked = {"Read": {"session": session, "cursor": 0}}
    socket.send(*[asked] * 400)
    assert "Sessions" in endless.rpc("List")  # others are answered meanwhile
    replies = [socket.receive() for _ in range(400)]
    assert all("Events" in reply for reply in replies)


async def test_a_server_that_stops_says_so_and_closes(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    async with on_web(home, scripted_gguf("loop")) as site:

        def follow() -> tuple[WebSocket, WebSocket, int]:
            session = site.session()
            follower, idle = site.websocket(), site.websocket()
            follower.send({"Subscribe": {"session": session, "cursor": 0, "provisional": False}})
            number: int = follower.until("SubEvent")[0]["Subscribed"]["sub"]
            assert "Sessions" in idle.ask("List")
            return follower, idle, number

        follower, idle, number = await trio.to_thread.run_sync(follow)
    replies = await trio.to_thread.run_sync(follower.until, "SubEnded")
    assert replies[-1] == {"SubEnded": {"sub": number, "reason": "publisher closed"}}
    for socket in (follower, idle):
        assert await trio.to_thread.run_sync(socket.closed) == websocket.GOING_AWAY


async def test_one_that_reads_nothing_does_not_hold_up_the_end(
    home: Path, scripted_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CUT", 0.05)
    with trio.move_on_after(LIMIT) as limit:
        async with on_web(home, scripted_gguf("loop")) as site:

            def follow() -> WebSocket:
                session = site.session("x" * (1 << 20))  # as events more than a connection holds
                silent = site.websocket()
                silent.socket.setsockopt(SOL_SOCKET, SO_RCVBUF, 1)
                silent.send({"Subscribe": {"session": session, "cursor": 0, "provisional": False}})
                silent.until("Subscribed")
                return silent

            silent = await trio.to_thread.run_sync(follow)
    assert not limit.cancelled_caught
    silent.socket.close()
