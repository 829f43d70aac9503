"""Which sessions an HTTP route made: `wal.log.http`, their ids as u64 LE, one after the other.

Not synced: an id that a crash loses keeps its session from being purged for its age, which is the safe side.
"""

import logging
import os
from pathlib import Path

import numpy as np

from superfluid.sessions.files import Files, read_regular, temporary_name

logger = logging.getLogger(__name__)


class HttpIds:
    """The ids, in memory and in their file."""

    def __init__(self, path: Path, files: Files, ids: set[int]) -> None:
        """Not for callers: use `HttpIds.open`."""
        self.ids = ids
        self._path = path
        self._files = files
        self._descriptor = -1

    @classmethod
    def open(cls, path: Path, files: Files) -> "HttpIds":
        """Read the file. Raises OSError."""
        data = b"" if not path.exists() else read_regular(path)
        return cls(path, files, set(np.frombuffer(data[: len(data) // 8 * 8], "<u8").tolist()))

    def begin_anew(self) -> None:
        """Forget every id, and the file: those of an older store mean nothing in a new one. Raises OSError."""
        self._files.remove(self._path)
        self.ids.clear()

    def add(self, session: int) -> None:
        """Note a session whose Created is durable."""
        self.ids.add(session)
        try:
            if self._descriptor < 0:
                self._descriptor = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
            end = self._files.size(self._descriptor) // 8 * 8
            self._files.write_whole(self._descriptor, session.to_bytes(8, "little"), end)
        except OSError as error:
            logger.warning("%s: %s; session %d will not be purged for its age", self._path, error, session)

    def drop(self, sessions: frozenset[int]) -> None:
        """Forget ids, and write the file anew without them."""
        if not self.ids & sessions:
            return
        self.ids -= sessions
        self.close()
        beside = temporary_name(self._path)
        try:
            self._files.create(beside, np.array(sorted(self.ids), "<u8").tobytes(), synced=False)
            self._files.rename(beside, self._path)
        except OSError as error:
            logger.warning("%s: %s; it keeps ids of sessions that are gone", self._path, error)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1
