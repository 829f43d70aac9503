"""The header of a GGUF file: its metadata, read without the library and without the token lists."""

import mmap
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

import attrs

MAGIC = b"GGUF"
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # version 1 had 32-bit counts and is long gone


class HeaderError(Exception):
    """The file is no GGUF file, or its header is damaged; the text names the file."""


@attrs.frozen
class Header:
    """Metadata of a model, and the files it consists of, in order. Arrays of strings are left out."""

    metadata: dict[str, Any]
    files: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """The architecture's name; empty when the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    def value(self, key: str) -> Any:
        """The architecture's own entry `<arch>.<key>`, None when there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> int:
        """The architecture's own entry as an integer; 0 when there is none, or it is an array."""
        value = self.value(key)
        return 0 if value is None or isinstance(value, list | str) else int(value)

    @property
    def n_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files)


def check_magic(path: Path) -> str | None:
    """Why `path` is not a GGUF file; None for a regular file that begins with the magic, whatever its name."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        return f"{path}: {(error.strerror or str(error)).lower()}"
    if not regular:
        return f"{path} is not a file; a GGUF model is one file"
    with path.open("rb") as file:
        return None if file.read(len(MAGIC)) == MAGIC else f"{path} is not a GGUF file (no GGUF magic)"


def shards(path: Path) -> tuple[Path, ...]:
    """All files of a split model, in order, when `path` is named as one of them; else `path` alone."""
    name = _SHARD.fullmatch(path.name)
    if name is None:
        return (path,)
    count = int(name["count"])
    return tuple(path.with_name(f"{name['prefix']}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1))


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def raw(self) -> bytes:
        size = self.scalar("<Q")
        end = self.at + size
        if end > len(self.data):
            raise struct.error("a string ends past the file")
        value = self.data[self.at : end]
        self.at = end
        return value

    def skip_strings(self, count: int) -> None:
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.raw().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            self.skip_strings(count)
            return None
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        layout = _SCALARS[kind]
        size = struct.calcsize(layout)
        end = self.at + count * size
        if end > len(self.data):
            raise struct.error("an array ends past the file")
        values = [value for (value,) in struct.iter_unpack(layout, self.data[self.at : end])]
        self.at = end
        return values


def read_header(path: Path) -> Header:
    """Read the metadata of `path`. Raises HeaderError, OSError."""
    reason = check_magic(path)
    if reason is not None:
        raise HeaderError(reason)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        reader.at = len(MAGIC)
        metadata: dict[str, Any] = {}
        try:
            version = reader.scalar("<I")
            if version not in _VERSIONS:
                raise HeaderError(f"{path} is a GGUF file of version {version}; versions 2 and 3 are read")
            reader.scalar("<Q")  # tensors
            for _ in range(reader.scalar("<Q")):
                key = reader.raw().decode("utf-8", "replace")
                value = reader.value(reader.scalar("<I"))
                if value is not None:
                    metadata[key] = value
        except (struct.error, KeyError, IndexError, OverflowError, MemoryError) as error:
            raise HeaderError(f"{path} has a damaged header ({error})") from None
    files = shards(path)
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        raise HeaderError(f"{path} is one of {len(files)} files, and {missing[0].name} is not beside it")
    return Header(metadata, files)
