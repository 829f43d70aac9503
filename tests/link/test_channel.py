"""Channels over real sockets."""

import socket
from collections.abc import Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from superfluid.link import linkf, linkw
from superfluid.link.channel import AsyncChannel, BlockingChannel, decode_message
from superfluid.link.envelope import MAX_PAYLOAD, FrameTooLarge, Truncated, VersionMismatch, encode_frame
from superfluid.link.errors import LinkError
from superfluid.link.postcard import PostcardError, encode

PING = linkw.Ping(3, linkw.MemCounters(1, 2, 3, 4, 5, 6))
EMIT = linkw.TickEmit(7, [1, 300, 70_000])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_come_with_their_numbers(pair: tuple[socket.socket, socket.socket]) -> None:
    worker, daemon = (BlockingChannel(end, linkw.VERSION) for end in pair)
    assert worker.send(PING) == 1
    assert worker.send(linkw.TickRejected(-106), correlation=9) == 2
    assert daemon.recv() == (1, 0, PING)
    assert daemon.recv() == (2, 9, linkw.TickRejected(-106))
    pair[0].close()
    assert daemon.recv() is None
    assert daemon.recv() is None


def test_emits_of_a_round_are_one_write(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    worker.send_many([EMIT, EMIT])
    worker.send_many([])
    payload = encode(EMIT)
    assert pair[1].recv(1 << 16) == encode_frame(8, 0x1D, 1, 0, payload) + encode_frame(8, 0x1D, 2, 0, payload)


def test_a_byte_at_a_time(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    data = encode_frame(8, 0x17, 1, 0, encode(PING))
    for byte in data[:-1]:
        pair[1].sendall(bytes([byte]))
        assert not worker.poll(0)
    pair[1].sendall(data[-1:])
    assert worker.poll(0)
    assert worker.poll(None)
    assert worker.recv() == (1, 0, PING)
    assert not worker.poll(0)


def test_the_end_of_the_stream_is_something_to_receive(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    assert not worker.poll(0)
    pair[1].close()
    assert worker.poll(None)
    assert worker.recv() is None


def test_what_came_before_a_broken_frame_is_received_first(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    good = encode_frame(8, 0x17, 1, 0, encode(PING))
    pair[1].sendall(good + encode_frame(7, 0x17, 2, 0, encode(PING)) + good)
    assert worker.recv() == (1, 0, PING)
    assert worker.poll(0)
    for _ in range(2):
        with pytest.raises(VersionMismatch, match="version 7"):
            worker.recv()


def test_a_stream_cut_inside_a_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    pair[1].sendall(encode_frame(8, 0x17, 1, 0, encode(PING))[:-1])
    pair[1].close()
    with pytest.raises(Truncated):
        worker.recv()


def test_a_payload_that_does_not_decode(pair: tuple[socket.socket, socket.socket]) -> None:
    worker = BlockingChannel(pair[0], linkw.VERSION)
    pair[1].sendall(encode_frame(8, 0x1D, 1, 0, b"\x07\x02\x01"))
    with pytest.raises(PostcardError, match="TickEmit"):
        worker.recv()


def test_what_cannot_be_sent_takes_no_number(pair: tuple[socket.socket, socket.socket]) -> None:
    worker, daemon = (BlockingChannel(end, linkw.VERSION) for end in pair)
    with pytest.raises(PostcardError):
        worker.send(linkw.TickEmit(-1, []))
    with pytest.raises(FrameTooLarge):
        worker.send(linkw.Telemetry(bytes(MAX_PAYLOAD)))
    with pytest.raises(LinkError, match="Reconcile is no message of this link"):
        worker.send(linkf.Reconcile([]))
    assert worker.send(PING) == 1
    assert daemon.recv() == (1, 0, PING)


def trio_pair(pair: tuple[socket.socket, socket.socket]) -> tuple[trio.SocketStream, socket.socket]:
    return trio.SocketStream(trio.socket.from_stdlib_socket(pair[0])), pair[1]


async def test_one_read_brings_many_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    stream, peer = trio_pair(pair)
    daemon = AsyncChannel(stream, linkw.VERSION)
    BlockingChannel(peer, linkw.VERSION).send_many([EMIT, PING, EMIT])
    frames = await daemon.receive_frames()
    assert [frame.seq for frame in frames] == [1, 2, 3]
    assert [decode_message(frame) for frame in frames] == [EMIT, PING, EMIT]
    peer.close()
    assert await daemon.receive_frames() == []


async def test_frames_before_an_error_and_then_the_error(pair: tuple[socket.socket, socket.socket]) -> None:
    stream, peer = trio_pair(pair)
    daemon = AsyncChannel(stream, linkw.VERSION)
    whole = encode_frame(8, 0x17, 1, 0, encode(PING))
    peer.sendall(whole + whole[:9])
    assert len(await daemon.receive_frames()) == 1
    peer.close()
    for _ in range(2):
        with pytest.raises(Truncated):
            await daemon.receive_frames()


async def test_tasks_that_send_together_do_not_mix_their_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    stream, peer = trio_pair(pair)
    daemon = AsyncChannel(stream, linkw.VERSION)
    worker = BlockingChannel(peer, linkw.VERSION)
    senders, length = 6, 400_000  # more than a socket holds
    received: list[tuple[int, bytes]] = []

    def receive() -> None:
        for _ in range(senders):
            message = worker.recv()
            assert message is not None
            received.append((message[0], message[2].spans))

    assert daemon.next_seq == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, receive)
        for i in range(senders):
            nursery.start_soon(daemon.send, linkw.Telemetry(bytes([i]) * length))
    assert [seq for seq, _ in received] == list(range(1, senders + 1))
    assert sorted(spans for _, spans in received) == [bytes([i]) * length for i in range(senders)]
    assert daemon.next_seq == senders + 1


async def test_a_send_that_is_cancelled_half_way_is_finished(pair: tuple[socket.socket, socket.socket]) -> None:
    stream, peer = trio_pair(pair)
    daemon = AsyncChannel(stream, linkw.VERSION)
    worker = BlockingChannel(peer, linkw.VERSION)
    scope = trio.CancelScope()
    sent = []

    async def send() -> None:
        with scope:
            sent.append(await daemon.send(linkw.Telemetry(bytes(3_000_000))))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await wait_all_tasks_blocked()
            scope.cancel()
            nursery.start_soon(trio.to_thread.run_sync, worker.recv)
        assert sent == [1]
        assert await daemon.send(PING) == 2
    assert worker.recv() == (2, 0, PING)
