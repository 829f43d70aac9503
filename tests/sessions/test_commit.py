"""Committing: group commit, what a failing disk leaves, subscriptions."""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from superfluid.link import events as ev
from superfluid.sessions import records, rules
from superfluid.sessions.errors import LogIOError, PurgedSession, UnknownSession
from superfluid.sessions.store import Store
from superfluid.sessions.subscriptions import MOST_BEHIND, Preview
from tests.sessions.conftest import OpenStore
from tests.sessions.faulty import FaultyFiles

PARAMS = ev.GenParams()


def make(store: Store) -> int:
    session, batch = rules.create(store, None, PARAMS)
    store.stage([*batch, (session, ev.Message(1, "hi", [1, 2, 3]))])
    store.flush()
    return session


def say(token: int) -> ev.Body:
    return ev.Generated([token], f"t{token}", 0, 0)


async def test_long_records_are_encoded_by_the_thread_that_writes(
    open_store: OpenStore, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    session = make(store)
    encoders: list[tuple[bool, bool]] = []  # of a long record, in this thread
    frame = records.frame

    def noted(session: int, event: ev.Event, *rest: Any) -> bytes:
        encoders.append((ev.is_long(event.body), threading.current_thread() is threading.main_thread()))
        return frame(session, event, *rest)

    monkeypatch.setattr(records, "frame", noted)
    await nursery.start(store.run)
    many = list(range(ev.LONG + 1))
    bodies = [ev.Message(1, "x", many), ev.Message(1, "short", [1]), ev.Appended("é" * len(many), [2]), say(3)]
    await store.commit([(session, body) for body in bodies])
    assert sorted(encoders) == [(False, True)] * 2 + [(True, False)] * 2
    assert [event.body for event in store.session(session).events()][-4:] == bodies
    again = open_store()
    assert [event.body for event in again.session(session).events()][-5:-1] == bodies


async def test_a_long_record_that_cannot_be_encoded_is_refused(open_store: OpenStore, nursery: trio.Nursery) -> None:
    store = open_store()
    session = make(store)
    await nursery.start(store.run)
    with pytest.raises(LogIOError, match="cannot be encoded"):
        await store.commit([(session, ev.Message(1, "\ud800" * (ev.LONG + 1), [9]))])
    await store.commit([(session, say(4))])
    assert store.session(session).tokens().tolist() == [1, 2, 3, 4]


def test_nothing_shows_before_its_sync(open_store: OpenStore) -> None:
    store = open_store()
    session, batch = rules.create(store, None, PARAMS)
    commit = store.stage([*batch, (session, say(1))])
    assert not commit.done
    assert store.session_ids() == []
    with pytest.raises(UnknownSession):
        store.session(session)
    store.flush()
    assert commit.result() == store.session(session).events()
    second = store.stage([(session, say(2))])
    third = store.stage([(session, say(3)), (session, ev.MetaUpdated(1, "title", None))])
    found = store.session(session)
    assert (found.tokens().tolist(), found.n_events, found.title) == ([1], 2, None)
    assert found.whole_ahead().n_tokens == 3
    view = found.tokens()
    store.flush()
    assert [event.event_id for commit in (second, third) for event in commit.result()] == [2, 3, 4]
    assert (found.tokens().tolist(), view.tolist(), found.title) == ([1, 2, 3], [1], "title")
    assert not view.flags.writeable


def test_a_batch_that_cannot_be_encoded_leaves_no_trace(open_store: OpenStore) -> None:
    store = open_store()
    session = make(store)
    queued = store.stage([(session, say(7))])
    fresh = store.new_session()
    with pytest.raises(ValueError, match=r"."):
        store.stage([(session, say(8)), (fresh, ev.Created(None, PARAMS)), (session, ev.Appended(None, [1 << 40]))])
    with pytest.raises(UnknownSession):
        store.stage([(fresh, say(1))])
    follow = store.stage([(session, say(9))])
    store.flush()
    assert [event.event_id for event in queued.result() + follow.result()] == [2, 3]
    assert store.session(session).tokens().tolist() == [1, 2, 3, 7, 9]
    assert [event.event_id for event in open_store().session(session).events()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_loses_only_what_was_not_acknowledged(open_store: OpenStore, error: int) -> None:
    files = FaultyFiles()
    store = open_store(files)
    session = make(store)
    durable = (store.path).read_bytes()
    files.arm("write", 1, error)
    lost = [store.stage([(session, say(1))]), store.stage(rules.create(store, None, PARAMS)[1])]
    store.flush()
    for commit in lost:
        with pytest.raises(LogIOError, match=r"^io: .*wal\.log"):
            commit.result()
    assert store.path.read_bytes() == durable
    assert store.session(session).tokens().tolist() == [1, 2, 3]
    assert store.session_ids() == [session]
    kept = store.stage([(session, say(4))])
    store.flush()
    assert [event.event_id for event in kept.result()] == [2]
    found = open_store().session(session)
    assert found.tokens().tolist() == [1, 2, 3, 4]
    assert [event.event_id for event in found.events()] == list(range(found.n_events))


def test_the_file_is_cut_before_the_next_append_when_it_could_not_be_before(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(files)
    session = make(store)
    durable = store.path.read_bytes()
    files.arm("write", 1, errno.ENOSPC)
    files.arm("truncate", 1)
    store.stage([(session, say(1))])
    store.flush()
    assert store.path.read_bytes() != durable
    files.arm("truncate", 1)
    refused = store.stage([(session, say(2))])
    store.flush()
    with pytest.raises(LogIOError):
        refused.result()
    kept = store.stage([(session, say(3))])
    store.flush()
    assert [event.body for event in kept.result()] == [say(3)]
    assert open_store().session(session).tokens().tolist() == [1, 2, 3, 3]


def test_short_writes_are_completed(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(files)
    session = make(store)
    files.short = lambda size: min(size, 5)
    store.stage([(session, say(token)) for token in range(20)])
    store.flush()
    files.short = lambda size: 0
    refused = store.stage([(session, say(99))])
    store.flush()
    with pytest.raises(LogIOError):
        refused.result()
    files.disarm()
    assert open_store().session(session).n_tokens == 23


def test_after_a_failed_sync_nothing_is_taken_until_the_log_is_read_back(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(files)
    session = make(store)
    files.arm("sync", 1)
    lost = store.stage([(session, say(1))])
    store.flush()
    with pytest.raises(LogIOError, match="synced"):
        lost.result()
    assert store.failed
    with pytest.raises(LogIOError):
        store.stage([(session, say(2))])
    assert store.session(session).tokens().tolist() == [1, 2, 3]  # reading goes on
    store.reopen()
    assert not store.failed
    found = store.session(session)
    assert (found.tokens().tolist(), found.epoch) == ([1, 2, 3], 2)
    store.stage([(session, say(5))])
    store.flush()
    assert open_store().session(session).tokens().tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("operation", ["open", "write", "sync", "sync_directory", "link"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_fault_while_opening_loses_nothing(open_store: OpenStore, operation: str, nth: int) -> None:
    files = FaultyFiles()
    files.arm(operation, nth)
    with suppress(LogIOError):
        open_store(files)
    store = open_store()
    session = make(store)
    files.calls.clear()
    files.arm(operation, nth)
    before = store.session(session).events()
    with suppress(LogIOError):
        open_store(files)
    files.disarm()
    assert open_store().session(session).events()[: len(before)] == before


async def test_commits_that_are_ready_together_share_one_sync(open_store: OpenStore, nursery: trio.Nursery) -> None:
    files = FaultyFiles()
    store = open_store(files)
    sessions = [make(store) for _ in range(8)]
    await nursery.start(store.run)
    before = files.calls["sync"]
    results: dict[int, list[ev.Event]] = {}

    async def one(session: int) -> None:
        results[session] = await store.commit([(session, say(session)), (session, say(0))])

    async with trio.open_nursery() as lanes:
        for session in sessions:
            lanes.start_soon(one, session)
    assert files.calls["sync"] == before + 1
    assert all([event.event_id for event in results[session]] == [2, 3] for session in sessions)


async def test_a_cancelled_run_writes_what_is_staged_and_takes_no_more(open_store: OpenStore) -> None:
    store = open_store()
    session = make(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        commit = store.stage([(session, say(1))])
        nursery.cancel_scope.cancel()
    assert [event.event_id for event in commit.result()] == [2]
    with pytest.raises(LogIOError, match="closed"):
        store.stage([(session, say(2))])


async def test_an_error_ends_every_commit_behind_it(open_store: OpenStore, nursery: trio.Nursery) -> None:
    files = FaultyFiles()
    store = open_store(files)
    session = make(store)
    await nursery.start(store.run)
    files.arm("write", 1, errno.ENOSPC)
    commits = [store.stage([(session, say(token))]) for token in range(3)]
    for commit in commits:
        with pytest.raises(LogIOError):
            await commit.wait()
    assert [event.event_id for event in await store.commit([(session, say(9))])] == [2]


class TestSubscriptions:
    async def test_backlog_then_live_without_gap_or_double(self, open_store: OpenStore, nursery: trio.Nursery) -> None:
        store = open_store()
        session = make(store)
        await nursery.start(store.run)
        staged = store.stage([(session, say(1))])
        subscription = store.subscribe(session, 1)
        await staged.wait()
        await store.commit([(session, say(2)), (session, say(3))])
        subscription.close()
        seen = [message.event_id async for message in subscription if isinstance(message, ev.Event)]
        assert seen == [1, 2, 3, 4]
        assert subscription.reason == "unsubscribed"
        assert len(store.subscriptions) == 0

    async def test_previews_come_to_those_who_asked(self, open_store: OpenStore) -> None:
        store = open_store()
        session = make(store)
        asking, other = store.subscribe(session, 9, previews=True), store.subscribe(session, 9)
        store.subscriptions.preview(session, 0, "t1")
        store.stage([(session, say(1))])
        store.flush()
        for subscription in (asking, other):
            subscription.close()
        assert [type(message) async for message in asking] == [Preview, ev.Event]
        assert [type(message) async for message in other] == [ev.Event]

    async def test_what_was_not_previewed_is_when_it_is_staged(self, open_store: OpenStore) -> None:
        store = open_store()
        session = make(store)
        early = store.subscribe(session, 9, previews=True)
        store.subscriptions.preview(session, 0, "t")
        middle = store.subscribe(session, 9, previews=True)
        store.stage([(session, say(1)), (session, ev.Generated([2], "call", 2, 0))])
        store.subscriptions.preview(session, 0, "t3")
        late = store.subscribe(session, 9, previews=True)
        store.flush()
        store.subscriptions.preview(session, 0, "t4")
        store.stage([(session, say(3))])
        store.flush()
        texts: list[str] = []
        for subscription in (early, middle, late):
            subscription.close()
            texts.append("".join([one.text async for one in subscription if isinstance(one, Preview)]))
        assert texts == ["t1t3t4"] * 3

    async def test_previews_that_nobody_has_taken_are_joined(self, open_store: OpenStore) -> None:
        """For who is slow; who takes them at once, and who comes meanwhile, get the same text."""
        store = open_store()
        session = make(store)
        slow, quick = (store.subscribe(session, 9, previews=True) for _ in range(2))
        store.subscriptions.preview(session, 0, "t1")
        store.subscriptions.preview(session, 0, "t")
        reading = quick.batches()
        taken = [await anext(reading)]
        store.subscriptions.preview(session, 0, "2t")
        store.subscriptions.preview(session, 0, "3")
        late = store.subscribe(session, 9, previews=True)
        store.subscriptions.preview(session, 0, "t4")
        store.subscriptions.preview(session, 1, "why")
        taken.append(await anext(reading))
        store.stage([(session, say(1)), (session, say(2)), (session, say(3)), (session, say(4))])
        store.subscriptions.preview(session, 0, "ahead")
        store.flush()
        seen: list[list[str]] = [[one.text for batch in taken for one in batch if isinstance(one, Preview)]]
        for subscription in (quick, slow, late):
            subscription.close()
            seen.append([one.text if isinstance(one, Preview) else "" async for one in subscription])
        rest = ["ahead", "", "", "", ""]
        assert seen[0] == ["t1t", "2t3", "t4", "why"]
        assert seen[1] == rest
        assert seen[2] == ["t1t", "2t3", "t4", "why", *rest]
        assert seen[3] == ["t1t2t3", "t4", "why", *rest]

    async def test_one_that_lags_gets_what_is_queued_and_ends(self, open_store: OpenStore) -> None:
        store = open_store()
        session = make(store)
        subscription = store.subscribe(session, 2)
        store.stage([(session, say(1))] * (MOST_BEHIND + 1))
        store.flush()
        assert subscription.reason == "lagged"
        seen = [message.event_id async for message in subscription if isinstance(message, ev.Event)]
        assert seen == list(range(2, MOST_BEHIND + 2))

    async def test_ends_with_the_session_and_with_the_store(self, open_store: OpenStore) -> None:
        store = open_store()
        first, second = make(store), make(store)
        subscriptions = [store.subscribe(first), store.subscribe(second)]
        store.stage(rules.purge(store, first, 0, ev.Descendants.Cascade))
        store.flush()
        with pytest.raises(PurgedSession):
            store.subscribe(first)
        store.close()
        assert [subscription.reason for subscription in subscriptions] == ["purged", "publisher closed"]


def test_streams_of_old_sessions_are_let_go_and_read_again(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superfluid.sessions.store.RESIDENT_TOKENS", 4000)
    store = open_store()
    sessions = [make(store) for _ in range(64)]
    resident = sum(store.session(session).resident for session in sessions)
    assert resident <= 4000 + 16 * 256
    assert all(store.session(session).tokens().tolist() == [1, 2, 3] for session in sessions)


def test_http_ids_survive_and_go_with_a_new_log(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    session = make(store)
    store.http.add(session)
    path = tmp_path / "s/wal.log.http"
    path.write_bytes(path.read_bytes() + b"half")
    store = open_store()
    assert store.http.ids == {session}
    store.http.add(77)
    assert open_store().http.ids == {session, 77}
    store.close()
    (tmp_path / "s/wal.log").unlink()
    assert open_store().http.ids == set()


class HeldFiles(FaultyFiles):
    """Opening a log a second time waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()
        self.hold = False

    def open(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        if self.hold and path.name == "wal.log":
            self.reached.set()
            assert self.go.wait(60)
        return super().open(path, flags)


async def test_sessions_are_read_while_the_log_is_read_back(open_store: OpenStore) -> None:
    files = HeldFiles()
    store = open_store(files)
    session = make(store)
    old = store.session(session)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        files.arm("sync", 1)
        with pytest.raises(LogIOError):
            await store.commit([(session, say(1))])
        files.hold = True
        async with trio.open_nursery() as reopening:
            reopening.start_soon(store.reopen_behind)
            await trio.to_thread.run_sync(files.reached.wait)
            assert store.session(session) is old
            assert len(old.events()) == 2
            follower = store.subscribe(session)
            with pytest.raises(LogIOError):
                store.stage([(session, say(2))])
            files.go.set()
        assert [type(event.body) async for event in follower if isinstance(event, ev.Event)] == [ev.Created, ev.Message]
        assert follower.reason == "publisher closed"
        await store.commit([(session, say(5))])
        assert store.session(session) is not old
        assert store.session(session).tokens().tolist() == [1, 2, 3, 5]
        nursery.cancel_scope.cancel()
