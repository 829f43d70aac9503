"""The session socket: frames, order, ends of connections, cancels, subscriptions."""

import itertools
import math
import os
import re
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

from superfluid.api import outlet, socket as session_socket
from superfluid.api.fanout import FanOut
from superfluid.api.socket import SocketTaken, bind, run_socket, serve_connection
from superfluid.client import Finish
from superfluid.client.errors import NothingInFlight, Refused, SessionBusy, UnknownSession
from superfluid.client.frames import LENGTH, SocketWire, frame
from superfluid.client.trio_client import AsyncConnection
from superfluid.daemon.daemon import Daemon
from superfluid.link import events as ev, postcard, session_api as api
from superfluid.observe.metrics import Metrics
from tests.api.on_socket import SOON, Served, lives, quiet, raw, read_all, ready, receive, receive_until

# ---- frames


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a frame says that it has 542393671 bytes, 67108864 is the most"),
        (LENGTH.pack(api.MAX_FRAME + 1), "67108865 bytes"),
        (LENGTH.pack(1 << 31), "2147483648 bytes"),
        (LENGTH.pack(0), r"a frame of 0 bytes holds no request \(Request: it ends early"),
        (LENGTH.pack(1) + b"\x7f", r"a frame of 1 bytes holds no request \(Request: Request has no variant 127\)"),
        (LENGTH.pack(2) + b"\x03\x01", "ends early"),  # Generate, cut
        (LENGTH.pack(6) + b"\x02\x01\x01\x02\xff\xff", "decode byte 0xff"),  # AppendMessage of no UTF-8
        (LENGTH.pack(11) + b"\x04" + b"\xff" * 10, "u64"),  # Read of a session over u64
    ],
)
async def test_what_is_no_request_closes_the_connection_without_an_answer(
    served: Served, data: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = served("loop")
    stream = await raw(server)
    await stream.send_all(data)
    assert await read_all(stream) == b""
    await lives(server)
    (line,) = [r.getMessage() for r in caplog.records if r.name == session_socket.__name__ and r.levelname == "WARNING"]
    assert re.match(f"a connection to the session socket is closed without an answer: .*{why}", line)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x05\x00\x00\x00", LENGTH.pack(100) + b"\x02\x01"])
async def test_a_connection_may_end_anywhere(served: Served, data: bytes) -> None:
    server = served("loop")
    stream = await raw(server)
    if data:
        await stream.send_all(data)
    await stream.send_eof()
    assert await read_all(stream) == b""
    await lives(server)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.binary(max_size=40), max_size=4), tail=st.binary(max_size=8))
def test_garbage_never_brings_the_server_down(served: Served, payloads: list[bytes], tail: bytes) -> None:
    """Frames of random bytes are answered or end the connection; what was answered decodes."""
    server = served("loop")
    data = b"".join(LENGTH.pack(len(payload)) + payload for payload in payloads) + tail
    responses = SocketWire()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SOON)
        connection.connect(str(server.path))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                responses.feed(piece)
        except ConnectionError:
            pass  # closed on the first bad frame, while more of ours was under way
    answered = list(iter(responses.next, None))  # raises for what does not decode
    assert responses.idle, "the last answer was cut"
    assert len(answered) <= len(payloads) + 1 or any(isinstance(one, api.SubEventResponse) for one in answered)
    with server.blocking_client() as client:
        assert isinstance(client.session_ids(), list)


async def test_bytes_after_a_message_are_ignored(served: Served) -> None:
    stream = await raw(served("loop"))
    payload = postcard.encode(api.ListRequest()) + b"a later field"
    await stream.send_all(LENGTH.pack(len(payload)) + payload)
    responses = SocketWire()
    while (response := responses.next()) is None:
        responses.feed(await stream.receive_some(65536))
    assert isinstance(response, api.SessionsResponse)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (ev.GenParams(temperature=-1), "temperature: a finite number from 0 (greedy) is wanted, not -1"),
        (ev.GenParams(temperature=math.inf), "temperature: a finite number from 0 (greedy) is wanted, not inf"),
        (ev.GenParams(temperature=math.nan), "temperature: a finite number from 0 (greedy) is wanted, not nan"),
        (ev.GenParams(top_p=7), "top_p: a number from 0 to 1 is wanted, not 7"),
        (ev.GenParams(min_p=-3), "min_p: a number from 0 to 1 is wanted, not -3"),
        (ev.GenParams(min_p=math.nan), "min_p: a number from 0 to 1 is wanted, not nan"),
    ],
)
async def test_sampling_out_of_its_range_makes_no_session(served: Served, params: ev.GenParams, why: str) -> None:
    """A client of another make may send it: the server checks too."""
    server = served("loop")
    session = await ready(server)
    before = await server.client().session_ids()
    stream = await raw(server)
    responses = SocketWire()
    for request in (
        api.CreateRequest(None, params),
        api.ForkRequest(session.id, 1, params),
        api.RebaseRequest(session.id, [ev.Drop(1, 2)], params),
    ):
        payload = postcard.encode(request)
        await stream.send_all(LENGTH.pack(len(payload)) + payload)
        while (response := responses.next()) is None:
            responses.feed(await stream.receive_some(65536))
        assert response == api.ErrResponse(f"protocol: {request.variant_name}.params.{why}")
    assert await server.client().session_ids() == before
    for least in (ev.GenParams(0, 0, 0), ev.GenParams(1e30, 1, 1)):
        await server.client().session(least)


async def test_a_purged_session_answers_purged_whatever_else_is_wrong(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    number = session.id
    await session.purge()
    bad = ev.GenParams(temperature=math.nan)
    asked = [
        api.CreateRequest(number, bad),
        api.AppendRequest(number, None, []),
        api.AppendRequest(number, None, [1 << 31]),
        api.AppendMessageRequest(number, 9, "x"),
        api.GenerateRequest(number, 0),
        api.ReadRequest(number, 99),
        api.AppendToolResultRequest(number, 99, "x"),
        api.OpenToolCallsRequest(number),
        api.CancelRequest(number),
        api.SubscribeRequest(number, 99, True),
        api.ForkRequest(number, 99, bad),
        api.SetMetaRequest(number, 99, None, None),
        api.RebaseRequest(number, [], bad),
        api.RebaseRequest(number, [ev.Replace(9, 1, 9, "x")], None),
        api.PurgeRequest(number, 99, ev.Descendants.Cascade),
        api.SetQosRequest(number, 9, False),
        api.InspectRequest(number),
        api.AppendBlockRequest(number, 9, 99, "{"),
        api.RequestPermissionRequest(number, 99, "x"),
        api.RespondPermissionRequest(number, 99, True),
        api.RequestToolCancelRequest(number, 99),
        api.AppendToolOutcomeRequest(number, 99, 9, "x"),
        api.LedgerRequest(number),
        api.AppendImageRequest(number, 9, "x", "", ""),
        api.TrimRequest(number, 99),
        api.PinRequest(number, 99),
        api.AppendSystemRequest(number, None, []),
        api.AppendSystemRequest(number, None, ["{"]),
    ]
    kinds = {kind for kind in api.Request.variants if {"session", "parent"} & {one.name for one in attrs.fields(kind)}}
    assert {type(request) for request in asked} == kinds
    stream = await raw(server)
    responses = SocketWire()
    for request in asked:
        payload = postcard.encode(request)
        await stream.send_all(LENGTH.pack(len(payload)) + payload)
        with trio.fail_after(SOON):
            while (response := responses.next()) is None:
                responses.feed(await stream.receive_some(65536))
        assert isinstance(response, api.ErrResponse), request
        assert response.message.startswith(f"session {number} was purged"), request
    await stream.aclose()


async def test_a_request_may_come_byte_by_byte(served: Served) -> None:
    stream = await raw(served("loop"))
    for byte in frame(api.ListRequest()):
        await stream.send_all(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
    assert (await stream.receive_some(1)) != b""


def test_an_answer_that_no_frame_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "MAX_FRAME", 200)
    assert len(outlet.frame(api.TextResponse("x" * 100))) < 200
    responses = SocketWire()
    responses.feed(outlet.frame(api.TextResponse("x" * 300)))
    refused = responses.next()
    assert isinstance(refused, api.ErrResponse)
    assert refused.message.startswith("protocol: the answer has 303 bytes")


async def test_a_request_that_fails_inside_is_told_and_the_connection_goes_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    model: Any = SimpleNamespace(sessions=SimpleNamespace(session_ids=fail, tree=list))
    daemon = Daemon(Path(), [model], Metrics("test"))
    ours, theirs = socket.socketpair()
    connection = AsyncConnection(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), SocketWire())
    async with trio.open_nursery() as nursery:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        nursery.start_soon(serve_connection, daemon, stream, FanOut(), trio.Event())
        await connection.send(api.ListRequest(), api.TreeRequest())
        assert await receive(connection) == api.ErrResponse("internal error in List: ZeroDivisionError: a bug")
        assert await receive(connection) == api.TreeResponse([])
        await connection.aclose()


# ---- order


async def test_pipelined_requests_are_answered_in_order_behind_a_generate_too(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    connection = await server.connect()
    await connection.send(
        api.ReadRequest(session.id, 99),
        api.GenerateRequest(session.id, 40),
        api.ReadRequest(session.id, 0),
        api.ReadRequest(10**9, 0),
        api.OpenToolCallsRequest(session.id),
        api.GenerateRequest(session.id, 3),
        api.InspectRequest(session.id),
    )
    assert await receive(connection) == api.EventsResponse([])
    *deltas, generated = await receive_until(connection, api.GeneratedResponse)
    assert isinstance(generated, api.GeneratedResponse)
    assert [delta.event for delta in deltas if isinstance(delta, api.DeltaResponse)] == generated.events
    assert generated.tokens_generated == 40
    read = await receive(connection)
    assert isinstance(read, api.EventsResponse)
    assert read.events[-1] == generated.events[-1]
    assert await receive(connection) == api.ErrResponse(f"unknown session {10**9}")
    assert await receive(connection) == api.ToolCallsResponse([])
    again = (await receive_until(connection, api.GeneratedResponse))[-1]
    assert isinstance(again, api.GeneratedResponse)
    assert again.tokens_generated == 3
    inspection = await receive(connection)
    assert isinstance(inspection, api.InspectionResponse)
    assert inspection.inspection.tier == api.Cold()
    await connection.aclose()


async def test_more_requests_than_are_read_ahead(served: Served) -> None:
    connection = await served("loop").connect()
    count = 5 * session_socket.WAITING
    await connection.send(*[api.ReadRequest(10**9 + index, 0) for index in range(count)])
    for index in range(count):
        assert await receive(connection) == api.ErrResponse(f"unknown session {10**9 + index}")
    await connection.aclose()


# ---- generating


async def test_generate_continues_an_open_turn_and_says_why_it_stopped(served: Served) -> None:
    session = await ready(served("loop"))
    first = await session.generate(3)
    assert (first.text, first.finish, first.tokens_generated) == ("tick tock tick ", Finish.NONE, 3)
    second = await session.generate(2)
    assert second.text == "tock tick "
    bodies = [type(event.body) for event in await session.events()]
    assert bodies.count(ev.GenerationPrompt) == bodies.count(ev.GenerationFingerprint) == 1
    nothing = await session.generate(0)
    assert (nothing.events, nothing.tokens_generated, nothing.finish) == ([], 0, Finish.NONE)


async def test_generate_fills_the_window_and_then_refuses(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    reply = await session.generate()
    assert reply.finish == Finish.LENGTH
    inspection = await session.inspect()
    assert inspection.summary.tokens == server.model.window
    with pytest.raises(Refused, match="maximum context length is 4096 tokens"):
        await session.user("More.")
        await session.generate(1)


async def test_a_session_is_busy_while_it_generates(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    async with session.stream() as stream:
        await stream.__anext__()
        for refused in (session.user("x"), session.generate(1), session.append("x")):
            with pytest.raises(SessionBusy):
                await refused
        assert await session.open_tool_calls() == []
        assert (await session.inspect()).tier == api.Resident()
        branch = await session.fork(at=2)
        await branch.generate(2)
        await session.set_meta(title="busy")
    assert stream.reply is not None
    assert stream.reply.finish == Finish.CANCELLED
    await session.user("usable again")


async def test_cancel_comes_over_another_connection(served: Served) -> None:
    server = served("loop")
    session = await ready(server)
    with pytest.raises(NothingInFlight):
        await session.cancel()
    with pytest.raises(UnknownSession):
        await server.client().get(10**9).cancel()
    connection = await server.connect()
    await connection.send(api.SubscribeRequest(session.id, 0, True), api.GenerateRequest(session.id, 4000))
    await receive_until(connection, api.SubProvisionalResponse)
    await session.cancel()
    generated = (await receive_until(connection, api.GeneratedResponse))[-1]
    assert isinstance(generated, api.GeneratedResponse)
    assert generated.finish == Finish.CANCELLED
    last = generated.events[-1].body
    assert isinstance(last, ev.Generated)
    assert (last.span, last.finish) == ([], Finish.CANCELLED)
    assert 0 < generated.tokens_generated < 4000
    assert (await session.events())[-1] == generated.events[-1]
    await connection.aclose()


async def test_a_cancel_while_the_turn_begins_counts(served: Served) -> None:
    """Sent as soon as the opener is in the log: before the job is queued, or just after."""
    server = served("loop")
    for _ in range(5):
        session = await ready(server)
        watcher = await server.connect()
        await watcher.send(api.SubscribeRequest(session.id, 0, False))
        await receive_until(watcher, api.SubscribedResponse)
        connection = await server.connect()
        await connection.send(api.GenerateRequest(session.id, 4000))
        while True:
            followed = await receive(watcher)
            assert isinstance(followed, api.SubEventResponse)
            if isinstance(followed.event.body, ev.GenerationPrompt):
                break
        await session.cancel()
        generated = (await receive_until(connection, api.GeneratedResponse))[-1]
        assert isinstance(generated, api.GeneratedResponse)
        assert generated.finish == Finish.CANCELLED
        await connection.aclose()
        await watcher.aclose()


@pytest.mark.parametrize("previews", [False, True])
async def test_a_client_that_goes_away_ends_its_generation(served: Served, previews: bool) -> None:
    server = served("loop")
    session = await ready(server)
    watcher = await server.connect()
    await watcher.send(api.SubscribeRequest(session.id, 0, True))
    goer = await server.connect()
    if previews:
        await goer.send(api.SubscribeRequest(session.id, 0, True))
    await goer.send(api.GenerateRequest(session.id, 4000))
    await receive_until(watcher, api.SubProvisionalResponse)
    await goer.aclose()
    while True:
        followed = await receive(watcher)
        if isinstance(followed, api.SubEventResponse) and isinstance(followed.event.body, ev.Generated):
            last = followed.event.body
            if last.finish:
                break
    assert (last.span, last.finish) == ([], Finish.CANCELLED)
    await quiet(session)
    await session.user("Still here?")
    reply = await session.generate(2)
    assert reply.text == "tick tock "
    await watcher.aclose()


async def test_a_client_that_reads_nothing_harms_nobody(served: Served) -> None:
    server = served("loop")
    silent = await ready(server)
    connection = await server.connect()
    await connection.send(*[api.SubscribeRequest(silent.id, 0, True)] * 3, api.GenerateRequest(silent.id, 4000))
    other = await ready(server)
    assert (await other.generate(50)).tokens_generated == 50
    await connection.aclose()
    await quiet(silent)
    await lives(server)


# ---- the socket's file


async def listening(path: Path, nursery: trio.Nursery) -> None:
    model: Any = SimpleNamespace(sessions=SimpleNamespace(session_ids=list))
    await nursery.start(run_socket, Daemon(path.parent, [model], Metrics("test")), path)


async def test_the_socket_is_its_owners_alone_and_goes_with_the_server(home: Path) -> None:
    path = home / "made" / "s.sock"
    async with trio.open_nursery() as nursery:
        await listening(path, nursery)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_stale_socket_file_is_replaced(home: Path) -> None:
    path = home / "s.sock"
    old = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old.bind(str(path))
    old.close()
    assert path.is_socket()
    async with trio.open_nursery() as nursery:
        await listening(path, nursery)
        connection = await AsyncConnection.open(path)
        await connection.send(api.ListRequest())
        assert await receive(connection) == api.SessionsResponse([])
        await connection.aclose()
        nursery.cancel_scope.cancel()


async def test_a_successors_socket_file_stays(home: Path) -> None:
    path = home / "s.sock"
    async with trio.open_nursery() as second:
        async with trio.open_nursery() as first:
            await listening(path, first)
            await listening(path, second)
            first.cancel_scope.cancel()
        assert path.is_socket()
        second.cancel_scope.cancel()


def test_what_is_no_socket_is_left_alone(home: Path) -> None:
    path = home / "notes"
    path.write_text("precious")
    with pytest.raises(SocketTaken, match="something else is there"):
        bind(path)
    assert path.read_text() == "precious"


async def test_connections_leave_no_descriptors_behind(served: Served) -> None:
    server = served("loop")
    await lives(server)
    before = len(os.listdir("/proc/self/fd"))
    for index in itertools.islice(itertools.cycle((b"", b"\x00" * 4, LENGTH.pack(9))), 60):
        stream = await raw(server)
        if index:
            await stream.send_all(index)
        await stream.aclose()
    with trio.fail_after(SOON):
        while len(os.listdir("/proc/self/fd")) > before:
            await lives(server)
    assert len(os.listdir("/proc/self/fd")) <= before
