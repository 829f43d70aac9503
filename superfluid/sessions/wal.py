"""The log file: opening it after any crash, appending with one sync, reading frames back.

What is torn (never acknowledged) is cut with a warning; what is damaged is refused and left alone. `<log>.synced`
holds the length of the last sync, so that a batch which lost pages in a power cut is told from damage.
"""

import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from superfluid.sessions.errors import LogDamaged, LogIOError
from superfluid.sessions.files import Files, read_regular
from superfluid.sessions.records import HEADER, LONGEST, MAGIC, Index, Mapped, Stop, scan, touches_zero_sector

logger = logging.getLogger(__name__)

READ_AHEAD = 64 * 1024  # frames of one session often lie close together


@attrs.frozen
class Torn:
    """The bytes at a log's end that were not written whole; `batch`: they may hold records, and are kept beside it."""

    size: int
    batch: bool


class Wal:
    """An open log. One thread at a time appends; frames below `length` are durable and can be read by any."""

    def __init__(
        self, path: Path, files: Files, descriptor: int, version: int, length: int, torn: "Torn | None" = None
    ) -> None:
        """Not for callers: use `Wal.open`."""
        self.path = path
        self.version = version
        self.length = length
        self.failed = False  # after a failed sync: nothing is accepted until the log is opened again
        self._files = files
        self._descriptor = descriptor
        self._torn = torn
        self._uncut = False  # bytes of a failed append may lie past `length`
        self._watermark = -1
        self._named = True  # the directory's entry for this file is on disk

    @classmethod
    def open(cls, path: Path, files: Files | None = None) -> tuple["Wal", Index]:
        """Open or create the log at `path`, cut a torn end, and index what it holds.

        Raises LogDamaged (nothing was changed) and LogIOError.
        """
        wal, index = cls.read(path, files)
        try:
            wal.begin()
        except BaseException:
            wal.close()
            raise
        return wal, index

    @classmethod
    def read(cls, path: Path, files: Files | None = None) -> tuple["Wal", Index]:
        """The same, with every file left as it is until `begin`.

        Raises LogDamaged and LogIOError.
        """
        files = files or Files()
        descriptor = -1
        try:
            if path.exists():
                descriptor = files.open(path, os.O_RDWR)
            return cls._recover(path, files, descriptor)
        except OSError as error:
            if descriptor >= 0:
                files.close(descriptor)
            raise LogIOError(path, f"the log cannot be opened: {error}") from error
        except LogDamaged:
            files.close(descriptor)
            raise

    @classmethod
    def _recover(cls, path: Path, files: Files, descriptor: int) -> tuple["Wal", Index]:
        size = 0 if descriptor < 0 else files.size(descriptor)
        start = b"" if descriptor < 0 else files.read(descriptor, len(MAGIC), 0)
        torn = None
        if size >= len(MAGIC) or not MAGIC.startswith(start):
            version = 2 if start == MAGIC else 1
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as data:
                index, position, stop = scan(data, len(MAGIC) if version == 2 else 0, version)
                if stop is not Stop.END:
                    torn = Torn(size - position, judge(path, data, position, stop, _synced_length(path, size)))
            if position:
                return cls(path, files, descriptor, version, position, torn), index
        return cls(path, files, descriptor, 2, 0, torn), scan(MAGIC, len(MAGIC), 2)[0]

    def begin(self) -> None:
        """Make the file what was read of it: created, begun, its torn end cut. Nothing is appended before.

        Raises LogIOError.
        """
        path, files = self.path, self._files
        try:
            files.remove(companion(path, "compact"))
            if self._descriptor < 0:
                self._descriptor = files.open(path)
                files.sync_directory(path.parent)
            if self._torn is not None:
                self._cut_torn(self._torn)
            if not self.length:
                files.truncate(self._descriptor, 0)
                files.write_whole(self._descriptor, MAGIC, 0)
                files.sync(self._descriptor)
                self.length = len(MAGIC)
            self._watermark = files.open(companion(path, "synced"))
        except OSError as error:
            raise LogIOError(path, f"the log cannot be opened: {error}") from error

    def _cut_torn(self, torn: "Torn") -> None:
        kept = ""
        if torn.batch:
            copy = companion(self.path, "torn")
            self._files.remove(copy)
            with mmap.mmap(self._descriptor, self.length + torn.size, prot=mmap.PROT_READ) as data:
                self._files.create_synced(copy, data[self.length :])
            kept = f"; they are kept as {copy}"
        logger.warning(
            "%s: %d bytes after byte %d were not written whole before a crash and are cut%s",
            self.path,
            torn.size,
            self.length,
            kept,
        )
        self._files.truncate(self._descriptor, self.length)
        self._files.sync(self._descriptor)
        self._torn = None

    def append(self, data: bytes | memoryview) -> None:
        """Make `data`, whole frames, the end of the log, on disk when this returns.

        Raises LogIOError; none of `data` counts then. After a failed sync every later append is refused too: what
        the system's cache holds need not be on the disk any more.
        """
        if self.failed:
            raise LogIOError(self.path, "a sync of the log failed earlier; restart to read back what is on disk")
        end = self.length + len(data)
        try:
            if self._uncut:
                self._cut_back()
            if not self._named:
                self._files.sync_directory(self.path.parent)
                self._named = True
            self._uncut = True
            self._files.write_whole(self._descriptor, data, self.length)
        except OSError as error:
            self._cut_back_if_possible()
            raise LogIOError(self.path, f"the log cannot be written: {error}") from error
        try:
            self._files.sync(self._descriptor)
        except OSError as error:
            self.failed = True
            self._cut_back_if_possible()
            raise LogIOError(self.path, f"the log cannot be synced: {error}") from error
        self._uncut = False
        self.length = end
        self._mark_synced()

    def _mark_synced(self) -> None:
        if self._watermark < 0:
            return
        try:
            self._files.write_whole(self._watermark, self.length.to_bytes(8, "little"), 0)
        except OSError as error:  # behind the truth is safe, and the next sync tries again
            logger.warning("%s: %s", companion(self.path, "synced"), error)

    def _cut_back(self) -> None:
        self._files.truncate(self._descriptor, self.length)
        self._uncut = False

    def _cut_back_if_possible(self) -> None:
        try:
            self._cut_back()
        except OSError:
            logger.warning("%s: what a failed append left is cut before the next one", self.path)

    def payloads(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """The payload of the frame at each offset. Raises LogIOError when the file can no longer be read."""
        held, base = b"", 0
        for offset in offsets:
            start = offset - base
            if not 0 <= start <= len(held) - HEADER.size:
                held, base, start = self._read(READ_AHEAD, offset), offset, 0
            length, _ = HEADER.unpack_from(held, start)
            end = start + HEADER.size + length
            if end > len(held):
                held, base, start = self._read(max(READ_AHEAD, HEADER.size + length), offset), offset, 0
                end = HEADER.size + length
            yield held[start + HEADER.size : end]

    def _read(self, size: int, offset: int) -> bytes:
        try:
            held = self._files.read(self._descriptor, size, offset)
        except OSError as error:
            raise LogIOError(self.path, f"the log cannot be read: {error}") from error
        if len(held) < HEADER.size or len(held) < min(size, HEADER.size + HEADER.unpack_from(held)[0]):
            raise LogIOError(self.path, f"the log ends before the record at byte {offset} does")
        return held

    def mapped(self) -> mmap.mmap:
        """What is durable now, to be read whole; it stays valid when the log is closed. Raises OSError."""
        return mmap.mmap(self._descriptor, self.length, prot=mmap.PROT_READ)

    def raw(self, offset: int, size: int) -> bytes:
        """Bytes of the file. Raises OSError when there are not as many."""
        data = self._files.read(self._descriptor, size, offset)
        if len(data) < size:
            raise OSError(f"{len(data)} of {size} bytes read at byte {offset}")
        return data

    def take_over(self, descriptor: int, length: int, named: bool) -> None:
        """Go on in a file that has taken this one's place; `named`: its place is on disk."""
        for old in (self._descriptor, self._watermark):
            if old >= 0:
                self._files.close(old)
        self._descriptor, self.length, self._named, self._uncut = descriptor, length, named, False
        self._watermark = -1
        try:
            self._watermark = self._files.open(companion(self.path, "synced"))
        except OSError as error:
            logger.warning("%s: %s", companion(self.path, "synced"), error)
        else:
            self._mark_synced()

    def give_up(self) -> None:
        """Append nothing more, and leave nothing behind what is durable; it can still be read."""
        self.failed = True
        if self._uncut:
            self._cut_back_if_possible()

    def close(self) -> None:
        """Close the files; the log is as durable as its last append."""
        self.give_up()
        for descriptor in (self._descriptor, self._watermark):
            if descriptor >= 0:
                self._files.close(descriptor)
        self._descriptor = self._watermark = -1


def companion(log: Path, suffix: str) -> Path:
    return log.with_name(f"{log.name}.{suffix}")


def _synced_length(log: Path, size: int) -> int | None:
    """The length that `<log>.synced` names; none when it is absent, short or names more than the log holds."""
    try:
        mark = read_regular(companion(log, "synced"))
    except OSError:
        return None
    length = int.from_bytes(mark[:8], "little")
    return length if len(mark) >= 8 and length <= size else None


def judge(path: Path, data: Mapped, position: int, stop: Stop, synced: int | None) -> bool:
    """Whether the frame at `position`, where a scan stopped, is a torn batch (True) or a torn tail (False).

    Raises LogDamaged when it is neither.
    """
    if stop is Stop.TOO_LONG:
        raise LogDamaged(path, position, f"a record claims more than {LONGEST} bytes")
    if stop is Stop.UNDECODABLE:
        raise LogDamaged(path, position, "a record's checksum holds but it cannot be decoded")
    if stop is Stop.PAST_END:
        if synced is not None and position < synced:
            raise LogDamaged(path, position, "a record that was synced claims to run past the end of the file")
        return False
    size = HEADER.size + HEADER.unpack_from(data, position)[0]
    if not any_set(data, position + size):
        return False
    if synced is not None and position >= synced and touches_zero_sector(data, position, size):
        return True
    raise LogDamaged(path, position, "a record fails its checksum, and others follow it")


def any_set(data: Mapped, start: int) -> bool:
    """Whether any byte from `start` on is not zero."""
    for at in range(start, len(data), 1 << 20):
        piece = bytes(data[at : at + (1 << 20)])
        if piece.count(0) != len(piece):
            return True
    return False
