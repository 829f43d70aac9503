"""Compaction: what it erases, what it keeps bit for bit, and what a crash at any byte of it leaves."""

import os
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from superfluid.link import events as ev
from superfluid.sessions import errors, rules
from superfluid.sessions.compact import NO_PARAMS, compact_closed
from superfluid.sessions.files import Files
from superfluid.sessions.rebase import rebase
from superfluid.sessions.store import Record, Store
from tests.sessions.conftest import OpenStore
from tests.sessions.faulty import FaultyFiles, UnsyncedFiles
from tests.sessions.test_rules import DIALECT

SECRET = "the secret of session "
CASCADE, REROOT = ev.Descendants.Cascade, ev.Descendants.Reroot


def commit(store: Store, records: list[Record]) -> None:
    done = store.stage(records)
    store.flush()
    done.result()


def create(store: Store, parent: int | None = None) -> int:
    session, records = rules.create(store, parent, ev.GenParams(seed=9))
    commit(store, records)
    return session


def say(store: Store, session: int, text: str, n: int = 1) -> None:
    for _ in range(n):
        commit(store, [(session, ev.Message(1, text, [1, 2, len(text)]))])


def fork(store: Store, session: int, at: int) -> int:
    child, records = rules.fork(store, session, at, None)
    commit(store, records)
    return child


def purge(store: Store, session: int, mode: ev.Descendants = REROOT) -> None:
    commit(store, rules.purge(store, session, 0, mode))


def told(store: Store) -> dict[int, Any]:
    """Everything that a client can learn of the live sessions."""
    return {
        session.id: (
            session.summary(),
            session.params,
            session.epoch,
            session.events(),
            session.tokens().tolist(),
            session.ledger,
            session.open_permissions,
            session.qos_class,
            session.batch_invariant,
            session.pin_deadline,
            session.touched_ms,
        )
        for session in store.live()
    }


def fill(store: Store) -> None:
    """Eight sessions; two of them live, one of which inherits from purged ones through a purged one."""
    keeper, root, bare, lost = (create(store) for _ in range(4))
    say(store, keeper, "kept")
    say(store, bare, SECRET + "bare")
    say(store, root, "inherited", 2)
    say(store, root, SECRET + "root")
    commit(store, [(root, ev.QosSet(1, True))])
    middle = fork(store, root, 3)
    say(store, middle, SECRET + "middle")
    commit(store, [(middle, ev.MetaUpdated(1, SECRET + "title", None)), (root, ev.QosSet(3, False))])
    edit = ev.Replace(2, 4, 1, SECRET + "edit")
    rebased, records = rebase(store, middle, [edit], None, lambda edit, before: [40], DIALECT)
    commit(store, records)
    child = fork(store, rebased, 2)
    say(store, child, "kept too")
    gone = fork(store, keeper, 1)
    say(store, gone, SECRET + "gone")
    commit(store, [(lost, ev.ToolUse("f", SECRET + "call"))])
    purge(store, bare)
    purge(store, rebased)
    purge(store, middle)
    purge(store, root)
    purge(store, gone, CASCADE)
    purge(store, lost)
    commit(store, [(child, ev.Pinned(5)), (keeper, ev.MetaUpdated(1, "title", None))])
    assert store.session_ids() == [keeper, child]


def holds(directory: Path, text: str) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_what_was_purged_is_erased_and_the_rest_stays_bit_for_bit(open_store: OpenStore) -> None:
    store = open_store()
    fill(store)
    before, directory = told(store), store.directory
    assert holds(directory, SECRET) == ["wal.log"]
    assert holds(directory, "inherited") == ["wal.log"]
    purged = [session for session in range(1, 9) if session not in before]
    assert store.compact() > 0
    assert told(store) == before
    assert not holds(directory, SECRET)
    for session in purged:
        with pytest.raises(errors.PurgedSession):
            store.session(session)
    say(store, 1, "after it")
    after = told(store)
    store_id, next_id = store.store_id, store.new_session()
    size = store.path.stat().st_size
    store.close()
    assert compact_closed(directory).after == size  # nothing is left to erase
    store = open_store()
    assert store.store_id == store_id
    assert store.new_session() == next_id
    assert {id_: (kept[3], kept[7:9]) for id_, kept in after.items()} == {
        id_: (kept[3][:-1], kept[7:9]) for id_, kept in told(store).items()
    }
    assert not holds(directory, SECRET)
    assert holds(directory, "inherited") == ["wal.log"]


def test_a_purged_session_without_heirs_keeps_two_records(open_store: OpenStore) -> None:
    store = open_store()
    root = create(store)
    branch = fork(store, root, 1)
    linked = create(store, root)
    say(store, branch, SECRET)
    purge(store, branch)
    purge(store, linked)
    heads = {session: next(store.read_frames(store.any_session(session).frames[:1])) for session in (branch, linked)}
    store.compact()
    for session in (branch, linked):
        first, last = store.read_frames(store.any_session(session).frames)
        assert first == ev.Event(
            heads[session].event_id, heads[session].epoch, heads[session].ts_unix_ms, ev.Created(root, NO_PARAMS)
        )
        assert last.body == ev.Purged(1, REROOT)
    assert store.compact() == 0


def test_the_ids_of_http_sessions_go_with_them(open_store: OpenStore) -> None:
    store = open_store()
    for session in [create(store) for _ in range(3)]:
        store.http.add(session)
    purge(store, 2)
    store.compact()
    store.http.add(create(store))
    assert store.http.ids == {1, 3, 4}
    assert store.path.with_name("wal.log.http").read_bytes() == b"".join(n.to_bytes(8, "little") for n in (1, 3, 4))
    assert open_store().http.ids == {1, 3, 4}


def test_a_version_1_log_stays_one(tmp_path: Path, open_store: OpenStore) -> None:
    from superfluid.sessions.records import frame

    bodies = [(1, 0, ev.Created(None, ev.GenParams())), (2, 0, ev.Created(None, ev.GenParams()))]
    bodies += [(1, 1, ev.Message(1, SECRET, [1])), (2, 1, ev.Message(1, "kept", [1]))]
    directory = tmp_path / "s"
    directory.mkdir()
    (directory / "wal.log").write_bytes(b"".join(frame(one, ev.Event(at, 1, 0, body), 1) for one, at, body in bodies))
    store = open_store()
    purge(store, 1)
    before = told(store)
    store.compact()
    assert (store.version, told(store)) == (1, before)
    assert not holds(directory, SECRET)
    assert open_store().version == 1


class Crash(BaseException):
    """The process is gone."""


class CrashingFiles(Files):
    """Real files of a process that dies after so many bytes and operations of a compaction."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _spend(self, n: int = 1) -> int:
        if self.left < n:
            raise Crash
        self.left -= n
        return n

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        taken = min(len(data), self.left)
        super().write(descriptor, data[:taken], offset)
        self._spend(len(data))
        return taken

    def open(self, path: Path, flags: int = -1) -> int:
        self._spend()
        return super().open(path) if flags == -1 else super().open(path, flags)

    def sync(self, descriptor: int) -> None:
        self._spend()

    def sync_directory(self, path: Path) -> None:
        self._spend()

    def rename(self, source: Path, target: Path) -> None:
        self._spend()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._spend()
        super().remove(path)


def test_a_crash_at_any_byte_leaves_the_old_log_or_the_new_one(tmp_path: Path) -> None:
    times = count(1_000_000)
    clock: Callable[[], int] = lambda: next(times)  # noqa: E731
    whole = tmp_path / "whole"
    store = Store.open(whole, UnsyncedFiles(), clock)
    fill(store)
    before = {session: events for session, (_, _, _, events, *_) in told(store).items()}
    store.http.add(3)
    store.close()
    old = (whole / "wal.log").read_bytes()
    new: bytes | None = None
    renamed = 0
    for left in count():
        directory = tmp_path / "life"
        shutil.copytree(whole, directory)
        files = CrashingFiles(left)
        try:
            compact_closed(directory, files)
            new = (directory / "wal.log").read_bytes()
        except Crash:
            log = (directory / "wal.log").read_bytes()
            renamed += log != old
        store = Store.open(directory, UnsyncedFiles(), clock)
        assert {session: events[:-1] for session, (_, _, _, events, *_) in told(store).items()} == before, left
        assert not list(directory.glob("*compact*"))
        assert store.compact() >= 0
        store.close()
        assert not holds(directory, SECRET)
        shutil.rmtree(directory)
        if new is not None:
            break
    assert left > len(new)
    assert renamed


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("short", [False, True])
def test_an_operation_that_fails_leaves_a_log_that_goes_on(
    tmp_path: Path, operation: str, short: bool, open_store: OpenStore
) -> None:
    for nth in range(1, 5):
        directory = tmp_path / f"{nth}"
        files = FaultyFiles()
        store = open_store(files, directory)
        fill(store)
        before = told(store)
        if short:
            files.short = lambda size: max(1, size // 3)
        files.arm(operation, nth)
        try:
            store.compact()
        except errors.LogIOError as error:
            assert "compacted" in str(error)
        files.disarm()
        assert told(store) == before
        say(store, 1, "goes on")
        kept = {session: events for session, (_, _, _, events, *_) in told(store).items()}
        store.compact()
        assert not holds(directory, SECRET)
        store = open_store(None, directory)
        assert {session: events[:-1] for session, (_, _, _, events, *_) in told(store).items()} == kept


def test_nothing_is_appended_before_the_new_logs_name_is_on_disk(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(files)
    fill(store)
    files.arm("sync_directory", forever=True)
    store.compact()
    with pytest.raises(errors.LogIOError):
        say(store, 1, "refused")
    files.disarm()
    say(store, 1, "taken")
    assert store.session(1).events()[-1].body.text == "taken"


async def test_commits_go_on_beside_it(open_store: OpenStore) -> None:
    store = open_store()
    fill(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        saved: list[int] = []
        done = trio.Event()

        async def compact() -> None:
            for _ in range(10):
                saved.append(await store.compact_behind())
                session, records = rules.create(store, None, ev.GenParams())
                await store.commit([*records, (session, ev.Message(1, SECRET, [1]))])
                await store.commit(rules.purge(store, session, 0, REROOT))
            saved.append(await store.compact_behind())
            done.set()

        async def talk(text: str) -> None:
            n = 0
            while not done.is_set():
                session = 1
                await store.commit([(session, ev.Message(1, f"{text} {n}", [n]))])
                assert store.session(session).events()[-1].event_id == store.session(session).n_events - 1
                n += 1

        nursery.start_soon(compact)
        nursery.start_soon(talk, "a")
        nursery.start_soon(talk, "b")
        await done.wait()
        nursery.cancel_scope.cancel()
    assert min(saved) > 0
    texts = [event.body.text for event in store.session(1).events() if isinstance(event.body, ev.Message)]
    for name in "ab":
        said = [text for text in texts if text.startswith(f"{name} ")]
        assert said == [f"{name} {n}" for n in range(len(said))]
    before, directory = told(store), store.directory
    reopened = open_store()
    assert {session: kept[3] for session, kept in before.items()} == {
        session: kept[3][:-1] for session, kept in told(reopened).items()
    }
    assert not holds(directory, SECRET)


class HeldFiles(UnsyncedFiles):
    """Files that hold a compaction back where it begins to write."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def open(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        if path.name.endswith(".compact"):
            self.reached.set()
            assert self.go.wait(60)
        return super().open(path, flags)


async def test_a_log_that_was_read_back_meanwhile_is_left_alone(open_store: OpenStore) -> None:
    files = HeldFiles()
    store = open_store(files)
    fill(store)
    before = {session: kept[3] for session, kept in told(store).items()}
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        async with trio.open_nursery() as compacting:
            compacting.start_soon(store.compact_behind)
            await trio.to_thread.run_sync(files.reached.wait)
            store.reopen()
            files.go.set()
        assert not list(store.directory.glob("*compact*"))
        assert {session: kept[3][:-1] for session, kept in told(store).items()} == before
        assert await store.compact_behind() > 0
        nursery.cancel_scope.cancel()
    assert not holds(store.directory, SECRET)
