"""The media pool of a store: blobs by their SHA-256, put there before an image names them."""

import contextlib
import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path

from superfluid.sessions.files import Files

HASH = re.compile(r"[0-9a-f]{64}")


class MediaPool:
    """`media/` of a store. Everything here blocks, and raises OSError."""

    def __init__(self, store: Path, files: Files | None = None) -> None:
        self.directory = store / "media"
        self._files = files or Files()

    def path(self, blob: str) -> Path | None:
        """Where a blob lies; none when the pool does not have it."""
        path = self.directory / blob
        return path if HASH.fullmatch(blob) and path.is_file() else None

    def put(self, data: bytes) -> str:
        """Store a blob, once however often it is put; its SHA-256 as lower-case hex."""
        blob = hashlib.sha256(data).hexdigest()
        if self.path(blob) is not None:
            return blob
        self.directory.mkdir(mode=0o700, exist_ok=True)
        beside = self.directory / f".{blob}.tmp{os.getpid()}"
        self._files.remove(beside)
        try:
            self._files.create_synced(beside, data)
            self._files.rename(beside, self.directory / blob)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(beside)
            raise
        self._files.sync_directory(self.directory)
        return blob

    def collect(self, named: Container[str]) -> tuple[int, int]:
        """Delete every file that is not a blob of `named`; how many stayed, and how many went."""
        kept = removed = 0
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            if path.name in named:
                kept += 1
            else:
                self._files.remove(path)
                removed += 1
        return kept, removed
