"""The session store: the log, the sessions it makes, and the one task that writes to it.

Records are staged at once, in the order they are to have (ids and times are given there), and become visible when the
batch they are in is on disk. A batch that cannot be written takes everything staged behind it down with it.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import trio

from superfluid.link import events as ev
from superfluid.sessions import records, store_id
from superfluid.sessions.activity import Activity
from superfluid.sessions.commit import Commit, Staged
from superfluid.sessions.compact import Rewrite, named_blobs, remove_blobs
from superfluid.sessions.declared import Declaring
from superfluid.sessions.errors import LogClosed, LogIOError, PurgedSession, SessionError, UnknownSession
from superfluid.sessions.files import Files, StoreLock
from superfluid.sessions.http_ids import HttpIds
from superfluid.sessions.leases import Leasing
from superfluid.sessions.replay import replay
from superfluid.sessions.session import Session
from superfluid.sessions.state import State, new_state
from superfluid.sessions.subscriptions import PUBLISHER_CLOSED, PURGED, Subscription, Subscriptions
from superfluid.sessions.wal import Wal, companion

logger = logging.getLogger(__name__)

RESIDENT_TOKENS = 4 << 20  # 16 MiB of streams of sessions that were touched; older ones are read again when needed

Record = tuple[int, ev.Body]


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Store:
    """One model's sessions. All methods belong to one thread; the sync alone runs in another."""

    def __init__(self, directory: Path, files: Files, clock: Callable[[], int], lock: StoreLock) -> None:
        """Not for callers: use `Store.open`."""
        self.directory = directory
        self.path = directory / "wal.log"
        self.activity = Activity()
        self.subscriptions = Subscriptions()
        self._files = files
        self._clock = clock
        self._lock = lock
        self._queue: list[Commit] = []
        self._staged = trio.Event()
        self._afresh = False  # there is no log before `begin`
        self._found_id: bytes | None = None
        self._closed = False
        self._writing = False
        self._rewrite: Rewrite | None = None  # a compacted copy that waits to take the log's place
        self._rewritten = trio.Event()
        self.buried = trio.Event()  # a session was purged; whoever compacts waits for it and puts a new one

    @classmethod
    def open(cls, directory: Path, files: Files | None = None, clock: Callable[[], int] = now_unix_ms) -> "Store":
        """Open the store in `directory` (made when absent): lock it, replay its log and fence earlier owners.

        Raises StoreLocked, StoreIdCorrupt, LogDamaged and LogIOError.
        """
        store = cls.read(directory, files, clock)
        try:
            store.begin()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read(
        cls,
        directory: Path,
        files: Files | None = None,
        clock: Callable[[], int] = now_unix_ms,
        *,
        afresh: bool = False,
    ) -> "Store":
        """The same, with every file but the lock left as it is until `begin`, before which nothing may be staged.

        `afresh`: the log that is there is not looked at; it will have been put aside by then. Raises as `open` does.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = StoreLock(directory / "wal.log")
        except OSError as error:
            raise LogIOError(directory, f"the sessions directory cannot be used: {error}") from error
        store = cls(directory, files or Files(), clock, lock)
        store._afresh = afresh
        try:
            if not afresh:
                store._read()
        except BaseException:
            lock.close()
            raise
        return store

    def _read(self) -> None:
        """Replay the log, writing nothing."""
        try:
            self._found_id = store_id.read(self.path)
            self.http = HttpIds.open(companion(self.path, "http"), self._files)
        except OSError as error:
            raise LogIOError(self.path, f"the store cannot be read: {error}") from error
        self._wal, index = Wal.read(self.path, self._files)
        try:
            self._touched: OrderedDict[int, Session] = OrderedDict()
            self._sessions: dict[int, Session] = {}
            self._children: dict[int, list[int]] = {}
            replay(self, index)
            self._next_session = max(self._sessions, default=0) + 1
            self._next_session = max(self._next_session, int(index.session.max(initial=0)) + 1)
        except BaseException:
            self._wal.close()
            raise

    def begin(self) -> None:
        """Name the store where that is to be done, cut what was torn, and fence earlier owners.

        Raises LogIOError; of a store that is read `afresh`, also as `open` does.
        """
        if self._afresh:
            self._read()
            self._afresh = False
        try:
            if self._found_id is None:
                self._found_id = store_id.mint(self.path, self._files)
                self.http.begin_anew()
        except OSError as error:
            raise LogIOError(self.path, f"the store cannot be named: {error}") from error
        self.store_id = self._found_id
        self._wal.begin()
        self._fence()

    def _fence(self) -> None:
        """Begin a new epoch of every live session, so that no earlier owner goes on. Raises LogIOError."""
        live = [session for _, session in sorted(self._sessions.items()) if session.durable.purged is None]
        base = self._wal.length
        data, sizes = records.bumps(
            np.array([session.id for session in live], np.uint64),
            np.array([session.durable.n_events for session in live], np.uint64),
            np.array([session.durable.epoch + 1 for session in live], np.uint64),
            self._clock(),
            self._wal.version,
        )
        self._wal.append(data)
        for session, size in zip(live, sizes.tolist(), strict=True):
            session.frames.append(base)
            state = session.durable
            state.n_events += 1  # no one has seen this state yet
            state.epoch += 1
            base += size

    # reading

    @property
    def version(self) -> int:
        """Of the log's format: 1 or 2."""
        return self._wal.version

    @property
    def failed(self) -> bool:
        """A sync failed: commits are refused until `reopen`."""
        return self._wal.failed

    def session(self, session: int) -> Session:
        """A live session. Raises UnknownSession and PurgedSession."""
        found = self._sessions.get(session)
        if found is None or not found.frames:
            raise UnknownSession(session)
        if found.durable.purged is not None:
            raise PurgedSession(session)
        return found

    def any_session(self, session: int) -> Session | None:
        """A session even when it was purged: what live ones inherit of it is still in the log."""
        return self._sessions.get(session)

    def session_ids(self) -> list[int]:
        """Live sessions, ascending."""
        return sorted(session.id for session in self.live())

    def live(self) -> Iterator[Session]:
        """Live sessions, in no order."""
        return (session for session in self._sessions.values() if session.frames and session.durable.purged is None)

    def linked_children(self, session: int) -> list[Session]:
        """Sessions whose records name this one as their parent, ascending: purged and re-rooted ones too."""
        return [self._sessions[child] for child in sorted(self._children.get(session, ()))]

    def children(self, session: int) -> list[Session]:
        """Sessions whose parent this is, ascending: as it will be once everything that is staged is durable."""
        return [child for child in self.linked_children(session) if child.ahead.purged is None and not child.rerooted]

    def living_parent(self, session: int) -> Session | None:
        """The session's parent, when it has one that lives."""
        parent = self.session(session).parent
        found = None if parent is None else self._sessions.get(parent)
        return found if found is not None and found.frames and found.durable.purged is None else None

    def read_frames(self, offsets: Iterable[int]) -> Iterator[ev.Event]:
        """The events at these places of the log."""
        version = self._wal.version
        return (records.event(payload, version)[1] for payload in self._wal.payloads(offsets))

    def read_payloads(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """The records at these places of the log, as they are in their frames."""
        return self._wal.payloads(offsets)

    def subscribe(self, session: int, cursor: int = 0, previews: bool = False) -> Subscription:
        """Follow a session's committed events from `cursor` on. Raises UnknownSession and PurgedSession."""
        return self.subscriptions.add(session, self.session(session).events(cursor), previews)

    # writing

    def new_session(self) -> int:
        """An id that no session ever had: for the Created, Forked or Rebased record that makes it."""
        session = self._next_session
        self._next_session += 1
        return session

    def stage(self, batch: Sequence[Record]) -> Commit:
        """Give records their ids and times, and put them in line for the next sync, all or none.

        An empty batch is done when everything before it is. Nothing here looks at the rules of sessions. Raises
        LogIOError when the log takes no more, UnknownSession and PurgedSession.
        """
        if self._closed:
            raise LogClosed(self.path)
        if self._wal.failed:
            raise LogIOError(self.path, "a sync of the log failed earlier")
        now = self._clock()
        version = self._wal.version
        time_ms = now if version > 1 else 0
        staged: list[Staged] = []
        undo: list[tuple[Session, State]] = []
        try:
            for session_id, body in batch:
                session = self._sessions.get(session_id) or self._begin(session_id, body)
                before = session.whole_ahead()
                undo.append((session, before))
                if before.purged is not None:
                    raise PurgedSession(session_id)
                behind = b""
                if type(body) is Declaring:
                    behind, body = body.behind(), body.said
                elif type(body) is Leasing:
                    body = body.on(before.n_events - 1, now)
                epoch = before.epoch + 1 if type(body) is ev.EpochBump else before.epoch
                event = ev.Event(before.n_events, epoch, time_ms, body)
                frame: bytes | Callable[[], bytes]
                if ev.is_long(body):
                    frame = partial(records.frame, session_id, event, version, behind)
                else:
                    frame = records.frame(session_id, event, version, behind)
                span = getattr(body, "span", None)
                if span is not None and len(span):
                    session.extend(span)
                session.ahead = state = before.after(event)
                staged.append(Staged(session, event, state, frame))
        except BaseException:
            for session, before in reversed(undo):
                session.ahead = before
                self._unmake(session)
            raise
        for one in staged:
            if type(one.event.body) is ev.Generated:
                self.subscriptions.stage(one.session.id, one.event.body)
        commit = Commit(staged)
        if staged or self._queue or self._writing:
            self._queue.append(commit)
            self._staged.set()
        else:
            commit.finish()
        return commit

    async def commit(self, batch: Sequence[Record]) -> list[ev.Event]:
        """Stage records and wait until they are durable. Raises as `stage` and `Commit.wait` do."""
        return await self.stage(batch).wait()

    async def perform(self, plan: Callable[[], Sequence[Record]]) -> list[ev.Event]:
        """Commit what a rule plans; when the rule refuses, what the attempt leaves is committed and the refusal raised.

        Between the plan and its place in the log nothing else happens.
        """
        try:
            batch = plan()
        except SessionError as refusal:
            if refusal.records:
                await self.commit(refusal.records)
            raise
        return await self.commit(batch)

    def _begin(self, session_id: int, body: ev.Body) -> Session:
        if isinstance(body, ev.Created):
            session = Session(self, session_id, body.parent, 0, new_state())
            session.begin_stream(None)
        elif isinstance(body, ev.Forked | ev.Rebased):
            parent = self.session(body.parent)
            state = parent.state_at(body.fork_at)
            session = Session(self, session_id, body.parent, body.fork_at, state)
            session.begin_stream(parent.stream()[: state.n_tokens])
        else:
            raise UnknownSession(session_id)
        self.adopt(session)
        return session

    def adopt(self, session: Session) -> None:
        """Take a session in; only `replay` and `stage` make any."""
        self._sessions[session.id] = session
        if session.parent_link is not None:
            self._children.setdefault(session.parent_link, []).append(session.id)

    def _take_back(self, staged: Iterable[Staged]) -> None:
        for one in staged:
            one.session.ahead = one.session.durable
            self.subscriptions.take_back(one.session.id)
            self._unmake(one.session)

    def _unmake(self, session: Session) -> None:
        """Forget a session whose first record never came to be in line."""
        if session.frames or session.ahead is not session.durable or session.id not in self._sessions:
            return
        del self._sessions[session.id]
        self._touched.pop(session.id, None)
        if session.parent_link is not None:
            self._children[session.parent_link].remove(session.id)

    # the sync

    def flush(self) -> None:
        """Write and sync what is staged, here and now: for callers without a running `run`."""
        while batch := self._take():
            self._settle(batch, self._write(batch))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The `wal` task: one write and one sync for all commits that are ready together, in a thread.

        When cancelled it writes what is staged, and the store takes no more.
        """
        limiter = trio.CapacityLimiter(1)
        task_status.started()
        try:
            while True:
                if not self._queue and self._rewrite is None:
                    self._staged = trio.Event()
                    await self._staged.wait()
                await trio.lowlevel.checkpoint()  # let the other tasks of this step stage theirs too
                await self._write_behind(limiter)
                await self._put_rewrite_in_place(limiter)
        finally:
            self._closed = True
            with trio.CancelScope(shield=True):
                while self._queue:
                    await self._write_behind(limiter)

    async def _write_behind(self, limiter: trio.CapacityLimiter) -> None:
        with trio.CancelScope(shield=True):
            if batch := self._take():
                self._writing = True
                try:
                    error = await trio.to_thread.run_sync(self._write, batch, limiter=limiter)
                finally:
                    self._writing = False
                self._settle(batch, error)

    def _take(self) -> list[Commit]:
        batch, self._queue = self._queue, []
        return batch

    def _write(self, batch: list[Commit]) -> LogIOError | None:
        try:
            data = b"".join([chunk for commit in batch for chunk in commit.chunks])
        except Exception as error:  # long records are encoded here: there is nothing of the batch in the log
            return LogIOError(self.path, f"a record cannot be encoded: {type(error).__name__}: {error}")
        try:
            if data:
                self._wal.append(data)
        except LogIOError as error:
            return error
        return None

    def _settle(self, batch: list[Commit], error: LogIOError | None) -> None:
        if error is None:
            self._publish(batch)
            return
        logger.error("%s", error)
        batch = batch + self._take()  # what was staged meanwhile stands on what was lost
        for commit in reversed(batch):
            self._take_back(reversed(commit.staged))
        for commit in batch:
            commit.finish(error)

    def _publish(self, batch: list[Commit]) -> None:
        offset = self._wal.length - sum(one.size for commit in batch for one in commit.staged)
        for commit in batch:
            for one in commit.staged:
                session = one.session
                session.note_frame(offset, one.event.body)
                session.durable = one.state
                offset += one.size
                self.subscriptions.publish(session.id, one.event)
                if one.state.purged is not None:
                    self._bury(session)
            commit.finish()

    def _bury(self, session: Session) -> None:
        if session.durable.purged == ev.Descendants.Reroot:
            for child in self.linked_children(session.id):
                if child.durable.purged is None:
                    child.rerooted = True
        session.forget()
        self.buried.set()
        self._touched.pop(session.id, None)
        self.subscriptions.end(session.id, PURGED)

    # compaction

    def compact(self) -> int:
        """Write the log anew without what purged sessions left, here and now; the bytes that it lost.

        For callers without a running `run`. Raises LogIOError; the log is as it was then.
        """
        self.flush()
        before = self._wal.length
        rewrite = Rewrite(self._wal, self._files)
        if rewrite.copy():
            self._remove_blobs(rewrite.unnamed)
            rewrite.finish()
            self._move_to(rewrite)
        return before - self._wal.length

    async def named_blobs(self) -> set[str]:
        """The media blobs that image blocks of live sessions name. Raises LogIOError."""
        await self.commit([])  # those that are on their way to the log too
        version = self._wal.version
        try:
            data = self._wal.mapped()
        except (OSError, ValueError) as error:
            raise LogIOError(self.path, f"the log cannot be read: {error}") from error
        with data:
            return await trio.to_thread.run_sync(named_blobs, data, version)

    async def compact_behind(self) -> int:
        """The same beside a running `run`: commits go on but for the moment in which the new log takes its place.

        Raises LogIOError; the log is as it was then.
        """
        if self._closed or self._wal.failed:
            return 0
        rewrite = Rewrite(self._wal, self._files)
        if not await trio.to_thread.run_sync(rewrite.copy, self._is_closed):
            return 0
        try:
            if rewrite.unnamed:  # before the log forgets their names; a session may have named one since
                unnamed = rewrite.unnamed - await self.named_blobs()
                await trio.to_thread.run_sync(self._remove_blobs, unnamed)
        except BaseException:
            rewrite.abandon()
            raise
        if self._closed or self._wal is not rewrite.wal:
            rewrite.abandon()
            return 0
        self._rewrite, self._rewritten = rewrite, trio.Event()
        self._staged.set()
        try:
            await self._rewritten.wait()
        finally:
            if self._rewrite is rewrite:
                self._rewrite = None
                rewrite.abandon()
        if rewrite.error is not None:
            raise rewrite.error
        return rewrite.saved

    def _remove_blobs(self, blobs: set[str]) -> None:
        try:
            remove_blobs(self.directory, blobs, self._files)
        except OSError as error:
            raise LogIOError(self.directory / "media", f"blobs of purged sessions stay: {error}") from error

    def _is_closed(self) -> bool:
        return self._closed

    async def _put_rewrite_in_place(self, limiter: trio.CapacityLimiter) -> None:
        rewrite, self._rewrite = self._rewrite, None
        if rewrite is None:
            return
        if self._wal is not rewrite.wal or self._wal.failed:
            rewrite.abandon()
        else:
            with trio.CancelScope(shield=True):
                self._writing = True
                try:
                    await trio.to_thread.run_sync(rewrite.finish, limiter=limiter)
                except LogIOError as error:
                    rewrite.error = error
                else:
                    self._move_to(rewrite)
                finally:
                    self._writing = False
        self._rewritten.set()

    def _move_to(self, rewrite: Rewrite) -> None:
        rewrite.settle()
        sessions = list(self._sessions.values())
        held = np.frombuffer(b"".join([session.frames.tobytes() for session in sessions]), np.uint64)
        places, there = rewrite.moved(held)
        ends = np.cumsum([0, *(len(session.frames) for session in sessions)])
        bounds = (np.r_[0, np.cumsum(there)][ends] * held.itemsize).tolist()
        raw = places[there].tobytes()
        for session, start, end in zip(sessions, bounds, bounds[1:], strict=False):
            reroot = session.reroot
            if reroot is not None:
                place, kept = rewrite.moved(np.array([reroot], np.uint64))
                reroot = int(place[0]) if kept[0] else None
            session.relocate(raw[start:end], reroot)
        self.http.drop(rewrite.purged)

    # streams in memory

    def touched(self, session: Session) -> None:
        """A session's stream is in use: keep it longest, and let go of those that were not for long."""
        touched = self._touched
        if session.id in touched:
            touched.move_to_end(session.id)
            return
        touched[session.id] = session
        if len(touched) % 16 == 0 and sum(one.resident for one in touched.values()) > RESIDENT_TOKENS:
            for one in list(touched.values())[: len(touched) // 2]:
                if one is not session and one.let_go():
                    del touched[one.id]

    # ends

    def reopen(self) -> None:
        """After a failed sync: cut the log to what was durable, and read it back. Sessions are new objects then.

        Raises as `open` does, and LogIOError while a sync runs; the store stays as it was, and takes nothing.
        """
        self._fail_staged()
        self._become(self._read_back())

    async def reopen_behind(self) -> None:
        """The same, the log being read in a thread; until it is, sessions show what was durable before."""
        self._fail_staged()
        self._become(await trio.to_thread.run_sync(self._read_back))

    def _fail_staged(self) -> None:
        if self._writing:
            raise LogIOError(self.path, "a sync of the log is still running")
        self._take_back(one for commit in reversed(self._queue) for one in reversed(commit.staged))
        for commit in self._take():
            commit.finish(LogIOError(self.path, "the log was opened again"))

    def _read_back(self) -> "Store":
        self._wal.give_up()
        fresh = Store(self.directory, self._files, self._clock, self._lock)
        fresh._read()
        try:
            fresh.begin()
        except BaseException:
            fresh._wal.close()
            raise
        return fresh

    def _become(self, fresh: "Store") -> None:
        self.subscriptions.close(PUBLISHER_CLOSED)
        self._wal.close()
        self.http.close()
        self.store_id, self.http, self._wal = fresh.store_id, fresh.http, fresh._wal
        self._sessions, self._children, self._touched = fresh._sessions, fresh._children, fresh._touched
        self._next_session = fresh._next_session
        for session in self._sessions.values():
            session.belongs_to(self)

    def close(self) -> None:
        """Write what is staged when that is still possible, end subscriptions, and let go of the files and the lock."""
        if not self._afresh:
            if not self._wal.failed:
                self.flush()
            self._wal.close()
            self.http.close()
        self._closed = True
        self.subscriptions.close(PUBLISHER_CLOSED)
        self._lock.close()
