"""Sequences of the runtime and the handles clients know them by."""

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np

from superfluid.engines.engine import EngineError, EngineFatal, Status
from superfluid.engines.primitives import FatalError, PrimitiveError, Primitives, TokenArray

NO_TOKENS: TokenArray = np.empty(0, np.uint32)


@attrs.define(eq=False)
class Sequence:
    """State of one stream outside the prefix cache. `handle` is what clients say, `seq` what the runtime says.

    `tokens` are those of a bare sequence, none when unknown (a restored one); a lane's are in its stream.
    `epoch` counts the changes that its length alone does not show.
    """

    handle: int
    seq: int
    taint: int = 0
    tokens: TokenArray | None = NO_TOKENS
    lane_tag: int | None = None
    lease: int | None = None
    shared_fork: bool = False
    epoch: int = 0

    @property
    def bare(self) -> bool:
        return self.lane_tag is None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what a primitive raises in an operation outside a tick into the status that answers it."""
    try:
        yield
    except PrimitiveError as error:
        raise EngineError(error.status, f"{what}: {error}") from error


@contextmanager
def dying() -> Iterator[None]:
    """Turn a runtime's Fatal in a tick into the end of the worker; other primitive errors pass."""
    try:
        yield
    except FatalError as error:
        raise EngineFatal(str(error)) from error


class Sequences:
    """Every sequence of the runtime: lanes' and bare ones by handle, cache entries' by the runtime's own.

    `live` counts them all, for runtimes with a bound on how many there may be.
    """

    def __init__(self, primitives: Primitives, max_seqs: int) -> None:
        self._primitives = primitives
        self._handles: dict[int, Sequence] = {}
        self._next = 1
        self.max_seqs = max_seqs
        self.live = 0

    @property
    def full(self) -> bool:
        return 0 < self.max_seqs <= self.live

    def find(self, handle: int) -> Sequence:
        """Raises EngineError -129."""
        sequence = self._handles.get(handle)
        if sequence is None:
            raise EngineError(Status.UnknownHandle, f"no sequence {handle}")
        return sequence

    def bare(self, handle: int) -> Sequence:
        """A sequence that no lane holds. Raises EngineError -129."""
        sequence = self.find(handle)
        if not sequence.bare:
            raise EngineError(Status.UnknownHandle, f"sequence {handle} is that of lane {sequence.lane_tag}")
        return sequence

    def free_to_change(self, handle: int, *, foreign: Status = Status.UnknownHandle) -> Sequence:
        """A bare sequence that no lease holds; a lane's is refused with `foreign`, a leased one with -120."""
        sequence = self.find(handle)
        if not sequence.bare:
            raise EngineError(foreign, f"sequence {handle} is that of lane {sequence.lane_tag}")
        if sequence.lease is not None:
            raise EngineError(Status.Busy, f"sequence {handle} is adopted by seed {sequence.lease}")
        return sequence

    def create(self) -> Sequence:
        """A new empty sequence. Raises PrimitiveError."""
        return self.wrap(self.create_raw())

    def wrap(self, seq: int, taint: int = 0) -> Sequence:
        """Give one of the runtime's sequences (a cache entry's, or a new one) a handle."""
        sequence = Sequence(self._next, seq, taint)
        self._next += 1
        self._handles[sequence.handle] = sequence
        return sequence

    def unwrap(self, sequence: Sequence) -> int:
        """Take the handle away; the state goes on under the runtime's own."""
        del self._handles[sequence.handle]
        return sequence.seq

    def free(self, sequence: Sequence) -> None:
        self.free_raw(self.unwrap(sequence))

    def create_raw(self) -> int:
        seq = self._primitives.seq_create()
        self.live += 1
        return seq

    def free_raw(self, seq: int) -> None:
        self._primitives.seq_free(seq)
        self.live -= 1
