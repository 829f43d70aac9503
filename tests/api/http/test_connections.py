"""Connections on raw sockets: how they end, who goes away and when, and what a drain does to them."""

import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from superfluid.api.http import app, choices, departures, listener, server
from superfluid.api.http.app import make_app
from superfluid.api.http.listener import Listener, server_config
from superfluid.api.http.security import Access
from tests.api.http.listening import HOST, Site, listening

HI = [{"role": "user", "content": "hi"}]
FOR_EVER = {"model": "scripted-loop", "messages": HI, "temperature": 0, "stream": True, "ignore_eos": True}
PLAIN = {"model": "scripted-plain", "messages": HI, "temperature": 0}
LIMIT = 60.0  # seconds that no step of these tests comes near

Script = Callable[[str], Path]


def request_bytes(body: object, *headers: str, path: str = "/v1/chat/completions", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode() if body is not None else b""
    lines = [
        f"{'POST' if body is not None else 'GET'} {path} HTTP/{version}", "Host: localhost",
        f"Content-Length: {len(data)}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + data


async def read_all(stream: trio.SocketStream) -> bytes:
    """Everything until the server ends the connection."""
    with trio.fail_after(LIMIT):
        return b"".join([part async for part in stream])


async def read_until(stream: trio.SocketStream, words: bytes) -> bytes:
    data = b""
    with trio.fail_after(LIMIT):
        while words not in data:
            part = await stream.receive_some(65536)
            assert part, f"the connection ended after {data!r}"
            data += part
    return data


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(LIMIT):
        while not true():  # noqa: ASYNC110 - nothing tells when a lane comes or goes
            await trio.sleep(0.002)


async def connect(site: Site) -> trio.SocketStream:
    return await trio.open_tcp_stream(HOST, site.port)


@asynccontextmanager
async def exchange(site: Site, data: bytes) -> AsyncIterator[trio.SocketStream]:
    async with await connect(site) as stream:
        await stream.send_all(data)
        yield stream


# ---- ends


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_is_to_end_ends(site: Site, version: str, stream: bool) -> None:
    headers = ["Connection: close"] if version == "1.1" else []
    async with exchange(site, request_bytes(PLAIN | {"stream": stream}, *headers, version=version)) as wire:
        data = await read_all(wire)
    assert data.startswith(b"HTTP/1.1 200")
    assert (b"data: [DONE]" in data) == stream
    async with exchange(site, request_bytes(None, *headers, path="/nowhere", version=version)) as wire:
        assert b"no such route" in await read_all(wire)


async def test_http_1_0_without_a_host(site: Site) -> None:
    async with exchange(site, b"GET /health HTTP/1.0\r\n\r\n") as wire:
        assert b'"status":"ok"' in await read_all(wire)


async def test_a_connection_is_kept_for_more(site: Site) -> None:
    async with await connect(site) as wire:
        for _ in range(3):
            await wire.send_all(request_bytes(PLAIN))
            assert b"Hello, world." in await read_until(wire, b'"usage"')


async def test_a_connection_whose_client_left_is_closed_at_once(site: Site) -> None:
    """A client that takes a connection per request leaves no descriptor behind to wait out the idle limit."""

    def held() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(1 for one in connections if one.laddr.port == site.port and one.status == psutil.CONN_CLOSE_WAIT)

    for _ in range(8):
        async with exchange(site, request_bytes(PLAIN)) as wire:
            assert b"Hello, world." in await read_until(wire, b'"usage"')
        async with exchange(site, request_bytes(PLAIN | {"stream": True})) as wire:
            await read_until(wire, b"[DONE]")
    with trio.fail_after(listener.IDLE / 2):
        await until(lambda: held() == 0)


async def test_requests_sent_ahead_are_answered_in_order(site: Site) -> None:
    ahead = request_bytes(PLAIN) + request_bytes(None, path="/health")
    last = request_bytes(None, "Connection: close", path="/v1/models")
    async with exchange(site, ahead + last) as wire:
        data = await read_all(wire)
    places = [data.index(words) for words in (b"chat.completion", b'"status":"ok"', b'"object":"list"')]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"hello there\r\n\r\n", b"\x00" * 200, b"x" * 100_000],
)
async def test_garbage_ends_its_connection_only(site: Site, garbage: bytes) -> None:
    async with await connect(site) as wire:
        try:
            await wire.send_all(garbage)
            await wire.send_eof()
            assert not (await read_all(wire)).startswith(b"HTTP/1.1 200")
        except trio.BrokenResourceError:
            pass  # ended before it had sent it all
    async with exchange(site, request_bytes(None, "Connection: close", path="/health")) as wire:
        assert b'"status":"ok"' in await read_all(wire)


async def test_half_a_request_and_gone(site: Site) -> None:
    for data in (b"POST /v1/chat/completions HT", request_bytes(PLAIN)[:-5]):
        async with exchange(site, data):
            pass
    async with exchange(site, request_bytes(PLAIN, "Connection: close")) as wire:
        assert b"Hello, world." in await read_all(wire)


async def test_nothing_speaks_websocket(site: Site) -> None:
    upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    async with exchange(site, request_bytes(None, *upgrade, "Sec-WebSocket-Version: 13", path="/v1/models")) as wire:
        assert (await read_until(wire, b"\r\n\r\n")).startswith(b"HTTP/1.1 403")


# ---- limits


def test_no_limit_cuts_a_running_stream() -> None:
    """A stream ends when it ends: what the server libraries would cut it after is off."""
    made = make_app(Access(HOST), lambda: False)
    assert made.config["RESPONSE_TIMEOUT"] is None
    assert made.config["BODY_TIMEOUT"] is None
    config = server_config()
    assert config.read_timeout is None
    assert config.keep_alive_timeout == 30


async def test_an_idle_limit_does_not_cut_a_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch, scripted_gguf: Script, tmp_path: Path
) -> None:
    """With an idle limit that has passed many times over, a stream runs on, and an idle connection is closed."""
    monkeypatch.setattr(listener, "IDLE", 0.05)
    monkeypatch.setattr(choices, "SILENCE", 0.01)
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=1) as own:
        async with await connect(own) as idle:
            assert await read_all(idle) == b""
        async with exchange(own, request_bytes(FOR_EVER | {"max_tokens": 300})) as wire:
            data = await read_until(wire, b"[DONE]")
            assert b'"completion_tokens":300' in data
            assert await read_all(wire) == b"0\r\n\r\n" or data.endswith(b"0\r\n\r\n")


async def test_a_body_that_brings_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SLOW_BODY", 0.05)
    async with exchange(site, request_bytes(PLAIN)[:-5]) as wire:
        data = await read_all(wire)
    assert data.startswith(b"HTTP/1.1 408")
    assert b"brought nothing" in data


async def test_a_body_that_is_too_large(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by its length, or as it comes; a client that writes before it reads gets to read why."""
    size = app.MAX_BODY + 1
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
    async with exchange(site, head) as wire:
        part = b" " * (1 << 20)
        for start in range(0, size, len(part)):
            await wire.send_all(part[: size - start])
        data = await read_until(wire, b"payload_too_large")
    assert data.startswith(b"HTTP/1.1 413")
    assert b"Request body too large" in data
    monkeypatch.setattr(app, "MAX_BODY", 1000)
    chunked = (
        b"POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000
    )
    async with exchange(site, chunked) as wire:
        await wire.send_all(b"\r\n0\r\n\r\n")
        assert b"payload_too_large" in await read_until(wire, b"payload_too_large")


def test_a_client_that_reads_nothing_is_dropped_by_the_system() -> None:
    with listener.listen(HOST, 0) as listening_socket, socket.create_connection(listening_socket.getsockname()):
        accepted, _ = listening_socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


# ---- clients that go away


async def test_leaving_in_mid_stream_frees_the_lane(scripted_gguf: Script, tmp_path: Path) -> None:
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=2) as site:
        async with exchange(site, request_bytes(FOR_EVER | {"max_tokens": 200})) as stays:
            async with exchange(site, request_bytes(FOR_EVER)) as leaves:
                await read_until(leaves, b"tock")
            with trio.fail_after(LIMIT):
                await until(lambda: len(site.model.scheduler.lanes) <= 1)
            data = await read_until(stays, b"[DONE]")
        assert b'"completion_tokens":200' in data
        with trio.fail_after(LIMIT):
            await site.daemon.idle()
        assert not site.model.scheduler.lanes


BEHIND = pytest.mark.parametrize(
    "behind", [b"", b"\r\n", request_bytes(None, path="/health")], ids=["", "blank", "next"]
)
"""Bytes that stand behind a request: while it is answered nothing is read then, the end of the stream neither."""


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "LOOK", 0.01)


@BEHIND
async def test_leaving_before_the_answer_frees_the_lane(
    scripted_gguf: Script, tmp_path: Path, behind: bytes, looking: None
) -> None:
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=1) as site:
        async with exchange(site, request_bytes(FOR_EVER | {"stream": False}) + behind):
            await until(lambda: len(site.model.scheduler.lanes) == 1)
        with trio.fail_after(LIMIT):
            await site.daemon.idle()
        assert site.model.scheduler.lanes == []
        assert site.model.metrics.decode_tokens_total < site.model.window  # it did not run to its end


@BEHIND
async def test_leaving_while_queued(scripted_gguf: Script, tmp_path: Path, behind: bytes, looking: None) -> None:
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=1) as site:
        scheduler = site.model.scheduler
        async with exchange(site, request_bytes(FOR_EVER)) as runs:
            await read_until(runs, b"tick")
            for stream in (False, True):
                async with exchange(site, request_bytes(FOR_EVER | {"stream": stream}) + behind):
                    await until(lambda: sum(scheduler.queue_depths) == 1)
                await until(lambda: sum(scheduler.queue_depths) == 0)
            await read_until(runs, b"tick")
            assert len(scheduler.lanes) == 1
        with trio.fail_after(LIMIT):
            await site.daemon.idle()


@BEHIND
async def test_leaving_while_prefilling(scripted_gguf: Script, tmp_path: Path, behind: bytes, looking: None) -> None:
    long = FOR_EVER | {"messages": [{"role": "user", "content": "x" * 4000}], "stream": False}
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=1) as site:
        async with exchange(site, request_bytes(long) + behind):
            await until(lambda: bool(site.model.scheduler.lanes))
        with trio.fail_after(LIMIT):
            await site.daemon.idle()
        async with exchange(site, request_bytes(FOR_EVER | {"max_tokens": 3}, "Connection: close")) as wire:
            assert b"[DONE]" in await read_all(wire)


@BEHIND
async def test_leaving_right_after_asking(scripted_gguf: Script, tmp_path: Path, behind: bytes, looking: None) -> None:
    """At whatever point the request is: no lane and no task stays behind."""
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=2) as site:
        before = trio.lowlevel.current_statistics().tasks_living
        for stream in (False, True) * 8:
            async with exchange(site, request_bytes(FOR_EVER | {"stream": stream}) + behind):
                pass
        with trio.fail_after(LIMIT):
            await site.daemon.idle()
        assert site.model.scheduler.lanes == site.model.scheduler.waiting == []
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
        assert trio.lowlevel.current_statistics().tasks_living <= before


# ---- drain


async def test_drain(scripted_gguf: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections are refused, requests on open ones answer 503, what runs goes on to its end."""
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=2) as site:
        idle = await connect(site)
        await idle.send_all(request_bytes(None, path="/health"))
        await read_until(idle, b'"status"')
        async with exchange(site, request_bytes(FOR_EVER | {"max_tokens": 400})) as runs:
            await read_until(runs, b"tick")
            site.daemon.drain()
            await idle.send_all(request_bytes(PLAIN))
            refused = await read_until(idle, b"shutting down")
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 5" in refused.lower()
            with pytest.raises(OSError, match="connect"):
                await connect(site)
            assert b'"completion_tokens":400' in await read_until(runs, b"[DONE]")
        assert await read_all(idle) == b""
        with trio.fail_after(LIMIT):
            await site.daemon.idle()


async def test_a_client_that_reads_nothing_does_not_hold_up_a_drain(
    scripted_gguf: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FLUSH", 0.05)
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=8) as site:
        wire = trio.socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        await wire.connect((HOST, site.port))
        with wire:
            flood = {"n": 8, "max_tokens": 500, "logprobs": True, "top_logprobs": 20}  # more than the buffers hold
            await wire.send(request_bytes(FOR_EVER | flood))
            await until(lambda: site.model.metrics.decode_tokens_total > 0)
            site.daemon.drain()
            with trio.fail_after(LIMIT):
                await site.daemon.idle()
            assert site.model.scheduler.lanes == []
            assert site.daemon.draining


async def test_what_is_cut_gets_an_error_frame(scripted_gguf: Script, tmp_path: Path) -> None:
    stream: trio.SocketStream
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=1) as site:
        stream = await connect(site)
        await stream.send_all(request_bytes(FOR_EVER))
        await read_until(stream, b"tick")
    data = await read_all(stream)
    assert b'data: {"error":{"message":' in data
    assert b'"type":"server_error"' in data
    assert b"data: [DONE]" in data


async def test_workers_do_not_keep_the_port(scripted_gguf: Script, tmp_path: Path) -> None:
    """The listening socket is not inherited, though the server library marks it so."""
    with listener.listen(HOST, 0) as listening_socket:
        listening_on = Listener(listening_socket)
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.serve, make_app(Access(HOST), lambda: False), listening_on, shutdown)
        with socket.socket(fileno=listening_on.descriptor) as probe:
            assert not probe.get_inheritable()
            probe.detach()
        shutdown.set()


# ---- faults


async def test_a_dead_worker_ends_its_streams_with_a_typed_error(scripted_gguf: Script, tmp_path: Path) -> None:
    """What streamed before is a prefix of the reply; the next request is served unaided."""
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=2) as site:
        async with (
            exchange(site, request_bytes(FOR_EVER)) as stream,
            exchange(site, request_bytes(FOR_EVER | {"stream": False})) as whole,
        ):
            head = await read_until(stream, b"tock")
            lanes = site.model.scheduler.lanes
            await until(lambda: [lane.new for lane in lanes] == [False] * 2)  # one the worker never saw would be served
            os.kill(worker_of(site), signal.SIGKILL)
            data = head + await read_until(stream, b"[DONE]")
            refused = await read_until(whole, b"}}")
        assert refused.startswith(b"HTTP/1.1 500")
        assert b'"type":"server_error"' in refused
        events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
        assert json.loads(events[-1])["error"]["type"] == "server_error"
        said = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert said == ("tick tock " * 3000)[: len(said)]
        async with exchange(site, request_bytes(FOR_EVER | {"max_tokens": 4}, "Connection: close")) as again:
            data = await read_all(again)
        assert b'"completion_tokens":4' in data


def worker_of(site: Site) -> int:
    """The process id of the model's worker."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    named = str(site.model.config.path)
    for pid in " ".join(path.read_text() for path in children).split():
        if named in Path(f"/proc/{pid}/cmdline").read_text():
            return int(pid)
    raise AssertionError(f"no worker of {named}")


async def test_one_line_per_request_that_generated(
    scripted_gguf: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "superfluid.api.http.access_log")
    async with listening(tmp_path, scripted_gguf("plain"), max_batch=2) as site:
        for body in (PLAIN, PLAIN | {"stream": True}, PLAIN | {"n": 3}, PLAIN | {"model": "nobody"}):
            async with exchange(site, request_bytes(body, "Connection: close")) as wire:
                await read_all(wire)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("<--")]
    assert len(lines) == 3
    pattern = (
        r"<-- 200 POST /v1/chat/completions%s model=scripted-plain prompt=21 cached=\d+ completion=%d ttft=\d+ms "
        r"prefill=(\d+|-) tok/s decode=(\d+\.\d|-) tok/s total=\d+ms finish=stop"
    )
    for line, (kind, made) in zip(lines, (("", 5), (r" \(stream\)", 5), ("", 15)), strict=True):
        assert re.fullmatch(pattern % (kind, made), line), line


async def test_one_line_per_request_that_was_refused(
    scripted_gguf: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "superfluid.api.http.access_log")
    async with listening(tmp_path, scripted_gguf("plain"), max_batch=2) as site:
        for asked in (
            request_bytes(PLAIN | {"model": "nobody"}, "Connection: close"),
            request_bytes({}, "Connection: close", path="/no%0Asuch%20route?secret=1"),
            request_bytes({}, "Connection: close", path="/health"),
        ):
            async with exchange(site, asked) as wire:
                await read_all(wire)
    assert [record.getMessage() for record in caplog.records if "superfluid.api.http" in record.name] == [
        "refused 404 POST /v1/chat/completions code=model_not_found",
        "refused 404 POST /no%0Asuch%20route code=-",
        "refused 405 POST /health code=-",
    ]


async def test_the_line_of_a_stream_that_is_cut_is_true(
    scripted_gguf: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "superfluid.api.http.access_log")
    async with listening(tmp_path, scripted_gguf("loop"), max_batch=2) as site:
        stream = await connect(site)
        await stream.send_all(request_bytes(FOR_EVER))
        await read_until(stream, b"tock")
    await read_all(stream)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("<--")]
    found = re.search(r"<-- 200 .* completion=(\d+) ttft=(\d+)ms .* finish=cancelled$", line)
    assert found, line
    assert int(found[1]) > 0
