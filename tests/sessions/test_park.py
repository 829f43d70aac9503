"""Park artifacts and shelved logs."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from superfluid.link import events as ev
from superfluid.sessions import park, rules
from superfluid.sessions.park import Artifact, Parks, Space
from superfluid.sessions.shelve import shelve
from superfluid.sessions.store import Store

TOKENS = [1, 2, 3, 70000]


def test_golden_artifacts(shared: Path) -> None:
    folder = shared / "data/golden/park"
    expected = json.loads((folder / "expected.json").read_text())
    for name in ("7.park", "8.park"):
        data = (folder / name).read_bytes()
        artifact = Artifact.of(
            expected["tokens"],
            [
                Space(space["space_id"], space["kind"], space["encoding"], bytes.fromhex(space["sealed_hex"]))
                for space in expected[name]["spaces"]
            ],
        )
        assert (artifact.covered, artifact.digest) == (expected[name]["covered"], expected["digest"])
        assert park.encode(artifact) == data
        assert park.decode(data) == artifact


def artifact(sealed: bytes = b"sealed", kind: int = 1) -> Artifact:
    return Artifact.of(TOKENS, [Space(1, kind, 0, sealed)])


@pytest.mark.parametrize("kind", [1, 2])
def test_what_is_not_an_artifact(kind: int) -> None:
    data = park.encode(artifact(kind=kind))
    for cut in range(len(data) - 5 if kind == 1 else len(data)):
        assert park.decode(data[:cut]) is None
    assert park.decode(b"BRTPARK4" + data[8:]) is None
    assert park.decode(data[:8] + bytes(8) + data[16:]) is None  # covers nothing
    if kind == 1:
        assert park.decode(data[:24] + (256).to_bytes(8, "little") + data[32:]) is None
    else:
        assert park.decode(data + b"x") is None
        assert park.decode(data[:24] + bytes(4) + data[28:]) is None
        spaces = [Space(n, 2, 0, b"x") for n in range(65)]
        assert park.decode(park.encode(Artifact.of(TOKENS, spaces))) is None
        assert park.decode(park.encode(Artifact.of(TOKENS, spaces[:64]))) is not None


@given(st.binary(max_size=200), st.sampled_from([b"", park.MAGIC_2, park.MAGIC_3]))
def test_any_bytes_are_an_artifact_or_none(data: bytes, magic: bytes) -> None:
    found = park.decode(magic + data)
    if found is not None:
        assert park.decode(park.encode(found)) == found


def test_an_artifact_of_another_stream_is_ignored(tmp_path: Path) -> None:
    parks = Parks(tmp_path / "park", 0)
    assert parks.read(7, TOKENS) is None
    parks.write(7, artifact())
    assert parks.read(7, [*TOKENS, 5]) == artifact()
    assert parks.read(7, TOKENS[:3]) is None
    assert parks.read(7, [9, *TOKENS]) is None
    parks.write(7, artifact(b"newer"))
    assert parks.read(7, TOKENS) == artifact(b"newer")
    assert os.listdir(parks.directory) == ["7.park"]
    parks.remove(7)
    parks.remove(7)
    assert parks.read(7, TOKENS) is None


def test_the_oldest_go_first(tmp_path: Path) -> None:
    parks = Parks(tmp_path / "park", 250)
    for session in range(1, 5):
        parks.write(session, artifact(bytes(68)))  # 100 bytes each
        os.utime(parks.path(session), (session, session))
    (parks.directory / "9.park.tmp").write_bytes(bytes(51))
    os.utime(parks.directory / "9.park.tmp", (0, 0))
    (parks.directory / "other").write_bytes(bytes(900))
    assert parks.sweep() == 1
    assert sorted(os.listdir(parks.directory)) == ["3.park", "4.park", "other"]


def test_the_last_run_is_put_aside(tmp_path: Path) -> None:
    other = tmp_path / "models" / "other"
    ids = []
    for directory in (tmp_path, other):
        store = Store.open(directory)
        store.stage(rules.create(store, None, ev.GenParams())[1])
        store.flush()
        store.http.add(1)
        store.close()
        ids.append(store.store_id)
    empty = tmp_path / "models" / "empty"
    empty.mkdir()
    (empty / "wal.log").touch()
    assert shelve(tmp_path) == [tmp_path / "wal.log.prev", other / "wal.log.prev"]
    assert os.listdir(empty) == []
    assert (tmp_path / "wal.log.prev.store-id").read_text().startswith(ids[0].hex())
    store = Store.open(tmp_path)
    assert store.session_ids() == []
    assert store.store_id not in ids
    assert store.http.ids == set()
    store.close()
    assert shelve(tmp_path) == []  # it holds nothing, and replaces nothing
    assert (tmp_path / "wal.log.prev.store-id").read_text().startswith(ids[0].hex())
    assert not (tmp_path / "wal.log").exists()
    store = Store.open(tmp_path)
    store.stage(rules.create(store, None, ev.GenParams())[1])
    store.close()
    assert shelve(tmp_path) == [tmp_path / "wal.log.prev"]
    assert (tmp_path / "wal.log.prev.store-id").read_text().startswith(store.store_id.hex())
