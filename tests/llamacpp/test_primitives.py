"""The primitives on the real library: continuations after copies, cuts, exports and moves equal the original's."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from superfluid.engines.kit.runtime import ModelRefused
from superfluid.engines.llamacpp.model import open_model
from superfluid.engines.llamacpp.options import Settings
from superfluid.engines.llamacpp.primitives import LlamaPrimitives
from superfluid.engines.llamacpp.sequences import PoolTable, StreamTable
from superfluid.engines.primitives import (
    CapacityError,
    FaultError,
    Feed,
    OutOfBoundaryError,
    SampleSpec,
    UnknownSeqError,
    UnsupportedError,
)
from superfluid.llama.search import open_library
from tests import models

WINDOW = 512
SAME_SHAPE = 0.05  # in a logit, for the same batch shape; 0.5 across shapes
ACROSS_SHAPES = 0.5
GREEDY = SampleSpec(temperature=0, top_p=1, min_p=0, top_k=0, position=0)

Open = Callable[..., LlamaPrimitives]


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    made: list[LlamaPrimitives] = []

    def make(
        path: Path,
        *,
        lanes: int = 4,
        window: int = WINDOW,
        shared_pool: bool | None = None,
        **options: int | float | bool | str,
    ) -> LlamaPrimitives:
        given = {"threads": 1} | {name.replace("_", "-"): value for name, value in options.items()}
        settings = Settings.of(given)  # one thread: several that wait for each other crawl on a busy machine
        made.append(open_model(open_library(), path, settings, window=window, lanes=lanes, shared_pool=shared_pool))
        return made[-1]

    yield make
    for primitives in made:
        primitives.close()


@pytest.fixture(scope="module", params=["streams", "pool"])
def smol(request: pytest.FixtureRequest, opened: Open, smollm2: Path) -> LlamaPrimitives:
    return opened(smollm2, shared_pool=request.param == "pool")


@pytest.fixture(autouse=True)
def left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test frees what it made."""
    yield
    for name in ("smol", "streams", "pool", "sliding"):
        if name in request.fixturenames:
            primitives: LlamaPrimitives = request.getfixturevalue(name)
            for handle in list(primitives.sequences.table):
                primitives.seq_free(handle)
            assert primitives.mem_counters().cells_used == 0


def prompt(n_tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(300, 40_000, n_tokens).astype(np.uint32)


def fed(primitives: LlamaPrimitives, tokens: np.ndarray) -> int:
    seq = primitives.seq_create()
    primitives.step([Feed(seq, tokens)])
    return seq


def continued(primitives: LlamaPrimitives, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Rows after each of `tokens`, fed one a step."""
    return np.stack([primitives.step([Feed(seq, tokens[i : i + 1], True)])[0].copy() for i in range(len(tokens))])


def near(rows: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(rows - expected).max() <= tolerance


def exact(primitives: LlamaPrimitives) -> float:
    """A state cut out of a pool lies elsewhere than the original's; one of a buffer is the same bit for bit."""
    return ACROSS_SHAPES if primitives.describe().copy_shares_cells else 0.0


class TestState:
    def test_a_copy_continues_as_the_original(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(40)
        seq = fed(smol, tokens[:30])
        copies = [smol.seq_create() for _ in range(2)]
        smol.seq_copy(seq, copies[0], 30)
        smol.seq_copy(seq, copies[1], 22)
        assert [smol.seq_len(copy) for copy in copies] == [30, 22]
        expected = continued(smol, seq, tokens[30:])
        near(continued(smol, copies[0], tokens[30:]), expected, exact(smol))
        smol.step([Feed(copies[1], tokens[22:30])])
        near(continued(smol, copies[1], tokens[30:]), expected, ACROSS_SHAPES)

    def test_a_cut_sequence_continues_as_before(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(40)
        seq = fed(smol, tokens[:30])
        expected = continued(smol, seq, tokens[30:])
        smol.seq_truncate(seq, 30)
        near(continued(smol, seq, tokens[30:]), expected, exact(smol))
        smol.seq_truncate(seq, 0)
        assert smol.seq_len(seq) == 0

    def test_an_export_fills_another_sequence(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(40)
        seq = fed(smol, tokens[:30])
        whole, part = smol.seq_export(seq, 30, 0), smol.seq_export(seq, 20, 0)
        assert 20_000 < len(whole) / 30 < 26_000  # bytes a token
        assert len(part) < len(whole)
        assert smol.seq_export_size(seq, 30, 0) == len(whole)
        assert smol.seq_export_size(seq, 20, 0) in (None, len(part))
        for payload, length in ((whole, 30), (part, 20)):
            out = bytearray(len(payload))
            smol.seq_export_into(seq, length, 0, memoryview(out))
            assert out == payload
        expected = continued(smol, seq, tokens[30:])
        smol.seq_free(seq)
        for payload, length in ((whole, 30), (part, 20)):
            other = smol.seq_create()
            assert smol.seq_import(other, memoryview(payload)) == length == smol.seq_len(other)
            if length < 30:
                smol.step([Feed(other, tokens[length:30])])
            near(continued(smol, other, tokens[30:]), expected, ACROSS_SHAPES)

    def test_a_damaged_state_leaves_the_sequence_empty(self, smol: LlamaPrimitives) -> None:
        seq = fed(smol, prompt(20))
        payload = smol.seq_export(seq, 20, 0)
        other = smol.seq_create()
        with pytest.raises(FaultError, match="does not load"):
            smol.seq_import(other, memoryview(payload[: len(payload) // 2]))
        assert smol.seq_len(other) == 0
        assert smol.seq_import(other, memoryview(payload)) == 20

    def test_an_import_needs_an_empty_sequence(self, smol: LlamaPrimitives) -> None:
        seq = fed(smol, prompt(20))
        with pytest.raises(OutOfBoundaryError, match="empty"):
            smol.seq_import(seq, memoryview(smol.seq_export(seq, 20, 0)))

    def test_bounds(self, smol: LlamaPrimitives) -> None:
        seq, other = fed(smol, prompt(20)), smol.seq_create()
        for operation in (
            lambda: smol.seq_copy(seq, other, 21),
            lambda: smol.seq_truncate(seq, 21),
            lambda: smol.seq_export(seq, 21, 0),
        ):
            with pytest.raises(OutOfBoundaryError):
                operation()
        with pytest.raises(UnsupportedError):
            smol.seq_export(seq, 20, 1)
        assert [smol.seq_boundary(seq, cap) for cap in (0, 7, 20, 99)] == [0, 7, 20, 20]
        with pytest.raises(UnknownSeqError):
            smol.seq_len(10_000)

    def test_handles_are_not_reused(self, smol: LlamaPrimitives) -> None:
        seq = smol.seq_create()
        smol.seq_free(seq)
        assert smol.seq_create() > seq
        with pytest.raises(UnknownSeqError):
            smol.seq_free(seq)

    def test_as_many_sequences_as_described(self, smol: LlamaPrimitives) -> None:
        for _ in range(smol.describe().max_seqs):
            smol.seq_create()
        with pytest.raises(CapacityError):
            smol.seq_create()

    def test_a_full_window_is_a_capacity_error(self, smol: LlamaPrimitives) -> None:
        seq = smol.seq_create()
        room = smol._window_cells
        with pytest.raises(CapacityError, match=f"0 \\+ {room + 1} tokens"):
            smol.step([Feed(seq, prompt(room + 1))])
        assert smol.seq_len(seq) == 0


class TestSteps:
    def test_rows_come_in_the_order_of_the_feeds(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(60)
        seqs = [fed(smol, tokens[20 * i : 20 * i + 15]) for i in range(3)]
        alone = [continued(smol, seq, tokens[:1])[0] for seq in seqs]
        for seq in seqs:
            smol.seq_truncate(seq, 15)
        order = [2, 0, 1]
        rows = smol.step([Feed(seqs[i], tokens[:1], i != 0) for i in order])
        assert rows.shape == (2, smol.describe().vocab_size)
        near(rows[0], alone[2], ACROSS_SHAPES)
        near(rows[1], alone[1], ACROSS_SHAPES)

    def test_sampled_tokens_are_the_highest_of_each_row(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(60)
        seqs = [fed(smol, tokens[20 * i : 20 * i + 15]) for i in range(3)]
        feeds = [Feed(seqs[i], tokens[:1], True) for i in (2, 0, 1)]
        rows = smol.step(feeds).copy()
        for seq in seqs:
            smol.seq_truncate(seq, 15)
        assert smol.step_sampled(feeds, [GREEDY] * 3) == rows.argmax(axis=1).tolist()

    def test_draws_are_not_honoured(self, smol: LlamaPrimitives) -> None:
        seq = fed(smol, prompt(10))
        warm = SampleSpec(temperature=1, top_p=1, min_p=0, top_k=0, position=0)
        assert smol.step_sampled([Feed(seq, prompt(1), True)], [warm]) is None
        assert smol.seq_len(seq) == 10

    def test_a_row_after_every_token(self, smol: LlamaPrimitives) -> None:
        tokens = prompt(60)
        seqs = [fed(smol, tokens[20 * i : 20 * i + 10]) for i in range(2)]
        expected = [continued(smol, seq, tokens[40:45]) for seq in seqs]
        for seq in seqs:
            smol.seq_truncate(seq, 10)
        rows = smol.step_rows([Feed(seqs[1], tokens[40:45]), Feed(seqs[0], tokens[40:43])])
        assert [len(of_feed) for of_feed in rows] == [5, 3]
        near(rows[0], expected[1], ACROSS_SHAPES)
        near(rows[1], expected[0][:3], ACROSS_SHAPES)
        with pytest.raises(UnsupportedError):
            smol.step_rows([Feed(seqs[0], tokens[:9])])

    def test_a_step_longer_than_the_batch_is_split(self, opened: Open, smollm2: Path) -> None:
        whole = opened(smollm2, lanes=2)
        parts = opened(smollm2, lanes=2, batch_size=32)
        assert parts.describe().prefill_step_tokens == 32
        tokens = prompt(100)
        rows = []
        for primitives in (whole, parts):
            first, second = primitives.seq_create(), primitives.seq_create()
            rows.append(primitives.step([Feed(first, tokens[:70], True), Feed(second, tokens[60:], True)]).copy())
            assert [primitives.seq_len(seq) for seq in (first, second)] == [70, 40]
        near(rows[1], rows[0], ACROSS_SHAPES)

    def test_greedy_text(self, smol: LlamaPrimitives) -> None:
        vocab = smol._vocab
        text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        tokens = np.array(vocab.encode(text), np.uint32)
        seq = smol.seq_create()
        (token,) = smol.step_sampled([Feed(seq, tokens, True)], [GREEDY]) or [0]
        reply = b""
        while not smol.is_eos(token) and len(reply) < 200:
            reply += vocab.piece(token)
            (token,) = smol.step_sampled([Feed(seq, np.array([token], np.uint32), True)], [GREEDY]) or [0]
        assert reply == b"The capital of France is Paris."


@pytest.fixture(scope="module")
def streams(opened: Open, tiny_gguf: Path) -> LlamaPrimitives:
    return opened(tiny_gguf, lanes=6)


class TestStreams:
    def test_the_shape(self, streams: LlamaPrimitives) -> None:
        description = streams.describe()
        assert isinstance(streams.sequences, StreamTable)
        assert (description.max_seqs, description.cells_total) == (7, 8 * WINDOW)
        assert description.takeover_preferred
        assert description.seed_min_tokens == 16
        assert description.cache_resident_cells == 0
        assert not description.copy_shares_cells

    def test_buffers_that_decode_together_are_brought_together(self, streams: LlamaPrimitives) -> None:
        tokens = prompt(200)
        seqs = [fed(streams, tokens[20 * i : 20 * i + 10 + i]) for i in range(7)]
        table = streams.sequences.table
        chosen = [seqs[6], seqs[0], seqs[3]]
        expected = [continued(streams, seq, tokens[:4]) for seq in seqs]
        for index, seq in enumerate(seqs):
            streams.seq_truncate(seq, 10 + index)
        for step in range(4):
            rows = streams.step([Feed(seq, tokens[step : step + 1], True) for seq in chosen])
            for row, seq in zip(rows, chosen, strict=True):
                near(row, expected[seqs.index(seq)][step], SAME_SHAPE)
        natives = sorted(table[seq].native for seq in chosen)
        assert natives == list(range(natives[0], natives[0] + 3))
        assert len({seq.native for seq in table.values()}) == 7
        for index, seq in enumerate(seqs):  # those that were moved aside go on too
            if seq not in chosen:
                near(continued(streams, seq, tokens[:4]), expected[index], SAME_SHAPE)

    def test_one_lane_among_free_buffers(self, streams: LlamaPrimitives) -> None:
        tokens = prompt(60)
        seqs = [fed(streams, tokens[:10]) for _ in range(5)]
        for seq in seqs[1:4]:
            streams.seq_free(seq)
        streams.step([Feed(seq, tokens[:1], True) for seq in (seqs[0], seqs[4])])
        natives = {streams.sequences[seq].native for seq in (seqs[0], seqs[4])}
        assert max(natives) - min(natives) == 1
        others = [streams.seq_create() for _ in range(5)]
        assert len({seq.native for seq in streams.sequences.table.values()}) == 7
        assert len(others) == 5

    def test_no_spare_buffer_never_happens_within_the_described_bound(self, streams: LlamaPrimitives) -> None:
        seqs = [fed(streams, prompt(20, seed)) for seed in range(streams.describe().max_seqs)]
        assert streams.seq_export(seqs[3], 11, 0)

    def test_counters(self, streams: LlamaPrimitives) -> None:
        seqs = [fed(streams, prompt(20)), fed(streams, prompt(30))]
        counters = streams.mem_counters()
        per_token = streams.describe().kv_bytes_per_token
        assert per_token == 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, width, bytes
        assert (counters.cells_used, counters.allocated_bytes) == (50, 50 * per_token)
        assert streams.cells_released(seqs) == 50
        assert streams.seq_export(seqs[0], 20, 0)
        assert streams.shed(1) > 0


@pytest.fixture(scope="module")
def pool(opened: Open, tiny_gguf: Path) -> LlamaPrimitives:
    return opened(tiny_gguf, lanes=4, shared_pool=True)


class TestPool:
    def test_the_shape(self, pool: LlamaPrimitives) -> None:
        description = pool.describe()
        assert isinstance(pool.sequences, PoolTable)
        assert (description.max_seqs, description.cells_total) == (31, 4 * WINDOW)
        assert description.copy_shares_cells
        assert description.cache_resident_cells == WINDOW
        assert description.seed_min_tokens == 0

    def test_copies_share_their_cells(self, pool: LlamaPrimitives) -> None:
        seq = fed(pool, prompt(100))
        copies = [pool.seq_create() for _ in range(3)]
        for copy, length in zip(copies, (100, 60, 30), strict=True):
            pool.seq_copy(seq, copy, length)
        assert pool.mem_counters().cells_used == 100
        assert pool.cells_released([seq]) == 0
        assert pool.cells_released([seq, copies[0]]) == 40
        pool.seq_free(seq)
        pool.seq_truncate(copies[0], 10)
        assert pool.mem_counters().cells_used == 60
        pool.step([Feed(copies[1], prompt(5))])
        assert pool.mem_counters().cells_used == 65

    def test_a_full_pool_is_a_capacity_error(self, pool: LlamaPrimitives) -> None:
        for seed in range(4):
            fed(pool, prompt(WINDOW, seed))
        with pytest.raises(CapacityError, match="no free cells"):
            fed(pool, prompt(10))


@pytest.fixture(scope="module")
def sliding(opened: Open, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaPrimitives:
    path = tmp_path_factory.mktemp("sliding") / "sliding.gguf"
    models.write_random(path, shared / "data/vocab/ggml-vocab-gpt-2.gguf", window=64)
    return opened(path)


class TestSliding:
    def test_its_state_is_whole_or_nothing(self, sliding: LlamaPrimitives) -> None:
        description = sliding.describe()
        assert not description.truncate_partial
        assert description.copy_shares_cells
        tokens = prompt(120)
        seq, other = fed(sliding, tokens[:100]), sliding.seq_create()
        for operation in (
            lambda: sliding.seq_copy(seq, other, 50),
            lambda: sliding.seq_truncate(seq, 50),
            lambda: sliding.seq_export(seq, 50, 0),
        ):
            with pytest.raises(OutOfBoundaryError, match="cannot be cut"):
                operation()
        assert [sliding.seq_boundary(seq, cap) for cap in (50, 99, 100, 101)] == [0, 0, 100, 100]
        sliding.seq_copy(seq, other, 100)
        third = sliding.seq_create()
        assert sliding.seq_import(third, memoryview(sliding.seq_export(seq, 100, 0))) == 100
        expected = continued(sliding, seq, tokens[100:])
        for copy in (other, third):
            near(continued(sliding, copy, tokens[100:]), expected, ACROSS_SHAPES)
        sliding.seq_truncate(seq, 0)
        assert sliding.seq_len(seq) == 0


def test_a_scripted_model_says_its_script(opened: Open, scripted_gguf: Callable[[str], Path]) -> None:
    primitives = opened(scripted_gguf("text_tool"))
    seq = primitives.seq_create()
    (token,) = primitives.step_sampled([Feed(seq, np.array([10], np.uint32), True)], [GREEDY]) or [0]
    said = b""
    while not primitives.is_eos(token):
        said += primitives._vocab.piece(token)
        (token,) = primitives.step_sampled([Feed(seq, np.array([token], np.uint32), True)], [GREEDY]) or [0]
    call = '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    assert said.decode() == f"Let me look.<tool_call>{call}</tool_call>"


def test_the_vocabulary_of_grammars(opened: Open, scripted_gguf: Callable[[str], Path]) -> None:
    vocabulary = opened(scripted_gguf("think")).vocabulary()
    by_text = {text: token for token, text in enumerate(vocabulary.token_bytes) if text}
    assert vocabulary.token_bytes[ord("a")] == b"a"
    think, end = by_text[b"\xff<think>"], by_text[b"\xff<|im_end|>"]
    assert {think, end} <= vocabulary.specials
    assert end in vocabulary.eos
    assert think not in vocabulary.eos
    assert not any(text.startswith(b"<|unused_") for text in vocabulary.token_bytes)


def test_states_of_another_attention_do_not_load(opened: Open, tiny_gguf: Path) -> None:
    flash, plain = opened(tiny_gguf, flash_attn="on"), opened(tiny_gguf, flash_attn="off")
    payload = flash.seq_export(fed(flash, prompt(20)), 20, 0)
    with pytest.raises(FaultError, match="does not load"):
        plain.seq_import(plain.seq_create(), memoryview(payload))


def test_the_identity_is_the_weights_and_the_settings(opened: Open, tiny_gguf: Path) -> None:
    plain = opened(tiny_gguf).describe().weights_identity
    quantized = opened(tiny_gguf, cache_type_k="bf16").describe().weights_identity
    assert plain[16:] == quantized[16:] == tiny_gguf.stat().st_size.to_bytes(8, "little") + bytes(8)
    assert plain[:16] != quantized[:16]
    assert opened(tiny_gguf, threads=2, ubatch_size=64).describe().weights_identity == plain


def test_too_many_lanes(tiny_gguf: Path) -> None:
    with pytest.raises(ModelRefused, match=r"at most 255 lanes \(--max-batch\)"):
        open_model(open_library(), tiny_gguf, Settings.of({}), window=WINDOW, lanes=256)
