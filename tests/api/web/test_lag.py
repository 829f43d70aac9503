"""Followers that do not read, on real sockets with the least buffers: how they end, and that nobody waits for them."""

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from superfluid.api.http.listener import listen
from superfluid.api.web import server as web_server, websocket
from superfluid.link import session_api as api
from superfluid.scheduler import generation, planner
from superfluid.sessions.subscriptions import MOST_BEHIND
from tests.api.web.serving import HOST, LIMIT, Site, SiteThread
from tests.api.web.test_stream import generated, wait_until_free

SMALLEST = 1  # bytes of a socket's buffer: the kernel takes its least
LARGE = 1 << 20
LARGE = 1 << 20
UNSENT = 4096
TOKENS = 2000


def listen_with_small_buffers(host: str, port: int) -> socket.socket:
    listening = listen(host, port)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALLEST)  # its connections inherit it
    return listening


@pytest.fixture(scope="module")
def site(scripted_gguf: Callable[[str], Path]) -> Iterator[Site]:
    """Replies only end with their max_tokens; a connection holds a few kilobytes."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="sf-") as home:
        patch.setattr(web_server, "listen", listen_with_small_buffers)
        patch.setattr(websocket, "MOST_UNSENT", UNSENT)
        with SiteThread(Path(home), scripted_gguf("loop")) as site:
            yield site


def holding(connected: socket.socket, most: int) -> None:
    """Set how many bytes a client's end takes ahead of its reader."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most)


def test_one_that_does_not_read_a_websocket_ends_as_lagged(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what was queued, without a gap, then why it ends; its connection goes on, and others saw everything."""
    monkeypatch.setitem(planner.FLOOR, True, 1)
    monkeypatch.setattr(planner, "MOST_ROUNDS", 1)  # each token is an event
    session = site.session()
    laggard, reader = site.websocket(), site.websocket()
    holding(laggard.socket, SMALLEST)
    for follower in (laggard, reader):
        follower.send({"Subscribe": {"session": session, "cursor": 0, "provisional": follower is laggard}})
        follower.until("Subscribed")
    seen: list[Any] = []

    def read() -> None:
        while sum(len(event["body"]["Generated"]["span"]) for event in seen if "Generated" in event["body"]) < TOKENS:
            seen.append(reader.receive()["SubEvent"]["event"])

    reading = threading.Thread(target=read)
    reading.start()
    done = site.post("/web/stream", {"session": session, "max_tokens": TOKENS}).events
    reading.join(LIMIT)
    assert done[-2]["done"]["tokens_generated"] == TOKENS  # while nobody read the laggard's
    holding(laggard.socket, LARGE)
    replies = laggard.until("SubEnded")
    assert replies[-1]["SubEnded"]["reason"] == "lagged"
    assert len(replies) >= MOST_BEHIND
    ids = [reply["SubEvent"]["event"]["event_id"] for reply in replies if "SubEvent" in reply]
    assert ids == list(range(len(ids)))
    previewed = "".join(reply["SubProvisional"]["text"] for reply in replies if "SubProvisional" in reply)
    assert generated(done).startswith(previewed)
    assert 0 < len(previewed) < len(generated(done))
    assert "Sessions" in laggard.ask("List")
    events = site.rpc({"Read": {"session": session, "cursor": 0}})["Events"]["events"]
    assert [*seen, *(reader.receive()["SubEvent"]["event"] for _ in events[len(seen) :])] == events


def test_a_stream_that_is_not_read_ends_and_frees_its_session(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane goes on alone up to a limit, then stops; whoever reads at last is told so."""
    monkeypatch.setattr(generation, "LAG_TOKENS", TOKENS // 4)
    session = site.session()
    body = json.dumps({"session": session, "max_tokens": TOKENS, "provisional": True}).encode()
    headers = "".join(f"{name}: {value}\r\n" for name, value in site.headers.items())
    head = f"POST /web/stream HTTP/1.1\r\nHost: {HOST}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((HOST, site.port), timeout=LIMIT) as client:
        holding(client, SMALLEST)
        client.sendall(head.encode() + body)
        while "Generated" not in json.dumps(site.rpc({"Read": {"session": session, "cursor": 2}})):
            pass
        found = wait_until_free(site, session)
        assert found["last_finish"] == 4
        made = sum(len(event["body"]["Generated"]["span"]) for event in found["events"] if "Generated" in event["body"])
        assert TOKENS // 4 < made < TOKENS
        holding(client, LARGE)
        data = b""
        while b"[DONE]" not in data:
            piece = client.recv(65536)
            assert piece, "the stream ended without its end"
            data += piece
    messages = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    assert messages[-1] == {"error": "generation failed: the client reads too slowly"}
    said = generated(messages)
    assert said == generated([{"committed": event} for event in found["events"]])[: len(said)]


def test_a_thousand_followers_get_every_event(site: Site) -> None:
    """Half over WebSockets, half over the socket; each sees all of a session, in order, to the end."""
    session = site.session()
    each, connections = 50, 10
    subscribe = {"session": session, "cursor": 0, "provisional": False}
    sockets = [site.websocket() for _ in range(connections)]
    with site.server.blocking_client() as client:
        wires = [client.connect() for _ in range(connections)]
        for socket_ in sockets:
            socket_.send(*[{"Subscribe": subscribe}] * each)
        for wire in wires:
            wire.send(*[api.SubscribeRequest(**subscribe)] * each)
        while len(site.server.model.store.subscriptions) < 2 * each * connections:
            site.rpc("List")
        reply = client.get(session).generate(100)
        assert reply.tokens_generated == 100
        last = reply.events[-1].event_id
        every = list(range(last + 1))

        def read(receive: Callable[[], Any], seen: Callable[[Any], tuple[int, int] | None]) -> None:
            followers: dict[int, list[int]] = {}
            open_ = each
            while open_:
                one = seen(receive())
                if one is not None:
                    followers.setdefault(one[0], []).append(one[1])
                    open_ -= one[1] == last
            assert list(followers.values()) == [every] * each

        def of_json(reply: Any) -> tuple[int, int] | None:
            assert "SubEnded" not in reply
            event = reply.get("SubEvent")
            return None if event is None else (event["sub"], event["event"]["event_id"])

        def of_frame(reply: api.Response | None) -> tuple[int, int] | None:
            assert reply is not None
            assert not isinstance(reply, api.SubEndedResponse)
            return (reply.sub, reply.event.event_id) if isinstance(reply, api.SubEventResponse) else None

        for socket_ in sockets:
            read(socket_.receive, of_json)
            socket_.socket.close()
        for wire in wires:
            read(wire.receive, of_frame)
            wire.close()
