"""The log's bytes: golden files, the written-out vector, versions 1 and 2."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, strategies as st
from superfluid._native import ffi, lib

from superfluid.link import events as ev
from superfluid.link.postcard import decode, encode, from_json, to_json
from superfluid.sessions import records
from superfluid.sessions.records import MAGIC, Stop
from superfluid.sessions.store import Store
from superfluid.sessions.wal import Wal

VECTOR = bytes.fromhex(
    "42525457414c3032"
    "1a000000 3da95d933b59ef58 01000180d095ffbc31 0000 0000003f6666663f00000000 28 ac02"
    "12000000 e004c1c3c55e173f 01010185d095ffbc31 02 01 026869 0201ac02"
    "0a000000 88dffcbe923468a9 01020289d095ffbc31 07".replace(" ", "")
)
T0 = 1_700_000_000_000
VECTOR_EVENTS = [
    ev.Event(0, 1, T0, ev.Created(None, ev.GenParams(0.5, 0.8999999761581421, 0.0, 40, 300))),
    ev.Event(1, 1, T0 + 5, ev.Message(1, "hi", [1, 300])),
    ev.Event(2, 2, T0 + 9, ev.EpochBump()),
]


def frames_of(data: bytes) -> list[tuple[int, ev.Event]]:
    """Every record of a log, by the scan and the decoder."""
    version = 2 if data.startswith(MAGIC) else 1
    index, position, stop = records.scan(data, len(MAGIC) if version == 2 else 0, version)
    assert (position, stop) == (len(data), Stop.END)
    found = []
    for offset in index.offset.tolist():
        length, _ = records.HEADER.unpack_from(data, offset)
        found.append(records.event(data[offset + 12 : offset + 12 + length], version))
    return found


def test_vector_reads_and_writes() -> None:
    assert frames_of(VECTOR) == [(1, event) for event in VECTOR_EVENTS]
    assert MAGIC + b"".join(records.frame(1, event, 2) for event in VECTOR_EVENTS) == VECTOR


def test_golden_bodies(shared: Path) -> None:
    for line in (shared / "data/golden/log_bodies.jsonl").read_text().splitlines():
        golden = json.loads(line)
        body = from_json(ev.Body, golden["value"])
        assert encode(body).hex() == golden["postcard"]
        assert decode(ev.Body, bytes.fromhex(golden["postcard"])) == body
        assert to_json(body) == golden["value"]


def test_golden_log_of_every_record(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data/golden/log"
    data = (folder / "every_record.wal").read_bytes()
    expected = json.loads((folder / "every_record.json").read_text())
    found = frames_of(data)
    assert [{"session": session, **to_json(event)} for session, event in found] == expected
    assert MAGIC + b"".join(records.frame(session, event, 2) for session, event in found) == data
    (tmp_path / "wal.log").write_bytes(data)
    Store.open(tmp_path).close()  # an order that means nothing is still a log


def test_golden_conversation(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data/golden"
    data = (folder / "log/conversation.wal").read_bytes()
    (tmp_path / "wal.log").write_bytes(data)
    (tmp_path / "wal.log.store-id").write_bytes((folder / "log/conversation.wal.store-id").read_bytes())
    read: dict[int, dict[int, Any]] = {}
    for line in (folder / "session_conversation.jsonl").read_text().splitlines():
        step = json.loads(line)
        request, response = step["request"], step["response"]
        if isinstance(request, dict) and "Read" in request and "Events" in response:
            for event in response["Events"]["events"]:
                read.setdefault(request["Read"]["session"], {})[event["event_id"]] = event
    store = Store.open(tmp_path)
    try:
        assert store.store_id.hex() == (folder / "log/conversation.wal.store-id").read_text().split()[0]
        assert store.session_ids() == [1, 3, 4, 5, 6]
        assert [(s.id, s.parent, s.fork_at) for s in map(store.session, store.session_ids())] == [
            (1, None, 0),
            (3, 1, 2),
            (4, 1, 3),
            (5, None, 0),
            (6, 5, 8),
        ]
        compared = 0
        for session_id, events in read.items():
            if session_id == 2:  # purged at the end
                continue
            found = [to_json(event) for event in store.session(session_id).events()]
            for event_id, expected in events.items():
                event = found[event_id]
                event["ts_unix_ms"] = "*"
                if "GenerationFingerprint" in event["body"]:
                    event["body"]["GenerationFingerprint"]["digest"] = "*"
                assert event == expected
                compared += 1
        assert compared > 40
        for session_id in store.session_ids():
            session = store.session(session_id)
            last = session.events()[-1]
            assert isinstance(last.body, ev.EpochBump)
            assert (last.epoch, session.epoch) == (2, 2)
            assert last.event_id == session.n_events - 1
            spans = [token for event in session.events() for token in getattr(event.body, "span", [])]
            assert session.tokens().tolist() == spans
        five = store.session(5)
        assert [(entry.state, entry.cancel_requested) for entry in five.ledger.values()][:1] == [(2, True)]
        assert five.qos_class == 2
        assert store.session(1).qos_class == 3
    finally:
        store.close()
    assert (tmp_path / "wal.log").read_bytes().startswith(data)


def test_version_one_stays_version_one(tmp_path: Path) -> None:
    log = b"".join(records.frame(1, event, 1) for event in VECTOR_EVENTS)
    (tmp_path / "wal.log").write_bytes(log)
    store = Store.open(tmp_path)
    session = store.session(1)
    assert store.version == 1
    assert [event.ts_unix_ms for event in session.events()] == [0, 0, 0, 0]
    store.stage([(1, ev.Appended("x", [9]))])
    store.flush()
    store.close()
    assert frames_of((tmp_path / "wal.log").read_bytes())[-1] == (1, ev.Event(4, 3, 0, ev.Appended("x", [9])))


@pytest.mark.parametrize("length", range(len(MAGIC)))
def test_a_prefix_of_the_header_becomes_an_empty_log(tmp_path: Path, length: int) -> None:
    path = tmp_path / "wal.log"
    path.write_bytes(MAGIC[:length])
    wal, index = Wal.open(path)
    wal.close()
    assert (path.read_bytes(), len(index), wal.version) == (MAGIC, 0, 2)


def test_bytes_after_a_body_are_ignored() -> None:
    payload = records.varint(1) + b"\x00\x01\x05" + encode(ev.Message(1, "hi", [1])) + b"later fields"
    data = MAGIC + records.HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
    assert frames_of(data) == [(1, ev.Event(0, 1, 5, ev.Message(1, "hi", [1])))]


@given(st.binary(max_size=2048) | st.integers(0, 70_000).map(lambda n: bytes(i * i % 251 for i in range(n))))
def test_native_checksum(data: bytes) -> None:
    assert lib.sf_xxh3_64(ffi.from_buffer("uint8_t[]", data), len(data)) == xxhash.xxh3_64_intdigest(data)


@given(st.binary(max_size=120))
def test_the_scan_and_the_decoder_agree_on_what_decodes(body: bytes) -> None:
    payload = b"\x01\x00\x01\x05" + body
    data = records.HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
    _, _, stop = records.scan(data, 0, 2)
    try:
        decode(ev.Body, body)
    except ValueError:
        assert stop is Stop.UNDECODABLE
    else:
        assert stop is Stop.END
