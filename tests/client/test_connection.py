"""Connections of the client: what a server may do to them."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from superfluid.client import AsyncClient, Client, ConnectionLost, NotReached, Refused, UnexpectedReply, default_socket
from superfluid.client.errors import Throttled
from superfluid.client.frames import LENGTH, SocketWire, frame
from superfluid.link import events as ev, session_api as api
from tests.client.double import Answer, Double, packed

Serve = Callable[[Answer], Double]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    made: list[Double] = []

    def start(answer: Answer) -> Double:
        made.append(Double(tmp_path / "s.sock", answer))
        return made[-1]

    yield start
    for double in made:
        double.__exit__()


def test_connections_are_kept_and_a_refusal_keeps_them(serve: Serve) -> None:
    server = serve(lambda request: [api.ErrResponse("no")])
    with Client(server.path) as client:
        for _ in range(5):
            with pytest.raises(Refused, match="no"):
                client.session_ids()
    assert server.connections == 1


def test_a_connection_that_the_server_closed_is_replaced(serve: Serve, tmp_path: Path) -> None:
    with Client(tmp_path / "s.sock") as client:
        with Double(tmp_path / "s.sock", lambda request: [api.SessionsResponse([1])]) as first:
            assert client.session_ids() == [1]
            client._kept[0]._socket.shutdown(socket.SHUT_WR)  # ends the double's thread, which closes
        assert first.connections == 1
        serve(lambda request: [api.SessionsResponse([2])])
        assert client.session_ids() == [2]


def test_bytes_nobody_asked_for_end_a_connection(serve: Serve) -> None:
    late = packed(api.AckResponse())
    server = serve(lambda request: [packed(api.SessionsResponse([3])) + late])
    with Client(server.path) as client:
        assert client.session_ids() == [3]
        assert client.session_ids() == [3]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None], ConnectionLost),
        ([b"\x05\x00\x00\x00\x05", None], ConnectionLost),  # half an answer
        ([LENGTH.pack(api.MAX_FRAME + 1)], UnexpectedReply),
        ([LENGTH.pack(1) + b"\x7f"], UnexpectedReply),
        ([api.AckResponse()], UnexpectedReply),
    ],
)
async def test_what_breaks_a_call(
    serve: Serve, answers: list[api.Response | bytes | None], error: type[Exception]
) -> None:
    server = serve(lambda request: answers)
    with Client(server.path) as client:
        with pytest.raises(error):
            client.session_ids()
        assert client._kept == []
        with pytest.raises(error):
            list(client.get(1).stream())
    async with AsyncClient(server.path) as other:
        with pytest.raises(error):
            await other.session_ids()
        assert other._kept == []
        with pytest.raises(error):
            async with other.get(1).stream() as stream:
                async for _ in stream:
                    pass


def test_throttled(serve: Serve) -> None:
    server = serve(lambda request: [api.ThrottledResponse(9)])
    with Client(server.path) as client, pytest.raises(Throttled) as error:
        client.session_ids()
    assert error.value.retry_after_ms == 9


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(NotReached, match=r"no server answers at .*/none\.sock: No such file"):
        Client(tmp_path / "none.sock").session_ids()
    (tmp_path / "file").touch()
    with pytest.raises(NotReached, match="Connection refused"):
        Client(tmp_path / "file").session_ids()


def test_deltas_and_subscriptions_stand_aside(serve: Serve) -> None:
    event = ev.Event(3, 1, 0, ev.Generated([1], "hi", 0, 1))
    aside = [
        api.DeltaResponse(event), api.SubEventResponse(1, event), api.SubProvisionalResponse(1, 0, "hi"),
        api.SubEndedResponse(1, "lagged"),
    ]  # fmt: skip
    server = serve(lambda request: [*aside, api.GeneratedResponse([event], 1, 1, 0)])
    with Client(server.path) as client:
        reply = client.get(1).generate(4)
    assert (reply.text, reply.finish) == ("hi", ev.Finish.EOS)


def test_responses_in_any_pieces() -> None:
    data = packed(api.SessionsResponse([1, 2])) + packed(api.AckResponse()) + packed(api.ErrResponse("no"))
    for size in range(1, len(data) + 1):
        responses = SocketWire()
        found = []
        for at in range(0, len(data), size):
            responses.feed(data[at : at + size])
            while (response := responses.next()) is not None:
                found.append(response)
        assert found == [api.SessionsResponse([1, 2]), api.AckResponse(), api.ErrResponse("no")]


def test_vectors() -> None:
    assert frame(api.ListRequest()) == bytes.fromhex("0100000007")
    assert frame(api.AppendMessageRequest(1, 1, "hi")) == bytes.fromhex("06000000020101026869")
    with pytest.raises(ValueError, match="67108864 is the most"):
        frame(api.AppendMessageRequest(1, 1, "x" * api.MAX_FRAME))


def test_the_default_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUPERFLUID_HOME", str(tmp_path))
    assert default_socket() == tmp_path / "superfluid.sock"
    monkeypatch.setenv("SUPERFLUID_HOME", "/" + "x" * 100)
    assert default_socket().name.startswith("superfluid-")
    monkeypatch.delenv("SUPERFLUID_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert default_socket() == Path("/somewhere/.superfluid/superfluid.sock")


async def test_a_cancelled_call_leaves_no_connection_in_the_middle(serve: Serve) -> None:
    asked = threading.Event()

    def answer(request: api.Request) -> list[api.Response | bytes | None]:
        if isinstance(request, api.TreeRequest):  # never answered
            asked.set()
            return []
        return [api.SessionsResponse([4])]

    server = serve(answer)
    async with AsyncClient(server.path) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.tree)
            await trio.to_thread.run_sync(asked.wait)
            nursery.cancel_scope.cancel()
        assert client._kept == []
        assert await client.session_ids() == [4]


async def test_the_trio_client_finds_nobody(tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="No such file"):
        await AsyncClient(tmp_path / "none.sock").session_ids()
