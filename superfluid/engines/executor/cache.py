"""The prefix cache: sequences of finished streams kept in the pool, pushed out to host memory, evicted."""

from collections.abc import Iterable, Sequence
from typing import cast

import attrs
import numpy as np

from superfluid._native import ffi, lib
from superfluid.engines.engine import CacheClass, EngineError, Status
from superfluid.engines.executor.radix import Cached, Node, RadixTree
from superfluid.engines.executor.sequences import Sequences
from superfluid.engines.primitives import Description, FatalError, PrimitiveError, Primitives, TokenArray
from superfluid.link import linkw

SHARE = 8  # a use, an export's offer and a cover count from one part in eight on
EXPORT_PAUSE_TICKS = 64  # no exports for so long after memory was short


@attrs.define(eq=False)
class Entry:
    """A cached prefix: in the pool (`seq`) or exported to host memory (`payload`).

    `prompt_len` is how much of it was a lane's prompt, `used` the time of its last use, `lanes` how many started
    from it, `pins` the leases that hold it.
    """

    tokens: TokenArray = attrs.field(repr=False)
    prompt_len: int
    seq: int | None
    taint: int
    shared_fork: bool
    used: int
    payload: bytes | memoryview | None = attrs.field(default=None, repr=False)
    lanes: int = 0
    pins: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def resident(self) -> bool:
        return self.seq is not None

    @property
    def shared(self) -> bool:
        """It holds a prefix that several streams have."""
        return self.shared_fork or self.lanes >= 2

    @property
    def worth(self) -> tuple[bool, int]:
        return self.shared, self.used


def content_digests(span: TokenArray, lengths: Iterable[int]) -> list[bytes]:
    """The content digests of several prefixes of a span, lengths ascending, from one pass."""
    ends = np.fromiter(lengths, np.uint32)
    ids = np.ascontiguousarray(span, np.uint32)
    out = bytearray(32 * len(ends))
    lib.sf_content_digests(
        ffi.cast("uint32_t *", ffi.from_buffer(ids)),
        ffi.cast("uint32_t *", ffi.from_buffer(ends)),
        len(ends),
        ffi.from_buffer(out),
    )
    return [bytes(out[i : i + 32]) for i in range(0, len(out), 32)]


def content_digest(tokens: TokenArray) -> bytes:
    return content_digests(tokens, [len(tokens)])[0]


class PrefixCache:
    """Entries by token path. Nothing here knows of lanes; leases pin what they will copy."""

    def __init__(self, primitives: Primitives, description: Description, sequences: Sequences) -> None:
        self._primitives = primitives
        self._of = description
        self._sequences = sequences
        self._tree = RadixTree()
        self._pool: dict[Entry, None] = {}
        self._exports: dict[Entry, None] = {}
        self._fresh: list[Entry] = []  # published since the last settling
        self._clock = 0
        self.page = max(1, description.page_size_tokens)
        self.head_only = not description.truncate_partial
        self.exported_cells = 0
        self.ticks = 0
        self._no_exports_until = 0

    # ---- looking up

    def match(self, span: TokenArray) -> list[linkw.MatchCandidate]:
        """What the cache offers of a span, longest first, each length once."""
        offers: list[tuple[int, Entry]] = []
        for length, node in self._tree.branches(span):
            kept = length if self.head_only else self.round(length)
            if kept < self.page or (offers and offers[-1][0] == kept):
                continue
            entry = self._whole(span, kept) if self.head_only else self._serve(node, kept)
            if entry is not None:
                offers.append((kept, entry))
        digests = content_digests(span, (length for length, _ in offers))
        return [
            linkw.MatchCandidate(length, digest, entry.taint, 0 if entry.resident else 1)
            for (length, entry), digest in zip(reversed(offers), reversed(digests), strict=True)
        ]

    def find(self, span: TokenArray, length: int, deterministic: bool) -> Entry:
        """The entry that serves the first `length` ids of a span. Raises EngineError -130."""
        if self.head_only:
            entry = self._whole(span, length, deterministic)
        else:
            node = self._tree.reaching(span, length) if length % self.page == 0 else None
            entry = self._serve(node, length, deterministic) if node is not None else None
        if entry is None or not 0 < length <= len(span):
            raise EngineError(Status.SeedUnservable, f"no cached prefix of {length} tokens serves this span")
        if length < self._of.seed_min_tokens and length != entry.length:
            raise EngineError(
                Status.SeedUnservable,
                f"{length} tokens of a longer entry; at least {self._of.seed_min_tokens} expected",
            )
        return entry

    def holds(self, tokens: TokenArray) -> bool:
        """Whether an entry has exactly these tokens."""
        return bool(self._tree.exact(tokens))

    def round(self, length: int) -> int:
        """Down to whole pages."""
        return length - length % self.page

    def _serve(self, node: Node, length: int, deterministic: bool = False) -> Entry | None:
        """The cheapest entry under a node to take `length` ids from; those in the pool first."""
        resident, exported = cast("tuple[Entry | None, Entry | None]", node.shortest())
        if deterministic and any(entry is not None and entry.taint for entry in (resident, exported)):
            clean = [entry for entry in self._under(node) if not entry.taint]
            resident = min((e for e in clean if e.resident), key=lambda e: e.length, default=None)
            exported = min((e for e in clean if not e.resident), key=lambda e: e.length, default=None)
        if resident is None and exported is not None and SHARE * length < exported.length:
            return None
        return resident or exported

    def _whole(self, span: TokenArray, length: int, deterministic: bool = False) -> Entry | None:
        """An entry of exactly the first `length` ids, which must be fewer than the span's."""
        if length >= len(span):
            return None
        found = cast("list[Entry]", self._tree.exact(span[:length]))
        usable = [entry for entry in found if not (deterministic and entry.taint)]
        return max(usable, key=lambda entry: (entry.resident, entry.used), default=None)

    def _under(self, node: Node) -> Iterable[Entry]:
        pending = [node]
        while pending:
            here = pending.pop()
            yield from cast("list[Entry]", here.entries)
            pending.extend(here.children.values())

    # ---- coming and using

    def now(self) -> int:
        self._clock += 1
        return self._clock

    def publish(self, seq: int, tokens: TokenArray, prompt_len: int, taint: int, shared_fork: bool) -> Entry:
        """Keep a sequence, which holds exactly `tokens` and whose slot it has. An older equal entry that nobody
        holds makes way for it and leaves it its standing."""
        tokens = tokens.copy()
        entry = Entry(tokens, prompt_len, seq, taint, shared_fork, self.now())
        for old in cast("list[Entry]", self._tree.exact(tokens)):
            if not old.pins and not taint & ~old.taint:
                entry.shared_fork |= old.shared_fork
                entry.lanes += old.lanes
                self.drop(old)
        self._tree.insert(entry)
        self._pool[entry] = None
        self._fresh.append(entry)
        return entry

    def used(self, entry: Entry, kept: int) -> None:
        """A lane started from the first `kept` ids of an entry."""
        entry.lanes += 1
        if SHARE * kept >= entry.length:
            entry.used = self.now()

    def take_over(self, entry: Entry) -> int:
        """Take an entry's sequence out of the cache, slot and all."""
        seq = entry.seq
        assert seq is not None
        self._forget(entry)
        return seq

    # ---- going

    def eviction_order(self) -> list[Entry]:
        """Unpinned entries of the pool, the first to go first."""
        return sorted((entry for entry in self._pool if not entry.pins), key=lambda entry: entry.worth)

    def leave(self, entry: Entry) -> bool:
        """Move an entry out of the pool: dropped when another covers it, else exported, else evicted (true)."""
        if self._covered(entry):
            self.drop(entry)
            return False
        if self._export(entry):
            return False
        self.drop(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Forget an entry and free what it holds."""
        seq = entry.seq
        self._forget(entry)
        if seq is not None:
            self._sequences.free_raw(seq)

    def settle(self) -> list[tuple[Entry, int]]:
        """Bring the pool under its bound and drop exports that are covered by now; the entries evicted, with the
        bytes each freed."""
        evicted: list[tuple[Entry, int]] = []
        bound = self._of.cache_resident_cells
        while bound and self.cells(self._pool) > bound:
            for entry in self.eviction_order():
                if self.cells([entry]) > 0 or self._covered(entry):
                    break
            else:
                break
            n_bytes = self.bytes([entry])
            if self.leave(entry):
                evicted.append((entry, n_bytes))
        fresh, self._fresh = self._fresh, []
        if self._exports:
            for entry in fresh:
                for common, other in list(self._tree.sharing(entry.tokens, 1)):
                    export = cast("Entry", other)
                    if not export.resident and not export.pins and self._covers(entry, export, common):
                        self.drop(export)
        return evicted

    def give_slot(self) -> bool:
        """Free the slot of the first entry in eviction order; false when there is none."""
        order = self.eviction_order()
        if order:
            self.leave(order[0])
        return bool(order)

    def evict(self, target: int, policy: linkw.ShedPolicy) -> int:
        """Free up to `target` bytes of the pool within a policy; the bytes freed."""
        classes = policy.evictable_cache_classes
        if classes & CacheClass.HOST_EXPORT:
            self._no_exports_until = self.ticks + EXPORT_PAUSE_TICKS
            for entry in [entry for entry in self._exports if not entry.pins]:
                self.drop(entry)
            self._primitives.shed(target)
        if not classes & CacheClass.RESIDENT:
            return 0
        room = min(target, self.evictable(policy))
        with_shared = bool(classes & CacheClass.SHARED_PREFIX)
        chosen: list[Entry] = []
        freed = 0
        for entry in self.eviction_order():
            if freed >= room:
                break
            if entry.shared and not with_shared:
                continue
            frees = self.bytes([*chosen, entry])
            if frees <= room:
                chosen.append(entry)
                freed = frees
        for entry in chosen:
            self.leave(entry)
        return freed

    def evict_digests(self, digests: Sequence[bytes]) -> None:
        """Drop the unpinned entries whose content digest is named."""
        wanted = set(digests)
        for entry in [*self._pool, *self._exports]:
            if not entry.pins and content_digest(entry.tokens) in wanted:
                self.drop(entry)

    def unpublish(self, tokens: TokenArray) -> None:
        """Drop the unpinned entries of exactly these tokens."""
        for entry in cast("list[Entry]", self._tree.exact(tokens)):
            if not entry.pins:
                self.drop(entry)

    # ---- counting

    def cells(self, entries: Iterable[Entry]) -> int:
        """Cells that freeing these entries of the pool would give back."""
        if not self._of.copy_shares_cells:
            return sum(entry.length for entry in entries)
        return self._primitives.cells_released([entry.seq for entry in entries if entry.seq is not None])

    def bytes(self, entries: Iterable[Entry]) -> int:
        return self.cells(entries) * self._of.kv_bytes_per_token

    def evictable(self, policy: linkw.ShedPolicy) -> int:
        """Bytes that a policy lets go."""
        return max(0, min(policy.max_evict_bytes, self.bytes(self._pool) - policy.protected_quota_bytes))

    @property
    def unpinned_bytes(self) -> int:
        return self.bytes([entry for entry in self._pool if not entry.pins])

    @property
    def exported_bytes(self) -> int:
        return sum(len(entry.payload) for entry in self._exports if entry.payload is not None)

    # ---- within

    def _forget(self, entry: Entry) -> None:
        self._tree.remove(cast("Cached", entry))
        if entry.resident:
            del self._pool[entry]
        else:
            del self._exports[entry]
            self.exported_cells -= entry.length
        entry.seq = entry.payload = None
        if entry in self._fresh:
            self._fresh.remove(entry)

    def _covered(self, entry: Entry) -> bool:
        if self.head_only or entry.length < self._of.seed_min_tokens:
            return False
        least = entry.length - entry.length // SHARE
        return any(
            self._covers(cast("Entry", other), entry, common)
            for common, other in self._tree.sharing(entry.tokens, least)
        )

    def _covers(self, other: Entry, entry: Entry, common: int) -> bool:
        """Whether `other`, which shares `common` ids, makes `entry` needless."""
        if self.head_only or other is entry or entry.length < self._of.seed_min_tokens:
            return False
        if other.taint & ~entry.taint or SHARE * common < other.length:
            return False
        if common == entry.length and other.length > common:
            return True
        return other.used > entry.used and SHARE * common >= (SHARE - 1) * entry.length

    def _export(self, entry: Entry) -> bool:
        """Push an entry out to host memory, if there may be exports and it is worth what would have to go."""
        bound = self._of.cache_exported_cells
        if entry.length > bound or self.ticks < self._no_exports_until:
            return False
        going: list[Entry] = []
        excess = self.exported_cells + entry.length - bound
        for other in sorted((e for e in self._exports if not e.pins), key=lambda e: e.worth):
            if excess <= 0 or other.worth > entry.worth:
                break
            going.append(other)
            excess -= other.length
        if excess > 0:
            return False
        seq = entry.seq
        assert seq is not None
        try:
            payload = self._primitives.seq_export(seq, entry.length, 0)
        except FatalError:
            raise
        except PrimitiveError:
            return False
        for other in going:
            self.drop(other)
        self._sequences.free_raw(seq)
        del self._pool[entry]
        entry.seq, entry.payload = None, payload
        self._exports[entry] = None
        self.exported_cells += entry.length
        self._tree.retier(cast("Cached", entry))
        return True
