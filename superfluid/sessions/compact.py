"""Compaction: the log written anew without what purged sessions leave behind.

Everything else keeps its bytes and its order. The new log stands beside the old one until it is whole and on disk; one
rename puts it in its place, so that a crash finds either of them.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link import events as ev
from superfluid.sessions import records
from superfluid.sessions.errors import LogIOError
from superfluid.sessions.files import Files, StoreLock
from superfluid.sessions.http_ids import HttpIds
from superfluid.sessions.records import HEADER, Index, Mapped
from superfluid.sessions.replay import CREATED, FORKED, PURGED, QOS_SET, REBASED, REROOTED
from superfluid.sessions.wal import Wal, companion

logger = logging.getLogger(__name__)

PIECE = 1 << 20  # bytes that are copied at once
BLOCK = ev.Body.variants.index(ev.Block)
IMAGE = 7  # the kind of an image block
BLOB = re.compile(r"[0-9a-f]{64}")
NO_PARAMS = ev.GenParams(temperature=0.0, top_p=0.0, min_p=0.0, top_k=0, seed=0)

Offsets = npt.NDArray[np.uint64]


@attrs.define
class _Life:
    """One session, by positions in the log; what live sessions inherit of it."""

    begin: int
    kind: int  # variant of its first record
    parent: int | None
    fork_at: int
    end: int | None = None  # of the Purged record
    classes: list[int] = attrs.Factory(list)  # of the QosSet records
    inherited: int = 0  # a live session's history has its events below this id
    branched: int = -1  # the last branch whose history goes through it


@attrs.frozen
class Plan:
    """What stays of an indexed log: `keep` per frame, and frames that take the place of others, by position."""

    keep: npt.NDArray[np.bool_]
    stand_ins: dict[int, bytes]
    purged: frozenset[int]

    @property
    def changes(self) -> bool:
        return bool(self.stand_ins) or not self.keep.all()


def plan(data: Mapped, index: Index, version: int) -> Plan:
    """Decide what stays of the log `data`.

    Of a purged session: Purged, the records that a live session inherits, and the class it had when a branch took it
    over. Where nothing of its own stays, a record without content takes the place of its first: Created, or Forked
    when a live session's history goes through it to an ancestor.
    """
    lives = _lives(index)
    purged = {session: life for session, life in lives.items() if life.end is not None}
    keep = np.ones(len(index), np.bool_)
    stand_ins: dict[int, bytes] = {}
    if not purged:
        return Plan(keep, stand_ins, frozenset())
    order = np.argsort(index.session, kind="stable")
    ids = index.session[order]
    wanted = np.fromiter(purged, np.uint64, len(purged))
    starts, ends = np.searchsorted(ids, wanted), np.searchsorted(ids, wanted, "right")
    for life, start, end in zip(purged.values(), starts.tolist(), ends.tolist(), strict=True):
        assert life.end is not None
        places = order[start:end]
        keep[places] = False
        keep[life.end] = True
        own = places[(places >= life.begin) & (places < life.end)][: max(life.inherited - life.fork_at, 0)]
        keep[own] = True
        keep[[at for at in life.classes if at < life.branched]] = True
        if not len(own):
            body: ev.Body = ev.Created(life.parent, NO_PARAMS)
            if life.inherited:
                assert life.parent is not None
                body = ev.Forked(life.parent, life.fork_at, NO_PARAMS)
            made = _in_place_of(data, int(index.offset[life.begin]), version, body)
            if made is None:
                keep[life.begin] = True
            else:
                stand_ins[life.begin] = made
    return Plan(keep, stand_ins, frozenset(purged))


def _lives(index: Index) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    for at, row in zip(index.at.tolist(), index.steps.tolist(), strict=True):
        _, session, _, _, _, a, b, _, _, variant, flags = row
        life = lives.get(session)
        if life is None:
            if variant == CREATED:
                lives[session] = _Life(at, variant, a if flags else None, 0)
            elif variant in (FORKED, REBASED):
                lives[session] = _Life(at, variant, a, b)
        elif life.end is None:
            if variant == QOS_SET:
                life.classes.append(at)
            elif variant == PURGED:
                life.end = at
    for life in reversed(lives.values()):  # branches before what they branch from
        origin = None if life.parent is None or life.kind == CREATED else lives.get(life.parent)
        reach = life.fork_at if life.end is None else min(life.fork_at, life.inherited)
        if origin is not None and reach:
            origin.inherited = max(origin.inherited, reach)
            origin.branched = max(origin.branched, life.begin)
    return lives


def _in_place_of(data: Mapped, offset: int, version: int, body: ev.Body) -> bytes | None:
    """The frame of `body` with the head of the frame at `offset`; none when that is what stands there."""
    length, _ = HEADER.unpack_from(data, offset)
    held = bytes(data[offset : offset + HEADER.size + length])
    session, (event_id, epoch, time_ms), _ = records.head(held[HEADER.size :], version)
    made = records.frame(session, ev.Event(event_id, epoch, time_ms, body), version)
    return None if made == held else made


class Rewrite:
    """One compaction of an open log. `copy` may run in a thread while the log grows; `finish` while nothing is
    appended; then `settle` in the log's own thread. `copy` and `finish` raise LogIOError, and the log is as it was.
    """

    def __init__(self, wal: Wal, files: Files) -> None:
        self.wal = wal
        self.purged: frozenset[int] = frozenset()
        self.unnamed: set[str] = set()  # media blobs that only what goes names
        self.error: LogIOError | None = None  # for who waits while another task finishes it
        self._files = files
        self._path = companion(wal.path, "compact")
        self._length = wal.length  # of the log that `copy` reads
        self._base = 0  # and of what it makes of that
        self._written = 0
        self._descriptor = -1
        self.named = True  # its place is on disk
        try:
            self._data = wal.mapped()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> LogIOError:
        return LogIOError(self.wal.path, f"it cannot be compacted: {error}")

    @property
    def saved(self) -> int:
        """Bytes that the log lost."""
        return self._length - self._base

    def copy(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Write what stays of the log so far. False when all of it stays, or `stop` says so: nothing is left then."""
        version = self.wal.version
        start = len(records.MAGIC) if version > 1 else 0
        try:
            with self._data as data:
                index, _, _ = records.scan(data, start, version)
                todo = plan(data, index, version)
                self.purged = todo.purged
                if not todo.changes or stop():
                    return False
                self.unnamed = _blobs_in(data, index, ~todo.keep, version)
                if self.unnamed:
                    self.unnamed -= _blobs_in(data, index, todo.keep, version)
                sizes = self._place(index, todo, start)
                self._files.remove(self._path)
                self._descriptor = self._files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                for piece in _pieces(data, start, index.offset, sizes, todo):
                    if stop():
                        self.abandon()
                        return False
                    self._write(piece)
            self._files.sync(self._descriptor)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error
        self._base = self._written
        return True

    def _place(self, index: Index, todo: Plan, start: int) -> npt.NDArray[np.uint64]:
        """Where each frame that stays comes to lie; returns the bytes of the frames as they are."""
        sizes: npt.NDArray[np.uint64] = np.diff(np.r_[index.offset, np.uint64(self._length)])
        stays = todo.keep.copy()
        after = np.where(todo.keep, sizes, np.uint64(0))
        for at, frame in todo.stand_ins.items():
            stays[at], after[at] = True, len(frame)
        places = np.uint64(start) + np.cumsum(after, dtype=np.uint64) - after
        self._kept, self._moved = index.offset[stays], places[stays]
        return sizes

    def _write(self, piece: bytes | memoryview) -> None:
        self._files.write_whole(self._descriptor, piece, self._written)
        self._written += len(piece)

    def finish(self) -> None:
        """Bring the copy up to the log as it is now, and put it in its place."""
        wal, files = self.wal, self._files
        try:
            for at in range(self._length, wal.length, PIECE):
                self._write(wal.raw(at, min(PIECE, wal.length - at)))
            if wal.length > self._length:
                files.sync(self._descriptor)
            for suffix in ("synced", "torn"):
                files.remove(companion(wal.path, suffix))
            files.rename(self._path, wal.path)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error
        try:
            files.sync_directory(wal.path.parent)
        except OSError as error:
            logger.warning("%s: %s; nothing is appended before that is done", wal.path.parent, error)
            self.named = False

    def settle(self) -> None:
        """After `finish`: have the log go on in the new file."""
        self.wal.take_over(self._descriptor, self._written, self.named)
        self._descriptor = -1

    def moved(self, offsets: Offsets) -> tuple[Offsets, npt.NDArray[np.bool_]]:
        """Where frames of the old log lie in the new one, and which of them are there at all."""
        found = np.minimum(np.searchsorted(self._kept, offsets), len(self._kept) - 1)
        behind = offsets >= self._length
        places = np.where(behind, offsets - self._length + self._base, self._moved[found])
        return places, behind | (self._kept[found] == offsets)

    def abandon(self) -> None:
        """Leave the log as it was."""
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1
            try:
                self._files.remove(self._path)
            except OSError as error:
                logger.warning("%s: %s; it is removed when the log is opened", self._path, error)


def _pieces(data: Mapped, start: int, offsets: Offsets, sizes: npt.NDArray[np.uint64], todo: Plan) -> Iterator[bytes]:
    """The new log's bytes: the header, runs of frames that stay, and stand-ins, gathered into large pieces."""
    held: list[bytes] = [bytes(data[:start])]
    size = start
    kept = np.flatnonzero(todo.keep)
    breaks = np.flatnonzero(np.diff(kept) != 1) + 1
    firsts = kept[np.r_[0, breaks]] if len(kept) else kept
    lasts = kept[np.r_[breaks - 1, len(kept) - 1]] if len(kept) else kept
    runs: list[tuple[int, Any]] = [
        (first, (begin, end))
        for first, begin, end in zip(
            firsts.tolist(), offsets[firsts].tolist(), (offsets[lasts] + sizes[lasts]).tolist(), strict=True
        )
    ]
    for _, run in sorted([*runs, *todo.stand_ins.items()], key=lambda one: one[0]):
        if isinstance(run, bytes):
            held.append(run)
            size += len(run)
        else:
            begin, end = run
            for at in range(begin, end, PIECE):
                held.append(bytes(data[at : min(at + PIECE, end)]))
                size += len(held[-1])
                if size >= PIECE:
                    yield b"".join(held)
                    held, size = [], 0
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def named_blobs(data: Mapped, version: int) -> set[str]:
    """The blobs that image blocks of live sessions name, in a log's bytes."""
    index, _, _ = records.scan(data, len(records.MAGIC) if version > 1 else 0, version)
    return _blobs_in(data, index, plan(data, index, version).keep, version)


def _blobs_in(data: Mapped, index: Index, frames: npt.NDArray[np.bool_], version: int) -> set[str]:
    """The blobs that image blocks name, among these frames."""
    found: set[str] = set()
    for offset in index.offset[frames & np.isin(index.variant, (BLOCK, REROOTED))].tolist():
        length, _ = HEADER.unpack_from(data, offset)
        start = offset + HEADER.size
        body = records.event(bytes(data[start : start + length]), version)[1].body
        bodies = [inner for _, inner in body.prefix] if isinstance(body, ev.Rerooted) else [body]
        found.update(blob for one in bodies if isinstance(one, ev.Block) and (blob := _blob(one)))
    return found


def remove_blobs(store: Path, blobs: Iterable[str], files: Files) -> None:
    """Delete blobs from a store's media pool. Raises OSError."""
    for blob in blobs:
        if BLOB.fullmatch(blob):
            files.remove(store / "media" / blob)


def _blob(block: ev.Block) -> str | None:
    if block.kind != IMAGE:
        return None
    try:
        payload = json.loads(block.payload)
    except ValueError:
        return None
    blob = payload.get("blob") if isinstance(payload, dict) else None
    return blob if isinstance(blob, str) else None


@attrs.frozen
class Compacted:
    """What a compaction did to one log."""

    path: Path
    before: int  # bytes
    after: int


def compact_closed(directory: Path, files: Files | None = None) -> Compacted | None:
    """Compact the log of a store that no server has open; none when there is no log in `directory`.

    Raises StoreLocked, LogDamaged and LogIOError.
    """
    files = files or Files()
    path = directory / "wal.log"
    if not path.exists() or not path.stat().st_size:
        return None
    lock = StoreLock(path)
    try:
        return _compact(directory, path, files)
    finally:
        lock.close()


def compact_sessions(sessions: Path) -> Iterator[Compacted]:
    """Compact every log below a sessions directory: the default model's, and those of `models/*`."""
    for store in (sessions, *sorted((sessions / "models").glob("*"))):
        if (done := compact_closed(store)) is not None:
            yield done


def _compact(directory: Path, path: Path, files: Files) -> Compacted:
    wal, _ = Wal.open(path, files)
    try:
        before = wal.length
        rewrite = Rewrite(wal, files)
        if rewrite.copy():
            remove_blobs(directory, rewrite.unnamed, files)
            rewrite.finish()
            rewrite.settle()
            if not rewrite.named:
                files.sync_directory(directory)
        http = HttpIds.open(companion(path, "http"), files)
        http.drop(rewrite.purged)
        http.close()
        for session in rewrite.purged:
            files.remove(directory / "park" / f"{session}.park")
        for unfinished in (*directory.glob("park/*.tmp"), *directory.glob("cache/*.tmp"), *directory.glob("media/.*")):
            files.remove(unfinished)
        return Compacted(path, before, wal.length)
    except OSError as error:
        raise LogIOError(path, f"it cannot be compacted: {error}") from error
    finally:
        wal.close()
