"""A link read on a thread: streamed text straight to its socket, all else to the event loop, in order and whole."""

import json
import os
import socket
import threading
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import trio
from hypothesis import given, settings, strategies as st

from superfluid.codec.utf8 import Utf8Stream
from superfluid.link import linkw
from superfluid.link.channel import Framer
from superfluid.link.relay import EMIT_TYPE, Relay, TextOut

LIMIT = 60.0
VERSION = linkw.VERSION
PIECES = [
    b"", b"a", b" the", b'"', b"\\", b"\n\t\r\b\f", b"\x00\x1f\x7f", "é".encode(), "é".encode()[:1], "é".encode()[1:],
    "😀".encode()[:1], "😀".encode()[1:3], "😀".encode()[3:], b"\xff", b"\xed\xa0", "\u2028</script>".encode(),
    b"<eos>",
]  # fmt: skip
EOS = len(PIECES) - 1
BEYOND = len(PIECES) + 7  # no token of the vocabulary
LEAD, TAIL = b'data: {"text":"', b'"}\n\n'

tokens = st.integers(0, len(PIECES) - 2) | st.sampled_from([1, 2, 2, 2, BEYOND])


class Wire(NamedTuple):
    """A text out, and the end where what it writes arrives."""

    text: TextOut
    ours: socket.socket
    theirs: socket.socket


def wire(buffer: int | None = None, pace: float = 0.0) -> Wire:
    ours, theirs = socket.socketpair()
    if buffer is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    ends = array("L", [0])
    for piece in PIECES:
        ends.append(ends[-1] + len(piece))
    made = TextOut(ours.fileno(), b"".join(PIECES), ends, {EOS}, LEAD, TAIL, pace)
    made.open()
    theirs.setblocking(False)
    return Wire(made, ours, theirs)


def arrived(wire: Wire) -> bytes:
    data = b""
    try:
        while more := wire.theirs.recv(1 << 16):
            data += more
    except BlockingIOError:
        pass
    return data


def texts(body: bytes) -> list[str]:
    """The texts of a chunked body that has not ended."""
    found = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        chunk, end, body = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert chunk.startswith(LEAD), chunk
        assert chunk.endswith(TAIL), chunk
        assert end == b"\r\n"
        found.append(json.loads(chunk[len(LEAD) - 1 : len(chunk) - len(TAIL) + 1]))
    return found


def decoded(spans: Sequence[Sequence[int]]) -> str:
    stream = Utf8Stream()
    return "".join(stream.feed(b"".join(PIECES[t] for t in span if t < len(PIECES))) for span in spans)


def valid(spans: Sequence[Sequence[int]]) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in decoded(spans)


@given(st.lists(st.lists(tokens, max_size=5), max_size=12))
@settings(max_examples=300)
def test_text_is_what_the_event_loop_would_write(spans: list[list[int]]) -> None:
    out = wire()
    taken = []
    for span in spans:
        if not out.text.put(span):
            assert not valid([*taken, span])
            assert not out.text.put([1])  # nor anything behind it
            break
        taken.append(span)
        assert valid(taken)
    assert out.text.close() == b""
    shown = texts(arrived(out))
    assert "".join(shown) == decoded(taken)
    assert all(shown)  # no chunk without text
    assert out.text.take() == [t for span in taken for t in span]
    assert out.text.take() == []


def test_a_special_token_is_for_the_event_loop() -> None:
    out = wire()
    assert out.text.put([1, 2])
    assert not out.text.put([1, EOS, 1])
    assert not out.text.put([1])
    assert texts(arrived(out)) == ["a the"]
    assert out.text.take() == [1, 2]
    out.text.open()
    assert out.text.put([2])
    assert texts(arrived(out)) == [" the"]
    out.text.close()
    assert not out.text.put([2])


def test_texts_that_come_fast_are_written_together() -> None:
    out = wire(pace=1.0)
    for now in (0.0, 0.25, 0.75, 1.0, 1.5):
        assert out.text.put([1], now)
    assert texts(arrived(out)) == ["a", "aaa"]
    out.text.close()
    assert texts(arrived(out)) == ["a"]


@pytest.mark.parametrize("buffer", [2048, 5000])
def test_what_a_socket_does_not_take_is_given_back(buffer: int) -> None:
    out = wire(buffer)
    count = 0
    while out.text.put([2]):
        count += 1
    rest = out.text.close()
    assert rest
    assert "".join(texts(arrived(out) + rest)) == " the" * count
    assert out.text.close() == b""  # once


def test_a_client_that_is_gone_is_found_by_who_writes_next() -> None:
    out = wire()
    out.theirs.close()
    assert out.text.put([1])
    assert not out.text.put([1])
    assert texts(out.text.close()) == ["a"]


# ---- the thread


def emit_frames(emits: Sequence[tuple[int, list[int]]]) -> list[bytes]:
    framer = Framer(VERSION, linkw.MESSAGES)
    frames = []
    for tag, span in emits:
        out = bytearray()
        framer.add(out, linkw.TickEmit(tag, span))
        frames.append(bytes(out))
    return frames


async def to_the_end(relay: Relay) -> bytes:
    data = b""
    while more := await relay.receive():
        data += more
    return data


def answer_frame(size: int) -> bytes:
    """A frame that answers a request, with a payload of any bytes."""
    out = bytearray()
    Framer(VERSION, linkw.MESSAGES).add(out, linkw.TickEmit(1, [3] * size), correlation=9)
    return bytes(out)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.sampled_from([1, 2, 7, EOS]), max_size=4)), max_size=25),
    st.lists(st.integers(1, 60), max_size=20),
    st.lists(st.integers(0, 24), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_every_frame_goes_one_way_in_order(
    emits: list[tuple[int, list[int]]], cuts: list[int], answers: list[int]
) -> None:
    frames = emit_frames(emits)
    lent = {1: wire(), 2: wire()}
    expected, straight, open_lanes = b"", {1: [], 2: []}, {1, 2}  # type: tuple[bytes, dict[int, list[int]], set[int]]
    stream = b""
    for at, ((tag, span), frame) in enumerate(zip(emits, frames, strict=True)):
        for _ in range(answers.count(at)):
            stream += answer_frame(at)
            expected += answer_frame(at)
        stream += frame
        if tag in open_lanes and EOS not in span:
            straight[tag] += span
        else:
            expected += frame
            open_lanes.discard(tag)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        before = cuts[0] if cuts else 0
        relay = Relay(ours.fileno(), VERSION, stream[:before])
        for tag, out in lent.items():
            relay.lend(tag, out.text)
        at = before
        for cut in cuts[1:]:
            theirs.send(stream[at : at + cut])
            at += cut
            await trio.lowlevel.checkpoint()
        theirs.send(stream[at:])
        theirs.close()
        with trio.fail_after(LIMIT):
            assert await to_the_end(relay) == expected
        relay.take_back()
        relay.close()

    if cuts:  # the first bytes were read before it, when nothing was lent yet: they hold no whole frame
        cuts[0] = min(cuts[0], len(stream), 20)
    trio.run(main)
    for tag, out in lent.items():
        out.text.close()
        assert "".join(texts(arrived(out))) == decoded([straight[tag]])
        assert out.text.take() == straight[tag]


async def test_text_that_is_kept_back_goes_out_by_itself() -> None:
    ours, theirs = socket.socketpair()
    out = wire(pace=0.02)
    relay = Relay(ours.fileno(), VERSION)
    relay.lend(5, out.text)
    theirs.send(b"".join(emit_frames([(5, [1]), (5, [2]), (5, [2])])))
    body = b""
    with trio.fail_after(LIMIT):
        while b"the" not in body:
            await trio.lowlevel.wait_readable(out.theirs)
            body += arrived(out)
    assert texts(body) == ["a", " the the"]
    relay.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 40, b"\xff" * 100, (30).to_bytes(4, "little") + b"\x07" * 12, b"\x15\x00\x00\x00" + b"\x01" * 300],
)
async def test_what_is_no_frame_is_for_the_event_loop(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    out = wire()
    relay = Relay(ours.fileno(), VERSION)
    relay.lend(1, out.text)
    first, second = emit_frames([(1, [1]), (1, [EOS])])
    theirs.send(first + garbage + second)
    theirs.close()
    with trio.fail_after(LIMIT):
        assert await to_the_end(relay) == garbage + second
        assert await relay.receive() == b""  # an end stays one
    assert texts(arrived(out)) == ["a"]
    relay.close()


async def test_emits_that_do_not_decode_are_for_the_event_loop() -> None:
    good = emit_frames([(1, [1, 2])])[0]
    head, payload = good[:25], good[25:]
    bad = [payload[:-1], payload + b"\0", b"\xff" * 12, b"", b"\x01\xff\xff\x03"]
    frames = [(21 + len(one)).to_bytes(4, "little") + head[4:] + one for one in bad]
    frames.append(good[:4] + (VERSION + 1).to_bytes(2, "little") + good[6:])
    frames.append(good[:24] + b"\x01" + good[25:])
    for frame in frames:
        ours, theirs = socket.socketpair()
        out = wire()
        relay = Relay(ours.fileno(), VERSION)
        relay.lend(1, out.text)
        theirs.send(frame)
        theirs.close()
        with trio.fail_after(LIMIT):
            assert await to_the_end(relay) == frame
        relay.close()
        assert out.text.take() == []


async def test_a_worker_that_ends_with_bytes_unread_says_so() -> None:
    ours, theirs = socket.socketpair()
    relay = Relay(ours.fileno(), VERSION)
    ours.send(b"a request")
    theirs.close()
    with trio.fail_after(LIMIT), pytest.raises(trio.BrokenResourceError) as caught:
        await relay.receive()
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    relay.close()


async def test_a_flood_waits_for_its_reader() -> None:
    ours, theirs = socket.socketpair()
    relay = Relay(ours.fileno(), VERSION)
    frame = answer_frame(30_000)
    count = (40 << 20) // len(frame)

    def flood() -> None:
        for _ in range(count):
            theirs.sendall(frame)
        theirs.close()

    sender = threading.Thread(target=flood)
    sender.start()
    most = total = 0
    with trio.fail_after(LIMIT):
        while data := await relay.receive():
            most, total = max(most, len(data)), total + len(data)
    sender.join()
    assert total == count * len(frame)
    assert most < 9 << 20
    relay.close()


async def test_closing_leaves_nothing() -> None:
    ours, theirs = socket.socketpair()
    before = sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        relay = Relay(ours.fileno(), VERSION)
        relay.lend(1, wire().text)
        theirs.send(emit_frames([(1, [1])])[0][:9])
        relay.close()
        relay.close()
        relay.lend(1, wire().text)
        relay.take_back()
    del relay
    assert (sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    theirs.close()
    ours.close()


def test_the_type_of_emits() -> None:
    assert linkw.MESSAGES[EMIT_TYPE] is linkw.TickEmit
