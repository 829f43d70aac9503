"""Sequences of the mock: token ids and, per state space, how far the state reaches."""

import struct
from array import array
from collections.abc import Iterator

import attrs
from xxhash import xxh3_64_intdigest

from superfluid.engines.engine import EngineError
from superfluid.engines.mock.config import MockConfig
from superfluid.link import linkw
from superfluid.link.codes import SPACE_NO_OPERATIONS, SpaceKind, Status

PREFILL, DECODE, PROMOTE, SEED = 1, 2, 4, 5  # operations in a provenance
_STEP = struct.Struct("<8sQQ")


def advance(provenance: bytes, operation: int, detail: int) -> bytes:
    """The 32-byte provenance after one more operation."""
    first = xxh3_64_intdigest(_STEP.pack(provenance[:8], operation, detail))
    return first.to_bytes(8, "little") + provenance[8:]


@attrs.define(eq=False)
class Sequence:
    """One sequence. `lengths` is per space: a restore fills one space after the other."""

    handle: int
    tokens: "array[int]"
    lengths: dict[int, int]
    provenance: bytes = bytes(32)
    taint: int = 0
    known: bool = True  # false: restored, its token ids are not in the artifact
    demoted: list[tuple[int, int, int]] = attrs.Factory(list)  # (space, start, end)
    generation: int = 1  # of its content
    lane: int | None = None
    seed: int | None = None  # the seed that holds it (adopted)
    shared_fork: bool = False  # a fork that is not private: what it publishes is a shared prefix
    locks: set[int] = attrs.Factory(set)  # spaces with an operation under way

    @property
    def length(self) -> int:
        return max(self.lengths.values(), default=0)

    def settle(self, operation: int) -> None:
        """Let every space reach over the tokens that were appended."""
        length = len(self.tokens)
        if length != self.length:
            self.lengths = dict.fromkeys(self.lengths, length)
            self.provenance = advance(self.provenance, operation, length)
            self.generation += 1

    def demoted_tokens(self, space_id: int) -> int:
        return sum(end - start for space, start, end in self.demoted if space == space_id)


class SequenceTable:
    """Every live sequence by its handle; handles are never reused."""

    def __init__(self, config: MockConfig) -> None:
        self._spaces = {space.space_id: space for space in config.spaces}
        self._paged = [space for space in config.spaces if space.bytes_per_token]
        self._live: dict[int, Sequence] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def create(self) -> Sequence:
        sequence = Sequence(self._next, array("I"), dict.fromkeys(self._spaces, 0))
        self._next += 1
        self._live[sequence.handle] = sequence
        return sequence

    def get(self, handle: int) -> Sequence:
        """Raises EngineError -129."""
        try:
            return self._live[handle]
        except KeyError:
            raise EngineError(Status.UnknownHandle, f"no sequence {handle}") from None

    def bare(self, handle: int) -> Sequence:
        """A sequence no lane owns. Raises EngineError -129."""
        sequence = self.get(handle)
        if sequence.lane is not None:
            raise EngineError(Status.UnknownHandle, f"sequence {handle} belongs to lane {sequence.lane}")
        return sequence

    def idle(self, handle: int, *, bare: bool = True) -> Sequence:
        """A sequence with no operation under way and no seed on it. Raises EngineError -129, -120."""
        sequence = self.bare(handle) if bare else self.get(handle)
        if sequence.locks:
            raise EngineError(Status.Busy, f"a state operation runs on sequence {handle}")
        if sequence.seed is not None:
            raise EngineError(Status.Busy, f"sequence {handle} is held by seed {sequence.seed}")
        return sequence

    def drop(self, sequence: Sequence) -> None:
        self._live.pop(sequence.handle, None)

    def space(self, space_id: int) -> linkw.StateSpaceDesc:
        """Raises EngineError -129 for an unknown space, -127 for one no operation serves."""
        space = self._spaces.get(space_id)
        if space is None:
            raise EngineError(Status.UnknownHandle, f"no state space {space_id}")
        if space.flags & SPACE_NO_OPERATIONS:
            raise EngineError(Status.Unsupported, f"no state operation serves space {space_id} ({space.name})")
        return space

    def bytes_of(self, sequence: Sequence) -> int:
        """Pool bytes of the sequence: its paged spaces, without what was demoted."""
        return sum(
            (sequence.lengths[space.space_id] - sequence.demoted_tokens(space.space_id)) * space.bytes_per_token
            for space in self._paged
        )


def boundary(space: linkw.StateSpaceDesc, length: int) -> int:
    """The newest durable boundary of a space at or under `length`."""
    step = space.page_size_tokens if space.kind != SpaceKind.BLOB else space.snapshot_interval_tokens
    return length // max(1, step) * max(1, step)
