"""Directories of a server: one server per sessions directory, one store per model below it."""

import fcntl
import hashlib
import os
import re
from pathlib import Path
from types import TracebackType

PRIVATE_DIRECTORY = 0o700


class ServeLocked(Exception):
    """Another server holds the sessions directory, or it cannot be made."""


def make_private(path: Path) -> None:
    """Make a directory and those above it that are missing, each for its owner alone. Raises OSError."""
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)


class ServeLock:
    """`serve.lock` of a sessions directory, held while the context is open."""

    def __init__(self, sessions: Path) -> None:
        self.sessions = sessions
        self._file = -1

    def __enter__(self) -> "ServeLock":
        try:
            make_private(self.sessions)
            self._file = os.open(self.sessions / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ServeLocked(f"{self.sessions}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ServeLocked(
                f"another server is already running on {self.sessions}; "
                "stop it, or name another directory with --sessions"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def store_directory(sessions: Path, name: str, *, default: bool) -> Path:
    """A model's store: `sessions` itself for the default model, else `models/<name>` below it.

    Made when it is not there; `model-id` in it says whose it is, and a name that clashes gets a digest. The caller
    holds the ServeLock. Raises OSError.
    """
    if default:
        return sessions
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"
    for folder in (safe, f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"):
        path = sessions / "models" / folder
        make_private(path)
        owner = path / "model-id"
        if not owner.exists():
            owner.touch(0o600)
            owner.write_text(name)
        if owner.read_text() == name:
            return path
    raise OSError(f"{path} belongs to another model")
