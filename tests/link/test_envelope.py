"""Frames: limits, classes, unknown types, any cut of the stream, and damage."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.link import linkf, linkw
from superfluid.link.channel import decode_message
from superfluid.link.envelope import (
    MAX_LENGTH,
    MAX_PAYLOAD,
    BadLength,
    ClassMismatch,
    Decoder,
    EnvelopeError,
    Frame,
    FrameTooLarge,
    Truncated,
    UnknownRequiredType,
    encode_frame,
)
from superfluid.link.postcard import PostcardError, encode
from tests.link.catalog import messages

HELLO = bytes.fromhex("19000000 0800 0100 0100000000000000 0000000000000000 00 08080000")


def frames_of(data: bytes, known: Any = linkw.MESSAGES) -> list[Frame]:
    decoder = Decoder(known)
    decoder.feed(data)
    return list(decoder)


def test_the_first_frame_of_a_daemon() -> None:
    hello = linkw.Hello((8, 8), linkw.LinkRole.NodeAgent)
    assert encode_frame(8, 1, 1, 0, encode(hello)) == HELLO
    assert frames_of(HELLO) == [Frame(8, 1, 1, 0, bytes.fromhex("08080000"))]


def test_an_empty_payload_is_a_frame() -> None:
    data = encode_frame(8, 0x19, 7, 0, b"")
    assert len(data) == 25
    assert frames_of(data) == [Frame(8, 0x19, 7, 0, b"")]


@pytest.mark.parametrize(("length", "error"), [(0, BadLength), (20, BadLength), (MAX_LENGTH + 1, FrameTooLarge)])
def test_a_bad_length_is_refused_from_its_four_bytes(length: int, error: type[EnvelopeError]) -> None:
    decoder = Decoder(linkw.MESSAGES)
    head = struct.pack("<I", length)
    decoder.feed(head[:3])
    assert decoder.next() is None
    decoder.feed(head[3:])
    with pytest.raises(error):
        decoder.next()
    decoder.feed(HELLO)
    with pytest.raises(error):  # the stream stays lost
        decoder.next()


def test_the_largest_frame_is_legal_both_ways_and_one_byte_more_is_not() -> None:
    assert MAX_PAYLOAD == 16_777_195
    payload = bytes(MAX_PAYLOAD)
    assert frames_of(encode_frame(8, 0x15, 1, 0, payload)) == [Frame(8, 0x15, 1, 0, payload)]
    with pytest.raises(FrameTooLarge):
        encode_frame(8, 0x15, 1, 0, payload + b"\0")


def with_class(frame: bytes, klass: int) -> bytes:
    return frame[:24] + bytes([klass]) + frame[25:]


@pytest.mark.parametrize(
    ("msg_type", "klass"), [(0x0019, 1), (0x0019, 2), (0x8001, 0), (0x8001, 2), (0x8123, 0), (0x0123, 1)]
)
def test_the_class_byte_must_be_what_the_type_says_also_of_unknown_types(msg_type: int, klass: int) -> None:
    with pytest.raises(ClassMismatch):
        frames_of(with_class(encode_frame(8, msg_type, 1, 0, b""), klass))


def test_encoding_refuses_another_class() -> None:
    assert encode_frame(8, 0x8001, 1, 0, b"\0", droppable=True)[24] == 1
    with pytest.raises(ClassMismatch):
        encode_frame(8, 0x8001, 1, 0, b"\0", droppable=False)
    with pytest.raises(ClassMismatch):
        encode_frame(8, 0x0001, 1, 0, b"\0", droppable=True)


def test_the_class_is_looked_at_once_the_frame_is_whole() -> None:
    frame = with_class(encode_frame(8, 0x19, 1, 0, b"abc"), 1)
    decoder = Decoder(linkw.MESSAGES)
    decoder.feed(frame[:-1])
    assert decoder.next() is None
    decoder.feed(frame[-1:])
    with pytest.raises(ClassMismatch):
        decoder.next()


def test_unknown_types_fail_closed_unless_they_are_droppable() -> None:
    skipped = encode_frame(8, 0x8123, 1, 0, b"whatever")
    assert frames_of(skipped + HELLO + skipped) == frames_of(HELLO)
    decoder = Decoder(linkw.MESSAGES)
    decoder.feed(HELLO + encode_frame(8, 0x0123, 1, 0, b""))
    assert decoder.next() is not None
    with pytest.raises(UnknownRequiredType):
        decoder.next()


@pytest.mark.parametrize("cut", [1, 3, 4, 24, len(HELLO) - 1])
def test_a_stream_that_ends_inside_a_frame(cut: int) -> None:
    decoder = Decoder(linkw.MESSAGES)
    decoder.feed(HELLO + HELLO[:cut])
    assert len(list(decoder)) == 1
    with pytest.raises(Truncated):
        decoder.eof()


def test_a_stream_that_ends_between_frames() -> None:
    decoder = Decoder(linkw.MESSAGES)
    decoder.eof()
    decoder.feed(HELLO)
    assert len(list(decoder)) == 1
    decoder.eof()


tables = st.sampled_from([linkw.MESSAGES, linkf.MESSAGES])


@st.composite
def framed(draw: st.DrawFn) -> tuple[dict[int, type], bytes]:
    table = draw(tables)
    msg_type = draw(st.sampled_from(sorted(table)))
    payload = encode(draw(messages(table[msg_type])))
    return table, encode_frame(draw(st.integers(0, 9)), msg_type, draw(st.integers(0, 1 << 63)), 0, payload)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(framed().filter(lambda f: f[0] is linkw.MESSAGES), max_size=4))
def test_a_byte_at_a_time(stream: list[tuple[dict[int, type], bytes]]) -> None:
    data = b"".join(frame for _, frame in stream)
    decoder = Decoder(linkw.MESSAGES)
    frames = []
    for byte in data:
        decoder.feed(bytes([byte]))
        frames += list(decoder)
    decoder.eof()
    assert frames == frames_of(data)
    assert b"".join(encode_frame(*frame) for frame in frames) == data


@settings(max_examples=400, deadline=None, derandomize=True)
@given(framed(), st.data())
def test_damaged_frames_bring_typed_errors_and_nothing_else(
    subject: tuple[dict[int, type], bytes], data: st.DataObject
) -> None:
    table, frame = subject
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    stream = bytes(damaged[: data.draw(st.integers(0, len(frame)))]) if data.draw(st.booleans()) else bytes(damaged)
    decoder = Decoder(table)
    decoder.feed(stream)
    try:
        for found in decoder:
            decode_message(found, table)
        decoder.eof()
    except (EnvelopeError, PostcardError):
        pass
