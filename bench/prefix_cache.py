"""Lookups in a large prefix cache: 10 000 prefixes of 2 000 tokens, spans of 4 000.

Run: python bench/prefix_cache.py
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from superfluid.engines.executor.cache import PrefixCache
from superfluid.engines.executor.sequences import Sequences
from superfluid.engines.primitives import Description, PoolCounters, Primitives, Row

PREFIXES, PREFIX_TOKENS, SPAN_TOKENS, ROUNDS = 10_000, 2_000, 4_000, 300
Tokens = npt.NDArray[np.uint32]


class NoModel(Primitives):
    """Sequences that hold nothing."""

    def describe(self) -> Description:
        return Description("none", "1", 8, SPAN_TOKENS, 50_000)

    def seq_create(self) -> int:
        return 1

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

    def step(self, feeds: object) -> Row:
        return np.empty((0, 0), np.float32)

    def is_eos(self, token: int) -> bool:
        return False

    def mem_counters(self) -> PoolCounters:
        return PoolCounters()


def filled(paths: list[Tokens]) -> PrefixCache:
    model = NoModel()
    cache = PrefixCache(model, model.describe(), Sequences(model, 0))
    for seq, path in enumerate(paths):
        cache.publish(seq, path, len(path), 0, False)
    return cache


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Median and the slowest but one in a hundred, over the rounds."""
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took), sorted(took)[-max(1, ROUNDS // 100)]


def main() -> None:
    rng = np.random.default_rng(1)

    def some(n: int) -> Tokens:
        return rng.integers(0, 50_000, n, dtype=np.uint32)

    shared = some(500)
    chats: list[Tokens] = []
    for _ in range(PREFIXES // 10):
        turns = np.concatenate((shared, some(PREFIX_TOKENS - 500)))
        chats += [np.concatenate((turns[: 600 + 140 * i], some(1_400 - 140 * i))) for i in range(10)]
    for name, paths, base in (
        ("unrelated", [some(PREFIX_TOKENS) for _ in range(PREFIXES)], None),
        ("a shared system prompt, branching chats", chats, chats[-1]),
        (
            "long chats, each turn cached",
            [p for _ in range(PREFIXES // 100) for p in _turns(some(PREFIX_TOKENS))],
            None,
        ),
    ):
        began = time.perf_counter()
        cache = filled(paths)
        fill = time.perf_counter() - began
        stem = paths[-1] if base is None else base
        span = np.concatenate((stem, some(SPAN_TOKENS - len(stem))))
        offers = len(cache.match(span))
        median, slow = milliseconds(partial(cache.match, span))
        print(
            f"{name}: match {median:.3f} ms (p99 {slow:.3f}), {offers} offers; publish {1e6 * fill / PREFIXES:.1f} us"
        )
        find, _ = milliseconds(partial(cache.find, span, len(stem), False))
        print(f"  find {find:.3f} ms")


def _turns(chat: Tokens) -> list[Tokens]:
    return [chat[: (i + 1) * PREFIX_TOKENS // 100] for i in range(100)]


if __name__ == "__main__":
    main()
