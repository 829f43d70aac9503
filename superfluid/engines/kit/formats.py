"""Model formats: the rule by which a path is known to be a runtime's, without loading anything."""

import os
import stat
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class FileRule:
    """A path whose extension is listed (any case, by name alone), or a regular file that begins with the magic."""

    extensions: tuple[str, ...] = ()
    magic: str | None = None

    def matches(self, path: Path) -> bool:
        suffix = path.suffix[1:].lower()
        if suffix and suffix in (extension.lower() for extension in self.extensions):
            return True
        return self.magic is not None and begins_with(path, self.magic.encode())


@attrs.frozen
class DirectoryRule:
    """A directory that holds every listed file and at least one with a listed extension (exact case)."""

    files: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()

    def matches(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        if not all((path / name).is_file() for name in self.files):
            return False
        try:
            return any(entry.suffix[1:] in self.extensions for entry in path.iterdir() if entry.suffix)
        except OSError:
            return False


@attrs.frozen
class Format:
    """One format a runtime reads; `describe` are words for it (`a GGUF file`). One of the two rules is set."""

    id: str
    describe: str
    file: FileRule | None = None
    directory: DirectoryRule | None = None

    def matches(self, path: Path) -> bool:
        return (self.file is not None and self.file.matches(path)) or (
            self.directory is not None and self.directory.matches(path)
        )

    def report(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": self.id, "describe": self.describe}
        if self.file is not None:
            entry["file"] = {"extensions": list(self.file.extensions)}
            if self.file.magic is not None:
                entry["file"]["magic"] = self.file.magic
        if self.directory is not None:
            entry["directory"] = {
                "files": list(self.directory.files),
                "extensions": list(self.directory.extensions),
            }
        return entry

    @classmethod
    def from_report(cls, entry: dict[str, Any]) -> "Format | None":
        """Read an entry of a check report back; none for one without a rule."""
        file, directory = entry.get("file"), entry.get("directory")
        if file is None and directory is None:
            return None
        return cls(
            entry["id"],
            entry["describe"],
            None if file is None else FileRule(tuple(file["extensions"]), file.get("magic")),
            None if directory is None else DirectoryRule(tuple(directory["files"]), tuple(directory["extensions"])),
        )


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a regular file begins with `magic`; a FIFO or a device is never opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
