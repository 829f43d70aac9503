"""Bytes that an independent implementation produced, both ways."""

import json
from pathlib import Path
from typing import Any

import pytest

from superfluid.link import events, linkf, linkw, session_api
from superfluid.link.channel import decode_message
from superfluid.link.envelope import Decoder, Frame, encode_frame
from superfluid.link.postcard import decode, encode, from_json, to_json
from tests.link.golden import lines


def check(cls: type[Any], value: Any, payload: bytes) -> None:
    message = from_json(cls, value)
    assert encode(message) == payload
    assert decode(cls, payload) == message
    if value == {}:
        value = None  # a struct without fields: null and {} both read
    assert to_json(message) == value
    assert json.loads(json.dumps(to_json(message))) == value


@pytest.mark.parametrize(("name", "table"), [("link_w", linkw.MESSAGES), ("link_f", linkf.MESSAGES)])
def test_messages_and_frames_of_the_links(shared: Path, name: str, table: dict[int, type]) -> None:
    for line in lines(shared, f"{name}.jsonl"):
        payload, wire = bytes.fromhex(line["payload"]), bytes.fromhex(line["frame"])
        frame = Frame(line["version"], line["msg_type"], line["seq"], line["correlation_id"], payload)
        check(table[frame.msg_type], line["value"], payload)
        assert encode_frame(*frame) == wire
        decoder = Decoder(table)
        decoder.feed(wire)
        assert list(decoder) == [frame]
        decoder.eof()
        assert encode(decode_message(frame, table)) == payload


def test_session_api(shared: Path) -> None:
    for line in lines(shared, "session_api.jsonl"):
        union = session_api.Request if line["kind"] == "request" else session_api.Response
        check(union, line["value"], bytes.fromhex(line["postcard"]))


def test_log_bodies(shared: Path) -> None:
    for line in lines(shared, "log_bodies.jsonl"):
        check(events.Body, line["value"], bytes.fromhex(line["postcard"]))


def test_whole_streams_of_frames_are_cut_the_same_however_they_arrive(shared: Path) -> None:
    wire = [bytes.fromhex(line["frame"]) for line in lines(shared, "link_w.jsonl")]
    stream = b"".join(wire)
    for size in (1, 3, 24, 1000, len(stream)):
        decoder = Decoder(linkw.MESSAGES)
        frames = []
        for at in range(0, len(stream), size):
            decoder.feed(stream[at : at + size])
            frames += list(decoder)
        decoder.eof()
        assert [encode_frame(*frame) for frame in frames] == wire
