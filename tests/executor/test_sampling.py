"""The host sampler against golden data and a plain numpy reference."""

import json
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from superfluid.engines.engine import Sampling
from superfluid.engines.executor.sampling import Bias, Sampler, argmax, uniform
from superfluid.link.linkw import SamplingParams

F32 = np.float32
TOLERANCE = 2e-6  # of a running sum: the exponential is good to 1e-6


@pytest.fixture(scope="module")
def golden(shared: Path) -> list[dict[str, Any]]:
    """Every line, with the row of the line that gave it last."""
    lines, row = [], None
    for text in (shared / "data/golden/sampling.jsonl").read_text().splitlines():
        line = json.loads(text)
        row = line.get("row_bits") or row
        if "row_bits" in line:
            line["row"] = np.array(row, np.uint32).view(F32)
        lines.append(line)
    return lines


def test_golden_uniform(golden: list[dict[str, Any]]) -> None:
    lines = [line for line in golden if line["op"] == "uniform"]
    assert len(lines) == 8
    for line in lines:
        assert struct.pack(">d", uniform(line["position"])).hex() == line["u_bits"]


def test_golden_picks(golden: list[dict[str, Any]]) -> None:
    lines = [line for line in golden if line["op"] == "sample"]
    assert len(lines) == 288
    for line in lines:
        params = SamplingParams(line["temperature"], line["top_p"], line["min_p"], line["top_k"])
        sampler = Sampler(len(line["row"]))
        lane = sampler.lane(params, Sampling.SAMPLED, line["position"])
        assert sampler.pick(line["row"].copy(), lane) == line["token"], line


def test_golden_penalties(golden: list[dict[str, Any]]) -> None:
    lines = [line for line in golden if line["op"] == "penalties"]
    assert len(lines) == 6
    for line in lines:
        row = line["row"].copy()
        sampler = Sampler(len(row), line["exempt"])
        params = SamplingParams(
            freq_penalty=line["frequency"], presence_penalty=line["presence"], repeat_penalty=line["repeat"]
        )
        sampler.pick(row, sampler.lane(params, Sampling.GREEDY, 0, line["recent"]))
        assert row.view(np.uint32).tolist() == line["result_bits"]


def test_golden_logprobs(golden: list[dict[str, Any]]) -> None:
    lines = [line for line in golden if line["op"] == "logprobs"]
    assert len(lines) == 4
    for line in lines:
        row, chosen = line["row"].copy(), line["chosen"]
        if chosen >= len(row):
            continue  # an id outside the row cannot be picked
        sampler = Sampler(len(row))
        # the chosen id is drawn by a position that lands on it
        lane = next(
            lane
            for position in range(200_000)
            if sampler.pick(
                row, lane := sampler.lane(SamplingParams(1.0), Sampling.SAMPLED, position, (), line["k"] + 1)
            )
            == chosen
        )
        record = lane.record()
        assert record is not None
        assert record.logprob == line["logprob"]
        assert list(zip(record.ids, record.logprobs, strict=True)) == [tuple(pair) for pair in line["top"]]


# ---- against numpy


def reference_weights(row: np.ndarray, temperature: float) -> np.ndarray | None:
    """Full softmax by numpy's exponential, f32 like the rest; none without mass."""
    with np.errstate(all="ignore"):
        scaled = row * (F32(1) / F32(temperature))
        if not np.any(~np.isnan(scaled)):
            return None
        x = scaled - np.nanmax(scaled)
        weights = np.where(x > F32(-36.7368), np.exp(x, dtype=F32), F32(0))
        total = weights.sum(dtype=np.float64)
    return (weights / total).astype(F32) if total > 0 else None


def acceptable(row: np.ndarray, params: SamplingParams, position: int) -> set[int]:
    """Ids a draw may give when running sums are only known to TOLERANCE: the exact one, mostly alone."""
    p = reference_weights(row, params.temperature)
    if p is None:
        return {0}
    order = np.lexsort((np.arange(len(p)), -p))
    allowed: set[int] = set()
    for slack in (-TOLERANCE, 0.0, TOLERANCE):
        kept = order[: params.top_k] if params.top_k else order
        if params.min_p > 0:
            kept = kept[p[kept] >= F32(params.min_p) * p[order[0]] * F32(1 + slack)]
        if params.top_p < 1 and len(kept):
            reached = np.nonzero(np.cumsum(p[kept], dtype=np.float64) >= params.top_p + slack)[0]
            kept = kept[: reached[0] + 1] if len(reached) else kept
        kept = kept if len(kept) else order[:1]
        cut = len(kept) < len(row)
        ends = np.cumsum(p[kept], dtype=np.float64)
        t = float(F32(uniform(position))) * (ends[-1] if cut else 1.0)
        for shift in (-TOLERANCE, TOLERANCE):
            found = np.nonzero(t + shift < ends)[0]
            index = found[0] if len(found) else np.nonzero(p[kept] > 0)[0][-1]
            # neighbours of equal weight may change places when the weights are this close
            close = np.nonzero(np.abs(p[kept] - p[kept[index]]) <= 2e-6 * p[kept[index]])[0]
            allowed.update(int(i) for i in kept[close])
            if index + 1 < len(kept) and ends[index] - (t + shift) < TOLERANCE:
                allowed.add(int(kept[index + 1]))
    return allowed


values = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, 1.0, 2.0, -1.0, float("nan"), float("inf"), float("-inf")]),
)
rows = hnp.arrays(F32, st.integers(1, 200), elements=values)
settings_of_a_draw = st.builds(
    SamplingParams,
    temperature=st.floats(0.0625, 4, width=32),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
)


@given(rows, settings_of_a_draw, st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_draw_matches_reference(row: np.ndarray, params: SamplingParams, position: int) -> None:
    sampler = Sampler(len(row))
    lane = sampler.lane(params, Sampling.SAMPLED, position)
    expected = acceptable(row, params, position)
    assert sampler.pick(row.copy(), lane) in expected
    assert lane.position == (position + 1) % 2**64


@given(st.integers(0, 2**32 - 1), settings_of_a_draw, st.sampled_from([0.1, 1.0, 3.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_draw_matches_reference_on_long_rows(seed: int, params: SamplingParams, spread: float) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(5000) * spread).astype(F32)
    row[rng.integers(0, 5000, 500)] = row[0]  # ties across blocks
    sampler = Sampler(len(row))
    assert sampler.pick(row.copy(), sampler.lane(params, Sampling.SAMPLED, seed)) in acceptable(row, params, seed)


@given(rows)
@settings(max_examples=200, deadline=None)
def test_argmax(row: np.ndarray) -> None:
    best = 0
    for i, value in enumerate(row):
        if value > row[best]:
            best = i
    assert argmax(row) == best


def test_argmax_of_nothing() -> None:
    assert argmax(np.zeros(0, F32)) == 0


@given(rows, st.floats(0.0625, 4, width=32))
@settings(max_examples=200, deadline=None)
def test_weights_within_tolerance(row: np.ndarray, temperature: float) -> None:
    found, expected = Sampler(len(row)).probabilities(row, temperature), reference_weights(row, temperature)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-15)


def test_softmax_sum_has_the_pinned_order() -> None:
    """A row whose weights are known exactly: each partial sum in its own order, then the fold, then the tail."""
    rng = np.random.default_rng(5)
    for n in (1, 15, 16, 17, 64, 1000, 1003):
        row = (rng.standard_normal(n) * 3).astype(F32)
        p = Sampler(n).probabilities(row, 1.0)
        assert p is not None
        # the largest weight is exp(0) = 1, so its probability is 1 / sum, rounded
        w = np.array([one_weight(value - row.max()) for value in row], F32)
        partial = np.zeros(16, F32)
        whole = n // 16 * 16
        for i in range(whole):
            partial[i % 16] += w[i]
        a = [(partial[q] + partial[q + 4]) + (partial[q + 8] + partial[q + 12]) for q in range(4)]
        total = (a[0] + a[1]) + (a[2] + a[3])
        for i in range(whole, n):
            total += w[i]
        assert (p == w / total).all()


def one_weight(x: np.float32) -> np.float32:
    """exp(x) by the sampler's polynomial, operation by operation."""
    if x == 0:
        return F32(1)
    k = F32(np.round(F32(x) * F32(1.44269504)))
    r = F32(F32(x) - k * F32(0.693359375)) - k * F32(-2.12194440e-4)
    q = F32(0.00831250194)
    for c in (0.0418903306, 0.166671157, 0.499992311):
        q = F32(q * r) + F32(c)
    e = F32(F32(F32(q * r) * r) + r) + F32(1)
    return F32(np.ldexp(e, int(k)))


# ---- the row before the pick


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_mask_bias_penalties_and_logprobs(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 150))
    row = data.draw(hnp.arrays(F32, n, elements=st.floats(-30, 30, width=32)))
    exempt = data.draw(st.sets(st.integers(0, n - 1), max_size=5))
    stream = data.draw(st.lists(st.integers(0, n + 3), max_size=150))
    mask = data.draw(st.none() | hnp.arrays(np.uint32, st.integers(1, n // 32 + 2)))
    ids = data.draw(st.lists(st.integers(0, n + 40), max_size=5, unique=True))
    added = [data.draw(st.floats(-100, 100, width=32)) for _ in ids]
    want = data.draw(st.integers(0, 25))
    params = SamplingParams(
        freq_penalty=data.draw(st.sampled_from([0.0, 0.5, -0.25])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
        repeat_penalty=data.draw(st.sampled_from([0.0, 1.0, 1.25, 0.5])),
    )
    sampler = Sampler(n, exempt)
    lane = sampler.lane(params, Sampling.GREEDY, 0, stream[:40], want, Bias(ids, added))
    for token in stream[40:]:
        lane.push(token)
    lane.mask = mask
    found = row.copy()
    token = sampler.pick(found, lane)

    expected = row.copy()
    if mask is not None:
        for i in range(n):
            if i // 32 >= len(mask) or not int(mask[i // 32]) >> (i % 32) & 1:
                expected[i] = -np.inf
    for i, value in zip(ids, added, strict=True):
        if i < n:
            expected[i] += F32(value)
    window = stream[-64:]
    repeat = F32(params.repeat_penalty or 1)
    if repeat != 1 or params.presence_penalty or params.freq_penalty:
        for i in set(window) - exempt:
            if i < n:
                expected[i] = expected[i] / repeat if expected[i] > 0 else expected[i] * repeat
                expected[i] -= F32(params.presence_penalty) + F32(params.freq_penalty) * F32(window.count(i))
    assert found.tobytes() == expected.tobytes()
    assert token == argmax(expected)

    record = lane.record()
    assert (record is None) == (want == 0)
    if record is not None and np.isfinite(expected.max()):
        total = expected.max() + np.log(np.exp(expected.astype(np.float64) - expected.max()).sum())
        order = np.lexsort((np.arange(n), -expected))[: min(want - 1, 20)]
        assert record.ids == order.tolist()
        np.testing.assert_allclose(record.logprobs, expected[order] - total, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(record.logprob, expected[token] - total, rtol=1e-5, atol=1e-4)


def test_a_round_picks_as_single_rows_do() -> None:
    rng = np.random.default_rng(3)
    matrix = (rng.standard_normal((20, 500)) * 2).astype(F32)
    kinds = [
        (SamplingParams(), Sampling.GREEDY),
        (SamplingParams(0.8, 0.9, 0.02, 30), Sampling.SAMPLED),
        (SamplingParams(1.5, repeat_penalty=1.3), Sampling.SAMPLED),
        (SamplingParams(0.0, presence_penalty=1.0), Sampling.SAMPLED),
    ]
    sampler = Sampler(500)
    together = [sampler.lane(*kinds[i % 4], i, [i, i + 1]) for i in range(20)]
    alone = [sampler.lane(*kinds[i % 4], i, [i, i + 1]) for i in range(20)]
    for _ in range(5):
        picked = sampler.pick_rows(matrix.copy(), together).tolist()
        assert picked == [sampler.pick(matrix[i].copy(), lane) for i, lane in enumerate(alone)]
    assert [lane.draws for lane in together] == [5] * 20


def test_a_drawn_token_and_a_committed_one_leave_the_same_lane() -> None:
    rng = np.random.default_rng(4)
    params = SamplingParams(1.0, freq_penalty=0.7)
    sampler = Sampler(100)
    drawn, told = (sampler.lane(params, Sampling.SAMPLED, 2**64 - 2) for _ in range(2))
    for _ in range(80):
        row = (rng.standard_normal(100)).astype(F32)
        told.commit(sampler.pick(row, drawn))
        assert told.position == drawn.position
    row = rng.standard_normal(100).astype(F32)
    assert sampler.pick(row.copy(), told) == sampler.pick(row.copy(), drawn)


def test_wrong_rows_are_refused() -> None:
    sampler = Sampler(100)
    lane = sampler.lane(SamplingParams(), Sampling.GREEDY, 0)
    with pytest.raises(ValueError, match="rows of 1 x 100"):
        sampler.pick(np.zeros(99, F32), lane)
    with pytest.raises(ValueError, match="rows of 2 x 100"):
        sampler.pick_rows(np.zeros((2, 100)), [lane, lane])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 ids and 1 values"):
        Bias([1, 2], [0.5])


def test_plain_lanes() -> None:
    sampler = Sampler(10)
    assert sampler.lane(SamplingParams(0.7, top_k=4), Sampling.SAMPLED, 0).plain
    assert sampler.lane(SamplingParams(repeat_penalty=1.0), Sampling.GREEDY, 0).plain
    for change in ({"repeat_penalty": 1.1}, {"presence_penalty": 0.1}, {"freq_penalty": -0.1}):
        assert not sampler.lane(attrs.evolve(SamplingParams(), **change), Sampling.GREEDY, 0).plain
    assert not sampler.lane(SamplingParams(), Sampling.GREEDY, 0, (), 1).plain
    assert not sampler.lane(SamplingParams(), Sampling.GREEDY, 0, (), 0, Bias([1], [1.0])).plain
