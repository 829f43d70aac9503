"""What the executor adds to a decode round, over a runtime that does nothing.

Run: python bench/executor_round.py
"""

import time
from collections.abc import Sequence

import numpy as np

from superfluid.engines.executor import Executor
from superfluid.engines.primitives import Description, Feed, PoolCounters, Primitives, Row
from superfluid.link import linkw
from superfluid.shm.ring import Ring, ring_specs

VOCAB, WINDOW, GRANT, TICKS = 49_152, 8_192, 32, 40


class Idle(Primitives):
    """Steps cost nothing: the same random rows every time, written over by each pick."""

    def __init__(self, lanes: int) -> None:
        self._rows = np.random.default_rng(1).standard_normal((lanes, VOCAB), np.float32)
        self._seq = 0

    def describe(self) -> Description:
        return Description("idle", "1", len(self._rows), WINDOW, VOCAB)

    def seq_create(self) -> int:
        self._seq += 1
        return self._seq

    def seq_free(self, seq: int) -> None:
        return

    def seq_len(self, seq: int) -> int:
        return 0

    def seq_copy(self, src: int, dst: int, length: int) -> None:
        return

    def seq_truncate(self, seq: int, length: int) -> None:
        return

    def seq_boundary(self, seq: int, cap: int) -> int:
        return cap

    def seq_export(self, seq: int, length: int, encoding: int) -> bytes:
        return b""

    def seq_import(self, seq: int, payload: memoryview) -> int:
        return 0

    def step(self, feeds: Sequence[Feed]) -> Row:
        return self._rows if feeds[0].wants_row else self._rows[:0]

    def is_eos(self, token: int) -> bool:
        return False

    def mem_counters(self) -> PoolCounters:
        return PoolCounters()


def round_us(lanes: int, params: linkw.SamplingParams, sampling: int, logprobs: bool, partial: bool) -> float:
    """Microseconds of one round."""
    engine = Executor(Idle(lanes))
    inbound, *others = (Ring.create(spec) for spec in ring_specs(WINDOW, VOCAB, lanes))
    for ring in (inbound, *others):
        engine.attach_ring(ring)
    admits = [
        linkw.LaneAdmit(
            tag, inbound.push_tokens(range(1, 17)), sampling=sampling, params=params, want_logprobs=logprobs
        )
        for tag in range(lanes)
    ]
    prefills = [linkw.LanePrefill(tag, 0, 16) for tag in range(lanes)]
    engine.tick(linkw.TickPlan(1, 0, 4096, lanes, admits, prefills=prefills))
    decodes = [linkw.LaneDecode(tag, GRANT) for tag in range(lanes)]
    began = time.perf_counter()
    for n in range(TICKS):
        engine.tick(linkw.TickPlan(n + 2, 4 if partial else 0, 0, lanes, decodes=decodes), lambda emits: None)
    return 1e6 * (time.perf_counter() - began) / TICKS / GRANT


def main() -> None:
    plain = linkw.SamplingParams(flags=1)
    warm = linkw.SamplingParams(0.8, 0.95, 0.05, 40, repeat_penalty=1.1, flags=1)
    for name, params, sampling, logprobs in (
        ("greedy", plain, 0, False),
        ("sampled, penalties, top-k, top-p, min-p", warm, 1, False),
        ("greedy with logprobs", plain, 0, True),
    ):
        for lanes in (1, 8, 32):
            print(f"{name}, {lanes} lanes: {round_us(lanes, params, sampling, logprobs, True):.0f} us a round")


if __name__ == "__main__":
    main()
