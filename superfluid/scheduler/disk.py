"""The disk tier of the prefix cache: states of finished streams in files, found again by the ids they begin with."""

import contextlib
import logging
import os
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from superfluid.link.codes import Encoding
from superfluid.link.digests import prefix_digest
from superfluid.link.linkw import StateSpaceDesc
from superfluid.scheduler.shared import common_prefix
from superfluid.scheduler.states import Ids, SavedState, SpaceState, read_segment
from superfluid.sessions.files import Files, open_regular

log = logging.getLogger(__name__)

MAGIC = b"SFCACHE1"
HEAD = struct.Struct("<8sQ")  # magic, covered tokens; the ids follow
LENGTH = struct.Struct("<Q")  # of the sealed bytes
SUFFIX = ".kv"
ID_BYTES = 4
SPARE = 8
"""A stream is not written when a file covers all but this part of it."""


class NotACacheFile(Exception):
    """A file that is damaged, or of another size than it says."""


@attrs.frozen(eq=False)
class CacheFile:
    """One file of the tier. `key` are its ids, big-endian, so that keys sort as their ids do."""

    path: Path
    key: bytes
    size: int

    @property
    def covered(self) -> int:
        return len(self.key) // ID_BYTES

    @property
    def ids(self) -> Ids:
        return np.frombuffer(self.key, ">u4").astype(np.uint32)

    @property
    def sealed_at(self) -> int:
        return HEAD.size + len(self.key) + LENGTH.size


def key_of(ids: Ids) -> bytes:
    return ids.astype(">u4").tobytes()


class PrefixIndex:
    """Files by their keys, sorted: the longest prefix a stream shares with any of them, it shares with a neighbour."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._files: dict[bytes, CacheFile] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, file: CacheFile) -> None:
        if file.key not in self._files:
            insort(self._keys, file.key)
        self._files[file.key] = file

    def remove(self, file: CacheFile) -> None:
        if self._files.pop(file.key, None) is not None:
            del self._keys[bisect_left(self._keys, file.key)]

    def longest(self, ids: Ids) -> tuple[int, CacheFile | None]:
        """The most ids that `ids` begins with in common with a file, and that file."""
        key = key_of(ids)
        at = bisect_left(self._keys, key)
        best: tuple[int, CacheFile | None] = (0, None)
        for neighbour in self._keys[max(at - 1, 0) : at + 1]:
            common = _common(neighbour, key)
            if common > best[0]:
                best = common, self._files[neighbour]
        return best

    def prefixes(self, ids: Ids) -> Iterator[CacheFile]:
        """The files whose ids all are a prefix of `ids`, longest first."""
        key = key_of(ids)
        while key:
            at = bisect_right(self._keys, key) - 1
            if at < 0:
                return
            found = self._keys[at]
            common = _common(found, key) * ID_BYTES
            if common == len(found):
                yield self._files[found]
                key = found[:-ID_BYTES]
            else:  # a shorter prefix of `key` is one of what both have in common
                key = key[:common]


def _common(left: bytes, right: bytes) -> int:
    return common_prefix(np.frombuffer(left, np.uint32), np.frombuffer(right, np.uint32))


class DiskTier:
    """The files in `directory`, at most `budget` bytes of them. The index belongs to the event loop; what is said to
    block does not touch it."""

    def __init__(self, directory: Path, budget: int, files: Files | None = None) -> None:
        self.directory = directory
        self.budget = budget
        self._os = files or Files()
        self._index = PrefixIndex()
        self._used: dict[CacheFile, None] = {}  # least recently used first
        self._total = 0

    def __len__(self) -> int:
        return len(self._index)

    # ---- the index

    def longest(self, ids: Ids, *, whole: bool) -> tuple[int, CacheFile | None]:
        """The file that shares the most ids with a stream; with `whole`, one that is a prefix of it."""
        if not whole:
            return self._index.longest(ids)
        file = next(self._index.prefixes(ids), None)
        return (0, None) if file is None else (file.covered, file)

    def covers(self, ids: Ids, *, whole: bool) -> bool:
        """Whether a file serves all but a small part of a stream."""
        return self.longest(ids, whole=whole)[0] >= len(ids) - len(ids) // SPARE

    def use(self, file: CacheFile) -> None:
        """A file is about to be read."""
        self._used[file] = self._used.pop(file, None)

    def add(self, file: CacheFile) -> list[CacheFile]:
        """Take in a file that was written; the files that must go now: those it covers, and the least recently used
        over the budget. They are forgotten; the caller has them deleted."""
        going = list(self._index.prefixes(file.ids))
        for old in going:
            self.forget(old)
        self._index.add(file)
        self._used[file] = None
        self._total += file.size
        while self._total > self.budget and self._used:
            oldest = next(iter(self._used))
            self.forget(oldest)
            going.append(oldest)
        return [old for old in going if old.path != file.path or old is file]

    def within(self, ids: Ids) -> list[CacheFile]:
        """The files that hold nothing but a beginning of a stream."""
        return list(self._index.prefixes(ids))

    def forget(self, file: CacheFile) -> None:
        if file in self._used:
            del self._used[file]
            self._index.remove(file)
            self._total -= file.size

    # ---- the files; these block

    def scan(self) -> list[CacheFile]:
        """The files of an earlier run, least recently used first; what is no file of the tier is deleted."""
        found: list[tuple[int, CacheFile]] = []
        if not self.directory.is_dir():
            return []
        for path in self.directory.iterdir():
            if path.suffix == ".tmp":
                self.delete(path)
            elif path.suffix == SUFFIX:
                try:
                    found.append((path.stat().st_mtime_ns, _read_head(path)))
                except NotACacheFile as error:
                    log.warning("%s is deleted: %s", path, error)
                    self.delete(path)
                except OSError as error:
                    log.warning("%s is not read: %s", path, error)
        return [file for _, file in sorted(found, key=lambda each: each[0])]

    def plan(self, saved: SavedState) -> CacheFile:
        """The file that a state is to be written to."""
        size = HEAD.size + ID_BYTES * saved.covered + LENGTH.size + saved.size
        return CacheFile(self.directory / f"{saved.digest:016x}{SUFFIX}", key_of(saved.ids), size)

    def write(self, file: CacheFile, saved: SavedState) -> None:
        """Raises OSError; nothing is left then."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        temporary = file.path.with_name(file.path.name + ".tmp")
        (space,) = saved.spaces
        try:
            self._os.remove(temporary)
            with saved.ids.astype("<u4").data.cast("B") as ids:
                self._os.create(
                    temporary,
                    HEAD.pack(MAGIC, saved.covered),
                    ids,
                    LENGTH.pack(saved.size),
                    space.sealed,
                    synced=False,
                    behind=True,
                )
            self._os.rename(temporary, file.path)
        except OSError:
            self.delete(temporary)
            raise

    def read(self, file: CacheFile, space: StateSpaceDesc) -> SavedState:
        """The state in a file, which is used by this. Raises OSError, NotACacheFile."""
        if _read_head(file.path).key != file.key:
            raise NotACacheFile("it holds other ids than it did")
        os.utime(file.path)
        try:
            length = file.size - file.sealed_at
            segment = read_segment(file.path, file.sealed_at, length)
        except EOFError as error:
            raise NotACacheFile(str(error)) from error
        state = SpaceState(space.space_id, space.kind, Encoding.LOSSLESS, segment, length)
        return SavedState(file.ids, (state,))

    def delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._os.remove(path)

    def erase(self, files: Sequence[CacheFile]) -> None:
        """Delete files whose content must not stay. Raises OSError."""
        for file in files:
            self._os.remove(file.path)
        if files:
            self._os.sync_directory(self.directory)


def _read_head(path: Path) -> CacheFile:
    """Raises OSError, NotACacheFile."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise NotACacheFile(f"it does not begin with {MAGIC.decode()}")
        _, covered = HEAD.unpack(head)
        sealed_at = HEAD.size + ID_BYTES * covered + LENGTH.size
        if not covered or sealed_at >= size:
            raise NotACacheFile(f"{size} bytes cannot hold the state of {covered} tokens")
        ids = np.frombuffer(file.read(ID_BYTES * covered), "<u4").astype(np.uint32)
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length != size - sealed_at:
        raise NotACacheFile(f"{size} bytes where it says {sealed_at + length}")
    if path.stem != f"{prefix_digest(ids):016x}":
        raise NotACacheFile("its name is not the digest of its ids")
    return CacheFile(path, key_of(ids), size)
