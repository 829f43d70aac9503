"""Park artifacts: the engine's state of a session on disk, so that it resumes without prefilling again.

Never the truth: whatever is wrong with one, it is ignored and the session starts cold.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from superfluid.link.digests import Ids, prefix_digest
from superfluid.sessions.files import Files, open_regular, read_regular

MAGIC_2, MAGIC_3 = b"BRTPARK2", b"BRTPARK3"
HEAD_2 = struct.Struct("<8sQQQ")  # magic, covered, digest, encoding
HEAD_3 = struct.Struct("<8sQQI4x")  # magic, covered, digest, spaces
SPACE = struct.Struct("<IIB7xQ")  # space id, kind, encoding, length
MOST_SPACES = 64
PAGED = (1, 1)  # space id and kind of what version 2 holds
SUFFIX = ".park"

Read = Callable[[int, int], bytes]  # (size, offset): fewer bytes at the end of a file


@attrs.frozen
class Space:
    """One state space; `sealed` is the engine's state envelope, `encoding` 0 lossless or 1 Q8."""

    space_id: int
    kind: int
    encoding: int
    sealed: bytes | memoryview


@attrs.frozen
class Artifact:
    """The state of a stream's first `covered` tokens, whose prefix digest is `digest`."""

    covered: int
    digest: int
    spaces: tuple[Space, ...]

    @classmethod
    def of(cls, tokens: Ids, spaces: Sequence[Space]) -> "Artifact":
        return cls(len(tokens), prefix_digest(tokens), tuple(spaces))


@attrs.frozen
class Part:
    """One state space of an artifact's file: `length` sealed bytes at `offset`."""

    space_id: int
    kind: int
    encoding: int
    offset: int
    length: int


@attrs.frozen
class Head:
    """What an artifact's file says of itself."""

    covered: int
    digest: int
    parts: tuple[Part, ...]

    def fits(self, stream: Ids) -> bool:
        """Whether it holds the state of a prefix of `stream`."""
        return self.covered <= len(stream) and self.digest == prefix_digest(stream[: self.covered])


def encode(artifact: Artifact) -> bytes:
    """The file's bytes: version 2 for a paged space alone, else version 3."""
    return b"".join(pieces(artifact))


def pieces(artifact: Artifact) -> list[bytes | memoryview]:
    """The file's bytes, sealed states as they lie in memory."""
    spaces = artifact.spaces
    if len(spaces) == 1 and (spaces[0].space_id, spaces[0].kind) == PAGED:
        return [HEAD_2.pack(MAGIC_2, artifact.covered, artifact.digest, spaces[0].encoding), spaces[0].sealed]
    parts: list[bytes | memoryview] = [HEAD_3.pack(MAGIC_3, artifact.covered, artifact.digest, len(spaces))]
    for space in spaces:
        parts += [SPACE.pack(space.space_id, space.kind, space.encoding, len(space.sealed)), space.sealed]
    return parts


def decode(data: bytes) -> Artifact | None:
    """The artifact in a file's bytes; none when they are not one."""
    head = read_head(lambda size, offset: data[offset : offset + size], len(data))
    if head is None:
        return None
    spaces = (
        Space(part.space_id, part.kind, part.encoding, data[part.offset : part.offset + part.length])
        for part in head.parts
    )
    return Artifact(head.covered, head.digest, tuple(spaces))


def read_head(read: Read, size: int) -> Head | None:
    """The head of a file of `size` bytes, of which `read` gives any piece; none when it is no artifact."""
    start = read(HEAD_2.size, 0)
    try:
        if start[:8] == MAGIC_2:
            _, covered, digest, encoding = HEAD_2.unpack(start)
            valid = covered and size > HEAD_2.size and encoding <= 255
            part = Part(*PAGED, encoding, HEAD_2.size, size - HEAD_2.size)
            return Head(covered, digest, (part,)) if valid else None
        if start[:8] == MAGIC_3:
            _, covered, digest, count = HEAD_3.unpack(start)
            parts = _parts(read, size, count) if covered and 1 <= count <= MOST_SPACES else None
            return Head(covered, digest, parts) if parts else None
    except struct.error:
        pass
    return None


def _parts(read: Read, size: int, count: int) -> tuple[Part, ...] | None:
    at = HEAD_3.size
    parts = []
    for _ in range(count):
        space_id, kind, encoding, length = SPACE.unpack(read(SPACE.size, at))
        at += SPACE.size
        if not 0 < length <= size - at:
            return None
        parts.append(Part(space_id, kind, encoding, at, length))
        at += length
    return tuple(parts) if at == size else None


class Parks:
    """The artifacts of one store, in `<store>/park`. `budget` in bytes, 0: no bound. Everything here blocks."""

    def __init__(self, directory: Path, budget: int, files: Files | None = None) -> None:
        self.directory = directory
        self.budget = budget
        self._files = files or Files()

    def path(self, session: int) -> Path:
        return self.directory / f"{session}{SUFFIX}"

    def sessions(self) -> list[int]:
        """Sessions that have a file here, readable or not."""
        if not self.directory.is_dir():
            return []
        names = (path.name.removesuffix(SUFFIX) for path in self.directory.iterdir() if path.name.endswith(SUFFIX))
        return [int(name) for name in names if name.isdecimal()]

    def write(self, session: int, artifact: Artifact) -> None:
        """Replace the session's artifact, then sweep. Raises OSError; the old one stands then."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        path = self.path(session)
        temporary = path.with_name(path.name + ".tmp")
        try:
            self._files.remove(temporary)
            self._files.create(temporary, *pieces(artifact), synced=True, behind=True)
            self._files.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk gets its room back
                self._files.remove(temporary)
            raise
        self.sweep()

    def head(self, session: int) -> Head | None:
        """What the session's file says of itself; none when there is no artifact."""
        try:
            descriptor = open_regular(self.path(session))
        except OSError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            return read_head(lambda n_bytes, offset: os.pread(descriptor, n_bytes, offset), size)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def read(self, session: int, stream: Ids) -> Artifact | None:
        """The session's artifact, when it is one of a prefix of `stream`."""
        try:
            artifact = decode(read_regular(self.path(session)))
        except OSError:
            return None
        if artifact is None or artifact.covered > len(stream):
            return None
        return artifact if artifact.digest == prefix_digest(stream[: artifact.covered]) else None

    def remove_unfinished(self) -> None:
        """Delete what a crash left half written. Only while nobody writes."""
        if self.directory.is_dir():
            for path in self.directory.glob(f"*{SUFFIX}.tmp"):
                self._files.remove(path)

    def remove(self, session: int) -> None:
        self._files.remove(self.path(session))

    def sweep(self) -> int:
        """Delete artifacts, oldest first, until the rest is within the budget; how many went."""
        if not self.budget or not self.directory.is_dir():
            return 0
        found = []
        for path in self.directory.iterdir():
            if path.name.endswith((SUFFIX, f"{SUFFIX}.tmp")):
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        removed = 0
        for _, size, path in sorted(found):
            if total <= self.budget:
                break
            self._files.remove(path)
            total -= size
            removed += 1
        return removed
