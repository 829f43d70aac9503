"""The mock's prefix cache: published token paths, and the seeds that pin them."""

from array import array
from collections.abc import Iterable, Iterator
from math import lcm

import attrs
import numpy as np

from superfluid.engines.engine import EngineError, TokenArray
from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.state import Sequence
from superfluid.link import linkw
from superfluid.link.codes import SPACE_NO_OPERATIONS, SPACE_NOT_CACHED, CacheClass, SpaceKind, Status


@attrs.define(eq=False)
class Entry:
    """A cached prefix in whole pages."""

    tokens: TokenArray
    provenance: bytes
    taint: int
    used: int  # larger: used later
    shared_fork: bool
    lanes_started: int = 0
    pins: int = 0

    @property
    def shared(self) -> bool:
        return self.shared_fork or self.lanes_started >= 2

    @property
    def cache_class(self) -> int:
        return CacheClass.SHARED_PREFIX if self.shared else CacheClass.RESIDENT


@attrs.define(eq=False)
class Seed:
    """A lease on `length` tokens of an entry, or on the whole of an adopted sequence."""

    handle: int
    tokens: TokenArray
    determinism: int
    acquired: int  # ticks the engine had run
    source: Entry | Sequence

    @property
    def length(self) -> int:
        return len(self.tokens)


class PrefixCache:
    def __init__(self, config: MockConfig) -> None:
        self._spaces = [space for space in config.spaces if space.kind != SpaceKind.ENCODER_CACHE]
        self._bytes_per_token = sum(space.bytes_per_token for space in config.spaces)
        self._lease_ticks = config.lease_ticks
        self._page = lcm(*(max(1, space.page_size_tokens) for space in self._spaces))
        self._step = lcm(self._page, *(max(1, space.snapshot_interval_tokens) for space in self._spaces))
        self._entries: list[Entry] = []
        self._seeds: dict[int, Seed] = {}
        self._next_seed = 1
        self._clock = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def bytes_of(self, entry: Entry) -> int:
        return len(entry.tokens) * self._bytes_per_token

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self._entries))

    @property
    def evictable_bytes(self) -> int:
        return sum(self.bytes_of(entry) for entry in self._entries if not entry.pins)

    # ---- entries

    def publish(self, tokens: TokenArray, sequence: Sequence) -> None:
        """Cache the whole pages of `tokens`; a path that an entry already covers only counts as used."""
        path = tokens[: len(tokens) // self._page * self._page]
        if not len(path):
            return
        self._clock += 1
        for entry in self._entries:
            if _common(entry.tokens, path) == len(path) and entry.taint & ~sequence.taint == 0:
                entry.used = self._clock
                entry.shared_fork |= sequence.shared_fork and len(entry.tokens) == len(path)
                return
        covered = [
            entry
            for entry in self._entries
            if not entry.pins and _common(entry.tokens, path) == len(entry.tokens) and not sequence.taint & ~entry.taint
        ]
        for entry in covered:
            self._entries.remove(entry)
        self._entries.append(Entry(path.copy(), sequence.provenance, sequence.taint, self._clock, sequence.shared_fork))

    def unpublish(self, tokens: TokenArray) -> None:
        self._entries = [e for e in self._entries if e.pins or not np.array_equal(e.tokens, tokens)]

    def evict_keys(self, digests: set[bytes]) -> None:
        self._entries = [e for e in self._entries if e.pins or e.provenance not in digests]

    def victims(self, wanted: int, policy: linkw.ShedPolicy, *, exact: bool = False) -> list[Entry]:
        """Whole entries to evict for `wanted` bytes within the policy, in eviction order; `exact` never passes it."""
        left = min(policy.max_evict_bytes, self.total_bytes - policy.protected_quota_bytes)
        if exact:
            left = min(left, wanted)
        chosen = []
        for entry in sorted(self._entries, key=lambda e: (e.shared, e.used)):
            if wanted <= 0:
                break
            size = self.bytes_of(entry)
            if entry.pins or not policy.evictable_cache_classes & entry.cache_class or size > left:
                continue
            chosen.append(entry)
            left -= size
            wanted -= size
        return chosen

    def evict(self, entries: Iterable[Entry]) -> int:
        """Bytes given back."""
        freed = 0
        for entry in entries:
            self._entries.remove(entry)
            freed += self.bytes_of(entry)
        return freed

    # ---- offers and seeds

    def match(self, space_id: int, tokens: TokenArray) -> list[linkw.SpaceMatch]:
        served = [s for s in self._spaces if not s.flags & (SPACE_NO_OPERATIONS | SPACE_NOT_CACHED)]
        return [
            linkw.SpaceMatch(space.space_id, self._offers(space, tokens))
            for space in served
            if space_id in (linkw.ALL_SPACES, space.space_id)
        ]

    def acquire(self, tokens: TokenArray, length: int, determinism: int, ticks: int) -> int:
        """A seed over an entry. Raises EngineError -130."""
        self._require_servable()
        if not 0 < length < len(tokens) or length % self._step:
            raise EngineError(
                Status.SeedUnservable,
                f"{length} of {len(tokens)} tokens; a seed is shorter than the span and a multiple of {self._step}",
            )
        wanted = tokens[:length]
        for entry in sorted(self._entries, key=lambda e: -e.used):
            if _common(entry.tokens, wanted) == length and not (determinism and entry.taint):
                entry.pins += 1
                return self._lease(wanted.copy(), determinism, ticks, entry)
        raise EngineError(Status.SeedUnservable, f"nothing cached holds these {length} tokens")

    def adopt(self, sequence: Sequence, tokens: TokenArray, ticks: int) -> int:
        """A seed that is the whole of a bare sequence. Raises EngineError -123, -130."""
        self._require_servable()
        lengths = {sequence.lengths[space.space_id] for space in self._spaces}
        if lengths != {len(tokens)} or not len(tokens) or sequence.demoted:
            raise EngineError(
                Status.OutOfBoundary, f"sequence {sequence.handle} reaches {sorted(lengths)}, the span {len(tokens)}"
            )
        if sequence.known and not np.array_equal(np.frombuffer(sequence.tokens, np.uint32), tokens):
            raise EngineError(Status.OutOfBoundary, f"sequence {sequence.handle} holds other tokens than the span")
        sequence.tokens = array("I", tokens.tobytes())
        sequence.known = True
        sequence.seed = self._lease(tokens.copy(), 0, ticks, sequence)
        return sequence.seed

    def seed(self, handle: int) -> Seed | None:
        return self._seeds.get(handle)

    def release(self, handle: int) -> None:
        """End a lease; an adopted sequence is bare again. Raises EngineError -129."""
        seed = self._seeds.pop(handle, None)
        if seed is None:
            raise EngineError(Status.UnknownHandle, f"no seed {handle}")
        if isinstance(seed.source, Entry):
            seed.source.pins -= 1
        else:
            seed.source.seed = None

    def consume(self, seed: Seed) -> None:
        """A lane started from the seed."""
        self.release(seed.handle)
        if isinstance(seed.source, Entry):
            self._clock += 1
            seed.source.lanes_started += 1
            seed.source.used = self._clock

    def sweep(self, ticks: int) -> None:
        """End the leases that `ticks` run ticks have outlived."""
        for seed in [s for s in self._seeds.values() if ticks > s.acquired + self._lease_ticks]:
            self.release(seed.handle)

    def _lease(self, tokens: TokenArray, determinism: int, ticks: int, source: Entry | Sequence) -> int:
        handle = self._next_seed
        self._next_seed += 1
        self._seeds[handle] = Seed(handle, tokens, determinism, ticks, source)
        return handle

    def _require_servable(self) -> None:
        for space in self._spaces:
            if space.flags & (SPACE_NO_OPERATIONS | SPACE_NOT_CACHED):
                raise EngineError(Status.SeedUnservable, f"space {space.space_id} ({space.name}) serves no seed")

    def _offers(self, space: linkw.StateSpaceDesc, tokens: TokenArray) -> list[linkw.MatchCandidate]:
        """A paged space offers the longest length of each entry, a blob every snapshot of it."""
        offers: dict[int, Entry] = {}
        for entry in sorted(self._entries, key=lambda e: -e.used):
            common = min(_common(entry.tokens, tokens), len(tokens) - 1)
            if space.kind == SpaceKind.BLOB:
                step = max(1, space.snapshot_interval_tokens)
                lengths: Iterable[int] = range(step, common + 1, step)
            else:
                lengths = [common // self._page * self._page]
            for length in lengths:
                if length and (length not in offers or offers[length].taint):
                    offers[length] = entry
        return [
            linkw.MatchCandidate(length, entry.provenance, entry.taint, 0)
            for length, entry in sorted(offers.items(), reverse=True)
        ]


def _common(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
