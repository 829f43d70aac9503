"""Which states are kept when lanes retire, where, and which of them jobs start from."""

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import trio

from superfluid.link.codes import SpaceKind
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.admission import NotYet, Restored, Worker
from superfluid.scheduler.disk import CacheFile, DiskTier, NotACacheFile
from superfluid.scheduler.exports import WORTH_SECONDS, ExportBudget, Writer
from superfluid.scheduler.lanes import Lane, Source, Ticket
from superfluid.scheduler.link import EngineRefused, LinkFault, status_name
from superfluid.scheduler.parks import Parks, holds
from superfluid.scheduler.rates import Rates
from superfluid.scheduler.shared import common_prefix
from superfluid.scheduler.states import UNREADABLE, Ids, SavedState, adopt, export, publish, restore
from superfluid.sessions import park
from superfluid.sessions.files import Files
from superfluid.sessions.park import Head
from superfluid.shm.spares import Spares

log = logging.getLogger(__name__)

GIGABYTE = 1 << 30
READERS = 2
"""Files that are read at once."""

SPARE_SECONDS = 30.0
"""How long the memory of an export is kept for the next one."""

NO_BOUND = 1 << 62
"""Bytes that no disk has: files of a disk tier that is off stay as they are, until their sessions are purged."""


class ParkMode(Enum):
    """Which lanes park."""

    NEVER = 0
    WITHIN_BUDGET = 1  # those of sessions of the session API, as far as the export budget goes
    ALWAYS = 2  # those, and every lane that gives way


@attrs.frozen
class KeepSettings:
    """Operator settings; budgets in bytes, a park budget of 0 has no bound, a disk budget of 0 is no disk tier.

    `worth_seconds` of prefill is what a state must save to be kept within the budget.
    """

    park: ParkMode = ParkMode.WITHIN_BUDGET
    lossy: bool = False
    park_budget: int = 20 * GIGABYTE
    disk_budget: int = 4 * GIGABYTE
    worth_seconds: float = WORTH_SECONDS


class Fate(Enum):
    """What becomes of a finished lane's state beside its place in the engine's own cache."""

    NOTHING = 0
    PARKED = 1
    PARKED_AT_ONCE = 2
    ON_DISK = 3


@attrs.define(eq=False)
class Choice:
    """A kept state that a job may start from: `usable` tokens of it. `saved` once it is in memory."""

    source: Source
    origin: SavedState | Head | CacheFile
    usable: int
    saved: SavedState | None = None
    loaded: bool = False  # from a file: it is this job's own


class Keeper:
    """The kept states of one model. Made by `open`; outlives workers; `run` must be running for files to be used."""

    def __init__(
        self, directory: Path, settings: KeepSettings, metrics: ModelMetrics, files: Files | None = None
    ) -> None:
        """`directory` is the model's store."""
        self.settings = settings
        self._metrics = metrics
        self._rates = Rates()
        self._wake: Callable[[], None] = lambda: None
        self._awaits_lease: Callable[[int], bool] = lambda session: False
        self._writer = Writer()
        self._spares = Spares()
        self._budget = ExportBudget(settings.worth_seconds)
        artifacts = park.Parks(directory / "park", settings.park_budget, files)
        self.parks = Parks(artifacts, self._writer)
        self._parking = settings.park is not ParkMode.NEVER
        self._tier = DiskTier(directory / "cache", settings.disk_budget or NO_BOUND, files)
        self.disk = self._tier if settings.disk_budget else None  # what is there is known also while it is off
        self.disk_scanned = trio.Event()
        self._loads: dict[Ticket, Choice] = {}
        self._nursery: trio.Nursery | None = None
        self._readers = trio.CapacityLimiter(READERS)

    def attach(
        self, rates: Rates, wake: Callable[[], None], awaits_lease: Callable[[int], bool] = lambda session: False
    ) -> None:
        """Serve a scheduler: `rates` are what it has learned, `wake` is called when a job that waited can go on.

        `awaits_lease`: whether a session is pinned and needs its state published, which lossy parks are not.
        """
        self._rates = rates
        self._wake = wake
        self._awaits_lease = awaits_lease

    @classmethod
    def open(
        cls, directory: Path, settings: KeepSettings, metrics: ModelMetrics, files: Files | None = None
    ) -> "Keeper":
        """Read what parks there are. Blocks."""
        keeper = cls(directory, settings, metrics, files)
        try:
            keeper.parks.artifacts.remove_unfinished()
            if keeper._parking:
                keeper.parks.open()
            elif left := keeper.parks.artifacts.sessions():
                log.warning("%s: %d parked sessions are left alone: parking is off", directory / "park", len(left))
        except OSError as error:
            log.warning("parked sessions start cold: %s", error)
        return keeper

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write and read files until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._writer.run, name="state-writer")
            nursery.start_soon(self.parks.run, name="parks")
            nursery.start_soon(self._scan, name="disk-tier")
            nursery.start_soon(self._expire_spares, name="spare-memory")
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None
                self.parks.close()
                self._spares.close()

    async def _expire_spares(self) -> None:
        while True:
            await trio.sleep(SPARE_SECONDS / 2)
            self._spares.expire(trio.current_time() - SPARE_SECONDS)

    async def flush(self) -> None:
        """Write everything that waits for its session to be idle; returns when nothing is left to write."""
        await self.parks.flush()
        await self._writer.wait_idle()

    async def _scan(self) -> None:
        try:
            found = await trio.to_thread.run_sync(self._tier.scan, limiter=self._readers)
        except OSError as error:
            log.warning("what the prefix cache had on disk is not used: %s", error)
            found = []
        except Exception:
            log.exception("what the prefix cache had on disk is not used")
            found = []
        for file in found:
            self._delete(self._tier, self._tier.add(file))
        self.disk_scanned.set()

    def _delete(self, disk: DiskTier, files: list[CacheFile]) -> None:
        for file in files:
            self._writer.add(f"{file.path} is not deleted", partial(disk.delete, file.path))

    def tier(self, session: int) -> tuple[int, int] | None:
        """(covered tokens, encoding) of a parked session."""
        return self.parks.tier(session) if self._parking else None

    async def erase(self, ids: Ids, kin: Iterable[Ids]) -> None:
        """Before a session is purged: delete the files of the disk tier that hold nothing but a beginning of its
        stream `ids`, and of no stream of `kin` (looked at only when there are such files).

        None of its generations may run. Raises OSError; nothing that still has a file is forgotten then.
        """
        await self.disk_scanned.wait()
        await self._writer.caught_up()  # with its last generation's file
        going = self._tier.within(ids)
        if not going:
            return
        shared = max((common_prefix(ids, other) for other in kin), default=0)
        going = [file for file in going if file.covered > shared]
        await trio.to_thread.run_sync(self._tier.erase, going, limiter=self._readers)
        for file in going:
            self._tier.forget(file)

    def purged(self, session: int) -> None:
        """A session is no more."""
        self.parks.remove(session)
        if not self._parking:  # what it left with parking on was not read
            self._writer.add(f"removing the park of session {session}", partial(self.parks.artifacts.remove, session))

    # ---- lanes that finish

    async def before_retire(self, worker: Worker, lanes: Iterable[Lane]) -> None:
        """Take copies of the lanes that the next plan retires. Raises WorkerGone."""
        for lane in lanes:
            if lane.finishing and not lane.kept and not lane.new:
                lane.kept = True
                fate = self._fate(worker, lane)
                if fate is not Fate.NOTHING:
                    await self._keep(worker, lane, fate)

    def _fate(self, worker: Worker, lane: Lane) -> Fate:
        ticket, job = lane.ticket, lane.ticket.job
        if job.raw or job.session is None or job.batch_invariant or lane.media:
            return Fate.NOTHING
        if lane.fault is not None or lane.code is not None or ticket.failure is not None:
            return Fate.NOTHING
        always = self.settings.park is ParkMode.ALWAYS
        if self._parking and (job.native or (always and lane.preempted)):
            lossy_draw = self.settings.lossy and lane.preempted and job.seed_chosen
            if not worker.record.park_lossless or lossy_draw:
                return Fate.NOTHING
            if worker.spaces.unservable:
                self._metrics.unservable_park_refusals_total += 1
                return Fate.NOTHING
            return Fate.PARKED_AT_ONCE if always else Fate.PARKED
        return Fate.ON_DISK if self.disk is not None and serves_disk(worker) else Fate.NOTHING

    async def _keep(self, worker: Worker, lane: Lane, fate: Fate) -> None:
        ticket = lane.ticket
        tokens = min(lane.prefilled, ticket.stream_len - 1) if lane.prefill_left else ticket.stream_len - 1
        if tokens < worker.spaces.page:
            return
        started = trio.current_time()
        budgeted = fate is not Fate.PARKED_AT_ONCE
        if budgeted:
            worth = self._budget.worth(tokens, self._rates)
            if not (lane.restored is not None if worth is None else worth):  # what was kept before was worth it
                return
        ids = ids_of(ticket)
        disk = self.disk if fate is Fate.ON_DISK else None
        if disk is not None and disk.covers(ids[:tokens], whole=not worker.record.rollback):
            return
        if budgeted:
            behind = disk is not None and not self._writer.has_room
            if behind or not self._budget.affords(tokens, started):
                self._metrics.exports_skipped_total += 1
                return
        lossy = self.settings.lossy and worker.record.park_lossy and disk is None and not self._is_awaited(ticket)
        try:
            saved = await export(worker, lane, ids, self._spares, lossy=lossy)
            if saved is None:
                return
            if disk is not None:
                self._write(disk, saved, ticket)
            else:
                self._park(lane, saved, at_once=fate is Fate.PARKED_AT_ONCE, lossy=lossy)
            self._budget.measure(saved.covered, saved.size, trio.current_time() - started)
        except (EngineRefused, LinkFault) as error:
            log.warning("the state of lane %d is not kept: %s", lane.tag, error)
        finally:
            if budgeted:  # all the time the lanes were held, whatever came of it
                now = trio.current_time()
                self._budget.charge(now - started, now)

    def _park(self, lane: Lane, saved: SavedState, *, at_once: bool, lossy: bool) -> None:
        session = lane.ticket.job.session
        assert session is not None
        if self.parks.keep(session, saved, at_once=at_once):
            self._metrics.parks_total["lossy" if lossy else "lossless"] += 1
            lane.ticket.parked = True
            lane.publish = not lossy

    def _is_awaited(self, ticket: Ticket) -> bool:
        return ticket.job.session is not None and self._awaits_lease(ticket.job.session)

    def _write(self, disk: DiskTier, saved: SavedState, ticket: Ticket) -> None:
        file = disk.plan(saved)
        if file.size > disk.budget:
            saved.discard()
            return

        def done(ok: bool) -> None:
            saved.discard()
            if ok and ticket.failure is not None:  # the log does not have all of its tokens: a purge would not find it
                self._delete(disk, [file])
            elif ok:
                self._delete(disk, disk.add(file))

        self._writer.add(f"{file.path} is not written", partial(disk.write, file, saved), done)

    # ---- jobs that start

    def loading(self, ticket: Ticket) -> bool:
        """Whether a job waits for a file to be read."""
        load = self._loads.get(ticket)
        return load is not None and not load.loaded

    async def warm(self, worker: Worker, ticket: Ticket, offer: int) -> Restored | None:
        """Bring the kept state a job starts best from into the engine, when it is better than the `offer` tokens that
        the engine's cache has; none when there is none.

        Raises NotYet while a file is read, WorkerGone.
        """
        if ticket.given_up or worker.spaces.unservable:
            return None
        ids = ids_of(ticket)
        while True:
            choice = self._loads.pop(ticket, None) or self._choose(worker, ticket, ids, offer)
            if choice is None:
                return None
            if not choice.loaded and choice.saved is None:
                if self._nursery is None:
                    return None
                self._loads[ticket] = choice
                self._nursery.start_soon(self._load, worker, ticket, choice, ids, name="state-reader")
                raise NotYet
            if choice.saved is None:
                continue  # the file was no good, and is forgotten
            try:
                if choice.usable <= offer:
                    return None
                return await self._restore(worker, ticket, choice)
            finally:
                if choice.loaded:
                    choice.saved.discard()

    def _choose(self, worker: Worker, ticket: Ticket, ids: Ids, offer: int) -> Choice | None:
        cap = min(len(ids) - 1, len(ids) - len(ticket.produced))
        cap -= cap % worker.spaces.page
        best = self._parked(worker, ticket, ids, cap)
        if best is not None and best.usable <= offer:
            best = None
        if self.disk is None or not serves_disk(worker):
            return best
        common, file = self.disk.longest(ids, whole=not worker.record.rollback)
        if file is None or file.covered > worker.link.window:
            return best
        usable = self._cut(worker, common, cap)
        gain = usable - (offer if best is None else best.usable)
        worth = self._budget.worth(gain, self._rates)
        if gain > 0 and (2 * gain > file.covered if worth is None else worth):  # all of a file was worth it once
            return Choice(Source.DISK, file, usable)
        return best

    def _parked(self, worker: Worker, ticket: Ticket, ids: Ids, cap: int) -> Choice | None:
        session = ticket.job.session
        found = self.parks.find(session) if self._parking and session is not None else None
        spaces = worker.spaces.streams
        if session is None or found is None or found.covered > len(ids) or not holds(found, spaces):
            return None
        if len(spaces) > 1:
            usable = found.covered if found.covered < len(ids) else 0
        else:
            whole_pages = found.covered % worker.spaces.page == 0
            usable = self._cut(worker, found.covered, cap) if whole_pages else 0
        if not usable:
            return None
        if isinstance(found, Head):
            return Choice(Source.PARK, found, usable) if found.fits(ids) else None
        same = np.array_equal(found.ids, ids[: found.covered])
        return Choice(Source.PARK, found, usable, found) if same else None

    def _cut(self, worker: Worker, held: int, cap: int) -> int:
        """Tokens of a state of one space that a stream can use."""
        if not worker.record.rollback:
            return held if held <= cap else 0
        usable = min(held, cap)
        return usable - usable % worker.spaces.page

    async def _load(self, worker: Worker, ticket: Ticket, choice: Choice, ids: Ids) -> None:
        """Read a choice's file in a thread."""
        origin = choice.origin
        saved: SavedState | None = None
        session = ticket.job.session
        try:
            if isinstance(origin, CacheFile) and self.disk is not None:
                self.disk.use(origin)
                read = self.disk.read
                saved = await trio.to_thread.run_sync(read, origin, worker.spaces.streams[0], limiter=self._readers)
            elif isinstance(origin, Head) and session is not None:
                saved = await trio.to_thread.run_sync(self.parks.read, session, origin, ids, limiter=self._readers)
        except (OSError, EOFError, NotACacheFile) as error:
            log.warning("a kept state is not read: %s", str(error))
            self._useless(ticket, choice)
        except Exception:  # a job starts cold rather than the server ends
            log.exception("a kept state is not read")
            self._useless(ticket, choice)
        if self._loads.get(ticket) is not choice:  # the job is over
            if saved is not None:
                saved.discard()
            return
        choice.saved = saved
        choice.loaded = True
        self._wake()

    async def _restore(self, worker: Worker, ticket: Ticket, choice: Choice) -> Restored | None:
        saved = choice.saved
        assert saved is not None
        wanted = {space.space_id for space in worker.spaces.streams}
        parts = tuple(space for space in saved.spaces if space.space_id in wanted)
        try:
            with saved:
                sequence = await restore(worker, parts)
            if len(worker.spaces.streams) > 1:
                return Restored(choice.source, await adopt(worker, sequence, saved.ids), saved.covered)
            await publish(worker, sequence, saved.ids)
            return Restored(choice.source)
        except EngineRefused as refusal:
            log.warning("a kept state of %d tokens is not used (%s)", saved.covered, status_name(refusal.status))
            if refusal.status in UNREADABLE:
                self._useless(ticket, choice)
        except LinkFault as fault:
            log.warning("a kept state of %d tokens is not used: %s", saved.covered, fault)
        ticket.given_up = True
        return None

    def _useless(self, ticket: Ticket, choice: Choice) -> None:
        origin = choice.origin
        if isinstance(origin, CacheFile):
            if self.disk is not None:
                self.disk.forget(origin)
                self._delete(self.disk, [origin])
        elif ticket.job.session is not None:
            self.parks.useless(ticket.job.session, origin)

    # ---- generations that begin and end

    def began(self, ticket: Ticket) -> None:
        if ticket.job.session is not None:
            self.parks.resumed(ticket.job.session)

    def ended(self, ticket: Ticket) -> None:
        """A generation is over."""
        load = self._loads.pop(ticket, None)
        if load is not None and load.loaded and load.saved is not None:
            load.saved.discard()
        session = ticket.job.session
        if session is None:
            return
        if ticket.parked and not ticket.job.native:
            self.parks.remove(session)
        else:
            self.parks.ended(session)


def ids_of(ticket: Ticket) -> Ids:
    """A ticket's whole stream."""
    return np.array(ticket.stream(), np.uint32) if ticket.produced else ticket.ids


def serves_disk(worker: Worker) -> bool:
    """Whether an engine's states can be kept in the disk tier: one paged space, exported losslessly."""
    spaces = worker.spaces.streams
    return (
        len(spaces) == 1
        and spaces[0].kind == SpaceKind.PAGED_KV
        and not worker.spaces.unservable
        and worker.spaces.cached
        and worker.record.park_lossless
    )
