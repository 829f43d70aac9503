"""Sessions that go: purges on request and for their age, and the compaction that erases what they leave in the log."""

import logging
from collections.abc import Callable, Container, Iterable

import trio

from superfluid.link.events import Descendants
from superfluid.scheduler.keeping import Keeper
from superfluid.scheduler.loop import Scheduler
from superfluid.sessions import rules
from superfluid.sessions.errors import LogIOError, PurgeTimeout, SessionError, StoreError
from superfluid.sessions.store import Store, now_unix_ms

QUIESCE = 10.0  # seconds that a session's generation may take to end once it is cancelled
TOGETHER = 64  # purges for age that are under way at once, and share a sync of the log
LEAST_LOOK = 1.0  # seconds between two looks for old sessions
LOOKS = 4  # and as many in the time that sessions are kept
GATHER = 60.0  # seconds from a purge to the compaction that erases it, so that one serves many
REST = 100.0  # times as long as a compaction took, none follows it

log = logging.getLogger(__name__)


class Purges:
    """Ends sessions of one model. Refusals are the SessionError classes; a log that cannot be written, LogIOError."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        keeper: Keeper,
        starting: dict[int, bool],
        forget: Callable[[int], None],
    ) -> None:
        """`starting`: generations that are not queued yet, and whether they are to be cancelled then. `forget` is
        called with every session that is no more."""
        self._store = store
        self._scheduler = scheduler
        self._keeper = keeper
        self._starting = starting
        self._forget = forget
        self._ended = trio.Event()

    @property
    def _busy(self) -> Container[int]:
        return self._store.activity.busy

    async def purge(self, session: int, expected: int, mode: Descendants) -> list[int]:
        """End a session, with Cascade its descendants too; the sessions that ended, itself the last.

        Their generations are cancelled and waited for. Raises PurgeTimeout when one does not end; nothing is purged
        then.
        """
        store, fenced = self._store, self._store.activity.purging
        while not fenced.isdisjoint(targets := rules.purge_targets(store, session, expected, mode)):
            await self._ended.wait()
        fenced.update(targets)
        try:
            await store.commit([])  # children that are being made are durable then; the fence lets no more be made
            for target in targets:
                await self._quiet(target)
            for target in targets:
                await self._erase_states(target)
            await store.perform(lambda: rules.purge(store, session, expected, mode))
        finally:
            fenced.difference_update(targets)
            self._ended.set()
            self._ended = trio.Event()
        for target in targets:
            self._keeper.purged(target)
            self._forget(target)
        return targets

    async def _erase_states(self, session: int) -> None:
        """Delete what the disk tier has of a session, before its purge commits: a crash leaves it cold, not in part.

        What its parent or a child has too, and lives on, stays for them; not for one whose own purge is under way,
        which may have left what both have to this one.
        """
        relatives = self._store.children(session)
        if (parent := self._store.living_parent(session)) is not None:
            relatives.append(parent)
        going = self._store.activity.purging
        kin = (relative.tokens() for relative in relatives if relative.id not in going)
        try:
            await self._keeper.erase(self._store.session(session).tokens(), kin)
        except OSError as error:
            raise LogIOError(
                self._store.directory, f"what the disk tier has of session {session} stays: {error}"
            ) from error

    async def _quiet(self, session: int) -> None:
        with trio.move_on_after(QUIESCE):
            while session in self._starting:
                self._starting[session] = True
                await self._store.commit([])  # what starts it is durable then
            if self._scheduler.cancel(session):
                await self._scheduler.wait_quiet(session)
        if session in self._busy:
            raise PurgeTimeout(session)

    # ---- for their age

    async def keep_purging(self, ttl: float) -> None:
        """At start and from then on, purge what nothing touched for `ttl` seconds."""
        while True:
            await self.purge_untouched(ttl, now_unix_ms())
            await trio.sleep(max(LEAST_LOOK, ttl / LOOKS))

    async def purge_untouched(self, ttl: float, now: int) -> None:
        """Purge the sessions that HTTP routes made and nothing touched for `ttl` seconds; `now` in Unix milliseconds.

        Busy and pinned ones are left, and their children become roots.
        """
        since = now - int(ttl * 1000)
        made = sorted(self._store.http.ids, reverse=True)  # children first: to become a root is an event, and touches
        old = [session for session in self._live(made) if self._is_old(session, since, now)]
        for at in range(0, len(old), TOGETHER):
            async with trio.open_nursery() as nursery:
                for session in old[at : at + TOGETHER]:
                    nursery.start_soon(self._purge_old, session, since, now, name=f"purge:{session}")
        if old:
            log.info("%s: %d sessions that nothing touched for %g s were purged", self._store.path, len(old), ttl)

    def _is_old(self, session: int, since: int, now: int) -> bool:
        """Whether a session is idle, has no pin, and its last event came no later than `since`; unknown times are kept.

        Events on their way to the disk count.
        """
        state = self._store.session(session).ahead
        return 0 < state.touched_ms <= since and state.pin_deadline <= now and session not in self._busy

    def _live(self, sessions: Iterable[int]) -> list[int]:
        live = {session.id for session in self._store.live()}
        return [session for session in sessions if session in live]

    async def _purge_old(self, session: int, since: int, now: int) -> None:
        try:
            if self._is_old(session, since, now):  # still: the purges before it took a while
                await self.purge(session, self._store.session(session).generation, Descendants.Reroot)
        except (SessionError, StoreError) as error:
            log.warning("session %d is not purged for its age: %s", session, error)

    # ---- what they leave

    async def remove_leftovers(self) -> None:
        """Delete the park artifacts of sessions that were purged just before the last server died."""
        parked = await trio.to_thread.run_sync(self._keeper.parks.artifacts.sessions)
        for session in set(parked).difference(self._live(parked)):
            self._keeper.purged(session)

    async def erase(self) -> None:
        """Compact the log after purges, and once for those of earlier runs; a hundredth of the time at most."""
        store, pause = self._store, GATHER
        while True:
            await trio.sleep(pause)
            store.buried = trio.Event()
            begun = trio.current_time()
            try:
                if saved := await store.compact_behind():
                    log.info("%s: compaction took %d bytes of purged sessions out", store.path, saved)
            except StoreError as error:
                log.warning("%s", error)
                store.buried.set()
            pause = max(GATHER, REST * (trio.current_time() - begun))
            await store.buried.wait()
