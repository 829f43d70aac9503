"""Descriptors cross a socket one by one, and whatever is refused is closed."""

import os
import socket
from array import array
from collections.abc import Iterator

import pytest
import trio

from superfluid.shm.descriptors import DescriptorError, recv_descriptor, send_descriptor, send_descriptor_async

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def raw(sock: socket.socket, payload: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([payload], rights)


def test_a_descriptor_crosses(pair: Pair, pipe: int) -> None:
    send_descriptor(pair[0], 0xC0, pipe)
    fd = recv_descriptor(pair[1], 0xC0)
    assert fd != pipe
    assert os.fstat(fd).st_ino == os.fstat(pipe).st_ino
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_several_in_the_socket_are_taken_one_by_one(pair: Pair, pipe: int) -> None:
    for tag in (1, 2, 1 << 63):
        send_descriptor(pair[0], tag, pipe)
    for tag in (1, 2, 1 << 63):
        os.close(recv_descriptor(pair[1], tag))


def test_a_tag_is_eight_bytes_little_endian(pair: Pair, pipe: int) -> None:
    send_descriptor(pair[0], 0x0102, pipe)
    payload, fds, _, _ = socket.recv_fds(pair[1], 100, 4)
    assert payload == bytes.fromhex("0201000000000000")
    assert len(fds) == 1
    os.close(fds[0])


TAG = (7).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("payload", "count", "why"),
    [
        (TAG, 0, "0 descriptors"),
        (TAG, 2, "2 descriptors"),
        (TAG, 16, "16 descriptors"),
        (TAG, 40, "truncated"),
        (TAG[:7], 1, "7 bytes"),
        (TAG + b"\0", 1, "bytes, not 8"),
        (b"\x08" + TAG[1:], 1, "0x8 where 0x7"),
    ],
)
def test_what_is_refused_leaves_no_descriptor_open(pair: Pair, pipe: int, payload: bytes, count: int, why: str) -> None:
    before = open_descriptors()
    raw(pair[0], payload, *[pipe] * count)
    with pytest.raises(DescriptorError, match=why):
        recv_descriptor(pair[1], 7)
    assert open_descriptors() == before


def test_the_end_of_the_channel(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(DescriptorError, match="ended"):
        recv_descriptor(pair[1], 7)


async def test_sending_from_trio(pair: Pair, pipe: int) -> None:
    await send_descriptor_async(trio.socket.from_stdlib_socket(pair[0]), 3, pipe)
    fd = recv_descriptor(pair[1], 3)
    assert os.fstat(fd).st_ino == os.fstat(pipe).st_ino
    os.close(fd)
