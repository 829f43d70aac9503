"""What a tick has brought so far."""

import attrs

from superfluid.engines.engine import SHED_EVICTION, SHED_PREFILL
from superfluid.engines.executor.cache import Entry
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Lane
from superfluid.engines.executor.sampling import Record
from superfluid.engines.primitives import PrimitiveError
from superfluid.link import linkw


@attrs.define
class Outcome:
    """Collected for the events. `left` is what remains of each decoding lane's grant, `produced` its tokens."""

    core: Core
    left: dict[int, int]
    overshoot: dict[int, int]  # tokens a verified draft may bring beyond the grant
    produced: dict[int, list[int]] = attrs.Factory(dict)
    records: dict[int, list[Record]] = attrs.Factory(dict)
    spec: dict[int, linkw.SpecStats] = attrs.Factory(dict)
    faults: list[linkw.LaneFault] = attrs.Factory(list)
    shed: linkw.ShedReport = attrs.Factory(linkw.ShedReport)
    cut: set[int] = attrs.Factory(set)  # lanes whose prompt the yield word cut

    def fault(self, lane: Lane, code: int) -> None:
        """Stop a lane: its sequence is freed at once, its tag may be retired once."""
        core = self.core
        core.end_lane(lane)
        core.faulted.add(lane.tag)
        if lane.started:
            core.sequences.free(lane.sequence)
        self.faults.append(linkw.LaneFault(lane.tag, code))

    def fail(self, lanes: list[Lane], error: PrimitiveError) -> None:
        """A step failed: it stops its own lanes and no other."""
        for lane in lanes:
            self.fault(lane, error.fault)

    def evicted(self, entry: Entry, n_bytes: int, tag: int = 0) -> None:
        self.shed.evictions_performed += 1
        self.shed.bytes_evicted += n_bytes
        self.shed.entries.append(linkw.ShedEntry(tag, SHED_EVICTION, bytes=n_bytes, tokens=entry.length))

    def dropped(self, lane: Lane, tokens: int) -> None:
        """What is left of a lane's prefill."""
        self.shed.prefill_chunks_dropped += 1
        self.shed.entries.append(linkw.ShedEntry(lane.tag, SHED_PREFILL, tokens=tokens))
