"""What ticks and operations work on: one loaded model with its lanes, sequences, cache and handles."""

import attrs

from superfluid.engines.executor.cache import PrefixCache
from superfluid.engines.executor.lanes import GrammarSlot, Lane
from superfluid.engines.executor.leases import Leases
from superfluid.engines.executor.sampling import Bias, Sampler
from superfluid.engines.executor.sequences import Sequences
from superfluid.engines.executor.speculate import SLOT, Speculation
from superfluid.engines.primitives import Description, Primitives, Vocabulary
from superfluid.link import linkw
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring

_UNKNOWN, _NO, _YES = 0, 1, 2


class Core:
    """The state behind the engine; one per executor."""

    def __init__(self, primitives: Primitives, max_seq_len: int | None, max_batch: int | None) -> None:
        of = primitives.describe()
        self.primitives: Primitives = primitives
        self.description: Description = of
        self.max_seq_len: int = min(max_seq_len or of.max_seq_len, of.max_seq_len)
        self.max_batch: int = min(max_batch or of.max_batch, of.max_batch)
        self.head_only: bool = not of.truncate_partial
        self.vocabulary: Vocabulary | None = primitives.vocabulary()
        self.sequences = Sequences(primitives, of.max_seqs)
        self.cache = PrefixCache(primitives, of, self.sequences)
        self.leases = Leases(self.cache, self.sequences)
        exempt = self.vocabulary.specials | self.vocabulary.eos if self.vocabulary is not None else ()
        self.sampler = Sampler(of.vocab_size, exempt)
        self.lanes: dict[int, Lane] = {}
        self.faulted: set[int] = set()  # tags that may be retired once more
        self.grammars: dict[int, GrammarSlot] = {}
        self.biases: dict[int, Bias] = {}
        self.injected: dict[int, int] = {}  # fault code for a lane's next decode; a test's
        self.inbound: Ring | None = None
        self.outbound: Ring | None = None
        self.logits: Ring | None = None
        self.control: Control | None = None
        self.completions: list[linkw.OpComplete] = []  # not yet in a tick's events
        self.unpumped: list[linkw.OpComplete] = []  # not yet reported by a pump
        self.speculation: Speculation | None = None
        self.plan_seq = 0
        self.rate = PrefillRate()
        self.steps_synchronous: bool | None = None  # as the runtime was last told
        self._ends = bytearray(of.vocab_size)

    def is_eos(self, token: int) -> bool:
        """Whether a token ends the sequence; the runtime is asked once per id."""
        known = self._ends[token]
        if known == _UNKNOWN:
            known = self._ends[token] = _YES if self.primitives.is_eos(token) else _NO
        return known == _YES

    def granted(self, slot: int) -> bool:
        """Whether a strategy slot was granted."""
        return self.speculation is not None and slot == SLOT

    def counters(self) -> linkw.MemCounters:
        pool = self.primitives.mem_counters()
        page = self.cache.page
        return linkw.MemCounters(
            pool.allocated_bytes,
            self.cache.exported_bytes,
            pool.cells_total // page,
            pool.cells_used // page,
            self.cache.unpinned_bytes,
        )

    @property
    def yield_wanted(self) -> bool:
        return self.control is not None and self.control.yield_requested

    @property
    def latency_wanted(self) -> bool:
        return self.control is not None and self.control.latency

    def op_ended(self, done: linkw.OpComplete) -> None:
        self.completions.append(done)
        self.unpumped.append(done)

    def end_lane(self, lane: Lane) -> None:
        """A lane is over; its sequence is somebody else's business. Its grammar is given back."""
        lane.alive = False
        self.lanes.pop(lane.tag, None)
        if lane.grammar is not None:
            lane.grammar.in_use = False
            if lane.grammar.freed:
                del self.grammars[lane.admit.grammar_handle]

    def tick_over(self) -> None:
        """An accepted tick has run."""
        self.leases.tick_over()
        self.cache.ticks += 1


@attrs.define
class PrefillRate:
    """Seconds per prompt token, a running average over ticks long enough to tell; and how steps follow from it."""

    seconds: float | None = None

    MEASURED_TOKENS = 128  # a tick with fewer says little
    KEPT = 0.7
    STEP_SECONDS = 0.6  # so that a lane whose client leaves is free within a second
    LATENCY_STEP_SECONDS = 0.3
    SYNC_STEP_SECONDS = 0.5  # a step so long is waited for, so that a yield comes in time
    LATENCY_QUANTUM = 128

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens >= self.MEASURED_TOKENS:
            now = seconds / tokens
            self.seconds = now if self.seconds is None else self.KEPT * self.seconds + (1 - self.KEPT) * now

    def step_tokens(self, declared: int, latency: bool) -> int:
        """Tokens of a prefill step (0: all in one); while nothing is measured, the least."""
        if not declared and not (latency and self.seconds):
            return 0
        step = quantum = self.LATENCY_QUANTUM
        if self.seconds:
            wanted = self.LATENCY_STEP_SECONDS if latency else self.STEP_SECONDS
            step = max(quantum, int(wanted / self.seconds / quantum) * quantum)
        return min(step, declared) if declared else step

    def synchronous(self, step_tokens: int, latency: bool) -> bool:
        """Whether steps that read no row are waited for."""
        return latency or self.seconds is None or step_tokens * self.seconds >= self.SYNC_STEP_SECONDS
