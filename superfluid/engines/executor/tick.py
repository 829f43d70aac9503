"""One tick, top to bottom: validate the whole plan, make room, retire, commit, admit, prefill, decode, report."""

from time import perf_counter_ns

import numpy as np

from superfluid.engines.engine import AdmitStatus, FaultCode, OnEmit, PlanFlag, Sampling, TickStatus
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.decode import Decode
from superfluid.engines.executor.lanes import Lane
from superfluid.engines.executor.leases import Lease
from superfluid.engines.executor.outcome import Outcome
from superfluid.engines.executor.picks import Emits, Picker
from superfluid.engines.executor.prefill import Prefill
from superfluid.engines.executor.sequences import Sequence, dying
from superfluid.engines.executor.speculate import CERT_ID, DISTRIBUTION_EXACT, Drafter
from superfluid.engines.executor.validate import Work, validate
from superfluid.engines.primitives import CapacityError, FatalError, PrimitiveError
from superfluid.link import linkw
from superfluid.shm.ring import RingError

PLAIN_CLASS = 2  # of a lane admitted without speculation
PENALTY_WINDOW = 64


def run_tick(core: Core, plan: linkw.TickPlan, on_emit: OnEmit | None) -> linkw.TickEvents:
    """Raises EngineError -100 to -114 when the plan is refused, EngineFatal when the runtime broke."""
    began = perf_counter_ns()
    with dying():
        work = validate(core, plan)
        core.plan_seq = plan.plan_seq
        tick = Tick(core, plan, work, on_emit)
        tick.run()
        events = tick.events()
    core.tick_over()
    events.timings.wall_ns = perf_counter_ns() - began
    return events


class Tick:
    """An accepted plan being carried out."""

    def __init__(self, core: Core, plan: linkw.TickPlan, work: Work, on_emit: OnEmit | None) -> None:
        self._core = core
        self._plan = plan
        self._work = work
        self._on_emit = on_emit if plan.flags & PlanFlag.PARTIAL_EMITS else None
        self._outcome = Outcome(
            core,
            {lane.tag: grant for lane, grant in work.decodes},
            {decode.lane_tag: decode.overshoot for decode in plan.decodes},
        )
        self._outcome.produced = {lane.tag: [] for lane, _ in work.decodes}
        self._admitted: list[linkw.AdmitResult] = []
        self._timings = linkw.TickTimings()

    def run(self) -> None:
        work, outcome = self._work, self._outcome
        self._make_room()
        self._retire()
        self._settle()
        for lane, token in work.commits:
            self._commit(lane, token)
        taken = self._take_over(work.room.takeovers)
        for lane in work.admits:
            self._admit(lane, taken.get(lane.tag))
        self._inject_faults()
        picker = Picker(self._core, outcome)
        began = perf_counter_ns()
        Prefill(self._core, outcome, picker, self._emit).run(work.chunks, work.decodes, work.room)
        prefilled = perf_counter_ns()
        Decode(self._core, outcome, picker, self._emit, work.room).run([lane for lane, _ in work.decodes])
        self._timings.prefill_ns = prefilled - began
        self._timings.decode_ns = perf_counter_ns() - prefilled

    def events(self) -> linkw.TickEvents:
        """The result; the tokens go out through the ring."""
        core, outcome = self._core, self._outcome
        emits = [emit for lane, _ in self._work.decodes if lane.alive and (emit := self._result(lane)) is not None]
        logprobs = [
            linkw.LaneLogprob(emit.lane_tag, _bits([record.logprob])[0], record.ids, _bits(record.logprobs))
            for emit in emits
            for record in outcome.records.get(emit.lane_tag, ())
        ]
        shed = outcome.shed
        status = TickStatus.OK
        if outcome.faults:
            status = TickStatus.LANE_ERRORS
        elif shed.prefill_chunks_dropped or shed.evictions_performed:
            status = TickStatus.SHED
        completions, core.completions = core.completions, []
        return linkw.TickEvents(
            self._plan.plan_seq,
            status,
            self._admitted,
            emits,
            outcome.faults,
            shed,
            completions,
            self._timings,
            core.counters(),
            logprobs,
        )

    # ---- the order of work

    def _make_room(self) -> None:
        cache = self._core.cache
        for entry in self._work.room.leaving:
            n_bytes = cache.bytes([entry])
            if cache.leave(entry):
                self._outcome.evicted(entry, n_bytes)

    def _retire(self) -> None:
        """Let lanes go: those that publish nothing first, so that the others' held-back tokens find their cells."""
        core = self._core
        published: list[Lane] = []
        for tag, lane, publish in self._work.retires:
            if lane is None:
                core.faulted.discard(tag)
                continue
            core.end_lane(lane)
            if publish:
                published.append(lane)
            else:
                core.sequences.free(lane.sequence)
        held = [lane for lane in published if lane.held]
        broken: set[int] = set()
        for start in range(0, len(held), core.max_batch):
            broken |= self._ingest_held(held[start : start + core.max_batch])
        for lane in published:
            if lane.tag in broken or not self._publish(lane):
                core.sequences.free(lane.sequence)

    def _ingest_held(self, lanes: list[Lane]) -> set[int]:
        """Feed held-back tokens in one step, so that they are cached too; the tags whose state is not to be trusted
        after it: when it failed, all of them."""
        try:
            self._core.primitives.step([lane.next_feed(False) for lane in lanes])
        except CapacityError:  # nothing was fed: some may fit, the rest is cached without its last token
            if len(lanes) == 1:
                return set()
            return set[int]().union(*(self._ingest_held([lane]) for lane in lanes))
        except FatalError:
            raise
        except PrimitiveError:
            return {lane.tag for lane in lanes}
        for lane in lanes:
            lane.ingested += 1
        return set()

    def _publish(self, lane: Lane) -> bool:
        """Move a lane's state into the cache, cut to whole pages; false when there is nothing to keep."""
        core = self._core
        n = lane.ingested if core.head_only else core.cache.round(lane.ingested)
        if not n:
            return False
        if n < lane.ingested:
            try:
                core.primitives.seq_truncate(lane.sequence.seq, n)
            except FatalError:
                raise
            except PrimitiveError:
                return False
        sequence = lane.sequence
        seq = core.sequences.unwrap(sequence)
        core.cache.publish(seq, lane.stream[:n], min(lane.prompt_len, n), sequence.taint, sequence.shared_fork)
        return True

    def _settle(self) -> None:
        for entry, n_bytes in self._core.cache.settle():
            self._outcome.evicted(entry, n_bytes)

    def _commit(self, lane: Lane, token: int) -> None:
        lane.append(token)
        lane.draws.commit(token)
        lane.nonce = 0
        lane.row = None

    def _take_over(self, lanes: list[Lane]) -> dict[int, Sequence]:
        """Entries become their lanes' sequences, by tag."""
        core = self._core
        taken: dict[int, Sequence] = {}
        for lane in lanes:
            lease = lane.lease
            assert lease is not None and lease.entry is not None
            entry, keep = lease.entry, lane.ingested
            core.leases.end(lease)
            n_bytes = core.cache.bytes([entry])
            sequence = core.sequences.wrap(core.cache.take_over(entry), entry.taint)
            self._outcome.evicted(entry, n_bytes, lane.tag)
            self._cut(lane, sequence, entry.length, keep)
            taken[lane.tag] = sequence
        return taken

    def _admit(self, lane: Lane, sequence: Sequence | None) -> None:
        core, admit = self._core, lane.admit
        core.lanes[lane.tag] = lane
        core.faulted.discard(lane.tag)
        if lane.grammar is not None:
            lane.grammar.in_use = True
        lane.drafter = self._drafter(lane)
        cert, exactness = (0, PLAIN_CLASS) if lane.drafter is None else (CERT_ID, DISTRIBUTION_EXACT)
        self._admitted.append(linkw.AdmitResult(lane.tag, AdmitStatus.ADMITTED, 0, cert, exactness))
        try:
            lane.start(sequence or self._seeded(lane))
        except FatalError:
            raise
        except PrimitiveError as error:
            self._outcome.fault(lane, error.fault)
            return
        bias = core.biases.get(admit.logit_bias_handle)
        sampling = Sampling.SAMPLED if lane.host else admit.sampling
        window = lane.stream[max(0, lane.prompt_len - PENALTY_WINDOW) : lane.prompt_len]
        lane.draws = core.sampler.lane(admit.params, sampling, admit.rng_counter_base, window, lane.want_logprobs, bias)

    def _drafter(self, lane: Lane) -> Drafter | None:
        """For a lane that asks to be drafted for and can be."""
        admit, speculation = lane.admit, self._core.speculation
        if speculation is None or not admit.strategy_slot or lane.host or lane.grammar is not None:
            return None
        if admit.logit_bias_handle or lane.want_logprobs or admit.minimum_exactness > DISTRIBUTION_EXACT:
            return None
        return speculation.drafter()

    def _seeded(self, lane: Lane) -> Sequence:
        """A sequence with the state that the lane's seed brings, if it has one."""
        core, lease = self._core, lane.lease
        if lease is None:
            return core.sequences.create()
        core.leases.end(lease)
        if lease.sequence is not None:
            self._cut(lane, lease.sequence, len(lease.tokens), lane.ingested)
            return lease.sequence
        assert lease.entry is not None
        sequence = core.sequences.create()
        sequence.taint = lease.taint
        if lease.entry.resident:
            self._copy(lane, sequence, lease)
        else:
            self._import(lane, sequence, lease)
        core.cache.used(lease.entry, len(lease.tokens))
        return sequence

    def _copy(self, lane: Lane, sequence: Sequence, lease: Lease) -> None:
        assert lease.entry is not None and lease.entry.seq is not None
        try:
            self._core.primitives.seq_copy(lease.entry.seq, sequence.seq, lane.ingested)
        except FatalError:
            raise
        except PrimitiveError:
            self._feed_again(lane, sequence)

    def _import(self, lane: Lane, sequence: Sequence, lease: Lease) -> None:
        """Bring an export back; when that fails its entry is dropped, and the lane feeds the tokens itself."""
        entry = lease.entry
        assert entry is not None and entry.payload is not None
        try:
            length = self._core.primitives.seq_import(sequence.seq, memoryview(entry.payload))
        except FatalError:
            raise
        except PrimitiveError:
            length = -1
        if length == entry.length:
            self._cut(lane, sequence, length, lane.ingested)
            return
        self._feed_again(lane, sequence)
        if not entry.pins:
            self._core.cache.drop(entry)
        self._outcome.evicted(entry, 0, lane.tag)

    def _cut(self, lane: Lane, sequence: Sequence, length: int, keep: int) -> None:
        """Cut state down to what the lane keeps of it."""
        if keep < length:
            try:
                self._core.primitives.seq_truncate(sequence.seq, keep)
            except FatalError:
                raise
            except PrimitiveError:
                self._feed_again(lane, sequence)

    def _feed_again(self, lane: Lane, sequence: Sequence) -> None:
        """The seed's state is not to be had: the lane owes its tokens."""
        self._core.primitives.seq_truncate(sequence.seq, 0)
        sequence.taint = 0
        lane.ingested = 0

    def _inject_faults(self) -> None:
        for lane, grant in self._work.decodes:
            if grant and lane.alive and lane.tag in self._core.injected:
                self._outcome.fault(lane, self._core.injected.pop(lane.tag))

    def _emit(self, emits: Emits) -> None:
        if self._on_emit is not None and emits:
            self._on_emit(emits)

    def _result(self, lane: Lane) -> linkw.LaneEmit | None:
        """A lane's emit; none when the ring cannot hold it, which stops the lane."""
        outcome, ring = self._outcome, self._core.outbound
        tokens = outcome.produced[lane.tag]
        try:
            if ring is None:
                raise RingError("no outbound ring attached")
            ref = ring.push_tokens(tokens)
        except RingError:
            outcome.fault(lane, FaultCode.BOUNDS)
            return None
        row = lane.row if lane.nonce and lane.row is not None else linkw.RingRef()
        spec = outcome.spec.get(lane.tag) or linkw.SpecStats(0, 0, 0 if lane.drafter is None else CERT_ID)
        return linkw.LaneEmit(lane.tag, ref, len(tokens), int(lane.finish), row, spec)


def _bits(values: list[float]) -> list[int]:
    found: list[int] = np.asarray(values, np.float32).view(np.uint32).tolist()
    return found
