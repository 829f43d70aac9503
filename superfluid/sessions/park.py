"""Park artifacts: the engine's state of a session on disk, so that it resumes without prefilling again.

Never the truth: whatever is wrong with one, it is ignored and the session starts cold.
"""

import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import attrs

from superfluid.link.digests import prefix_digest
from superfluid.sessions.files import Files

logger = logging.getLogger(__name__)

MAGIC_2, MAGIC_3 = b"BRTPARK2", b"BRTPARK3"
HEAD_2 = struct.Struct("<8sQQQ")  # magic, covered, digest, encoding
HEAD_3 = struct.Struct("<8sQQI4x")  # magic, covered, digest, spaces
SPACE = struct.Struct("<IIB7xQ")  # space id, kind, encoding, length
MOST_SPACES = 64
PAGED = (1, 1)  # space id and kind of what version 2 holds


@attrs.frozen
class Space:
    """One state space; `sealed` is the engine's state envelope, `encoding` 0 lossless or 1 Q8."""

    space_id: int
    kind: int
    encoding: int
    sealed: bytes


@attrs.frozen
class Artifact:
    """The state of a stream's first `covered` tokens, whose prefix digest is `digest`."""

    covered: int
    digest: int
    spaces: tuple[Space, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], spaces: Sequence[Space]) -> "Artifact":
        return cls(len(tokens), prefix_digest(tokens), tuple(spaces))


def encode(artifact: Artifact) -> bytes:
    """The file's bytes: version 2 for a paged space alone, else version 3."""
    spaces = artifact.spaces
    if len(spaces) == 1 and (spaces[0].space_id, spaces[0].kind) == PAGED:
        return HEAD_2.pack(MAGIC_2, artifact.covered, artifact.digest, spaces[0].encoding) + spaces[0].sealed
    parts = [HEAD_3.pack(MAGIC_3, artifact.covered, artifact.digest, len(spaces))]
    for space in spaces:
        parts += [SPACE.pack(space.space_id, space.kind, space.encoding, len(space.sealed)), space.sealed]
    return b"".join(parts)


def decode(data: bytes) -> Artifact | None:
    """The artifact in a file's bytes; none when they are not one."""
    try:
        if data[:8] == MAGIC_2:
            _, covered, digest, encoding = HEAD_2.unpack_from(data)
            sealed = data[HEAD_2.size :]
            valid = covered and sealed and encoding <= 255
            return Artifact(covered, digest, (Space(*PAGED, encoding, sealed),)) if valid else None
        if data[:8] == MAGIC_3:
            return _decode_spaces(data)
    except struct.error:
        pass
    return None


def _decode_spaces(data: bytes) -> Artifact | None:
    _, covered, digest, count = HEAD_3.unpack_from(data)
    if not covered or not 1 <= count <= MOST_SPACES:
        return None
    at = HEAD_3.size
    spaces = []
    for _ in range(count):
        space_id, kind, encoding, length = SPACE.unpack_from(data, at)
        at += SPACE.size
        if not 0 < length <= len(data) - at:
            return None
        spaces.append(Space(space_id, kind, encoding, data[at : at + length]))
        at += length
    return Artifact(covered, digest, tuple(spaces)) if at == len(data) else None


class Parks:
    """The artifacts of one store, in `<store>/park`. `budget` in bytes, 0: no bound."""

    def __init__(self, directory: Path, budget: int, files: Files | None = None) -> None:
        self.directory = directory
        self.budget = budget
        self._files = files or Files()

    def path(self, session: int) -> Path:
        return self.directory / f"{session}.park"

    def write(self, session: int, artifact: Artifact) -> None:
        """Replace the session's artifact, then sweep. Blocks. Raises OSError; the old one stands then."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        path = self.path(session)
        temporary = path.with_name(path.name + ".tmp")
        self._files.remove(temporary)
        self._files.create_synced(temporary, encode(artifact))
        self._files.rename(temporary, path)
        self.sweep()

    def read(self, session: int, stream: Sequence[int]) -> Artifact | None:
        """The session's artifact, when it is one of a prefix of `stream`."""
        try:
            artifact = decode(self.path(session).read_bytes())
        except OSError:
            return None
        if artifact is None or artifact.covered > len(stream):
            return None
        return artifact if artifact.digest == prefix_digest(stream[: artifact.covered]) else None

    def remove(self, session: int) -> None:
        self._files.remove(self.path(session))

    def sweep(self) -> int:
        """Delete artifacts, oldest first, until the rest is within the budget; how many went."""
        if not self.budget or not self.directory.is_dir():
            return 0
        found = []
        for path in self.directory.iterdir():
            if path.name.endswith((".park", ".park.tmp")):
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
