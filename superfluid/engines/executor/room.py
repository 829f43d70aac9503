"""Whether a plan fits: cells and slots it needs, what would have to leave for them. Nothing moves here."""

import attrs

from superfluid.engines.engine import CacheClass, EngineError, Status
from superfluid.engines.executor.cache import Entry
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Chunk, Lane
from superfluid.link import linkw


@attrs.define
class Room:
    """What leaves the pool for a plan, which seeds take their entries over, and what is left to spare (none: no
    bound)."""

    leaving: list[Entry] = attrs.Factory(list)
    takeovers: list[Lane] = attrs.Factory(list)
    spare_cells: int | None = None
    spare_slots: int | None = None

    def take(self, cells: int) -> bool:
        """Claim a slot and so many cells that no lane of the plan was promised."""
        if (self.spare_cells is not None and self.spare_cells < cells) or self.spare_slots == 0:
            return False
        if self.spare_cells is not None:
            self.spare_cells -= cells
        if self.spare_slots is not None:
            self.spare_slots -= 1
        return True


def plan_room(
    core: Core,
    policy: linkw.ShedPolicy,
    admits: list[Lane],
    chunks: list[Chunk],
    decodes: list[tuple[Lane, int]],
    retires: list[tuple[int, Lane | None, bool]],
    committed: set[int],
) -> Room:
    """Raises EngineError -113 when the plan does not fit whatever its shed policy allows."""
    ledger = _Ledger(core, admits, retires)
    ledger.step_cells = _step_cells(core, chunks, decodes, committed)
    ledger.publish_cells = sum(1 for _, lane, publish in retires if publish and lane is not None and lane.held)
    for lane in admits:
        if core.description.takeover_preferred and _preferred(core, lane):
            ledger.take_over(lane)
    if ledger.short() and policy.evictable_cache_classes & CacheClass.RESIDENT:
        limit = core.cache.evictable(policy)
        for entry in core.cache.eviction_order():
            if core.cache.bytes([*ledger.leaving, entry]) <= limit:
                ledger.leaving.append(entry)
                if not ledger.short():
                    break
    if ledger.short():
        for lane in admits:
            if lane not in ledger.takeovers and _can_take_over(core, lane):
                ledger.take_over(lane)
                if not ledger.short():
                    break
    if ledger.short():
        cells, slots = ledger.spare()
        raise EngineError(
            Status.NeedsReplan,
            "the plan does not fit: "
            + " and ".join(
                f"{-spare} {what} are missing"
                for spare, what in ((cells, "cells"), (slots, "sequences"))
                if spare and spare < 0
            ),
        )
    cells, slots = ledger.spare()
    return Room(ledger.leaving, ledger.takeovers, cells, slots)


class _Ledger:
    """Cells and slots, needed and free, as the plan would have it."""

    def __init__(self, core: Core, admits: list[Lane], retires: list[tuple[int, Lane | None, bool]]) -> None:
        self._core = core
        self._admits = admits
        self._freed = [lane.sequence.seq for _, lane, publish in retires if lane is not None and not publish]
        counters = core.primitives.mem_counters() if core.description.cells_total else None
        self._free_cells = core.description.cells_total - counters.cells_used if counters is not None else None
        self.step_cells = self.publish_cells = 0
        self.leaving: list[Entry] = []
        self.takeovers: list[Lane] = []

    def take_over(self, lane: Lane) -> None:
        self.takeovers.append(lane)

    def short(self) -> bool:
        return any(spare is not None and spare < 0 for spare in self.spare())

    def spare(self) -> tuple[int | None, int | None]:
        """Cells and slots left over when all is done; negative: missing; none: no bound."""
        copies = excess = cut = slots = 0
        shares = self._core.description.copy_shares_cells
        for lane in self._admits:
            lease = lane.lease
            if lease is None:
                slots += 1
            elif lease.entry is not None:
                entry, keep = lease.entry, lease.keep(lane.prompt_len)
                if lane in self.takeovers:
                    cut += entry.length - keep
                    continue
                slots += 1
                if not entry.resident:
                    copies += keep
                    excess = max(excess, entry.length - keep)
                elif not shares:
                    copies += keep
        gone = self._freed + [entry.seq for entry in self.leaving if entry.seq is not None]
        spare_cells = None
        if self._free_cells is not None:
            released = self._core.primitives.cells_released(gone) if gone else 0
            spare_cells = (
                self._free_cells + released - (max(self.step_cells, excess) + copies + self.publish_cells - cut)
            )
        sequences = self._core.sequences
        spare_slots = sequences.max_seqs - sequences.live + len(gone) - slots if sequences.max_seqs else None
        return spare_cells, spare_slots


def _step_cells(core: Core, chunks: list[Chunk], decodes: list[tuple[Lane, int]], committed: set[int]) -> int:
    """Cells of the tick's prefill and decode, tokens of lost seeds included."""
    coming = {chunk.lane.tag: chunk.count for chunk in chunks}
    cells = sum(coming.values())
    for lane, grant in decodes:
        position = lane.position + coming.get(lane.tag, 0) + (lane.tag in committed)
        cells += min(grant, core.max_seq_len - position)
    touched = {chunk.lane.tag: chunk.lane for chunk in chunks} | {lane.tag: lane for lane, _ in decodes}
    return cells + sum(lane.owed for lane in touched.values())


def _can_take_over(core: Core, lane: Lane) -> bool:
    """Whether the entry of a lane's seed may become its sequence."""
    lease = lane.lease
    if lease is None or lease.entry is None or core.description.copy_shares_cells:
        return False
    entry = lease.entry
    if entry.pins > 1 or not entry.resident or entry.shared:
        return False
    return not core.head_only or (entry.lanes == 0 and lease.keep(lane.prompt_len) == entry.length)


def _preferred(core: Core, lane: Lane) -> bool:
    """Whether a seed goes on where its entry ended rather than branching off it."""
    if not _can_take_over(core, lane):
        return False
    lease = lane.lease
    assert lease is not None and lease.entry is not None
    keep, entry = lease.keep(lane.prompt_len), lease.entry
    return keep >= core.cache.round(entry.prompt_len) and entry.length - keep <= keep
