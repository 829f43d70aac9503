"""`superfluid session compact`, `superfluid media`, and what `--sessions-cache` contradicts."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.cli.command import run
from superfluid.cli.main import program
from superfluid.client import Descendants
from superfluid.client.errors import ProtocolMisuse, UnknownMedia, UnknownRole
from superfluid.daemon.start import ServeLock
from superfluid.link import events as ev, session_api as api
from superfluid.sessions import rules
from superfluid.sessions.store import Store
from tests.api.serving import Server
from tests.cli.server import Server as ServerProcess

Served = Callable[[str], Server]


def superfluid(*arguments: object) -> int:
    return run(program, [str(argument) for argument in arguments])


def test_compact_erases_what_was_purged_in_every_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = (tmp_path / "s", tmp_path / "s/models/other")
    kept: list[list[ev.Event]] = []
    for directory in directories:
        store = Store.open(directory)
        for session in (1, 2):
            store.stage(
                [(store.new_session(), ev.Created(None, ev.GenParams())), (session, ev.Message(1, "hush", [1]))]
            )
        store.stage([(2, ev.Message(1, "kept", [1]))])
        store.flush()
        store.stage(rules.purge(store, 1, 0, Descendants.Reroot))
        store.flush()
        kept.append(store.session(2).events())
        store.close()
        (directory / "park").mkdir()
        (directory / "park/1.park").write_bytes(b"state")
    assert superfluid("session", "compact", "--sessions", tmp_path / "s") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [str(directory / "wal.log") for directory in directories]
    for directory, events in zip(directories, kept, strict=True):
        assert (directory / "wal.log").read_bytes().count(b"hush") == 1  # of the session that lives
        assert not list(directory.glob("park/*"))
        store = Store.open(directory)
        assert store.session(2).events()[:-1] == events
        store.close()


def test_compact_leaves_a_running_server_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServeLock(tmp_path):
        assert superfluid("session", "compact", "--sessions", tmp_path) == 1
    assert "another server is already running" in capsys.readouterr().err
    assert superfluid("session", "compact", "--sessions", tmp_path / "none") == 1
    store = Store.open(tmp_path / "damaged")
    store.close()
    (tmp_path / "damaged/wal.log").write_bytes(b"BRTWAL02" + b"\xff" * 30)
    assert superfluid("session", "compact", "--sessions", tmp_path / "damaged") == 1
    assert "is damaged at byte 8" in capsys.readouterr().err


def test_a_fresh_log_contradicts_parking(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--park", "--park-lossy"):
        assert superfluid("serve", "demo", "--sessions-cache", flag) == 2
        assert "--sessions-cache contradicts" in capsys.readouterr().err


def test_media_go_into_the_pool_and_what_no_session_names_goes(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = served("text_tool")
    pool = server.model.config.store / "media"
    blobs = [b"one", b"two", b"three"]
    hashes = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    for blob in [*blobs, blobs[0]]:
        (tmp_path / "file").write_bytes(blob)
        assert superfluid("media", "put", tmp_path / "file", "--socket", server.path) == 0
    told = capsys.readouterr()
    assert told.out.split() == [*hashes, hashes[0]]
    assert (
        told.err.splitlines()
        == [
            f"superfluid: {tmp_path / 'file'} does not begin like a PNG, JPEG, GIF, BMP or WebP image; "
            "it is stored as it is"
        ]
        * 4
    )
    assert sorted(path.name for path in pool.iterdir()) == sorted(hashes)
    assert {path.stat().st_mode & 0o777 for path in pool.iterdir()} == {0o600}
    with server.blocking_client() as client:
        named, purged = client.session(), client.session()
        for session, blob in ((named, hashes[0]), (purged, hashes[1])):
            client.call(api.AppendBlockRequest(session.id, 1, 7, json.dumps({"blob": blob})))
        purged.purge()
        assert superfluid("media", "gc", "--socket", server.path) == 0
        assert capsys.readouterr().out == "kept 1, removed 2\n"
        assert [path.name for path in pool.iterdir()] == [hashes[0]]
        with pytest.raises(UnknownMedia):
            client.call(api.AppendImageRequest(named.id, 1, hashes[1], "", ""))
        with pytest.raises(UnknownMedia):
            client.call(api.AppendImageRequest(named.id, 1, "../wal.log", "", ""))
        with pytest.raises(UnknownRole):
            client.call(api.AppendImageRequest(named.id, 3, hashes[0], "", ""))
        with pytest.raises(ProtocolMisuse, match="does not accept images"):
            client.call(api.AppendImageRequest(named.id, 1, hashes[0], "", ""))
    assert superfluid("media", "put", tmp_path / "none", "--socket", server.path) == 1
    assert superfluid("media", "gc", "--socket", tmp_path / "none") == 1
    assert superfluid("media", "put") == 2


@pytest.mark.parametrize(
    "begin", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM6\0", b"RIFF\n\0\0\0WEBPVP8 "]
)
def test_an_image_is_put_without_a_notice(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], begin: bytes
) -> None:
    (tmp_path / "image").write_bytes(begin)
    assert superfluid("media", "put", tmp_path / "image", "--socket", served("text_tool").path) == 0
    assert capsys.readouterr().err == ""


def test_a_server_with_a_fresh_log_and_short_lived_http_sessions(
    tmp_path: Path, scripted_gguf: Callable[[str], Path]
) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir(0o700)
    before = Store.open(sessions)
    before.stage([(before.new_session(), ev.Created(None, ev.GenParams()))])
    before.close()
    log, name = (sessions / "wal.log").read_bytes(), (sessions / "wal.log.store-id").read_bytes()
    model = scripted_gguf("plain")
    flags = ("--model", model, "--port", 0, "--sessions-cache", "--sessions-ttl", "0.5")
    with ServerProcess(tmp_path, *map(str, flags)) as server:
        server.ready()
        assert (sessions / "wal.log.prev").read_bytes() == log
        assert (sessions / "wal.log.prev.store-id").read_bytes() == name
        with server.client() as client:
            assert client.session_ids() == []
            kept = client.session()
            assert server.chat(model.stem, max_tokens=2)[0] == 200
            limit = time.monotonic() + 30
            while client.session_ids() != [kept.id]:
                assert time.monotonic() < limit
