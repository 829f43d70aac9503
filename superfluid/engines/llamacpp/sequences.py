"""Sequences of a context: what each holds, and how one is copied, cut, saved and restored.

Two shapes. Streams: a buffer per sequence. Shared pool: one buffer in which copies share cells.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence as Sequences
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.engines.llamacpp.cells import SharedCells
from superfluid.engines.primitives import (
    CapacityError,
    FatalError,
    FaultError,
    OutOfBoundaryError,
    UnknownSeqError,
)
from superfluid.llama.library import Library

MOVE_LIMIT = 4 << 30  # bytes of state one gathering of buffers may move
_INTERNAL_FAULT = 5

Bytes = npt.NDArray[np.uint8]


@attrs.define(eq=False)
class Sequence:
    """`native` is the library's id of it (with streams: its buffer), `length` the tokens it holds."""

    handle: int
    native: int
    length: int = 0


class SequenceTable(ABC):
    """All sequences of one context. `cuts`: a state can be cut at any length, not only dropped whole."""

    copy_shares_cells: bool

    def __init__(
        self, library: Library, context: Any, *, n_seq_max: int, cells_total: int, cuts: bool, per_cell: int
    ) -> None:
        self._api, self._ffi = library.api, library.ffi
        self._errors = library.errors
        self._context = context
        self._memory = self._api.llama_get_memory(context)
        self._scratch = np.empty(0, np.uint8)
        self._next_handle = 1
        self.table: dict[int, Sequence] = {}
        self.cells_total = cells_total
        self.cuts = cuts
        self.per_cell = per_cell
        self.most = n_seq_max - 1  # one id stays free for exports and moves

    def __getitem__(self, handle: int) -> Sequence:
        try:
            return self.table[handle]
        except KeyError:
            raise UnknownSeqError(f"sequence {handle} is unknown") from None

    @property
    @abstractmethod
    def cells_used(self) -> int: ...

    @abstractmethod
    def _take_native(self) -> int: ...

    @abstractmethod
    def _give_native(self, native: int) -> None: ...

    def create(self) -> int:
        if len(self.table) >= self.most:
            raise CapacityError(f"all {self.most} sequences are taken")
        handle = self._next_handle
        self._next_handle += 1
        self.table[handle] = Sequence(handle, self._take_native())
        return handle

    def free(self, handle: int) -> None:
        seq = self[handle]
        self._clear(seq.native)
        self._give_native(seq.native)
        del self.table[handle]

    def grow(self, seq: Sequence, n_tokens: int) -> None:
        """A step appended tokens."""
        seq.length += n_tokens

    def check_length(self, seq: Sequence, length: int) -> None:
        """Whether a state can stop there. Raises OutOfBoundaryError."""
        if length > seq.length:
            raise OutOfBoundaryError(f"{length} tokens asked of a sequence of {seq.length}")
        if not self.cuts and length not in (0, seq.length):
            raise OutOfBoundaryError(f"this model's state cannot be cut from {seq.length} to {length} tokens")

    def boundary(self, handle: int, cap: int) -> int:
        length = self[handle].length
        if self.cuts:
            return min(cap, length)
        return length if length <= cap else 0

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None: ...

    def truncate(self, handle: int, length: int) -> None:
        seq = self[handle]
        self.check_length(seq, length)
        if length == 0:
            self._clear(seq.native)
        elif length < seq.length:
            self._cut(seq.native, length)
        seq.length = length

    @abstractmethod
    def released(self, handles: Sequences[int]) -> int: ...

    @abstractmethod
    def exported(self, seq: Sequence, length: int) -> AbstractContextManager[int]:
        """The id under which the library holds the first `length` tokens of `seq` alone, while it lasts."""

    def export(self, handle: int, length: int) -> memoryview:
        seq = self[handle]
        self.check_length(seq, length)
        with self.exported(seq, length) as native:
            state = np.empty(self._size(native), np.uint8)
            self._write(native, state)
        return state.data

    def export_size(self, handle: int, length: int) -> int | None:
        """Bytes of that export; none when it takes making it to know."""
        seq = self[handle]
        self.check_length(seq, length)
        with self.exported(seq, length) as native:
            return self._size(native)

    def export_into(self, handle: int, length: int, out: memoryview) -> None:
        seq = self[handle]
        self.check_length(seq, length)
        with self.exported(seq, length) as native:
            self._write(native, np.frombuffer(out, np.uint8))

    def restore(self, handle: int, payload: memoryview) -> int:
        seq = self[handle]
        if seq.length:
            raise OutOfBoundaryError(f"a state is restored into an empty sequence, this one holds {seq.length} tokens")
        length = self._load(seq.native, np.frombuffer(payload, np.uint8))
        self.grow(seq, length)
        return length

    def gather(self, sequences: Sequences[Sequence]) -> None:
        """The sequences of a decode round, in feed order, before it is packed."""
        return

    def pack_order(self, sequences: Sequences[Sequence]) -> list[int] | None:
        """The order in which feeds are packed; none: as they come."""
        return None

    def forget_scratch(self) -> int:
        """Give the export buffer back; its bytes."""
        n_bytes = self._scratch.nbytes
        self._scratch = np.empty(0, np.uint8)
        return n_bytes

    # ---- the library's ids

    def _clear(self, native: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, native, -1, -1)

    def _cut(self, native: int, length: int) -> None:
        if not self._api.llama_memory_seq_rm(self._memory, native, length, -1):
            raise OutOfBoundaryError(f"the library does not cut this state to {length} tokens")

    def _size(self, native: int) -> int:
        return int(self._api.llama_state_seq_get_size(self._context, native))

    def _write(self, native: int, out: Bytes) -> None:
        pointer = self._ffi.cast("uint8_t *", out.ctypes.data)
        if self._api.llama_state_seq_get_data(self._context, pointer, out.nbytes, native) != out.nbytes:
            raise self._failed("the state does not export")

    def _save(self, native: int) -> Bytes:
        """A sequence's state; a view of a buffer that the next one overwrites."""
        size = self._size(native)
        if size > self._scratch.nbytes:
            self._scratch = np.empty(size, np.uint8)
        self._write(native, self._scratch[:size])
        return self._scratch[:size]

    def _load(self, native: int, state: Bytes) -> int:
        """Fill an empty sequence; its length. It is empty again when that fails."""
        pointer = self._ffi.cast("uint8_t *", state.ctypes.data)
        if self._api.llama_state_seq_set_data(self._context, pointer, state.nbytes, native) == 0:
            self._clear(native)
            raise self._failed("the state does not load")
        return int(self._api.llama_memory_seq_pos_max(self._memory, native)) + 1

    def _failed(self, what: str) -> FaultError:
        return FaultError(_INTERNAL_FAULT, str(self._errors.failure(what)))


class StreamTable(SequenceTable):
    """A buffer per sequence. Buffers that decode together should be neighbours: the library runs attention over a run
    of buffers with rising numbers as one batch, and over any others one after another."""

    copy_shares_cells = False

    def __init__(self, *args: Any, n_seq_max: int, **kwargs: Any) -> None:
        super().__init__(*args, n_seq_max=n_seq_max, **kwargs)
        self._free = [True] * n_seq_max

    @property
    def cells_used(self) -> int:
        return sum(seq.length for seq in self.table.values())

    def _take_native(self) -> int:
        native = self._free.index(True)
        self._free[native] = False
        return native

    def _give_native(self, native: int) -> None:
        self._free[native] = True

    def released(self, handles: Sequences[int]) -> int:
        return sum(self[handle].length for handle in handles)

    def copy(self, source: int, target: int, length: int) -> None:
        origin, copied = self[source], self[target]
        self.check_length(origin, length)
        if length == 0:
            return
        # A whole seq_cp would only be carried out by the next decode, after either buffer may have changed.
        self._load(copied.native, self._save(origin.native))
        if length < origin.length:
            self._cut(copied.native, length)
        self.grow(copied, length)

    @contextmanager
    def exported(self, seq: Sequence, length: int) -> Iterator[int]:
        if length == seq.length:
            yield seq.native
            return
        if True not in self._free:
            raise CapacityError("no buffer is free to cut the exported state in")
        spare = self._free.index(True)
        try:
            self._load(spare, self._save(seq.native))
            self._cut(spare, length)
            yield spare
        finally:
            self._clear(spare)

    def export_size(self, handle: int, length: int) -> int | None:
        whole = length == self[handle].length
        return super().export_size(handle, length) if whole else None  # the cut moves the state twice: once is enough

    def pack_order(self, sequences: Sequences[Sequence]) -> list[int] | None:
        natives = [seq.native for seq in sequences]
        if all(a < b for a, b in itertools.pairwise(natives)):
            return None
        return sorted(range(len(natives)), key=natives.__getitem__)

    def gather(self, sequences: Sequences[Sequence]) -> None:
        count = len(sequences)
        natives = [seq.native for seq in sequences]
        if max(natives) - min(natives) == count - 1:
            return
        by_buffer = {seq.native: seq for seq in self.table.values()}
        members = set(natives)
        held = [by_buffer[native].length if native in by_buffer else 0 for native in range(len(self._free))]

        def moved(first: int) -> int:
            inside = sum(held[native] for native in range(first, first + count) if native not in members)
            return inside + sum(held[native] for native in natives if not first <= native < first + count)

        first = min(range(len(self._free) - count + 1), key=moved)
        if moved(first) * self.per_cell > MOVE_LIMIT:
            return
        outside = sorted(native for native in natives if not first <= native < first + count)
        places = [native for native in range(first, first + count) if native not in members]
        for origin, place in zip(outside, places, strict=True):
            self._swap(by_buffer[origin], by_buffer.get(place), place)

    def _swap(self, seq: Sequence, idle: Sequence | None, place: int) -> None:
        """Move a sequence to the buffer `place`, and what is idle there to where it came from."""
        origin = seq.native
        aside = self._save(place).copy() if idle is not None and idle.length else None
        state = self._save(origin) if seq.length else None
        self._clear(origin)
        self._clear(place)
        try:
            if state is not None:
                self._load(place, state)
            if aside is not None:
                self._load(origin, aside)
        except FaultError as error:
            raise FatalError(f"a buffer that was moved is lost: {error}") from error
        seq.native = place
        if idle is not None:
            idle.native = origin
        else:
            self._free[place], self._free[origin] = False, True


class PoolTable(SequenceTable):
    """One pool of cells for all sequences; copies share cells. The last id is scratch for exports."""

    copy_shares_cells = True

    def __init__(self, *args: Any, n_seq_max: int, **kwargs: Any) -> None:
        super().__init__(*args, n_seq_max=n_seq_max, **kwargs)
        self._scratch_id = n_seq_max - 1
        self._free_ids = list(range(n_seq_max - 2, -1, -1))
        self._cells = SharedCells()

    @property
    def cells_used(self) -> int:
        return self._cells.used

    def _take_native(self) -> int:
        return self._free_ids.pop()

    def _give_native(self, native: int) -> None:
        self._free_ids.append(native)

    def create(self) -> int:
        handle = super().create()
        self._cells.add(handle)
        return handle

    def free(self, handle: int) -> None:
        super().free(handle)
        self._cells.remove(handle)

    def grow(self, seq: Sequence, n_tokens: int) -> None:
        super().grow(seq, n_tokens)
        self._cells.grow(seq.handle, n_tokens)

    def truncate(self, handle: int, length: int) -> None:
        super().truncate(handle, length)
        self._cells.cut(handle, length)

    def released(self, handles: Sequences[int]) -> int:
        for handle in handles:
            self[handle]
        return self._cells.released(handles)

    def copy(self, source: int, target: int, length: int) -> None:
        origin, copied = self[source], self[target]
        self.check_length(origin, length)
        if length == 0:
            return
        end = length if self.cuts else -1
        self._api.llama_memory_seq_cp(self._memory, origin.native, copied.native, 0 if self.cuts else -1, end)
        copied.length = length
        self._cells.copy(source, target, length)

    @contextmanager
    def exported(self, seq: Sequence, length: int) -> Iterator[int]:
        if length == seq.length:
            yield seq.native
            return
        self._api.llama_memory_seq_cp(self._memory, seq.native, self._scratch_id, 0, length)
        try:
            yield self._scratch_id
        finally:
            self._clear(self._scratch_id)
