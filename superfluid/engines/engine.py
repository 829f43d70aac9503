"""The engine interface: what every runtime is driven through, one loaded model on one thread of a worker.

Plans and events are the Link W messages themselves (`superfluid.link.linkw`). A refusal is an `EngineError` with a
status code of `Status`; codes -100 to -114 refuse a plan and leave no trace, -120 to -131 answer one operation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link import linkw
from superfluid.link.codes import (
    FORK_EAGER as FORK_EAGER,
    FORK_PRIVATE as FORK_PRIVATE,
    MAX_ALTERNATIVES as MAX_ALTERNATIVES,
    PARAM_IGNORE_EOS as PARAM_IGNORE_EOS,
    SHED_EVICTION as SHED_EVICTION,
    SHED_PREFILL as SHED_PREFILL,
    SPACE_NO_OPERATIONS as SPACE_NO_OPERATIONS,
    SPACE_NOT_CACHED as SPACE_NOT_CACHED,
    AdmitStatus as AdmitStatus,
    CacheClass as CacheClass,
    Encoding as Encoding,
    FaultCode as FaultCode,
    OpState as OpState,
    PlanFlag as PlanFlag,
    Sampling as Sampling,
    SpaceKind as SpaceKind,
    Status as Status,
    TickStatus as TickStatus,
    status_name as status_name,
)
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring

TokenArray = npt.NDArray[np.uint32]
OnEmit = Callable[[list[tuple[int, list[int]]]], None]
"""Takes the tokens of one decode round: (lane tag, token ids) for each lane that has some."""

OnSegment = Callable[[linkw.Segment], bool]
"""Takes a transcribed segment; false stops the transcription."""


class EngineError(Exception):
    """An engine refused a plan or an operation; `status` says why (see `Status`)."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(f"{status_name(status)}: {reason}" if reason else status_name(status))
        self.status = int(status)
        self.reason = reason


class EngineFatal(EngineError):
    """The runtime broke; the process is presumed dead (a worker exits 70)."""

    def __init__(self, reason: str) -> None:
        super().__init__(Status.Fatal, reason)


@attrs.define
class OpStatus:
    """A state operation as it stands; `error` is a status code."""

    state: int
    error: int = 0
    bytes_moved: int = 0


class Engine(ABC):
    """One loaded model. Everything is called from one thread; nothing here blocks but work on the model.

    `idle_work`: the engine has work of its own between frames, so that it is pumped without an operation under way.
    """

    idle_work: bool = False

    # ---- rings and control words

    def attach_ring(self, ring: Ring) -> None:
        """Take one of the three rings (`linkw.RING_IN`, `RING_OUT`, `RING_LOGITS`); attach once per ring."""
        return

    def attach_control(self, control: Control) -> None:
        """Take the control words; an engine that cannot yield ignores them."""
        return

    # ---- the tick

    @abstractmethod
    def tick(self, plan: linkw.TickPlan, on_emit: OnEmit | None = None) -> linkw.TickEvents:
        """Validate the whole plan, then run retires, commits, admits, prefills and decodes.

        `on_emit` is called after each decode round while plan flag bit 2 is set. Tokens of the result are in the
        outbound ring. Raises EngineError (-100 to -114) when the plan is refused, EngineFatal when the runtime broke.
        """

    @abstractmethod
    def pump(self) -> list[linkw.OpComplete]:
        """Advance asynchronous operations between ticks; the operations that ended, each reported once."""

    def open_ops(self) -> int:
        """Number of state operations under way."""
        return 0

    # ---- prefix cache

    @abstractmethod
    def state_spaces(self) -> list[linkw.StateSpaceDesc]: ...

    @abstractmethod
    def space_match(self, space_id: int, tokens: TokenArray) -> list[linkw.SpaceMatch]:
        """Cached prefixes of `tokens` in one space, or in all (`linkw.ALL_SPACES`), longest first."""

    @abstractmethod
    def seed_acquire(self, tokens: TokenArray, prefix_len: int, determinism_class: int) -> int:
        """Pin `prefix_len` cached tokens of `tokens`; a seed handle. Raises EngineError -130."""

    @abstractmethod
    def seed_release(self, seed: int) -> None:
        """Unpin. Raises EngineError -129 for an unknown seed."""

    def seed_lease_ticks(self) -> int | None:
        """How many ticks a seed lives; none: for ever."""
        return None

    def seed_adopt(self, sequence: int, tokens: TokenArray) -> int:
        raise EngineError(Status.Unsupported, "seed_adopt")

    @abstractmethod
    def cache_evict(self, bytes_target: int, policy: linkw.ShedPolicy) -> int:
        """Evict up to `bytes_target` bytes within the policy; the bytes freed."""

    def cache_evict_entries(self, keys: Sequence[linkw.CacheKey]) -> None:
        raise EngineError(Status.Unsupported, "cache_evict_entries")

    def publish_sequence(self, sequence: int, tokens: TokenArray) -> None:
        raise EngineError(Status.Unsupported, "publish_sequence")

    def unpublish(self, tokens: TokenArray) -> None:
        raise EngineError(Status.Unsupported, "unpublish")

    # ---- sequences

    def create_sequence(self) -> int:
        raise EngineError(Status.Unsupported, "create_sequence")

    def free_sequence(self, sequence: int) -> None:
        raise EngineError(Status.Unsupported, "free_sequence")

    def lane_sequence(self, lane_tag: int) -> int | None:
        return None

    @abstractmethod
    def seq_fork(self, sequence: int, flags: int) -> int: ...

    # ---- state operations

    @abstractmethod
    def space_export_size(self, sequence: int, space_id: int, start: int, end: int, encoding: int) -> tuple[int, int]:
        """Exact bytes of an export (the 136-byte envelope included) and the sizing generation it is valid for."""

    @abstractmethod
    def space_snapshot(self, sequence: int, space_id: int, boundary: int, out: memoryview, sizing_gen: int) -> int:
        """Export losslessly at `boundary` into `out`, which stays loaned until the operation ends; its handle."""

    def space_snapshot_boundary(self, sequence: int, space_id: int, cap: int) -> int:
        raise EngineError(Status.Unsupported, "space_snapshot_boundary")

    @abstractmethod
    def space_restore(self, sequence: int, space_id: int, sealed: memoryview) -> int: ...

    @abstractmethod
    def space_trim(self, sequence: int, space_id: int, new_len: int) -> None: ...

    @abstractmethod
    def space_demote(
        self, sequence: int, space_id: int, start: int, end: int, encoding: int, out: memoryview, sizing_gen: int
    ) -> int: ...

    @abstractmethod
    def space_promote(self, sequence: int, space_id: int, start: int, end: int, sealed: memoryview) -> int: ...

    @abstractmethod
    def op_poll(self, op: int) -> OpStatus: ...

    @abstractmethod
    def op_cancel(self, op: int) -> None: ...

    # ---- constraints

    def grammar_create(self, json_schema: str) -> int:
        raise EngineError(Status.Unsupported, "grammar_create")

    def grammar_create_structural(self, tag_json: str) -> int:
        raise EngineError(Status.Unsupported, "grammar_create_structural")

    def grammar_draft(self, kind: str, text: str) -> Callable[[], None] | None:
        """Work for another thread ("schema" or "structural") behind which the grammar is made at once; None when
        nothing of it takes long. Ticks may run meanwhile."""
        return None

    def grammar_free(self, grammar: int) -> None:
        raise EngineError(Status.Unsupported, "grammar_free")

    def logit_bias_create(self, tokens: Sequence[int], values: Sequence[float]) -> int:
        raise EngineError(Status.Unsupported, "logit_bias_create")

    def logit_bias_free(self, bias: int) -> None:
        raise EngineError(Status.Unsupported, "logit_bias_free")

    # ---- other workloads

    def embed(self, tokens: TokenArray) -> npt.NDArray[np.float32]:
        raise EngineError(Status.Unsupported, "embed")

    def transcribe(self, request: linkw.TranscribeReq, on_segment: OnSegment | None) -> linkw.TranscribeOk:
        raise EngineError(Status.Unsupported, "transcribe")

    def lora_load(self, path: str) -> None:
        raise EngineError(Status.Unsupported, "lora_load")

    def lora_unload(self) -> None:
        raise EngineError(Status.Unsupported, "lora_unload")

    def lora_id(self) -> str | None:
        return None

    def media_probe(self, path: str) -> linkw.MediaInfo:
        raise EngineError(Status.Unsupported, "media_probe")

    def media_encode(self, path: str) -> tuple[int, linkw.MediaInfo]:
        raise EngineError(Status.Unsupported, "media_encode")

    def media_release(self, media: int) -> None:
        raise EngineError(Status.Unsupported, "media_release")

    def media_bind(self, lane_tag: int, media: int, token_offset: int) -> None:
        raise EngineError(Status.Unsupported, "media_bind")

    def forward_stage(
        self, tokens: Sequence[int], start_layer: int, end_layer: int, hidden_in: bytes | None
    ) -> bytes | int:
        raise EngineError(Status.Unsupported, "forward_stage")

    def n_layers(self) -> int:
        return 0

    # ---- identity

    def capability_descriptor(self) -> str | None:
        """The capability record as JSON text; none when there is none."""
        return None

    def kv_bits(self) -> int:
        return 0

    @abstractmethod
    def strategy_register(self, registration: linkw.StrategyRegister) -> linkw.StrategyGrantOk:
        """Raises EngineError -128 when refused."""

    def close(self) -> None:
        """Give back native memory; nothing may be called afterwards."""
        return
