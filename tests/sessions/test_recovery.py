"""Opening a log after any crash: what is torn is cut, what is damaged is refused and left alone."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import xxhash

from superfluid.link import events as ev
from superfluid.sessions import records, store_id
from superfluid.sessions.errors import LogDamaged, StoreIdCorrupt, StoreLocked
from superfluid.sessions.files import Files
from superfluid.sessions.records import HEADER, MAGIC
from superfluid.sessions.store import Store
from superfluid.sessions.wal import Wal, companion
from tests.sessions.faulty import UnsyncedFiles

PARAMS = ev.GenParams()


def write_log(path: Path, version: int = 2) -> tuple[bytes, list[int]]:
    """A small log of two sessions; its bytes, and where each frame ends."""
    events = [
        (1, ev.Event(0, 1, 10, ev.Created(None, PARAMS))),
        (1, ev.Event(1, 1, 11, ev.Message(1, "héllo", list(range(300))))),
        (2, ev.Event(0, 1, 12, ev.Created(1, PARAMS))),
        (1, ev.Event(2, 1, 13, ev.GenerationPrompt([7, 8]))),
        (1, ev.Event(3, 1, 14, ev.Generated([70000, 9], "ok", 0, 1))),
        (3, ev.Event(3, 1, 15, ev.Forked(1, 3, PARAMS))),
        (2, ev.Event(1, 1, 16, ev.MetaUpdated(1, "title", True))),
        (3, ev.Event(4, 1, 17, ev.QosSet(3, True))),
    ]
    data = MAGIC if version == 2 else b""
    ends = [len(data)]
    for session, event in events:
        data += records.frame(session, event, version)
        ends.append(len(data))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return data, ends


def history(store: Store) -> dict[int, list[ev.Event]]:
    return {session: store.session(session).events() for session in store.session_ids()}


def without_bump(events: list[ev.Event]) -> list[ev.Event]:
    assert isinstance(events[-1].body, ev.EpochBump)
    return events[:-1]


@pytest.mark.parametrize("version", [1, 2])
def test_cut_at_every_byte_a_log_opens_on_a_prefix(tmp_path: Path, version: int) -> None:
    whole, ends = write_log(tmp_path / "whole.log", version)
    full = [event for _, event in log_events(whole, version)]
    for cut in range(len(whole)):
        directory = tmp_path / "s"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        (directory / "wal.log").write_bytes(whole[:cut])
        store = Store.open(directory, UnsyncedFiles())
        kept = sum(end <= cut for end in ends[1:])
        found = history(store)
        store.close()
        events = [event for events in found.values() for event in without_bump(events)]
        assert all(event in full for event in events if event.ts_unix_ms)
        expected = frames(whole, ends, kept, version)
        for session, event in expected:
            assert event in found[session]
        assert sum(event in [e for _, e in expected] for event in own_events(found)) == kept


def log_events(data: bytes, version: int) -> list[tuple[int, ev.Event]]:
    start = len(MAGIC) if version == 2 else 0
    index, _, _ = records.scan(data, start, version)
    return [one_frame(data, offset, version) for offset in index.offset.tolist()]


def one_frame(data: bytes, offset: int, version: int) -> tuple[int, ev.Event]:
    length, _ = HEADER.unpack_from(data, offset)
    return records.event(data[offset + HEADER.size : offset + HEADER.size + length], version)


def frames(data: bytes, ends: list[int], count: int, version: int) -> list[tuple[int, ev.Event]]:
    return [one_frame(data, offset, version) for offset in ends[:count]]


def own_events(found: dict[int, list[ev.Event]]) -> list[ev.Event]:
    """Every event once: those of session 3 that it inherits from session 1 are dropped."""
    return [event for session, events in found.items() for event in (events[3:] if session == 3 else events)]


def test_a_torn_tail_is_cut_with_a_warning_that_counts_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "wal.log"
    data, ends = write_log(path)
    path.write_bytes(data[:-5])
    with caplog.at_level(logging.WARNING):
        Wal.open(path)[0].close()
    assert f"{len(data) - 5 - ends[-2]} bytes" in caplog.text
    assert path.read_bytes() == data[: ends[-2]]


@pytest.mark.parametrize("zeros", [1, 11, 12, 100, 5000])
def test_a_tail_of_zeros_is_cut(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "wal.log"
    data, _ = write_log(path)
    path.write_bytes(data + bytes(zeros))
    Wal.open(path)[0].close()
    assert path.read_bytes() == data


def refused(path: Path, data: bytes) -> LogDamaged:
    path.write_bytes(data)
    with pytest.raises(LogDamaged) as refusal:
        Wal.open(path)
    assert path.read_bytes() == data
    assert str(path) in str(refusal.value)
    assert "--sessions-cache" in str(refusal.value)
    return refusal.value


def test_a_changed_bit_before_other_records_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "wal.log"
    data, ends = write_log(path)
    for at in range(ends[1] + 4, ends[2]):  # checksum and payload of the second frame
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert refused(path, bytes(damaged)).offset == ends[1]


def test_a_changed_bit_in_the_last_record_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "wal.log"
    data, ends = write_log(path)
    path.write_bytes(data[:-1] + b"\xff")
    Wal.open(path)[0].close()
    assert path.read_bytes() == data[: ends[-2]]


def test_a_length_over_a_gibibyte_is_damage_at_the_end_too(tmp_path: Path) -> None:
    data, _ = write_log(tmp_path / "wal.log")
    refused(tmp_path / "wal.log", data + (2**30 + 1).to_bytes(4, "little"))
    path = tmp_path / "wal.log"
    path.write_bytes(data + (2**30).to_bytes(4, "little"))
    Wal.open(path)[0].close()
    assert path.read_bytes() == data


@pytest.mark.parametrize("payload", ["", "0102", "0100010519", "0100010502 01 01ff 00"])
def test_a_record_that_does_not_decode_is_damage(tmp_path: Path, payload: str) -> None:
    data, _ = write_log(tmp_path / "wal.log")
    body = bytes.fromhex(payload)
    refused(tmp_path / "wal.log", data + HEADER.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body)


class TestTornBatch:
    """A power loss in mid-batch can lose pages before ones it kept."""

    @staticmethod
    def batch(tmp_path: Path) -> tuple[Path, bytes, int]:
        """A log, and how much of it was synced before the last batch of large frames."""
        path = tmp_path / "wal.log"
        data, _ = write_log(path)
        synced = len(data)
        for event_id in range(4, 8):
            data += records.frame(1, ev.Event(event_id, 1, 20, ev.Appended("x" * 3000, [1])), 2)
        return path, data, synced

    @staticmethod
    def lose(data: bytes, start: int, sectors: int) -> bytes:
        first = -(-start // 512) * 512
        return data[:first] + bytes(512 * sectors) + data[first + 512 * sectors :]

    def test_is_cut_and_kept_beside(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path, data, synced = self.batch(tmp_path)
        torn = self.lose(data, synced, 3)
        path.write_bytes(torn)
        companion(path, "synced").write_bytes(synced.to_bytes(8, "little"))
        with caplog.at_level(logging.WARNING):
            Wal.open(path)[0].close()
        assert path.read_bytes() == data[:synced]
        assert companion(path, "torn").read_bytes() == torn[synced:]
        assert companion(path, "torn").stat().st_mode & 0o777 == 0o600
        assert str(len(torn) - synced) in caplog.text

    def test_without_the_mark_it_is_damage(self, tmp_path: Path) -> None:
        path, data, synced = self.batch(tmp_path)
        refused(path, self.lose(data, synced, 3))

    def test_before_the_mark_it_is_damage(self, tmp_path: Path) -> None:
        path, data, synced = self.batch(tmp_path)
        companion(path, "synced").write_bytes(len(data).to_bytes(8, "little"))
        refused(path, self.lose(data, synced, 3))

    def test_a_mark_past_the_end_says_nothing(self, tmp_path: Path) -> None:
        path, data, synced = self.batch(tmp_path)
        companion(path, "synced").write_bytes((len(data) + 1).to_bytes(8, "little"))
        refused(path, self.lose(data, synced, 3))

    def test_a_changed_bit_after_the_mark_is_damage(self, tmp_path: Path) -> None:
        path, data, synced = self.batch(tmp_path)
        companion(path, "synced").write_bytes(synced.to_bytes(8, "little"))
        refused(path, data[: synced + 600] + b"\xff" + data[synced + 601 :])

    def test_a_synced_frame_that_runs_past_the_end_is_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "wal.log"
        data, ends = write_log(path)
        companion(path, "synced").write_bytes(len(data).to_bytes(8, "little"))
        damaged = bytearray(data)
        damaged[ends[-3] + 2] = 1  # 65536 bytes longer
        assert refused(path, bytes(damaged)).offset == ends[-3]
        companion(path, "synced").unlink()
        path.write_bytes(damaged)
        Wal.open(path)[0].close()
        assert path.read_bytes() == data[: ends[-3]]


def test_the_mark_follows_every_sync_and_every_open(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    store = Store.open(directory)
    mark = directory / "wal.log.synced"
    for _ in range(3):
        session = store.new_session()
        store.stage([(session, ev.Created(None, PARAMS))])
        store.flush()
        assert int.from_bytes(mark.read_bytes(), "little") == (directory / "wal.log").stat().st_size
    store.close()
    path = directory / "wal.log"
    path.write_bytes(path.read_bytes()[:-3])
    Store.open(directory).close()
    assert int.from_bytes(mark.read_bytes(), "little") == path.stat().st_size


def test_a_leftover_of_compaction_goes(tmp_path: Path) -> None:
    path = tmp_path / "wal.log"
    companion(path, "compact").write_bytes(b"half a log")
    Wal.open(path)[0].close()
    assert not companion(path, "compact").exists()


def test_epochs_rise_in_id_order_with_one_sync(tmp_path: Path) -> None:
    class Counting(Files):
        syncs = 0

        def sync(self, descriptor: int) -> None:
            self.syncs += 1
            super().sync(descriptor)

    data, _ = write_log(tmp_path / "s/wal.log")
    files = Counting()
    store = Store.open(tmp_path / "s", files)
    assert files.syncs == 2  # the store id, and the bumps
    store.close()
    written = (tmp_path / "s/wal.log").read_bytes()
    added = log_events(written, 2)[len(log_events(data, 2)) :]
    assert [(session, event.event_id, event.epoch, event.body) for session, event in added] == [
        (1, 4, 2, ev.EpochBump()),
        (2, 2, 2, ev.EpochBump()),
        (3, 5, 2, ev.EpochBump()),
    ]
    store = Store.open(tmp_path / "s")
    assert [store.session(session).epoch for session in (1, 2, 3)] == [3, 3, 3]
    store.close()


class TestStoreId:
    def test_golden_lines(self, shared: Path, tmp_path: Path) -> None:
        golden = json.loads((shared / "data/golden/store_ids.json").read_text())
        for case in golden:
            assert store_id.line(bytes.fromhex(case["id_hex"])) == case["file"]
            assert store_id.parse(case["file"].encode(), tmp_path).hex() == case["id_hex"]
            assert (
                store_id.parse(b"\n " + case["file"].upper().replace(" ", "\t").encode(), tmp_path).hex()
                == (case["id_hex"])
            )

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "00",
            "000102030405060708090a0b0c0d0e0f 53f3ac290e1959cb\n",
            "000102030405060708090a0b0c0d0e0f 53f3ac290e1959ca more\n",
            "000102030405060708090a0b0c0d0e0g 53f3ac290e1959ca\n",
            "000102030405060708090a0b0c0d0e0f  53f3ac290e1959\n",
        ],
    )
    def test_anything_else_is_refused_and_left(self, tmp_path: Path, text: str) -> None:
        write_log(tmp_path / "wal.log")
        path = tmp_path / "wal.log.store-id"
        path.write_text(text)
        with pytest.raises(StoreIdCorrupt, match="store's id file is corrupt"):
            Store.open(tmp_path)
        assert path.read_text() == text

    def test_lives_as_long_as_its_log(self, tmp_path: Path) -> None:
        def opened() -> bytes:
            store = Store.open(tmp_path)
            store.close()
            return store.store_id

        first = opened()
        assert opened() == first  # an empty log of eight bytes keeps its id
        (tmp_path / "wal.log").unlink()
        second = opened()
        assert second != first
        (tmp_path / "wal.log").write_bytes(b"")
        third = opened()
        assert third not in (first, second)
        (tmp_path / "wal.log.store-id").unlink()
        assert opened() not in (first, second, third)
        assert not [path for path in os.listdir(tmp_path) if ".tmp" in path]


def test_a_second_opener_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superfluid.sessions.files.LOCK_PATIENCE", 0.03)
    store = Store.open(tmp_path)
    with pytest.raises(StoreLocked, match=r"wal\.log is already open"):
        Store.open(tmp_path)
    store.close()
    Store.open(tmp_path).close()


def test_files_are_private(tmp_path: Path) -> None:
    write_log(tmp_path / "wal.log")
    (tmp_path / "wal.log").chmod(0o644)
    Store.open(tmp_path).close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.keys() == {"wal.log", "wal.log.store-id", "wal.log.store-id.lock", "wal.log.synced"}
    assert set(modes.values()) == {0o600}
