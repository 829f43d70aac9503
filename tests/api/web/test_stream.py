"""/web/rpc and /web/stream: what they answer, previews, silences, and what ends a stream."""

import http.client
import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from superfluid.api.web import rpc
from superfluid.scheduler.generation import Ended, Generation, Job
from tests.api.web.serving import HOST, LIMIT, Site, on_web


class OpenStream:
    """A /web/stream as it runs."""

    def __init__(self, site: Site, **asked: Any) -> None:
        self._connection = http.client.HTTPConnection(HOST, site.port, timeout=LIMIT)
        self._connection.request("POST", "/web/stream", json.dumps(asked), site.headers)
        self.reply = self._connection.getresponse()

    def line(self) -> str:
        return self.reply.readline().decode().rstrip("\n")

    def event(self) -> Any:
        while not (line := self.line()).startswith("data: "):
            pass
        return json.loads(line.removeprefix("data: "))

    def close(self) -> None:
        self.reply.close()
        self._connection.close()


def generated(events: list[Any], channel: int = 0) -> str:
    bodies = [event["committed"]["body"].get("Generated") for event in events if "committed" in event]
    return "".join(body["text"] for body in bodies if body and body["channel"] == channel)


def wait_until_free(site: Site, session: int) -> Any:
    while (found := site.rpc({"Inspect": {"session": session}})["Inspection"]["inspection"])["tier"] == "Resident":
        pass
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {"Generate": {"session": 1, "max_tokens": 1}},
        {"Subscribe": {"session": 1, "cursor": 0, "provisional": False}},
        {"Unsubscribe": {"sub": 1}},
    ],
)
def test_what_needs_a_connection_is_sent_to_the_websocket(site: Site, asked: Any) -> None:
    name = next(iter(asked))
    route = "/web/stream or /web/ws" if name == "Generate" else "/web/ws"
    assert site.rpc(asked) == {"Err": {"message": f"protocol: {name} needs a connection: use {route}"}}


def test_previews_are_the_text_that_is_committed(endless: Site) -> None:
    session = endless.session()
    events = endless.post("/web/stream", {"session": session, "max_tokens": 50, "provisional": True}).events
    assert events[-1] == "[DONE]"
    assert events[-2]["done"]["tokens_generated"] == 50
    previewed = "".join(event["provisional"]["text"] for event in events if "provisional" in event)
    assert previewed == generated(events) != ""
    shown = said = ""
    for event in events[:-2]:
        if "provisional" in event:
            shown += event["provisional"]["text"]
        else:
            said += event["committed"]["body"]["Generated"]["text"]
            assert shown.startswith(said)


def test_no_previews_unless_asked(endless: Site) -> None:
    events = endless.post("/web/stream", {"session": endless.session(), "max_tokens": 20}).events
    assert not [event for event in events if "provisional" in event]


def test_a_refusal_is_an_event(site: Site) -> None:
    reply = site.post("/web/stream", {"session": 1 << 40, "max_tokens": 1})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.events == [{"error": f"unknown session {1 << 40}"}, "[DONE]"]


def test_closing_a_stream_cancels_its_generation(endless: Site) -> None:
    session = endless.session()
    stream = OpenStream(endless, session=session, max_tokens=3000, provisional=True)
    stream.event()
    stream.close()
    found = wait_until_free(endless, session)
    assert found["last_finish"] == 4
    made = sum(len(e["body"]["Generated"]["span"]) for e in found["events"] if "Generated" in e["body"])
    assert made < 3000


def test_a_cancel_from_beside_ends_a_stream_whole(endless: Site) -> None:
    session = endless.session()
    stream = OpenStream(endless, session=session, max_tokens=3000, provisional=True)
    stream.event()
    assert endless.rpc({"Cancel": {"session": session}}) == "Cancelling"
    while "done" not in (event := stream.event()):
        pass
    assert event["done"]["finish"] == 4
    assert (stream.line(), stream.line()) == ("", "data: [DONE]")
    stream.close()


def test_a_session_that_generates_is_busy(endless: Site) -> None:
    session = endless.session()
    stream = OpenStream(endless, session=session, max_tokens=3000, provisional=True)
    stream.event()
    refused = endless.post("/web/stream", {"session": session, "max_tokens": 1}).events
    assert f"session {session} is generating" in refused[0]["error"]
    stream.close()


async def test_a_silence_is_a_comment(endless: Site, autojump_clock: MockClock) -> None:
    """A generation of which nothing is heard for 15 s brings an empty batch, which is sent as a comment."""
    stream = rpc.Stream(rpc.Web(endless.server.daemon), 1, 1, False)
    router = endless.server.model.codec.router(0)
    generation = Generation(Job(None, [], 1, router), lambda _: None)
    generation.notify = stream._wake
    started = trio.current_time()
    assert await stream._items(generation) == []
    assert trio.current_time() - started == rpc.SILENCE == 15
    generation.put_end(Ended(1))
    (end,) = await stream._items(generation)
    assert isinstance(end, Ended)


async def test_a_server_that_stops_ends_its_streams_with_an_error(home: Any, scripted_gguf: Any) -> None:
    async with on_web(home, scripted_gguf("loop")) as site:
        session = await trio.to_thread.run_sync(site.session)
        stream = await trio.to_thread.run_sync(
            lambda: OpenStream(site, session=session, max_tokens=3500, provisional=True)
        )
        await trio.to_thread.run_sync(stream.event)
    rest = [line for line in (await trio.to_thread.run_sync(stream.reply.read)).decode().split("\n") if line]
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert "stopped" in last.get("error", "") or "done" in last
