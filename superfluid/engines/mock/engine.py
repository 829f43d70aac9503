"""MockEngine: a full engine with no model, deterministic, for tests and for `superfluid-workerd --engine mock`."""

import time
from array import array
from collections.abc import Sequence as Ids

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.engines.engine import Engine, EngineError, EngineFatal, OnEmit, OnSegment, OpStatus, TokenArray
from superfluid.engines.mock import workloads
from superfluid.engines.mock.cache import Entry, PrefixCache
from superfluid.engines.mock.config import N_LAYERS, Knobs, MockConfig
from superfluid.engines.mock.constraints import Constraints
from superfluid.engines.mock.lanes import Lane
from superfluid.engines.mock.operations import Operations
from superfluid.engines.mock.plan import Accepted, Admission, Chunk, Judge
from superfluid.engines.mock.state import DECODE, PREFILL, SEED, Sequence, SequenceTable, advance
from superfluid.engines.mock.strategies import NO_CERTIFICATE_CLASS, Strategies
from superfluid.link import linkw
from superfluid.link.codes import (
    FORK_PRIVATE,
    SHED_EVICTION,
    SHED_PREFILL,
    AdmitStatus,
    FaultCode,
    PlanFlag,
    Status,
    TickStatus,
)
from superfluid.shm.control import Control
from superfluid.shm.ring import OutOfBounds, PayloadTooLong, Ring, StaleReference

PREFILL_NS = 1563  # a prompt token
ROUND_NS = 2344  # a decode round


@attrs.define(eq=False)
class _Grant:
    """A decode under way."""

    lane: Lane
    left: int
    tokens: list[int] = attrs.Factory(list)
    row: linkw.RingRef = attrs.Factory(linkw.RingRef)
    spec: linkw.SpecStats = attrs.Factory(linkw.SpecStats)
    fault: int | None = None


class MockEngine(Engine):
    """Answers every operation of the interface; `knobs` may be turned between ticks."""

    def __init__(self, config: MockConfig | None = None, knobs: Knobs | None = None) -> None:
        self.config = config or MockConfig()
        self.knobs = knobs or Knobs()
        self.ticks = 0  # accepted plans
        self._rings: dict[int, Ring] = {}
        self._control: Control | None = None
        self._last_seq = 0
        self._lanes: dict[int, Lane] = {}
        self._faulted: set[int] = set()
        self._sequences = SequenceTable(self.config)
        self._cache = PrefixCache(self.config)
        self._constraints = Constraints()
        self._strategies = Strategies(self.config)
        self._operations = Operations(self.config, self._sequences)
        self._operations.room = self._require_room
        self._media = workloads.Media(self.config.image_token)
        self._judge = Judge(
            self.config,
            self._lanes,
            self._faulted,
            self._cache,
            self._constraints,
            self._strategies,
            self._read_prompt,
            self._free_bytes,
            self._sequences.bytes_of,
        )
        self._steps = 0  # of this tick

    # ---- test hooks

    def lane_tokens(self, lane_tag: int) -> list[int]:
        """The committed tokens of a lane."""
        return list(self._lanes[lane_tag].sequence.tokens)

    def inject_fault(self, lane_tag: int, code: int = FaultCode.INTERNAL) -> None:
        """Fault the lane's next decode."""
        self.knobs.faults[lane_tag] = code

    # ---- rings

    def attach_ring(self, ring: Ring) -> None:
        self._rings[ring.spec.ring_id] = ring

    def attach_control(self, control: Control) -> None:
        self._control = control

    # ---- the tick

    def tick(self, plan: linkw.TickPlan, on_emit: OnEmit | None = None) -> linkw.TickEvents:
        self._cache.sweep(self.ticks)
        accepted = self._judge.judge(plan, self._last_seq, self.knobs.refuse_admit)
        self._last_seq = plan.plan_seq
        self.ticks += 1
        self._steps = 0
        if self.knobs.die_after is not None and self.ticks > self.knobs.die_after:
            raise EngineFatal(f"the mock was told to break after {self.knobs.die_after} ticks")
        events = linkw.TickEvents(plan.plan_seq)
        if self.knobs.delay:
            time.sleep(self.knobs.delay)
        self._evict(accepted.victims, events.shed)
        for retire in plan.retires:
            self._retire(retire)
        for commit in plan.commits:
            lane = self._lanes[commit.lane_tag]
            lane.take(commit.token_id)
            lane.nonce = 0
            lane.sequence.settle(DECODE)
        events.admit_results = [self._admit(admission) for admission in accepted.admissions]
        prefilled = self._prefill(accepted.chunks, events)
        rounds = self._decode(accepted, events, on_emit if plan.flags & PlanFlag.PARTIAL_EMITS else None)
        events.op_completions = self._operations.take_completions()
        if events.faults:
            events.tick_status = TickStatus.LANE_ERRORS
        elif events.shed.prefill_chunks_dropped or events.shed.evictions_performed:
            events.tick_status = TickStatus.SHED
        prefill_ns, decode_ns = PREFILL_NS * prefilled, ROUND_NS * rounds
        events.timings = linkw.TickTimings(
            prefill_ns + decode_ns, prefill_ns, decode_ns, graph_hits=len(accepted.decodes)
        )
        events.mem = self._mem()
        return events

    def _evict(self, victims: list[Entry], shed: linkw.ShedReport) -> None:
        for entry in victims:
            freed = self._cache.evict([entry])
            shed.evictions_performed += 1
            shed.bytes_evicted += freed
            shed.entries.append(linkw.ShedEntry(0, SHED_EVICTION, bytes=freed, tokens=len(entry.tokens)))

    def _retire(self, retire: linkw.LaneRetire) -> None:
        if retire.lane_tag in self._faulted:
            self._faulted.discard(retire.lane_tag)
            return
        lane = self._lanes[retire.lane_tag]
        self._drop_lane(lane)
        if retire.publish_to_cache and not lane.sequence.demoted:
            self._cache.publish(np.frombuffer(lane.sequence.tokens, np.uint32), lane.sequence)

    def _drop_lane(self, lane: Lane) -> None:
        del self._lanes[lane.tag]
        self._sequences.drop(lane.sequence)
        self._constraints.give_back(lane.admit.grammar_handle)
        self._media.drop_lane(lane.tag)
        self.knobs.faults.pop(lane.tag, None)
        self.knobs.finishes.pop(lane.tag, None)

    def _admit(self, admission: Admission) -> linkw.AdmitResult:
        admit = admission.admit
        if admission.reject_code:
            code = admission.reject_code & 0xFFFFFFFF
            return linkw.AdmitResult(admit.lane_tag, AdmitStatus.REJECTED, reject_code=code)
        sequence = self._seeded_sequence(admission)
        sequence.lane = admit.lane_tag
        self._faulted.discard(admit.lane_tag)
        self._constraints.bind(admit.grammar_handle, admit.lane_tag)
        self._lanes[admit.lane_tag] = Lane(
            admit,
            admission.prompt,
            sequence,
            admission.prefill_end,
            admission.seeded,
            self.config,
            admission.cert,
            self._script_of(admission),
        )
        cert = admission.cert
        if cert is not None:
            return linkw.AdmitResult(admit.lane_tag, AdmitStatus.ADMITTED, 0, cert.cert_id, cert.exactness)
        granted = 0 if admit.strategy_slot else NO_CERTIFICATE_CLASS
        return linkw.AdmitResult(admit.lane_tag, AdmitStatus.ADMITTED, granted_class=granted)

    def _seeded_sequence(self, admission: Admission) -> Sequence:
        seed = admission.seed
        if seed is None:
            return self._sequences.create()
        self._cache.consume(seed)
        if isinstance(seed.source, Sequence):
            sequence = seed.source
        else:
            sequence = self._sequences.create()
            sequence.tokens = array("I", seed.tokens.tobytes())
            sequence.lengths = dict.fromkeys(sequence.lengths, seed.length)
            sequence.provenance = seed.source.provenance
            sequence.taint = seed.source.taint
        sequence.provenance = advance(sequence.provenance, SEED, seed.length)
        sequence.generation += 1
        return sequence

    def _script_of(self, admission: Admission) -> "array[int] | None":
        script = self.knobs.script
        if script is None:
            return None
        if callable(script):
            script = script(admission.admit.lane_tag, admission.prompt.tolist())
        return array("I", script)

    # ---- prefill

    def _prefill(self, chunks: list[Chunk], events: linkw.TickEvents) -> int:
        """Feed the chunks in micro-batches; prompt tokens fed. What a budget or a yield left is shed."""
        fed = 0
        in_step = 0
        yielded = False
        for chunk in chunks:
            lane = self._lanes[chunk.lane_tag]
            left = chunk.count
            faulted = False
            while left and not yielded and not faulted:
                if not in_step:
                    self._begin_step()
                step_room = (self.config.prefill_step_tokens or left + in_step) - in_step
                take = left if self._media.whole(lane.tag) else min(left, step_room)
                start, end = lane.fed, lane.fed + take
                faulted = not self._media.consume(lane.tag, lane.prompt, start, end)
                lane.sequence.tokens.extend(array("I", lane.prompt[start:end].tobytes()))
                lane.fed = end
                left -= take
                fed += take
                in_step += take
                if in_step >= self.config.prefill_step_tokens > 0:
                    in_step = 0
                    yielded = self._yields()
            lane.sequence.settle(PREFILL)
            dropped = chunk.asked - chunk.count + left
            if faulted:
                self._fault(lane, FaultCode.MEDIA, events)
            elif dropped:
                events.shed.prefill_chunks_dropped += 1
                events.shed.entries.append(linkw.ShedEntry(lane.tag, SHED_PREFILL, tokens=dropped))
        return fed

    def _begin_step(self) -> None:
        self._steps += 1
        if self.knobs.on_step is not None:
            self.knobs.on_step()
        if self.knobs.round_delay:
            time.sleep(self.knobs.round_delay)

    def _yields(self) -> bool:
        if self._control is not None and self._control.yield_requested:
            return True
        return self.knobs.yield_after is not None and self.knobs.yield_after(self._steps)

    def _fault(self, lane: Lane, code: int, events: linkw.TickEvents) -> None:
        self._drop_lane(lane)
        self._faulted.add(lane.tag)
        events.faults.append(linkw.LaneFault(lane.tag, code))

    # ---- decode

    def _decode(self, accepted: Accepted, events: linkw.TickEvents, on_emit: OnEmit | None) -> int:
        """Run the decodes in rounds; the rounds run."""
        grants = [
            _Grant(self._lanes[decode.lane_tag], decode.max_new_tokens)
            for decode in accepted.decodes
            if decode.lane_tag in self._lanes
        ]
        active = [grant for grant in grants if grant.left and grant.lane.ready]
        while active:
            self._begin_step()
            emitted = []
            for grant in active:
                before = len(grant.tokens)
                self._step(grant)
                if len(grant.tokens) > before:
                    emitted.append((grant.lane.tag, grant.tokens[before:]))
            if on_emit is not None and emitted:
                on_emit(emitted)
            active = [g for g in active if g.left and not g.lane.finish and g.fault is None]
            if active and self._yields():
                break
        for grant in grants:
            self._emit(grant, events)
        return max((emit.n_tokens for emit in events.emits), default=0)

    def _step(self, grant: _Grant) -> None:
        """One step of one lane: a replayed token, a host row, or a drawn token."""
        lane = grant.lane
        fault = self.knobs.faults.pop(lane.tag, None)
        if fault is not None:
            grant.fault = fault
            return
        if lane.replaying:
            lane.replay()
            grant.left -= 1
            return
        if lane.host:
            grant.row = self._rings[linkw.RING_LOGITS].push_row(lane.row())
            lane.nonce = grant.row.generation
            grant.left = 0
            return
        grant.spec.proposed += lane.propose(grant.left)
        token = lane.draw(self.knobs.finishes.pop(lane.tag, 0))
        grant.spec.accepted += lane.verify(token)
        grant.tokens.append(token)
        grant.left -= 1

    def _emit(self, grant: _Grant, events: linkw.TickEvents) -> None:
        lane = grant.lane
        lane.end_pass()
        lane.sequence.settle(DECODE)
        try:
            ref = self._rings[linkw.RING_OUT].push_tokens(grant.tokens)
        except PayloadTooLong:
            grant.fault = FaultCode.BOUNDS
        if grant.fault is not None:
            self._fault(lane, grant.fault, events)
            return
        if lane.cert is not None:
            grant.spec.cert_id_in_effect = lane.cert.cert_id
        events.emits.append(linkw.LaneEmit(lane.tag, ref, len(grant.tokens), lane.finish, grant.row, grant.spec))
        events.logprobs.extend(
            linkw.LaneLogprob(lane.tag, workloads.f32_bits(-(token % 20 + 1) / 20)) for token in grant.tokens
        )

    # ---- memory

    def _mem(self) -> linkw.MemCounters:
        used = self._used_bytes()
        page = max(1, sum(s.bytes_per_token * s.page_size_tokens for s in self.config.spaces))
        return linkw.MemCounters(
            allocated_bytes=used,
            pool_blocks_total=self.config.pool_bytes // page,
            pool_blocks_used=-(-used // page),
            pool_bytes_evictable=self._cache.evictable_bytes,
        )

    def _used_bytes(self) -> int:
        return sum(map(self._sequences.bytes_of, self._sequences)) + self._cache.total_bytes

    def _free_bytes(self) -> int:
        return self.config.pool_bytes - self._used_bytes()

    def _require_room(self, n_bytes: int) -> None:
        if n_bytes > self._free_bytes():
            raise EngineError(Status.NeedsReplan, f"{n_bytes} bytes wanted, {self._free_bytes()} free")

    def _read_prompt(self, ref: linkw.TokenRef) -> TokenArray:
        ring = self._rings.get(linkw.RING_IN)
        if ring is None or ref.ring_id != linkw.RING_IN:
            raise EngineError(Status.RejectBounds, f"no token ring {ref.ring_id}")
        try:
            return ring.read_tokens(ref)
        except StaleReference as error:
            raise EngineError(Status.RejectBadRefGeneration, str(error)) from error
        except OutOfBounds as error:
            raise EngineError(Status.RejectBounds, str(error)) from error

    # ---- prefix cache

    def state_spaces(self) -> list[linkw.StateSpaceDesc]:
        return list(self.config.spaces)

    def space_match(self, space_id: int, tokens: TokenArray) -> list[linkw.SpaceMatch]:
        if space_id != linkw.ALL_SPACES and space_id not in {space.space_id for space in self.config.spaces}:
            raise EngineError(Status.UnknownHandle, f"no state space {space_id}")
        return self._cache.match(space_id, tokens)

    def seed_acquire(self, tokens: TokenArray, prefix_len: int, determinism_class: int) -> int:
        self._cache.sweep(self.ticks)
        return self._cache.acquire(tokens, prefix_len, determinism_class, self.ticks)

    def seed_release(self, seed: int) -> None:
        self._cache.release(seed)

    def seed_lease_ticks(self) -> int | None:
        return self.config.lease_ticks

    def seed_adopt(self, sequence: int, tokens: TokenArray) -> int:
        self._cache.sweep(self.ticks)
        return self._cache.adopt(self._sequences.idle(sequence), tokens, self.ticks)

    def cache_evict(self, bytes_target: int, policy: linkw.ShedPolicy) -> int:
        self._cache.sweep(self.ticks)
        return self._cache.evict(self._cache.victims(bytes_target, policy, exact=True))

    def cache_evict_entries(self, keys: Ids[linkw.CacheKey]) -> None:
        ours = {self.config.compat_identity(space) for space in self.config.spaces}
        for key in keys:
            if key.compat_key not in ours:
                raise EngineError(Status.IdentityMismatch, f"a cache key of another engine: {key.compat_key.hex()}")
        self._cache.sweep(self.ticks)
        self._cache.evict_keys({key.provenance_digest for key in keys})

    def publish_sequence(self, sequence: int, tokens: TokenArray) -> None:
        found = self._sequences.idle(sequence)
        if len(tokens) > min(found.lengths.values()) or found.demoted:
            raise EngineError(
                Status.OutOfBoundary,
                f"{len(tokens)} tokens; sequence {sequence} holds {sorted(found.lengths.values())}",
            )
        self._sequences.drop(found)
        self._cache.publish(tokens, found)

    def unpublish(self, tokens: TokenArray) -> None:
        self._cache.unpublish(tokens)

    # ---- sequences

    def create_sequence(self) -> int:
        return self._sequences.create().handle

    def free_sequence(self, sequence: int) -> None:
        self._sequences.drop(self._sequences.idle(sequence))

    def lane_sequence(self, lane_tag: int) -> int | None:
        lane = self._lanes.get(lane_tag)
        return lane.sequence.handle if lane is not None else None

    def seq_fork(self, sequence: int, flags: int) -> int:
        parent = self._sequences.get(sequence)
        if parent.locks:
            raise EngineError(Status.Busy, f"a state operation runs on sequence {sequence}")
        self._require_room(self._sequences.bytes_of(parent))
        child = self._sequences.create()
        child.tokens = parent.tokens[:]
        child.lengths = dict(parent.lengths)
        child.provenance, child.taint, child.known = parent.provenance, parent.taint, parent.known
        child.demoted = list(parent.demoted)
        child.shared_fork = not flags & FORK_PRIVATE
        return child.handle

    # ---- state operations

    def space_export_size(self, sequence: int, space_id: int, start: int, end: int, encoding: int) -> tuple[int, int]:
        return self._operations.export_size(sequence, space_id, start, end, encoding)

    def space_snapshot(self, sequence: int, space_id: int, boundary: int, out: memoryview, sizing_gen: int) -> int:
        return self._operations.snapshot(sequence, space_id, boundary, out, sizing_gen)

    def space_snapshot_boundary(self, sequence: int, space_id: int, cap: int) -> int:
        return self._operations.boundary(sequence, space_id, cap)

    def space_restore(self, sequence: int, space_id: int, sealed: memoryview) -> int:
        return self._operations.restore(sequence, space_id, sealed)

    def space_trim(self, sequence: int, space_id: int, new_len: int) -> None:
        self._operations.trim(sequence, space_id, new_len)

    def space_demote(
        self, sequence: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int:
        return self._operations.demote(sequence, space_id, start, end, encoding, out, sizing_gen)

    def space_promote(self, sequence: int, space_id: int, start: int, end: int, sealed: memoryview) -> int:
        return self._operations.promote(sequence, space_id, start, end, sealed)

    def pump(self) -> list[linkw.OpComplete]:
        return self._operations.pump()

    def open_ops(self) -> int:
        return self._operations.running

    def op_poll(self, op: int) -> OpStatus:
        return self._operations.poll(op)

    def op_cancel(self, op: int) -> None:
        self._operations.cancel(op)

    # ---- constraints, other workloads, identity

    def grammar_create(self, json_schema: str) -> int:
        return self._constraints.create_grammar(json_schema)

    def grammar_create_structural(self, tag_json: str) -> int:
        return self._constraints.create_grammar(tag_json)

    def grammar_free(self, grammar: int) -> None:
        self._constraints.free_grammar(grammar)

    def logit_bias_create(self, tokens: Ids[int], values: Ids[float]) -> int:
        return self._constraints.create_bias(len(tokens))

    def logit_bias_free(self, bias: int) -> None:
        self._constraints.free_bias(bias)

    def embed(self, tokens: TokenArray) -> npt.NDArray[np.float32]:
        return workloads.embed(tokens)

    def transcribe(self, request: linkw.TranscribeReq, on_segment: OnSegment | None) -> linkw.TranscribeOk:
        return workloads.transcribe(request, on_segment)

    def lora_load(self, path: str) -> None:
        return

    def lora_unload(self) -> None:
        return

    def media_probe(self, path: str) -> linkw.MediaInfo:
        return self._media.probe()

    def media_encode(self, path: str) -> tuple[int, linkw.MediaInfo]:
        return self._media.encode()

    def media_release(self, media: int) -> None:
        self._media.release(media)

    def media_bind(self, lane_tag: int, media: int, token_offset: int) -> None:
        self._media.bind(lane_tag, media, token_offset)

    def forward_stage(self, tokens: Ids[int], start_layer: int, end_layer: int, hidden_in: bytes | None) -> bytes | int:
        return workloads.forward_stage(tokens, start_layer, end_layer, hidden_in, self.config.vocab_size)

    def n_layers(self) -> int:
        return N_LAYERS

    def capability_descriptor(self) -> str | None:
        return self.config.record

    def strategy_register(self, registration: linkw.StrategyRegister) -> linkw.StrategyGrantOk:
        return self._strategies.register(registration)
