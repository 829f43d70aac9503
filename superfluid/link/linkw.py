"""The Link W catalog, version 8: what daemon and worker say to each other (pure data, no I/O).

Integers that carry a status code in an unsigned field hold the i32's bit pattern (`status_bits`).
"""

from enum import IntEnum
from typing import Annotated

import attrs

from superfluid.link.postcard import (
    F32,
    I32,
    MAY_BE_MISSING,
    U8,
    U16,
    U32,
    U64,
    Bytes32,
    Choice,
    Tokens,
    message,
    variant,
)

VERSION = 8
ALL_SPACES = 0xFFFFFFFF
MAX_FRAME = 16_777_216
OP_WINDOW = 16

RING_IN, RING_OUT, RING_LOGITS = 1, 2, 3


class LinkRole(IntEnum):
    NodeAgent = 0
    Worker = 1
    HeadDaemon = 2


class RingKind(IntEnum):
    Tokens = 0
    Logits = 1


# ---- handshake -----------------------------------------------------------------------------------------------------


@message
class Hello:
    proto_versions: tuple[U16, U16]
    link_role: LinkRole
    auth: bytes = b""


@message
class RingSpec:
    """Shape of one ring; `slot_bytes` includes the 16-byte slot header."""

    ring_id: U32
    kind: RingKind
    slot_bytes: U32
    slots: U32


@message
class StateSpaceDesc:
    space_id: U32
    kind: U32
    version_tag: U64 = 0
    bytes_per_token: U64 = 0
    blob_bytes: U64 = 0
    page_size_tokens: U32 = 0
    fork_cost_class: U32 = 0
    fork_cost_bytes: U64 = 0
    snapshot_cadence: U32 = 0
    snapshot_interval_tokens: U32 = 0
    placement: U32 = 0
    flags: U32 = 0
    name: str = ""


@message
class StrategySummary:
    strategy_id: str
    strategy_slot: U32
    impl_version: str
    claimed_exactness: U8


@message
class LinkWLimits:
    max_frame: U32 = MAX_FRAME
    op_window: U32 = OP_WINDOW
    ring_specs: list[RingSpec] = attrs.Factory(list)


@message
class HelloAckW:
    chosen_version: U16
    engine_bundle_hash: Bytes32
    capabilities: str
    state_space_descriptors: list[StateSpaceDesc]
    registered_strategies: list[StrategySummary]
    limits: LinkWLimits
    kv_bits: U32 = 0


@message
class RingAttach:
    ring_id: U32
    layout: RingSpec


@message
class RingAck:
    ring_id: U32
    generation_base: U64 = 1


@message
class ControlAttach:
    bytes: U32 = 64


@message
class ControlAck:
    bytes: U32 = 64


# ---- references into shared memory ---------------------------------------------------------------------------------


@message
class TokenRef:
    """`count` token ids in one slot of a token ring; generation 0 is always stale."""

    ring_id: U32 = 0
    index: U32 = 0
    count: U32 = 0
    generation: U64 = 0


@message
class RingRef:
    ring_id: U32 = 0
    index: U32 = 0
    generation: U64 = 0


@message
class TokenRange:
    """Half open: [start, end)."""

    start: U64
    end: U64


# ---- the tick ------------------------------------------------------------------------------------------------------


@message
class SamplingParams:
    """temperature <= 0 is greedy; top_k 0 is off; repeat_penalty 0 means 1; flags bit 0: ignore end of sequence."""

    temperature: F32 = 0.0
    top_p: F32 = 1.0
    min_p: F32 = 0.0
    top_k: U32 = 0
    freq_penalty: F32 = 0.0
    presence_penalty: F32 = 0.0
    repeat_penalty: F32 = 0.0
    flags: U32 = 0


@message
class LaneAdmit:
    """A new lane. Handles and slots: 0 is none."""

    lane_tag: U64
    prompt: TokenRef
    seed_handle: U64 = 0
    sampling: U32 = 0
    params: SamplingParams = attrs.Factory(SamplingParams)
    rng_counter_base: U64 = 0
    grammar_handle: U32 = 0
    logit_bias_handle: U32 = 0
    want_logprobs: bool = False
    top_logprobs: U8 = 0
    strategy_slot: U32 = 0
    determinism_class: U8 = 0
    minimum_exactness: U8 = 0
    allow_approximate: bool = False
    required_cert_id: U32 = 0
    host_sampler_identity: Bytes32 = bytes(32)
    grammar_replay: U32 = 0
    decode_replay: U32 = 0


@message
class LaneCommit:
    lane_tag: U64
    token_id: U32
    logits_nonce: U64


@message
class LanePrefill:
    lane_tag: U64
    token_offset: U32
    token_count: U32


@message
class LaneDecode:
    lane_tag: U64
    max_new_tokens: U16
    overshoot: U16 = 0


@message
class LaneRetire:
    lane_tag: U64
    publish_to_cache: bool = False


@message
class ShedPolicy:
    victim_lanes: list[U64] = attrs.Factory(list)
    evictable_cache_classes: U64 = 0xFFFFFFFFFFFFFFFF
    protected_quota_bytes: U64 = 0
    max_evict_bytes: U64 = 0xFFFFFFFFFFFFFFFF


@message
class TickPlan:
    plan_seq: U64
    flags: U32 = 0
    prefill_token_budget: U32 = 0
    max_decode_lanes: U32 = 0
    admits: list[LaneAdmit] = attrs.Factory(list)
    commits: list[LaneCommit] = attrs.Factory(list)
    prefills: list[LanePrefill] = attrs.Factory(list)
    decodes: list[LaneDecode] = attrs.Factory(list)
    retires: list[LaneRetire] = attrs.Factory(list)
    shed_policy: ShedPolicy = attrs.Factory(ShedPolicy)


@message
class AdmitResult:
    lane_tag: U64
    status: U32
    reject_code: U32 = 0
    cert_id: U32 = 0
    granted_class: U8 = 0


@message
class SpecStats:
    proposed: U32 = 0
    accepted: U32 = 0
    cert_id_in_effect: U32 = 0


@message
class LaneEmit:
    """token_ref means something only when n_tokens > 0, logits_row only when its generation is not 0."""

    lane_tag: U64
    token_ref: TokenRef = attrs.Factory(TokenRef)
    n_tokens: U32 = 0
    finish: U32 = 0
    logits_row: RingRef = attrs.Factory(RingRef)
    spec: SpecStats = attrs.Factory(SpecStats)


@message
class LaneFault:
    lane_tag: U64
    code: U32
    detail: U64 = 0


@message
class ShedEntry:
    lane_tag: U64
    kind: U32
    reason: U32 = 0
    bytes: U64 = 0
    tokens: U64 = 0


@message
class ShedReport:
    prefill_chunks_dropped: U32 = 0
    evictions_performed: U32 = 0
    bytes_evicted: U64 = 0
    entries: list[ShedEntry] = attrs.Factory(list)


@message
class OpComplete:
    op: U64
    state: U8
    error: U32 = 0
    bytes_moved: U64 = 0


@message
class TickTimings:
    wall_ns: U64 = 0
    prefill_ns: U64 = 0
    decode_ns: U64 = 0
    graph_hits: U32 = 0
    graph_misses: U32 = 0


@message
class MemCounters:
    allocated_bytes: U64 = 0
    host_retained_bytes: U64 = 0
    pool_blocks_total: U64 = 0
    pool_blocks_used: U64 = 0
    pool_bytes_evictable: U64 = 0
    tentative_bytes: U64 = 0


@message
class LaneLogprob:
    """Bit patterns of f32; one per token, in emission order within a lane; at most 20 alternatives."""

    lane_tag: U64
    logprob_bits: U32
    top_ids: Tokens = attrs.Factory(list)
    top_logprob_bits: Tokens = attrs.Factory(list)


@message
class TickEvents:
    plan_seq: U64
    tick_status: U32 = 0
    admit_results: list[AdmitResult] = attrs.Factory(list)
    emits: list[LaneEmit] = attrs.Factory(list)
    faults: list[LaneFault] = attrs.Factory(list)
    shed: ShedReport = attrs.Factory(ShedReport)
    op_completions: list[OpComplete] = attrs.Factory(list)
    timings: TickTimings = attrs.Factory(TickTimings)
    mem: MemCounters = attrs.Factory(MemCounters)
    logprobs: list[LaneLogprob] = attrs.Factory(list)


@message
class TickSubmit:
    plan: TickPlan


class TickResult(Choice):
    """Answer to TICK_SUBMIT."""


@variant("Events", newtype=True)
class TickAccepted(TickResult):
    events: TickEvents


@variant("Rejected")
class TickRejected(TickResult):
    status: I32


@message
class TickEmit:
    lane_tag: U64
    tokens: Tokens


# ---- prefix cache --------------------------------------------------------------------------------------------------


@message
class MatchCandidate:
    prefix_len: U64
    provenance_digest: Bytes32
    taint_bits: U32 = 0
    resident_tier: U8 = 0


@message
class SpaceMatch:
    space_id: U32
    candidates: list[MatchCandidate] = attrs.Factory(list)


@message
class MatchReq:
    space_id: U32
    span: TokenRef
    media_deps: list[Bytes32] = attrs.Factory(list)


@message
class MatchRes:
    spaces: list[SpaceMatch] = attrs.Factory(list)


@message
class SeedAcquire:
    span: TokenRef
    prefix_len: U64
    determinism_class: U8 = 0


class SeedGrant(Choice):
    """Answer to SEED_ACQUIRE."""


@variant("Granted")
class SeedGranted(SeedGrant):
    """`ttl_ticks` is the engine's lease in ticks; a payload that ends before it decodes with none."""

    seed_handle: U64
    ttl_ms: U32 = 1000
    ttl_ticks: Annotated[U64 | None, MAY_BE_MISSING] = None


@variant("Refused")
class SeedRefused(SeedGrant):
    status: I32


@message
class SeedRelease:
    seed_handle: U64


# ---- state operations ----------------------------------------------------------------------------------------------


class StateOp(Choice):
    """An asynchronous move of one space of a sequence."""


@variant("Snapshot")
class Snapshot(StateOp):
    sequence: U64
    space_id: U32
    boundary_pos: U64
    buf_id: U64
    sizing_gen: U64


@variant("Restore")
class Restore(StateOp):
    sequence: U64
    space_id: U32
    buf_id: U64


@variant("Demote")
class Demote(StateOp):
    sequence: U64
    space_id: U32
    range: TokenRange
    encoding: U8
    buf_id: U64
    sizing_gen: U64


@variant("Promote")
class Promote(StateOp):
    sequence: U64
    space_id: U32
    range: TokenRange
    buf_id: U64


@message
class StateOpSubmit:
    op: StateOp


class StateOpReply(Choice):
    """Answer to STATE_OP_SUBMIT."""


@variant("Accepted")
class StateOpAccepted(StateOpReply):
    op_handle: U64


@variant("Rejected")
class StateOpRejected(StateOpReply):
    status: I32


@message
class StateOpDone:
    op_handle: U64
    state: U8
    error: U32
    bytes_moved: U64


@message
class OpCancel:
    op_handle: U64


@message
class BufAlloc:
    buf_id: U64
    len: U64


@message
class BufAttach:
    buf_id: U64
    len: U64
    generation: U64 = 1


@message
class BufRelease:
    buf_id: U64


# ---- strategies ----------------------------------------------------------------------------------------------------


@message
class StrategyArtifact:
    role: U32
    content_hash: Bytes32
    byte_size: U64
    load_path: str


@message
class TapSpec:
    layer: U32
    tensor: U32
    dtype: U32
    layout: U32


@message
class CapabilityReq:
    kind_id: U32
    params: bytes


@message
class StrategyRegister:
    strategy_id: str
    impl_version: str
    impl_hash: Bytes32
    config_hash: Bytes32
    artifacts: list[StrategyArtifact] = attrs.Factory(list)
    taps: list[TapSpec] = attrs.Factory(list)
    capabilities: list[CapabilityReq] = attrs.Factory(list)
    target_archs: list[str] = attrs.Factory(list)
    kernel_caps_required: U32 = 0
    est_state_bytes: U64 = 0
    claimed_exactness: U8 = 0
    rng_contract_version: U32 = 1


@message
class ExactnessCert:
    cert_id: U32
    exactness: U8
    sampling_modes: U8
    param_domain: U32
    grammar_allowed: bool
    logit_bias_allowed: bool
    verification_shape_class: U32
    admissible_host_identities: list[Bytes32] = attrs.Factory(list)


@message
class StrategyGrantOk:
    strategy_slot: U32
    certificates: list[ExactnessCert] = attrs.Factory(list)
    state_spaces: list[StateSpaceDesc] = attrs.Factory(list)
    reserved_bytes: U64 = 0


class StrategyGrant(Choice):
    """Answer to STRATEGY_REGISTER."""


@variant("Granted", newtype=True)
class StrategyGranted(StrategyGrant):
    grant: StrategyGrantOk


@variant("Refused")
class StrategyRefused(StrategyGrant):
    status: I32


# ---- synchronous requests: the two enums have their own orders ------------------------------------------------------


@message
class MediaInfo:
    n_tokens: U32
    image_token_id: U32
    boi_token_id: U32
    eoi_token_id: U32
    preprocess_fp: U64


@message
class CacheKey:
    compat_key: Bytes32
    provenance_digest: Bytes32


@message
class Segment:
    start_ms: I32
    end_ms: I32
    text: str
    avg_logprob_bits: U32
    no_speech_prob_bits: U32
    compression_ratio_bits: U32
    temperature_bits: U32


class StateSyncReq(Choice):
    """A request that one reply answers; `StateSyncOk` names the answers."""


@variant("Fork")
class ForkReq(StateSyncReq):
    parent_sequence: U64
    flags: U32 = 0


@variant("Trim")
class TrimReq(StateSyncReq):
    sequence: U64
    space_id: U32
    new_len: U64


@variant("ExportSize")
class ExportSizeReq(StateSyncReq):
    sequence: U64
    space_id: U32
    range: TokenRange
    encoding: U8


@variant("CacheEvict")
class CacheEvictReq(StateSyncReq):
    bytes_target: U64
    policy: ShedPolicy


@variant("LaneSequence")
class LaneSequenceReq(StateSyncReq):
    lane_tag: U64


@variant("CreateSequence")
class CreateSequenceReq(StateSyncReq):
    pass


@variant("FreeSequence")
class FreeSequenceReq(StateSyncReq):
    sequence: U64


@variant("PublishSequence")
class PublishSequenceReq(StateSyncReq):
    sequence: U64
    span: TokenRef


@variant("AdoptSequence")
class AdoptSequenceReq(StateSyncReq):
    sequence: U64
    span: TokenRef


@variant("MediaProbe")
class MediaProbeReq(StateSyncReq):
    image_path: str


@variant("MediaEncode")
class MediaEncodeReq(StateSyncReq):
    image_path: str


@variant("MediaRelease")
class MediaReleaseReq(StateSyncReq):
    media_handle: U64


@variant("MediaBind")
class MediaBindReq(StateSyncReq):
    lane_tag: U64
    media_handle: U64
    token_offset: U32


@variant("CreateGrammar")
class CreateGrammarReq(StateSyncReq):
    json_schema: str


@variant("CreateGrammarStructural")
class CreateGrammarStructuralReq(StateSyncReq):
    tag_json: str


@variant("FreeGrammar")
class FreeGrammarReq(StateSyncReq):
    grammar_handle: U32


@variant("CreateLogitBias")
class CreateLogitBiasReq(StateSyncReq):
    """`values` are f32 bit patterns, one per token."""

    tokens: list[I32]
    values: list[U32]


@variant("FreeLogitBias")
class FreeLogitBiasReq(StateSyncReq):
    handle: U32


@variant("ForwardStage")
class ForwardStageReq(StateSyncReq):
    tokens: Tokens
    start_layer: U32
    end_layer: U32
    hidden_in: bytes | None


@variant("Embed")
class EmbedReq(StateSyncReq):
    tokens: Tokens


@variant("Transcribe")
class TranscribeReq(StateSyncReq):
    audio_path: str
    language: str | None
    translate: bool
    timestamps: bool
    prompt: str | None
    stream: bool


@variant("LoraLoad")
class LoraLoadReq(StateSyncReq):
    adapter_path: str


@variant("LoraUnload")
class LoraUnloadReq(StateSyncReq):
    pass


@variant("LoraId")
class LoraIdReq(StateSyncReq):
    pass


@variant("Capabilities")
class CapabilitiesReq(StateSyncReq):
    pass


@variant("SnapshotBoundary")
class SnapshotBoundaryReq(StateSyncReq):
    sequence: U64
    space_id: U32
    cap: U64


@variant("CacheEvictEntries")
class CacheEvictEntriesReq(StateSyncReq):
    keys: list[CacheKey]


@variant("Unpublish")
class UnpublishReq(StateSyncReq):
    span: TokenRef


class StateSyncOk(Choice):
    """What a `StateSyncReq` brought; `Ok` side of STATE_SYNC_RES."""


@variant("Fork")
class ForkOk(StateSyncOk):
    child_sequence: U64


@variant("Trim")
class TrimOk(StateSyncOk):
    pass


@variant("ExportSize")
class ExportSizeOk(StateSyncOk):
    required_bytes: U64
    sizing_gen: U64


@variant("CacheEvict")
class CacheEvictOk(StateSyncOk):
    bytes_freed: U64


@variant("LaneSequence")
class LaneSequenceOk(StateSyncOk):
    sequence: U64


@variant("CreateSequence")
class CreateSequenceOk(StateSyncOk):
    sequence: U64


@variant("FreeSequence")
class FreeSequenceOk(StateSyncOk):
    pass


@variant("PublishSequence")
class PublishSequenceOk(StateSyncOk):
    pass


@variant("AdoptSequence")
class AdoptSequenceOk(StateSyncOk):
    seed_handle: U64


@variant("MediaProbe")
class MediaProbeOk(StateSyncOk):
    info: MediaInfo


@variant("MediaEncode")
class MediaEncodeOk(StateSyncOk):
    media_handle: U64
    info: MediaInfo


@variant("MediaRelease")
class MediaReleaseOk(StateSyncOk):
    pass


@variant("MediaBind")
class MediaBindOk(StateSyncOk):
    pass


@variant("CreateGrammar")
class CreateGrammarOk(StateSyncOk):
    grammar_handle: U32


@variant("FreeGrammar")
class FreeGrammarOk(StateSyncOk):
    pass


@variant("CreateLogitBias")
class CreateLogitBiasOk(StateSyncOk):
    handle: U32


@variant("FreeLogitBias")
class FreeLogitBiasOk(StateSyncOk):
    pass


@variant("ForwardStage")
class ForwardStageOk(StateSyncOk):
    """Exactly one of the two is given."""

    hidden: bytes | None
    token: U32 | None


@variant("Transcribe")
class TranscribeOk(StateSyncOk):
    text: str
    language: str
    duration_ms: I32
    segments: list[Segment]


@variant("Embed")
class EmbedOk(StateSyncOk):
    """`embedding` is f32 little-endian."""

    embedding: bytes


@variant("LoraId")
class LoraIdOk(StateSyncOk):
    id: str | None


@variant("Capabilities")
class CapabilitiesOk(StateSyncOk):
    json: str


@variant("SnapshotBoundary")
class SnapshotBoundaryOk(StateSyncOk):
    boundary: U64


@variant("CacheEvictEntries")
class CacheEvictEntriesOk(StateSyncOk):
    pass


@variant("Unpublish")
class UnpublishOk(StateSyncOk):
    pass


class StateSyncRes(Choice):
    """Answer to STATE_SYNC_REQ."""


@variant("Ok", newtype=True)
class StateSyncDone(StateSyncRes):
    ok: StateSyncOk


@variant("Err")
class StateSyncErr(StateSyncRes):
    status: I32


# ---- the rest ------------------------------------------------------------------------------------------------------


@message
class Ping:
    queue_depth: U32 = 0
    mem: MemCounters = attrs.Factory(MemCounters)


@message
class Pong:
    queue_depth: U32 = 0
    mem: MemCounters = attrs.Factory(MemCounters)


@message
class DrainReq:
    pass


@message
class Drained:
    pass


@message
class TranscribeSegment:
    start_ms: I32
    end_ms: I32
    text: str


@message
class TranscribeCancel:
    pass


@message
class Telemetry:
    spans: bytes


MESSAGES: dict[int, type] = {
    0x0001: Hello,
    0x0002: HelloAckW,
    0x0003: RingAttach,
    0x0004: RingAck,
    0x0005: TickSubmit,
    0x0006: TickResult,
    0x0007: MatchReq,
    0x0008: MatchRes,
    0x0009: SeedAcquire,
    0x000A: SeedGrant,
    0x000B: SeedRelease,
    0x000C: StateOpSubmit,
    0x000D: StateOpReply,
    0x000E: StateOpDone,
    0x000F: OpCancel,
    0x0010: StrategyRegister,
    0x0011: StrategyGrant,
    0x0012: StateSyncReq,
    0x0013: StateSyncRes,
    0x0014: BufAlloc,
    0x0015: BufAttach,
    0x0016: BufRelease,
    0x0017: Ping,
    0x0018: Pong,
    0x0019: DrainReq,
    0x001A: Drained,
    0x001B: TranscribeSegment,
    0x001C: TranscribeCancel,
    0x001D: TickEmit,
    0x001E: ControlAttach,
    0x001F: ControlAck,
    0x8001: Telemetry,
}
"""Message type to class; a variant of a union travels under its union's type."""
