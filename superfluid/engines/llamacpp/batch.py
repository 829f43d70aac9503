"""A packed batch in buffers that are made once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from superfluid.llama.library import Library

TokenArray = npt.NDArray[np.uint32]


class Batch:
    """Room for `capacity` tokens of one sequence each; a token is (id, position, sequence, wants a row)."""

    def __init__(self, library: Library, capacity: int, most_positions: int) -> None:
        self.capacity = capacity
        self._tokens = np.zeros(capacity, np.uint32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        self._counting = np.arange(most_positions + 1, dtype=np.int32)
        ones = np.ones(capacity, np.int32)
        pointers = np.uintp(self._sequences.ctypes.data) + 4 * np.arange(capacity, dtype=np.uintp)
        self._kept = (ones, pointers)  # the struct below points into these
        cast = library.ffi.cast
        self.struct: Any = library.ffi.new("struct llama_batch *")
        self.struct.token = cast("llama_token *", self._tokens.ctypes.data)
        self.struct.pos = cast("llama_pos *", self._positions.ctypes.data)
        self.struct.n_seq_id = cast("int32_t *", ones.ctypes.data)
        self.struct.seq_id = cast("llama_seq_id **", pointers.ctypes.data)
        self.struct.logits = cast("int8_t *", self._wanted.ctypes.data)

    def clear(self) -> None:
        self.struct.n_tokens = 0

    def add(self, tokens: TokenArray, position: int, sequence: int, *, last_row: bool, all_rows: bool = False) -> None:
        """Append tokens of one sequence, the first at `position`; they must fit."""
        start: int = self.struct.n_tokens
        count = len(tokens)
        end = start + count
        self._tokens[start:end] = tokens
        self._positions[start:end] = self._counting[position : position + count]
        self._sequences[start:end] = sequence
        self._wanted[start:end] = all_rows
        self._wanted[end - 1] = all_rows or last_row
        self.struct.n_tokens = end

    def fill_round(self, tokens: Sequence[Any], positions: list[int], sequences: list[int], wanted: list[bool]) -> None:
        """The whole batch at once: one token of each sequence."""
        count = len(positions)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._wanted[:count] = wanted
        self.struct.n_tokens = count
