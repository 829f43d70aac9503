"""The primitives over libllama: packed steps, rows of logits, and the state of sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from superfluid._native import ffi as native_ffi, lib as native
from superfluid.engines.llamacpp.batch import Batch
from superfluid.engines.llamacpp.options import ROWS_PER_SEQUENCE
from superfluid.engines.llamacpp.sequences import Sequence as SequenceState, SequenceTable
from superfluid.engines.primitives import (
    CapacityError,
    Description,
    FatalError,
    Feed,
    OutOfBoundaryError,
    PoolCounters,
    Primitives,
    Row,
    SampleSpec,
    UnknownSeqError,
    UnsupportedError,
    Vocabulary,
)
from superfluid.llama.library import Library
from superfluid.llama.vocab import ATTR_CONTROL, ATTR_UNUSED, ATTR_USER_DEFINED, Vocab

LOSSLESS = 0
_NO_CELLS = 1  # what llama_decode returns when no cells are free


class LlamaPrimitives(Primitives):
    """A loaded model and its context. Built by `superfluid.engines.llamacpp.model.open_model`."""

    def __init__(
        self,
        library: Library,
        model: Any,
        context: Any,
        sequences: SequenceTable,
        description: Description,
        *,
        window_cells: int,
    ) -> None:
        self._library = library
        self._api, self._ffi = library.api, library.ffi
        self._model, self._context = model, context
        self.sequences = sequences
        self._description = description
        self._vocab = Vocab.of_model(library, model)
        self._n_vocab = self._vocab.n_tokens
        self._eos = frozenset(token for token in range(self._n_vocab) if self._vocab.is_eog(token))
        self._window_cells = window_cells
        self._batch = Batch(library, self._api.llama_n_batch(context), window_cells)
        self._rows = np.empty((0, self._n_vocab), np.float32)
        self._synchronous = False

    def describe(self) -> Description:
        return self._description

    # ---- sequences

    def seq_create(self) -> int:
        return self.sequences.create()

    def seq_free(self, seq: int) -> None:
        self.sequences.free(seq)

    def seq_len(self, seq: int) -> int:
        return self.sequences[seq].length

    def seq_copy(self, src: int, dst: int, length: int) -> None:
        self.sequences.copy(src, dst, length)

    def seq_truncate(self, seq: int, length: int) -> None:
        self.sequences.truncate(seq, length)

    def seq_boundary(self, seq: int, cap: int) -> int:
        return self.sequences.boundary(seq, cap)

    def cells_released(self, seqs: Sequence[int]) -> int:
        return self.sequences.released(seqs)

    def seq_export(self, seq: int, length: int, encoding: int) -> memoryview:
        _check_encoding(encoding)
        return self.sequences.export(seq, length)

    def seq_export_size(self, seq: int, length: int, encoding: int) -> int | None:
        _check_encoding(encoding)
        return self.sequences.export_size(seq, length)

    def seq_export_into(self, seq: int, length: int, encoding: int, out: memoryview) -> None:
        _check_encoding(encoding)
        self.sequences.export_into(seq, length, out)

    def seq_import(self, seq: int, payload: memoryview) -> int:
        return self.sequences.restore(seq, payload)

    # ---- steps

    def step(self, feeds: Sequence[Feed]) -> Row:
        rows, order = self._forward(feeds, all_rows=False)
        if order is None:
            return rows
        fed = [index for index in order if feeds[index].wants_row]
        places = np.argsort(np.asarray(fed, np.intp))
        return rows.take(places, axis=0, out=self._buffer(len(places)), mode="clip")

    def step_sampled(self, feeds: Sequence[Feed], specs: Sequence[SampleSpec]) -> list[int] | None:
        if any(spec.temperature > 0 for spec in specs):
            return None
        rows, order = self._forward(feeds, all_rows=False)
        picked = _highest(rows)
        if order is None:
            return picked
        fed = [index for index in order if feeds[index].wants_row]
        return [token for _, token in sorted(zip(fed, picked, strict=True))]

    def step_rows(self, feeds: Sequence[Feed]) -> list[Row]:
        most = max((len(feed.tokens) for feed in feeds), default=0)
        if most > ROWS_PER_SEQUENCE:
            raise UnsupportedError(f"rows after {most} tokens of one sequence; at most {ROWS_PER_SEQUENCE}")
        rows, order = self._forward(feeds, all_rows=True)
        found: list[Row] = [rows] * len(feeds)
        at = 0
        for index in order if order is not None else range(len(feeds)):
            end = at + len(feeds[index].tokens)
            found[index] = rows[at:end]
            at = end
        return found

    def sync_steps(self, on: bool) -> None:
        self._synchronous = on

    def _forward(self, feeds: Sequence[Feed], *, all_rows: bool) -> tuple[Row, list[int] | None]:
        """Run the feeds; the rows in the order they were packed in, and that order (none: as fed)."""
        known = self.sequences.table
        try:
            sequences = [known[feed.seq] for feed in feeds]
        except KeyError as error:
            raise UnknownSeqError(f"sequence {error} is unknown") from None
        total, longest = self._check_room(feeds, sequences)
        if len(feeds) > 1 and longest <= ROWS_PER_SEQUENCE:
            self.sequences.gather(sequences)
        order = self.sequences.pack_order(sequences)
        packed = list(zip(feeds, sequences, strict=True))
        if order is not None:
            packed = [packed[index] for index in order]
        if total > self._batch.capacity:
            return self._forward_in_parts(packed, all_rows), order
        batch = self._batch
        if longest == 1:
            batch.fill_round(
                [feed.tokens[0] for feed, _ in packed],
                [seq.length for _, seq in packed],
                [seq.native for _, seq in packed],
                [all_rows or feed.wants_row for feed, _ in packed],
            )
        else:
            batch.clear()
            for feed, seq in packed:
                batch.add(feed.tokens, seq.length, seq.native, last_row=feed.wants_row, all_rows=all_rows)
        self._decode()
        for feed, seq in packed:
            self.sequences.grow(seq, len(feed.tokens))
        return self._read_rows(total if all_rows else sum(feed.wants_row for feed in feeds)), order

    def _check_room(self, feeds: Sequence[Feed], sequences: Sequence[SequenceState]) -> tuple[int, int]:
        """Tokens in all and of the longest feed."""
        total = longest = 0
        for feed, seq in zip(feeds, sequences, strict=True):
            count = len(feed.tokens)
            if count == 0:
                raise OutOfBoundaryError(f"no tokens were fed to sequence {seq.handle}")
            if seq.length + count > self._window_cells:
                raise CapacityError(
                    f"{seq.length} + {count} tokens do not fit a sequence of {self._window_cells} cells"
                )
            total += count
            longest = max(longest, count)
        return total, longest

    def _forward_in_parts(self, packed: Sequence[tuple[Feed, SequenceState]], all_rows: bool) -> Row:
        """A step longer than the library's batch, as several; rows are copied out of each."""
        batch = self._batch
        count = sum(len(feed.tokens) if all_rows else feed.wants_row for feed, _ in packed)
        found = self._buffer(count)
        at = 0
        fed: list[tuple[SequenceState, int]] = []
        rows = 0

        def flush() -> None:
            nonlocal at, rows
            self._decode()
            found[at : at + rows] = self._read_rows(rows)
            at += rows
            for seq, n_tokens in fed:
                self.sequences.grow(seq, n_tokens)
            fed.clear()
            rows = 0
            batch.clear()

        batch.clear()
        room = batch.capacity
        for feed, seq in packed:
            start = 0
            while start < len(feed.tokens):
                end = min(start + room, len(feed.tokens))
                last = end == len(feed.tokens) and feed.wants_row
                already = seq.length + sum(n_tokens for other, n_tokens in fed if other is seq)
                batch.add(feed.tokens[start:end], already, seq.native, last_row=last, all_rows=all_rows)
                fed.append((seq, end - start))
                rows += end - start if all_rows else last
                room -= end - start
                start = end
                if room == 0:
                    flush()
                    room = batch.capacity
        if fed:
            flush()
        return found

    def _decode(self) -> None:
        status = self._api.llama_decode(self._context, self._batch.struct[0])
        if status == 0:
            return
        if status == _NO_CELLS:
            raise CapacityError("the library found no free cells for a step")
        raise FatalError(str(self._library.errors.failure(f"llama_decode returned {status}")))

    def _read_rows(self, count: int) -> Row:
        """The rows of the last decode, where the library keeps them."""
        if count == 0:
            if self._synchronous:
                self._api.llama_synchronize(self._context)
            return self._rows[:0]
        pointer = self._api.llama_get_logits(self._context)
        if not pointer:
            raise FatalError(f"the library gave none of {count} rows of logits")
        size = count * self._n_vocab * np.dtype(np.float32).itemsize
        rows = np.frombuffer(self._ffi.buffer(pointer, size), np.float32)
        return rows.reshape(count, self._n_vocab)

    def _buffer(self, count: int) -> Row:
        if count > len(self._rows):
            self._rows = np.empty((count, self._n_vocab), np.float32)
        return self._rows[:count]

    # ---- facts

    def is_eos(self, token: int) -> bool:
        return token in self._eos

    def mem_counters(self) -> PoolCounters:
        used = self.sequences.cells_used
        return PoolCounters(used * self.sequences.per_cell, used, self.sequences.cells_total)

    def vocabulary(self) -> Vocabulary:
        """As grammars need it: a special token's bytes are 0xFF and its text, an unused one has none."""
        vocab = self._vocab
        token_bytes = vocab.pieces(special=True)
        specials = set()
        for token in range(self._n_vocab):
            attr = vocab.attr(token)
            if attr & (ATTR_CONTROL | ATTR_USER_DEFINED):
                text = vocab.text(token)
                token_bytes[token] = b"\xff" + text.encode()
                if text:
                    specials.add(token)
            elif attr & ATTR_UNUSED:
                token_bytes[token] = b""
        return Vocabulary(token_bytes, frozenset(specials), self._eos)

    def shed(self, n_bytes: int) -> int:
        return self.sequences.forget_scratch()

    def close(self) -> None:
        """Free the context and the model; rows given out before are gone."""
        if self._context is not None:
            self._api.llama_free(self._context)
            self._api.llama_model_free(self._model)
            self._context = self._model = None


def _check_encoding(encoding: int) -> None:
    if encoding != LOSSLESS:
        raise UnsupportedError(f"encoding {encoding}: states of llama.cpp export losslessly only")


def _highest(rows: Row) -> list[int]:
    """The argmax of each row as the sampler picks it: ties go to the lowest id, NaN never wins."""
    if len(rows) == 0:
        return []
    picked: list[int] = rows.argmax(axis=1).tolist()
    for index, token in enumerate(picked):
        if rows[index, token] != rows[index, token]:  # numpy lets the first NaN win
            row = native_ffi.cast("float *", rows[index].ctypes.data)
            picked[index] = native.sf_argmax(row, rows.shape[1])
    return picked
