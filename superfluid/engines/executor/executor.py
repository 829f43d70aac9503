"""The executor: an Engine over a runtime that only implements the primitives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from superfluid.engines.engine import (
    FORK_PRIVATE,
    Engine,
    EngineError,
    EngineFatal,
    FaultCode,
    OnEmit,
    OpStatus,
    Status,
    TokenArray,
)
from superfluid.engines.executor import sequences
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.grammar import GrammarCompiler
from superfluid.engines.executor.lanes import GrammarSlot
from superfluid.engines.executor.leases import LEASE_TICKS
from superfluid.engines.executor.record import capability_record
from superfluid.engines.executor.sampling import Bias
from superfluid.engines.executor.sequences import refusing
from superfluid.engines.executor.speculate import register
from superfluid.engines.executor.state import SPACE_ID, StateOps
from superfluid.engines.executor.tick import run_tick
from superfluid.engines.primitives import Primitives
from superfluid.link import linkw
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring


class Executor(Engine):
    """Lanes, host sampling, grammars, logprobs, the prefix cache, park and resume for one loaded model.

    `max_seq_len` and `max_batch` lower what the runtime describes. `record_overrides` are laid over the capability
    record, section by section.
    """

    def __init__(
        self,
        primitives: Primitives,
        *,
        max_seq_len: int | None = None,
        max_batch: int | None = None,
        record_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._core = Core(primitives, max_seq_len, max_batch)
        self._state = StateOps(self._core)
        self._record_overrides = dict(record_overrides or {})
        self._grammars = GrammarCompiler(self._core.vocabulary)
        self._last_grammar = self._last_bias = 0

    def warm_up(self) -> None:
        """Make now what the first request with a grammar would wait for."""
        self._grammars.prepare()

    # ---- rings and control words

    def attach_ring(self, ring: Ring) -> None:
        core = self._core
        if ring.spec.ring_id == linkw.RING_IN:
            core.inbound = ring
        elif ring.spec.ring_id == linkw.RING_OUT:
            core.outbound = ring
        elif ring.spec.ring_id == linkw.RING_LOGITS:
            core.logits = ring
        else:
            raise EngineError(Status.RingLayout, f"ring {ring.spec.ring_id}; 1, 2 and 3 are known")

    def attach_control(self, control: Control) -> None:
        self._core.control = control

    # ---- the tick

    def tick(self, plan: linkw.TickPlan, on_emit: OnEmit | None = None) -> linkw.TickEvents:
        return run_tick(self._core, plan, on_emit)

    def pump(self) -> list[linkw.OpComplete]:
        done, self._core.unpumped = self._core.unpumped, []
        return done

    # ---- prefix cache

    def state_spaces(self) -> list[linkw.StateSpaceDesc]:
        return self._state.spaces()

    def space_match(self, space_id: int, tokens: TokenArray) -> list[linkw.SpaceMatch]:
        if space_id not in (SPACE_ID, linkw.ALL_SPACES):
            raise EngineError(Status.UnknownHandle, f"no state space {space_id}")
        return [linkw.SpaceMatch(SPACE_ID, self._core.cache.match(_ids(tokens)))]

    def seed_acquire(self, tokens: TokenArray, prefix_len: int, determinism_class: int) -> int:
        return self._core.leases.acquire(_ids(tokens), prefix_len, determinism_class)

    def seed_release(self, seed: int) -> None:
        self._core.leases.release(seed)

    def seed_lease_ticks(self) -> int | None:
        return LEASE_TICKS

    def seed_adopt(self, sequence: int, tokens: TokenArray) -> int:
        core = self._core
        bare = core.sequences.bare(sequence)
        with refusing("seed_adopt"):
            length = core.primitives.seq_len(bare.seq)
        return core.leases.adopt(sequence, _ids(tokens), length)

    def cache_evict(self, bytes_target: int, policy: linkw.ShedPolicy) -> int:
        with refusing("cache_evict"):
            return self._core.cache.evict(bytes_target, policy)

    def cache_evict_entries(self, keys: Sequence[linkw.CacheKey]) -> None:
        ours = self._state.space.compat_identity[:16]
        for key in keys:
            if key.compat_key[:16] != ours:
                raise EngineError(Status.IdentityMismatch, f"a key of {key.compat_key[:16].hex()}, not {ours.hex()}")
        self._core.cache.evict_digests([key.provenance_digest for key in keys])

    def publish_sequence(self, sequence: int, tokens: TokenArray) -> None:
        core, tokens = self._core, _ids(tokens)
        bare = core.sequences.free_to_change(sequence)
        with refusing("publish_sequence"):
            length = core.primitives.seq_len(bare.seq)
            if len(tokens) > length or (core.head_only and len(tokens) != length):
                raise EngineError(Status.OutOfBoundary, f"{len(tokens)} tokens named of the {length} it holds")
            kept = length if core.head_only else core.cache.round(len(tokens))
            if kept and kept < length:
                core.primitives.seq_truncate(bare.seq, kept)
            self._state.forget(sequence)
            if kept:
                seq = core.sequences.unwrap(bare)
                core.cache.publish(seq, tokens[:kept], kept, bare.taint, bare.shared_fork)
            else:
                core.sequences.free(bare)
            core.cache.settle()

    def unpublish(self, tokens: TokenArray) -> None:
        self._core.cache.unpublish(_ids(tokens))

    # ---- sequences

    def create_sequence(self) -> int:
        return self._new_sequence("create_sequence").handle

    def free_sequence(self, sequence: int) -> None:
        bare = self._core.sequences.free_to_change(sequence)
        self._state.forget(sequence)
        with refusing("free_sequence"):
            self._core.sequences.free(bare)

    def lane_sequence(self, lane_tag: int) -> int | None:
        lane = self._core.lanes.get(lane_tag)
        return None if lane is None else lane.sequence.handle

    def seq_fork(self, sequence: int, flags: int) -> int:
        core = self._core
        parent = core.sequences.find(sequence)
        child = self._new_sequence("seq_fork")
        try:
            with refusing("seq_fork"):
                length = core.primitives.seq_len(parent.seq)
                core.primitives.seq_copy(parent.seq, child.seq, length)
        except EngineError:
            core.sequences.free(child)
            raise
        child.taint = parent.taint
        child.shared_fork = not flags & FORK_PRIVATE
        if parent.lane_tag is not None:
            child.tokens = core.lanes[parent.lane_tag].stream[:length].copy()
        else:
            child.tokens = parent.tokens
        return child.handle

    def _new_sequence(self, what: str) -> sequences.Sequence:
        """An empty sequence; on a full table it takes the slot of the cache entry that would go first."""
        core = self._core
        with refusing(what):
            if core.sequences.full and not core.cache.give_slot():
                raise EngineError(Status.NeedsReplan, f"all {core.sequences.max_seqs} sequences are in use")
            return core.sequences.create()

    # ---- state operations

    def space_export_size(self, sequence: int, space_id: int, start: int, end: int, encoding: int) -> tuple[int, int]:
        return self._state.export_size(sequence, space_id, start, end, encoding)

    def space_snapshot(self, sequence: int, space_id: int, boundary: int, out: memoryview, sizing_gen: int) -> int:
        return self._state.snapshot(sequence, space_id, boundary, out, sizing_gen)

    def space_snapshot_boundary(self, sequence: int, space_id: int, cap: int) -> int:
        return self._state.boundary(sequence, space_id, cap)

    def space_restore(self, sequence: int, space_id: int, sealed: memoryview) -> int:
        return self._state.restore(sequence, space_id, sealed)

    def space_trim(self, sequence: int, space_id: int, new_len: int) -> None:
        self._state.trim(sequence, space_id, new_len)

    def space_demote(
        self, sequence: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int:
        return self._state.demote(sequence, space_id, start, end, encoding, out, sizing_gen)

    def space_promote(self, sequence: int, space_id: int, start: int, end: int, sealed: memoryview) -> int:
        raise EngineError(Status.Unsupported, "space_promote: state comes back by restore")

    def op_poll(self, op: int) -> OpStatus:
        return self._state.poll(op)

    def op_cancel(self, op: int) -> None:
        """Operations end when they are submitted, so there is nothing to stop. Raises EngineError -129."""
        self._state.poll(op)

    # ---- constraints

    def grammar_create(self, json_schema: str) -> int:
        return self._add_grammar(GrammarSlot(self._grammars.schema(json_schema)))

    def grammar_create_structural(self, tag_json: str) -> int:
        return self._add_grammar(GrammarSlot(self._grammars.structural(tag_json)))

    def grammar_draft(self, kind: str, text: str) -> Callable[[], None] | None:
        return self._grammars.draft(kind, text)

    def grammar_free(self, grammar: int) -> None:
        slot = self._core.grammars.get(grammar)
        if slot is None or slot.freed:
            raise EngineError(Status.UnknownHandle, f"no grammar {grammar}")
        if slot.in_use:
            slot.freed = True
        else:
            del self._core.grammars[grammar]

    def _add_grammar(self, slot: GrammarSlot) -> int:
        self._last_grammar += 1
        self._core.grammars[self._last_grammar] = slot
        return self._last_grammar

    def logit_bias_create(self, tokens: Sequence[int], values: Sequence[float]) -> int:
        if not tokens:
            raise EngineError(Status.Unsupported, "a logit bias over no tokens")
        if len(tokens) != len(values):
            raise EngineError(Status.RejectBounds, f"{len(tokens)} tokens with {len(values)} values")
        inside = [(token, value) for token, value in zip(tokens, values, strict=True) if token >= 0]
        self._last_bias += 1
        self._core.biases[self._last_bias] = Bias([token for token, _ in inside], [value for _, value in inside])
        return self._last_bias

    def logit_bias_free(self, bias: int) -> None:
        if self._core.biases.pop(bias, None) is None:
            raise EngineError(Status.UnknownHandle, f"no logit bias {bias}")

    # ---- identity

    def capability_descriptor(self) -> str | None:
        core = self._core
        return capability_record(
            core.description, core.max_seq_len, core.max_batch, core.vocabulary, self._record_overrides
        )

    def strategy_register(self, registration: linkw.StrategyRegister) -> linkw.StrategyGrantOk:
        self._core.speculation, grant = register(self._core.description, registration)
        return grant

    def close(self) -> None:
        self._core.primitives.close()

    # ---- for tests of the contract

    def lane_tokens(self, tag: int) -> list[int]:
        """The committed ids of a lane. Raises KeyError."""
        tokens: list[int] = self._core.lanes[tag].tokens().tolist()
        return tokens

    def inject_fault(self, lane_tag: int, code: int = FaultCode.INTERNAL) -> None:
        """Make a lane's next decode fail."""
        self._core.injected[lane_tag] = code


def _ids(tokens: TokenArray) -> TokenArray:
    return np.ascontiguousarray(tokens, np.uint32)


__all__ = ["EngineFatal", "Executor"]
