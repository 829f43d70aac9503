"""The primitives a runtime implements to be driven by the executor: one packed forward step and sequence state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.engines.engine import Status

TokenArray = npt.NDArray[np.uint32]
Row = npt.NDArray[np.float32]


class PrimitiveError(Exception):
    """A primitive failed. `fault` is the lane fault code it gives in a tick, `status` its code elsewhere."""

    fault = 5
    status: int = Status.Fatal


class UnsupportedError(PrimitiveError):
    status = Status.Unsupported


class UnknownSeqError(PrimitiveError):
    status = Status.UnknownHandle


class OutOfBoundaryError(PrimitiveError):
    status = Status.OutOfBoundary


class CapacityError(PrimitiveError):
    fault = 4
    status = Status.NeedsReplan


class FaultError(PrimitiveError):
    """The runtime's own fault code for the lanes of a step."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason or f"fault {code}")
        self.fault = code


class FatalError(PrimitiveError):
    """The runtime is broken: the worker exits 70 and the daemon starts a clean one."""


@attrs.frozen
class Description:
    """What a runtime is and can do, asked once at open. Counts of 0 mean no bound (see each name in spec tick.md)."""

    id: str
    version: str
    max_batch: int
    max_seq_len: int
    vocab_size: int
    max_seqs: int = 0
    page_size_tokens: int = 1
    kv_bytes_per_token: int = 0
    cells_total: int = 0
    truncate_partial: bool = True
    copy_shares_cells: bool = False
    takeover_preferred: bool = False
    seed_min_tokens: int = 0
    cache_resident_cells: int = 0
    cache_exported_cells: int = 0
    recurrent: bool = False
    export_encodings: tuple[int, ...] = (0,)
    engine_sampling: bool = False
    engine_draws: bool = False
    verify_rows: bool = False
    verify_batches: bool = False
    prefill_step_tokens: int = 0
    weights_identity: bytes = bytes(32)
    architecture: str = ""
    backend: str = ""
    sampling_defaults: dict[str, float] = attrs.Factory(dict)


@attrs.define
class Feed:
    """Tokens to append to one sequence in a step; `wants_row`: the logits after its last token are read."""

    seq: int
    tokens: TokenArray
    wants_row: bool = False


@attrs.define
class SampleSpec:
    """What `step_sampled` is asked for one row; temperature 0 is greedy."""

    temperature: float
    top_p: float
    min_p: float
    top_k: int
    position: int


@attrs.frozen
class Vocabulary:
    """Bytes of every token (specials as 0xFF + text), the ids penalties spare, and the whole stop set.

    `encode` (plain text, no specials, nothing added) spells what a grammar forces as the model would; none: longest
    tokens first.
    """

    token_bytes: Sequence[bytes]
    specials: frozenset[int]
    eos: frozenset[int]
    encode: Callable[[str], list[int]] | None = None


@attrs.define
class PoolCounters:
    allocated_bytes: int = 0
    cells_used: int = 0
    cells_total: int = 0


class Primitives(ABC):
    """A loaded model that can run one packed step. Handles are never reused. Errors are `PrimitiveError`s."""

    @abstractmethod
    def describe(self) -> Description: ...

    @abstractmethod
    def seq_create(self) -> int: ...

    @abstractmethod
    def seq_free(self, seq: int) -> None: ...

    @abstractmethod
    def seq_len(self, seq: int) -> int: ...

    @abstractmethod
    def seq_copy(self, src: int, dst: int, length: int) -> None:
        """Make `dst`, which is empty, hold the first `length` tokens of `src`."""

    @abstractmethod
    def seq_truncate(self, seq: int, length: int) -> None:
        """Cut to `length`; to 0 always succeeds. Raises OutOfBoundaryError where the state cannot be cut."""

    @abstractmethod
    def seq_boundary(self, seq: int, cap: int) -> int:
        """The longest length at most `cap` at which the state can be exported."""

    def cells_released(self, seqs: Sequence[int]) -> int:
        """Cells that freeing all of `seqs` gives back; one that shares cells counts only what nothing else holds."""
        return sum(self.seq_len(seq) for seq in seqs)

    @abstractmethod
    def seq_export(self, seq: int, length: int, encoding: int) -> bytes | memoryview:
        """The state of the first `length` tokens, in memory of its own."""

    def seq_export_size(self, seq: int, length: int, encoding: int) -> int | None:
        """Bytes of that state, where they are known without making it; such a state `seq_export_into` writes."""
        return None

    def seq_export_into(self, seq: int, length: int, encoding: int, out: memoryview) -> None:
        """Write that state into `out`, which has its size: a state goes out to shared memory without another copy."""
        raise UnsupportedError("seq_export_into")

    @abstractmethod
    def seq_import(self, seq: int, payload: memoryview) -> int:
        """Fill the empty `seq`; the length it then has."""

    @abstractmethod
    def step(self, feeds: Sequence[Feed]) -> Row:
        """One packed pass. A (rows, vocabulary) f32 array, a row per feed that wants one, in order; valid until the
        next step."""

    def step_sampled(self, feeds: Sequence[Feed], specs: Sequence[SampleSpec]) -> list[int] | None:
        """As `step`, but the runtime picks a token per wanted row; none when not honoured (nothing was fed)."""
        return None

    def step_rows(self, feeds: Sequence[Feed]) -> list[Row]:
        """A row after every token of each feed (at most 8 a feed)."""
        raise UnsupportedError("step_rows")

    def sync_steps(self, on: bool) -> None:
        """Whether a step that reads no row has finished when it returns, or is only queued."""
        return

    @abstractmethod
    def is_eos(self, token: int) -> bool: ...

    @abstractmethod
    def mem_counters(self) -> PoolCounters: ...

    def vocabulary(self) -> Vocabulary | None:
        return None

    def shed(self, n_bytes: int) -> int:
        """Give back up to `n_bytes` of memory that can be made again; the bytes freed."""
        return 0

    def close(self) -> None:
        return
