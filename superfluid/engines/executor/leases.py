"""Seeds: leases on cached prefixes and on adopted sequences, good for one admission."""

import attrs
import numpy as np

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.cache import Entry, PrefixCache
from superfluid.engines.executor.sequences import Sequence, Sequences
from superfluid.engines.primitives import TokenArray

LEASE_TICKS = 64


@attrs.define(eq=False)
class Lease:
    """`tokens` of an entry, or of a whole bare sequence, promised to one lane."""

    handle: int
    tokens: TokenArray = attrs.field(repr=False)
    determinism: int
    acquired: int  # ticks this engine had run
    entry: Entry | None = None
    sequence: Sequence | None = None

    def keep(self, prompt_len: int) -> int:
        """Ids of state the lane takes: the last of a whole prompt is fed again, for its row."""
        return len(self.tokens) - (len(self.tokens) == prompt_len)

    @property
    def adopted(self) -> bool:
        return self.sequence is not None

    @property
    def taint(self) -> int:
        return self.entry.taint if self.entry is not None else self.sequence.taint if self.sequence is not None else 0


class Leases:
    def __init__(self, cache: PrefixCache, sequences: Sequences) -> None:
        self._cache = cache
        self._sequences = sequences
        self._leases: dict[int, Lease] = {}
        self._next = 1
        self.ticks = 0

    def acquire(self, span: TokenArray, length: int, determinism: int) -> int:
        """Pin an entry that serves `length` ids of a span. Raises EngineError -130."""
        entry = self._cache.find(span, length, bool(determinism))
        entry.pins += 1
        return self._add(span[:length].copy(), determinism, entry=entry)

    def adopt(self, handle: int, tokens: TokenArray, length: int) -> int:
        """Make the whole of a bare sequence, `length` ids long, a seed. Raises EngineError -129, -120, -123."""
        sequence = self._sequences.free_to_change(handle)
        if not length or len(tokens) != length:
            raise EngineError(
                Status.OutOfBoundary, f"sequence {handle} holds {length} tokens, {len(tokens)} were named; adopt all"
            )
        sequence.lease = self._add(tokens.copy(), 0, sequence=sequence)
        return sequence.lease

    def find(self, handle: int) -> Lease | None:
        return self._leases.get(handle)

    def release(self, handle: int) -> None:
        """Unpin. Raises EngineError -129."""
        lease = self._leases.get(handle)
        if lease is None:
            raise EngineError(Status.UnknownHandle, f"no seed {handle}")
        self.end(lease)

    def end(self, lease: Lease) -> None:
        """Used, released or expired: what it held is free again."""
        del self._leases[lease.handle]
        if lease.entry is not None:
            lease.entry.pins -= 1
        if lease.sequence is not None:
            lease.sequence.lease = None

    def tick_over(self) -> None:
        """A tick has run: leases that outlived their ticks end."""
        self.ticks += 1
        for lease in [lease for lease in self._leases.values() if self.ticks > lease.acquired + LEASE_TICKS]:
            self.end(lease)

    def _add(
        self, tokens: TokenArray, determinism: int, entry: Entry | None = None, sequence: Sequence | None = None
    ) -> int:
        handle = self._next
        self._next += 1
        tokens = np.ascontiguousarray(tokens, np.uint32)
        self._leases[handle] = Lease(handle, tokens, determinism, self.ticks, entry, sequence)
        return handle
