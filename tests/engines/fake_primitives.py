"""A primitive runtime with no model: every row is a function of the sequence's tokens alone.

It keeps the primitives' contract strictly (capacity, handles, where state can be cut, how long a row is valid), so that
an executor over it is tested for what it may rely on and nothing else.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np
from xxhash import xxh3_64_intdigest

from superfluid.engines.primitives import (
    CapacityError,
    Description,
    FaultError,
    Feed,
    OutOfBoundaryError,
    PoolCounters,
    PrimitiveError,
    Primitives,
    Row,
    SampleSpec,
    UnknownSeqError,
    UnsupportedError,
    Vocabulary,
)

BYTE_TOKENS = 256  # ids below are single bytes
EOS, PAD = 256, 257
VOCAB_SIZE = 320
WORDS = [b"the", b" the", b'{"', b'":', b'"}', b"name", b"true", b"false", b"null", b", ", b" ", b"\n", b"ab", b"abc"]
KV_BYTES = 64
VERIFY_ROWS = 8
_HEADER = struct.Struct("<4sBxxxI")
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def row_of(tokens: Sequence[int], vocab_size: int = VOCAB_SIZE) -> Row:
    """The logits after `tokens`: (vocab,) f32 in -8..8, any two sequences' rows unrelated."""
    seed = np.uint64(xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes()))
    with np.errstate(over="ignore"):
        z = seed + np.arange(1, vocab_size + 1, dtype=np.uint64) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return ((z >> np.uint64(40)).astype(np.float32) / np.float32(1 << 20) - np.float32(8)).astype(np.float32)


def byte_vocabulary(vocab_size: int = VOCAB_SIZE) -> Vocabulary:
    """256 single bytes, `<|end|>` (256, ends a sequence), `<|pad|>`, then a few words and fillers."""
    token_bytes = [bytes([i]) for i in range(min(vocab_size, BYTE_TOKENS))]
    token_bytes += [b"\xff<|end|>", b"\xff<|pad|>", *WORDS][: max(0, vocab_size - BYTE_TOKENS)]
    token_bytes += [f"<{i}>".encode() for i in range(len(token_bytes), vocab_size)]
    return Vocabulary(token_bytes, frozenset({EOS, PAD}), frozenset({EOS}))


@attrs.define
class StepRecord:
    """A step as it was asked: (sequence, tokens, wants a row) per feed."""

    call: str
    feeds: list[tuple[int, list[int], bool]]

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for _, tokens, _ in self.feeds)


@attrs.define
class _State:
    tokens: list[int] = attrs.Factory(list)
    cells: list[int] = attrs.Factory(list)  # one id per token; shared ids are shared cells


class FakePrimitives(Primitives):
    """Options are those of `Description`; `head_only` is `truncate_partial` false, `sizes_exports`: the bytes of
    an export are known without making it.

    `script(tokens)` may name the token that wins after `tokens`; `on_step(feeds)` runs before every step (to advance a
    clock, raise a yield word, ...); `fail_next` makes a coming call fail. `steps` records what was asked.
    """

    def __init__(
        self,
        *,
        vocab_size: int = VOCAB_SIZE,
        max_batch: int = 8,
        max_seqs: int = 0,
        max_seq_len: int = 4096,
        page_size_tokens: int = 16,
        cells_total: int = 0,
        head_only: bool = False,
        copy_shares_cells: bool = False,
        takeover_preferred: bool = False,
        seed_min_tokens: int = 0,
        cache_resident_cells: int = 0,
        cache_exported_cells: int = 0,
        export_encodings: tuple[int, ...] = (0,),
        engine_sampling: bool = False,
        engine_draws: bool = False,
        verify_rows: bool = False,
        verify_batches: bool = True,
        prefill_step_tokens: int = 0,
        with_vocabulary: bool = True,
        sizes_exports: bool = True,
        script: Callable[[Sequence[int]], int | None] | None = None,
        on_step: Callable[[Sequence[Feed]], None] | None = None,
    ) -> None:
        self.description = Description(
            id="fake",
            version="fake 1",
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            page_size_tokens=page_size_tokens,
            kv_bytes_per_token=KV_BYTES,
            cells_total=cells_total,
            truncate_partial=not head_only,
            copy_shares_cells=copy_shares_cells,
            takeover_preferred=takeover_preferred,
            seed_min_tokens=seed_min_tokens,
            cache_resident_cells=cache_resident_cells,
            cache_exported_cells=cache_exported_cells,
            recurrent=head_only,
            export_encodings=export_encodings,
            engine_sampling=engine_sampling,
            engine_draws=engine_draws,
            verify_rows=verify_rows,
            verify_batches=verify_rows and verify_batches,
            prefill_step_tokens=prefill_step_tokens,
            weights_identity=b"fake weights".ljust(32, b"\0"),
            architecture="fake",
            backend="none",
        )
        self.steps: list[StepRecord] = []
        self.calls: Counter[str] = Counter()
        self.synchronous: bool | None = None
        self.closed = False
        self.script = script
        self.on_step = on_step
        self._sizes_exports = sizes_exports
        self._vocabulary = byte_vocabulary(vocab_size) if with_vocabulary else None
        self._states: dict[int, _State] = {}
        self._cells: Counter[int] = Counter()
        self._next_seq = self._next_cell = 1
        self._failures: dict[str, list[tuple[int, PrimitiveError]]] = defaultdict(list)
        self._last_rows: list[Row] = []

    # ---- test hooks

    def fail_next(self, call: str, error: PrimitiveError | None = None, after: int = 0) -> None:
        """Make the call named `call` raise (FaultError(5) by default), after `after` more that succeed."""
        self._failures[call].append((self.calls[call] + after + 1, error or FaultError(5)))

    def tokens(self, seq: int) -> list[int]:
        return list(self._get(seq).tokens)

    @property
    def sequences(self) -> list[int]:
        return sorted(self._states)

    @property
    def cells_used(self) -> int:
        return len(self._cells)

    # ---- primitives

    def describe(self) -> Description:
        return self.description

    def seq_create(self) -> int:
        self._count("seq_create")
        if self.description.max_seqs and len(self._states) >= self.description.max_seqs:
            raise CapacityError(f"all {self.description.max_seqs} sequences are in use")
        seq = self._next_seq
        self._next_seq += 1
        self._states[seq] = _State()
        return seq

    def seq_free(self, seq: int) -> None:
        self._count("seq_free")
        self._release(self._get(seq).cells)
        del self._states[seq]

    def seq_len(self, seq: int) -> int:
        return len(self._get(seq).tokens)

    def seq_copy(self, src: int, dst: int, length: int) -> None:
        self._count("seq_copy")
        source, target = self._get(src), self._get(dst)
        if target.tokens:
            raise OutOfBoundaryError(f"sequence {dst} is not empty")
        self._check_cut(source, length)
        if self.description.copy_shares_cells:
            cells = source.cells[:length]
            self._cells.update(cells)
        else:
            cells = self._allocate(length)
        target.tokens, target.cells = source.tokens[:length], cells

    def seq_truncate(self, seq: int, length: int) -> None:
        self._count("seq_truncate")
        state = self._get(seq)
        if length:
            self._check_cut(state, length)
        self._release(state.cells[length:])
        del state.tokens[length:], state.cells[length:]

    def seq_boundary(self, seq: int, cap: int) -> int:
        length = self.seq_len(seq)
        if self.description.truncate_partial:
            return min(cap, length)
        return length if length <= cap else 0

    def cells_released(self, seqs: Sequence[int]) -> int:
        held = Counter(cell for seq in seqs for cell in self._get(seq).cells)
        return sum(1 for cell, count in held.items() if self._cells[cell] == count)

    def seq_export(self, seq: int, length: int, encoding: int) -> bytes:
        self._count("seq_export")
        out = bytearray(self._export_size(seq, length, encoding))
        self._export(seq, length, encoding, memoryview(out))
        return bytes(out)

    def seq_export_size(self, seq: int, length: int, encoding: int) -> int | None:
        self._count("seq_export_size")
        return self._export_size(seq, length, encoding) if self._sizes_exports else None

    def seq_export_into(self, seq: int, length: int, encoding: int, out: memoryview) -> None:
        self._count("seq_export_into")
        assert self._sizes_exports
        assert len(out) == self._export_size(seq, length, encoding)
        self._export(seq, length, encoding, out)

    def _export_size(self, seq: int, length: int, encoding: int) -> int:
        if encoding not in self.description.export_encodings:
            raise UnsupportedError(f"encoding {encoding}")
        self._check_cut(self._get(seq), length)
        return _HEADER.size + length * (KV_BYTES >> encoding)

    def _export(self, seq: int, length: int, encoding: int, out: memoryview) -> None:
        cells = np.zeros((length, KV_BYTES >> encoding), np.uint8)
        cells[:, :4] = np.asarray(self._get(seq).tokens[:length], "<u4").view(np.uint8).reshape(length, 4)
        out[:] = _HEADER.pack(b"FAKE", encoding, length) + cells.tobytes()

    def seq_import(self, seq: int, payload: memoryview) -> int:
        self._count("seq_import")
        state = self._get(seq)
        if state.tokens:
            raise OutOfBoundaryError(f"sequence {seq} is not empty")
        magic, encoding, length = _HEADER.unpack_from(payload, 0)
        width = KV_BYTES >> encoding
        if magic != b"FAKE" or len(payload) != _HEADER.size + length * width:
            raise FaultError(5, "no state of this runtime")
        cells = self._allocate(length)
        raw = np.frombuffer(payload, np.uint8, offset=_HEADER.size).reshape(length, width)
        state.tokens = np.ascontiguousarray(raw[:, :4]).view("<u4").ravel().tolist()
        state.cells = cells
        return length

    def step(self, feeds: Sequence[Feed]) -> Row:
        self._begin("step", feeds)
        rows = [self._row(tokens) for tokens in self._feed(feeds) if tokens is not None]
        made = np.stack(rows) if rows else np.empty((0, self.description.vocab_size), np.float32)
        self._last_rows = [made]
        return made

    def step_sampled(self, feeds: Sequence[Feed], specs: Sequence[SampleSpec]) -> list[int] | None:
        description = self.description
        drawn = any(spec.temperature > 0 for spec in specs)
        if not description.engine_sampling or (drawn and not description.engine_draws):
            return None
        self._begin("step_sampled", feeds)
        rows = [self._row(tokens) for tokens in self._feed(feeds) if tokens is not None]
        return [sample(row, spec) for row, spec in zip(rows, specs, strict=True)]

    def step_rows(self, feeds: Sequence[Feed]) -> list[Row]:
        if not self.description.verify_rows:
            raise UnsupportedError("step_rows")
        assert all(len(feed.tokens) <= VERIFY_ROWS for feed in feeds), "at most 8 rows a feed"
        assert len(feeds) == 1 or self.description.verify_batches, "this runtime verifies one sequence at a time"
        self._begin("step_rows", feeds)
        before = [self.seq_len(feed.seq) for feed in feeds]
        self._feed(feeds)
        rows = []
        for feed, start in zip(feeds, before, strict=True):
            tokens = self._get(feed.seq).tokens
            rows.append(np.stack([self._row(tokens[:end]) for end in range(start + 1, len(tokens) + 1)]))
        self._last_rows = rows
        return rows

    def sync_steps(self, on: bool) -> None:
        self.synchronous = on

    def is_eos(self, token: int) -> bool:
        return token == EOS

    def mem_counters(self) -> PoolCounters:
        return PoolCounters(self.cells_used * KV_BYTES, self.cells_used, self.description.cells_total)

    def vocabulary(self) -> Vocabulary | None:
        return self._vocabulary

    def shed(self, n_bytes: int) -> int:
        self._count("shed")
        return 0

    def close(self) -> None:
        self.closed = True

    # ---- inside

    def _count(self, call: str) -> None:
        assert not self.closed, f"{call} after close"
        self.calls[call] += 1
        for due, error in self._failures[call]:
            if due == self.calls[call]:
                self._failures[call].remove((due, error))
                raise error

    def _begin(self, call: str, feeds: Sequence[Feed]) -> None:
        for rows in self._last_rows:
            rows.fill(np.nan)  # valid until the next step, and not longer
        self._last_rows = []
        if self.on_step is not None:
            self.on_step(feeds)
        self.steps.append(
            StepRecord(call, [(feed.seq, [int(t) for t in feed.tokens], feed.wants_row) for feed in feeds])
        )
        self._count(call)
        assert feeds, "an empty step"
        seqs = [feed.seq for feed in feeds]
        assert len(set(seqs)) == len(seqs), f"a sequence is fed twice in one step: {seqs}"
        for feed in feeds:
            length = len(self._get(feed.seq).tokens) + len(feed.tokens)
            assert len(feed.tokens), f"sequence {feed.seq} is fed nothing"
            assert int(feed.tokens.max()) < self.description.vocab_size, "a token outside the vocabulary"
            if length > self.description.max_seq_len:
                raise OutOfBoundaryError(f"sequence {feed.seq} would have {length} tokens")
        self._require_cells(sum(len(feed.tokens) for feed in feeds))

    def _feed(self, feeds: Sequence[Feed]) -> list[list[int] | None]:
        """The tokens of each feed's sequence after the step where a row is wanted, else none."""
        fed: list[list[int] | None] = []
        for feed in feeds:
            state = self._get(feed.seq)
            state.tokens.extend(int(t) for t in feed.tokens)
            state.cells.extend(self._allocate(len(feed.tokens)))
            fed.append(state.tokens if feed.wants_row else None)
        return fed

    def _row(self, tokens: Sequence[int]) -> Row:
        row = row_of(tokens, self.description.vocab_size)
        if self.script is not None:
            winner = self.script(tokens)
            if winner is not None:
                row[winner] = 100.0
        return row

    def _check_cut(self, state: _State, length: int) -> None:
        whole = len(state.tokens)
        if length > whole or (length < whole and not self.description.truncate_partial):
            raise OutOfBoundaryError(f"{length} of {whole} tokens")

    def _get(self, seq: int) -> _State:
        try:
            return self._states[seq]
        except KeyError:
            raise UnknownSeqError(f"no sequence {seq}") from None

    def _require_cells(self, count: int) -> None:
        total = self.description.cells_total
        if total and len(self._cells) + count > total:
            raise CapacityError(f"{count} cells wanted, {total - len(self._cells)} of {total} free")

    def _allocate(self, count: int) -> list[int]:
        self._require_cells(count)
        cells = list(range(self._next_cell, self._next_cell + count))
        self._next_cell += count
        self._cells.update(cells)
        return cells

    def _release(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._cells[cell] -= 1
            if not self._cells[cell]:
                del self._cells[cell]


def uniform(position: int) -> float:
    """The draw at a stream position: splitmix64 to [0, 1)."""
    wrap = (1 << 64) - 1
    z = (position + 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & wrap
    return ((z ^ z >> 31) >> 11) / float(1 << 53)


def sample(row: Row, spec: SampleSpec) -> int:
    """A pick by the host sampler's rules, in plain numpy."""
    if spec.temperature <= 0:
        return int(np.argmax(row))
    scaled = row * np.float32(1 / spec.temperature)
    weights = np.exp(scaled - scaled.max()).astype(np.float32)
    p = weights / weights.sum(dtype=np.float32)
    order = np.lexsort((np.arange(len(p)), -p))
    kept = order[: spec.top_k] if spec.top_k else order
    if spec.min_p > 0:
        kept = kept[p[kept] >= np.float32(spec.min_p) * p[order[0]]]
    if spec.top_p < 1:
        reached = np.flatnonzero(np.cumsum(p[kept], dtype=np.float32) >= np.float32(spec.top_p))
        kept = kept[: int(reached[0]) + 1] if len(reached) else kept
    kept = kept if len(kept) else order[:1]
    t = np.float32(uniform(spec.position)) * (p[kept].sum(dtype=np.float32) if len(kept) < len(p) else np.float32(1))
    for token in kept:
        if t < p[token]:
            return int(token)
        t -= p[token]
    return int(kept[-1])
