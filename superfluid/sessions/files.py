"""The file operations under a store: one seam, so that a test can make any of them fail."""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from superfluid._native import ffi, lib
from superfluid.sessions.errors import StoreLocked

LOCK_POLL = 0.02  # seconds between two looks at a store lock
LOCK_PATIENCE = 3.0  # how long a store that is being closed may still hold it
PRIVATE = 0o600


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises OSError; also for anything else, which could keep its reader waiting."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. Raises as `open_regular` does."""
    with open(open_regular(path), "rb") as file:
        return file.read()


class Files:
    """Operations of the operating system, by descriptor and by path. All raise OSError."""

    def open(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """A descriptor of a file that only its owner can read; an existing file is tightened."""
        descriptor = open_regular(path, flags)
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, PRIVATE)
        return descriptor

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        return os.pread(descriptor, size, offset)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Write what the system takes at once; returns how much that was."""
        return os.pwrite(descriptor, data, offset)

    def write_behind(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """As `write`, from a thread that gives way to all others."""
        with ffi.from_buffer("uint8_t[]", data) as pointer:
            return _done(lib.sf_write_behind(descriptor, pointer, len(data), offset))

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Have the file's bytes on disk; SUPERFLUID_FULLFSYNC also asks the drive to empty its cache, where the
        platform can."""
        if _full_sync():
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined, unused-ignore]
        else:
            os.fsync(descriptor)

    def sync_behind(self, descriptor: int) -> None:
        """As `sync`, from a thread that gives way to all others."""
        if _full_sync():
            self.sync(descriptor)
        else:
            _done(lib.sf_sync_behind(descriptor))

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_whole(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`, however many calls that takes."""
        _write_whole(self.write, descriptor, data, offset)

    def create(self, path: Path, *pieces: bytes | memoryview, synced: bool, behind: bool = False) -> None:
        """A new file with these bytes; with `synced`, on disk; with `behind`, while nobody else needs the processor."""
        write, sync = (self.write_behind, self.sync_behind) if behind else (self.write, self.sync)
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            offset = 0
            for piece in pieces:
                _write_whole(write, descriptor, piece, offset)
                offset += len(piece)
            if synced:
                sync(descriptor)
        finally:
            self.close(descriptor)

    def create_synced(self, path: Path, *pieces: bytes | memoryview) -> None:
        """A new file with these bytes, on disk."""
        self.create(path, *pieces, synced=True)


def _full_sync() -> bool:
    return bool(os.environ.get("SUPERFLUID_FULLFSYNC")) and hasattr(fcntl, "F_FULLFSYNC")


def _write_whole(
    write: Callable[[int, memoryview, int], int], descriptor: int, data: bytes | memoryview, offset: int
) -> None:
    left = memoryview(data)
    while left:
        written = write(descriptor, left, offset)
        if written <= 0:
            raise OSError("the system took no bytes")
        left = left[written:]
        offset += written


def _done(result: int) -> int:
    """What a native call says it did. Raises OSError."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}.tmp.{os.getpid()}.{secrets.token_hex(8)}")


class StoreLock:
    """Exclusive flock on `<log>.store-id.lock`, held until `close`. Raises StoreLocked after LOCK_PATIENCE."""

    def __init__(self, log: Path) -> None:
        self.descriptor = os.open(f"{log}.store-id.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        deadline = time.monotonic() + LOCK_PATIENCE
        while not _take(self.descriptor):
            if time.monotonic() >= deadline:
                self.close()
                raise StoreLocked(log)
            time.sleep(LOCK_POLL)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
