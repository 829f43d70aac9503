"""Pins: prefixes that stay in the engine's cache until a deadline, by seeds that are held and renewed.

Who pins says so at any time; leases are taken and given back between ticks. A pin outlives its worker, a lease does
not: it is taken again when a session that has the prefix retires.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link import linkw
from superfluid.link.digests import blob_chain, block_chain, prefix_digest
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.link import EngineRefused, LinkFault
from superfluid.scheduler.seeds import PAGED, Spaces
from superfluid.scheduler.side import contained

LOOK_AHEAD = 0xFFFFFFFF
"""An id behind the stream that no vocabulary has: a seed is shorter than its span, and so holds the last page too."""

MOST_PREFIXES = 256
"""Prefix pins at a time; the least recently touched goes."""

TRIES = 4
"""Lengths that are asked for, the longest first."""

RENEW_UNNAMED = 3
"""Ticks between two renewals where the engine does not say how long its leases live."""

BUDGET_PCT = 50

Ids = npt.NDArray[np.uint32]


class EngineLike(Protocol):
    """What of a worker's link pins need; errors are those of EngineLink."""

    @property
    def window(self) -> int:
        """Longest span in tokens."""

    async def match(self, span: linkw.TokenRef) -> linkw.MatchRes:
        """What the cache has of a span."""

    async def seed_acquire(self, span: linkw.TokenRef, prefix_len: int) -> linkw.SeedGranted:
        """A seed of the span's first tokens."""

    def seed_release(self, handle: int) -> None:
        """Give a seed back."""


class WorkerLike(Protocol):
    """The worker that serves; see `admission.Worker`."""

    spaces: Spaces

    @property
    def link(self) -> EngineLike: ...

    @property
    def can_stage(self) -> bool: ...

    def stage(self, tokens: Ids) -> linkw.TokenRef: ...


@attrs.define(eq=False)
class Pin:
    """`tokens` are wanted in the cache until `deadline_ms` (Unix); `length` of them are held by `lease`, 0 for none."""

    tokens: Ids
    deadline_ms: int
    touched: int = 0
    due: bool = True  # the cache may have more of it than is held
    lease: int = 0
    length: int = 0
    taken_tick: int = 0
    blocks: dict[tuple[int, int], int] = attrs.Factory(dict)  # (space, digest) of what is held, and its bytes


class Pins:
    """The pins of one model. `wake` is called when there is something to do for the task that calls `step`."""

    def __init__(
        self,
        metrics: ModelMetrics,
        budget_pct: int = BUDGET_PCT,
        wake: Callable[[], None] = lambda: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`budget_pct` of the pool may be held, 0: pins are recorded only."""
        self.budget_pct = budget_pct
        self._metrics = metrics
        self._wake = wake
        self._now_ms = now_ms
        self._sessions: dict[int, Pin] = {}
        self._prefixes: dict[int, Pin] = {}  # by prefix digest
        self._given_up: list[int] = []  # leases to release
        self._touches = 0
        self._taking = False
        self._renew_every = 1
        self._enforced = True

    # ---- asking

    def pin_session(self, session: int, tokens: Ids, deadline_ms: int) -> None:
        """Hold a session's stream, as it is and as it grows; the last deadline counts, 0 ends the pin."""
        pin = self._sessions.get(session)
        if not deadline_ms:
            self._drop(self._sessions, session)
        elif pin is None:
            self._sessions[session] = Pin(tokens, deadline_ms, self._touch())
        else:
            pin.tokens, pin.deadline_ms, pin.due, pin.touched = tokens, deadline_ms, True, self._touch()
        self._wake()

    def pin_prefix(self, tokens: Ids, deadline_ms: int) -> None:
        """Hold a prefix that requests have in common; of several deadlines the latest counts."""
        key = prefix_digest(tokens)
        pin = self._prefixes.pop(key, None) or Pin(tokens, deadline_ms)
        pin.deadline_ms, pin.touched = max(pin.deadline_ms, deadline_ms), self._touch()
        pin.due = pin.due or not pin.lease
        self._prefixes[key] = pin
        if len(self._prefixes) > MOST_PREFIXES:
            self._drop(self._prefixes, min(self._prefixes, key=lambda one: self._prefixes[one].touched))
        self._wake()

    def purged(self, session: int) -> None:
        """A session is no more."""
        self._drop(self._sessions, session)
        self._wake()

    def retired(self, session: int | None, stream: Ids) -> None:
        """The cache may have a finished lane's stream now."""
        if session is not None and (pin := self._sessions.get(session)) is not None:
            pin.tokens, pin.due, pin.touched = stream, True, self._touch()
        for pin in self._prefixes.values():
            if not pin.lease and np.array_equal(pin.tokens, stream[: len(pin.tokens)]):
                pin.due, pin.touched = True, self._touch()

    def awaits_lease(self, session: int) -> bool:
        """Whether a session is pinned and nothing of it is held."""
        pin = self._sessions.get(session)
        return pin is not None and not pin.lease

    def _touch(self) -> int:
        self._touches += 1
        return self._touches

    # ---- holding

    @property
    def any(self) -> bool:
        return bool(self._sessions or self._prefixes)

    @property
    def due(self) -> bool:
        """Whether `step` has something to do that needs no tick, or is at it."""
        return self._taking or bool(self._given_up) or (self._may_hold and any(pin.due for pin in self._all()))

    def until_expiry(self) -> float:
        """Seconds until the first deadline."""
        first = min((pin.deadline_ms for pin in self._all()), default=math.inf)
        return max(0.0, (first - self._now_ms()) / 1000)

    @property
    def _may_hold(self) -> bool:
        return self._enforced and self.budget_pct > 0

    def lost(self) -> None:
        """The worker is gone, and every lease with it."""
        self._given_up.clear()
        self._enforced = True
        for pin in self._all():
            pin.lease = pin.length = 0
            pin.blocks = {}
            pin.due = False
        self._count()

    async def step(self, worker: WorkerLike, tick: int, pool: linkw.MemCounters) -> None:
        """Between ticks: release what is over, take what can be had, renew what would run out. `pool` is what the
        engine's last tick said of its memory; of a pool of unknown size pins may hold all.

        Raises WorkerGone.
        """
        if not (self._sessions or self._prefixes or self._given_up):
            return
        now = self._now_ms()
        for pins in (self._sessions, self._prefixes):
            for key in [key for key, pin in pins.items() if pin.deadline_ms <= now]:
                self._drop(pins, key)
                self._metrics.pins_expired_total += 1
        while self._given_up:
            worker.link.seed_release(self._given_up.pop())
        if self._may_hold and not (worker.spaces.cached and not worker.spaces.unservable):
            self._enforced = False  # for as long as this worker serves
        if self._may_hold:
            for pin in list(self._all()):
                if pin.due or (pin.lease and tick - pin.taken_tick >= self._renew_every):
                    if not worker.can_stage:
                        break
                    self._taking = True
                    pin.taken_tick = tick
                    try:
                        with contained("a pin"):
                            await self._take(worker, pin, tick, pool)
                    finally:
                        self._taking = False
        self._count()

    async def _take(self, worker: WorkerLike, pin: Pin, tick: int, pool: linkw.MemCounters) -> None:
        """Take a lease on as much of a pin as the cache has, or renew the one there is.

        Of a stream longer than the window, as after a restart with a smaller one, what fits it.
        """
        link = worker.link
        length, renews = pin.length, pin.lease and not pin.due
        pin.due = False
        tokens = pin.tokens[: link.window]
        if len(tokens) < link.window:
            tokens = np.append(tokens, np.uint32(LOOK_AHEAD))
        span = worker.stage(tokens)
        granted: linkw.SeedGranted | None = None
        try:
            if not renews:
                length = worker.spaces.seed_length(await link.match(span), len(tokens))
            for _ in range(TRIES):
                if length < worker.spaces.page:
                    break
                granted = await self._acquire(link, span, length)
                if granted is not None:
                    break
                length -= worker.spaces.page
        except (EngineRefused, LinkFault):
            pass  # a cache that cannot be asked holds nothing
        if pin.lease:
            link.seed_release(pin.lease)
            pin.lease = 0
        if granted is None:
            pin.length, pin.blocks = 0, {}
            return
        if granted.ttl_ticks == 0:  # gone with the next tick: nothing can be held
            link.seed_release(granted.seed_handle)
            self._enforced = False
            pin.length, pin.blocks = 0, {}
            return
        self._renew_every = RENEW_UNNAMED if granted.ttl_ticks is None else max(1, granted.ttl_ticks // 2)
        pin.lease = granted.seed_handle
        if length != pin.length or not renews:
            pin.length = length
            block = block_bytes(worker.spaces, pool)
            pin.blocks = charged(worker.spaces, pin.tokens[:length], block)
            self._keep_within(worker, pin, pool.pool_blocks_total * block * self.budget_pct // 100)

    async def _acquire(self, link: EngineLike, span: linkw.TokenRef, length: int) -> linkw.SeedGranted | None:
        try:
            return await link.seed_acquire(span, length)
        except EngineRefused:
            return None

    def _keep_within(self, worker: WorkerLike, asked: Pin, budget: int) -> None:
        """Have the least recently touched pins yield until the rest fits the budget, `asked` the last of them."""
        while budget and self._held_bytes() > budget:
            held = [pin for pin in self._all() if pin.lease]
            victim = min(held, key=lambda pin: (pin is asked, pin.touched))
            worker.link.seed_release(victim.lease)
            victim.lease = victim.length = 0
            victim.blocks = {}
            self._metrics.pins_yielded_total += 1

    def yield_oldest(self, worker: WorkerLike) -> bool:
        """Under memory pressure: let the least recently touched lease go; whether there was one."""
        held = [pin for pin in self._all() if pin.lease]
        if not held:
            return False
        victim = min(held, key=lambda pin: pin.touched)
        worker.link.seed_release(victim.lease)
        victim.lease = victim.length = 0
        victim.blocks = {}
        self._metrics.pins_yielded_total += 1
        self._count()
        return True

    def _drop(self, pins: dict[int, Pin], key: int) -> None:
        pin = pins.pop(key, None)
        if pin is not None and pin.lease:
            self._given_up.append(pin.lease)

    def _all(self) -> Iterator[Pin]:
        yield from self._sessions.values()
        yield from self._prefixes.values()

    def _held_bytes(self) -> int:
        held: dict[tuple[int, int], int] = {}
        for pin in self._all():
            held.update(pin.blocks)
        return sum(held.values())

    def _count(self) -> None:
        self._metrics.pins_held = sum(1 for pin in self._all() if pin.lease)
        self._metrics.pinned_bytes = self._held_bytes()


def charged(spaces: Spaces, tokens: Ids, block: int) -> dict[tuple[int, int], int]:
    """What holding a prefix costs: its pages in every paged space and one blob in every other, each in bytes.

    A page of a space that does not say its size is a block of the pool.
    """
    blocks: dict[tuple[int, int], int] = {}
    for space in spaces.streams:
        if space.kind in PAGED:
            page = space.page_size_tokens or 1
            size = page * space.bytes_per_token or block
            chain = block_chain(tokens, page, space.space_id)
        else:
            size, chain = space.blob_bytes, blob_chain(tokens, space.space_id)
        blocks.update({(space.space_id, digest): size for digest in chain})
    return blocks


def block_bytes(spaces: Spaces, pool: linkw.MemCounters) -> int:
    """Bytes of one block of the pool: a page of the paged space that comes first; at least 1."""
    paged = (space for space in spaces.streams if space.kind in PAGED)
    named = next(((space.page_size_tokens or 1) * space.bytes_per_token for space in paged), 0)
    return named or pool.allocated_bytes // max(pool.pool_blocks_total, 1) or 1
