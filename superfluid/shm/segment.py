"""Memory segments: anonymous shared memory that is passed between processes as a descriptor."""

import contextlib
import fcntl
import itertools
import mmap
import os
import sys
from collections.abc import Callable

_serial = itertools.count()
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the mmap module does not name


class ShmError(Exception):
    """Base of everything this package refuses."""


class SegmentError(ShmError):
    """A segment that cannot be made or mapped."""


class Segment:
    """`size` bytes of shared memory, mapped read-write. It owns its descriptor.

    Made by `create` or `attach`. On Linux the descriptor is a memfd sealed against shrinking and growing, so that no
    holder can take pages away from under the others.
    """

    __slots__ = ("_closing", "_populated", "buf", "fd", "map", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        # Native pointers are taken of `map`, never of `buf`: a collector that clears a cycle may clear a memoryview
        # before the pointer that was taken of it, which crashes when the pointer then lets go.
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.buf = memoryview(self.map)
        self._populated = False
        self._closing: list[Callable[[], None]] = []

    @classmethod
    def create(cls, name: str, size: int) -> "Segment":
        """A new segment of `size` zero bytes; `name` only shows in listings of open files."""
        if size <= 0:
            raise SegmentError(f"segment {name!r} of {size} bytes: the size must be positive")
        fd = _memfd(name, size) if sys.platform == "linux" else _unlinked_shm(size)
        try:
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> "Segment":
        """Map the first `size` bytes of a received descriptor, which is closed when it is refused.

        Raises SegmentError, before anything is mapped, for a segment shorter than `size`.
        """
        try:
            held = os.fstat(fd).st_size
            if size <= 0 or held < size:
                raise SegmentError(f"segment holds {held} bytes where {size} were announced")
            return cls(fd, size)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # it may be no descriptor at all
                os.close(fd)
            raise SegmentError(f"descriptor {fd} cannot be mapped as a segment of {size} bytes: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    def populate(self) -> None:
        """Have all pages here at once, to be written: as they are touched, each of them would cost a fault.

        Only where the system can (Linux 5.14), and once; nothing that is in the segment changes.
        """
        if sys.platform == "linux" and not self._populated:
            self._populated = True
            with contextlib.suppress(OSError):
                self.map.madvise(_POPULATE_WRITE)

    def when_closed(self, call: Callable[[], None]) -> None:
        """Have `call` called once the segment is closed."""
        self._closing.append(call)

    def close(self) -> None:
        """Unmap and close; a second call does nothing. Views taken from `buf` must be released before.

        Raises BufferError where they are not: it is closed then, and its memory goes with the last view.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        calls, self._closing = self._closing, []
        for call in calls:
            call()
        self.buf.release()
        self.map.close()

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memfd(name: str, size: int) -> int:
    fd = os.memfd_create(f"superfluid-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked_shm(size: int) -> int:
    import _posixshmem  # type: ignore[import-not-found, unused-ignore]

    name = f"/superfluid-{os.getpid()}-{next(_serial):x}"
    fd: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _posixshmem.shm_unlink(name)
    try:
        os.set_inheritable(fd, False)
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
