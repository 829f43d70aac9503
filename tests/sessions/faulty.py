"""File operations that fail on demand."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from superfluid.sessions.files import Files


class FaultyFiles(Files):
    """Real file operations; `arm(operation, nth, error)` makes the nth next call of one fail, once or from then on."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._faults: dict[str, tuple[int, int, bool]] = {}
        self.short: Callable[[int], int] | None = None  # how much of a write the system takes

    def arm(self, operation: str, nth: int = 1, error: int = errno.EIO, forever: bool = False) -> None:
        self._faults[operation] = (self.calls.get(operation, 0) + nth, error, forever)

    def disarm(self) -> None:
        self._faults.clear()
        self.short = None

    def _called(self, operation: str) -> None:
        count = self.calls[operation] = self.calls.get(operation, 0) + 1
        at, error, forever = self._faults.get(operation, (0, 0, False))
        if count == at or (forever and at and count > at):
            raise OSError(error, os.strerror(error))

    def open(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        self._called("open")
        return super().open(path, flags)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.short is not None:
            data = data[: self.short(len(data))]
        try:
            self._called("write")
        except OSError:
            super().write(descriptor, data[: len(data) // 2], offset)  # part of it got there
            raise
        return super().write(descriptor, data, offset)

    def write_behind(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return self.write(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        self._called("truncate")
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._called("sync")
        super().sync(descriptor)

    def sync_behind(self, descriptor: int) -> None:
        self.sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._called("rename")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._called("link")
        super().link(source, target)

    def sync_directory(self, path: Path) -> None:
        self._called("sync_directory")
        super().sync_directory(path)


class UnsyncedFiles(Files):
    """Real files without the wait for the disk, for tests that look at bytes alone."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_behind(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass
