"""The Link F catalog, versions 2 and 3: what a fleet's head and its nodes say to each other (pure data, no I/O)."""

from enum import IntEnum

import attrs

from superfluid.link.linkw import Hello, MemCounters, Telemetry, TokenRange
from superfluid.link.postcard import U8, U16, U32, U64, Bytes32, Choice, Tokens, message, variant

VERSIONS = (2, 3)

FINISH_EXPIRED = 0xFFFFFFFF
FINISH_REFUSED = 0xFFFFFFFE
FINISH_DECLINED = 0xFFFFFFFD


class SegmentKind(IntEnum):
    TextDelta = 0
    ReasoningDelta = 1
    ToolCallDelta = 2


# ---- handshake and status ------------------------------------------------------------------------------------------


@message
class Capacity:
    """Rates in tokens per second; 0 is unknown. `sampled_at_ms` is the node's uptime."""

    gpu_memory_bytes: U64 = 0
    gpu_memory_free_bytes: U64 = 0
    host_memory_bytes: U64 = 0
    active_sessions: U32 = 0
    max_sessions: U32 = 0xFFFFFFFF
    max_context_tokens: U64 = 0
    kv_blocks_used: U64 = 0
    kv_blocks_total: U64 = 0
    lanes_active: U32 = 0
    max_lanes: U32 = 0
    queue_depth: U32 = 0
    decode_tokens_per_s: U32 = 0
    prefill_tokens_per_s: U32 = 0
    sampled_at_ms: U64 = 0


@message
class LinkFLimits:
    max_frame: U32 = 16_777_216
    transfer_window: U32 = 8
    max_transfer: U64 = 67_108_864
    transfer_budget: U64 = 268_435_456


@message
class HelloAckF:
    chosen_version: U16
    node_identity: str
    capacity: Capacity
    loadable_models: list[str]
    feature_flags: U64 = 0
    limits: LinkFLimits = attrs.Factory(LinkFLimits)


@message
class NodeStatus:
    capacity: Capacity
    loadable_models: list[str]
    mem: MemCounters = attrs.Factory(MemCounters)


@message
class KeepAlive:
    pass


# ---- sessions and leases -------------------------------------------------------------------------------------------


@message
class Lease:
    """Counted from receipt."""

    duration_ms: U64
    renew_by_ms: U64


@message
class LeaseState:
    lease: Lease
    elapsed_ms: U64


@message
class SessionAssign:
    """`params` is a postcard GenParams."""

    command_id: U64
    session_id: U64
    epoch: U64
    lease: Lease
    codec: str
    params: bytes
    qos_class: U8
    policy_ref: U64 = 0


@message
class SessionRevoke:
    command_id: U64
    session_id: U64
    epoch: U64


@message
class PolicyUpdate:
    policy_version: U64
    envelope: bytes


@message
class LeaseRenew:
    session_id: U64
    epoch: U64


@message
class LeaseGrant:
    session_id: U64
    epoch: U64
    duration_ms: U64
    renew_by_ms: U64


@message
class GenerationWatermark:
    generation_id: U64
    watermark: U64 | None


@message
class SessionView:
    """The head's side of one session of a reconcile."""

    session_id: U64
    epoch: U64
    lease_state: LeaseState
    command_watermark: U64
    generation_watermarks: list[GenerationWatermark]


@message
class Reconcile:
    sessions: list[SessionView]


@message
class RetryRange:
    generation_id: U64
    from_seq: U64
    to_seq: U64


@message
class SessionHolding:
    """The node's side of one session of a reconcile."""

    session_id: U64
    held: bool
    retry_ranges: list[RetryRange]
    lease_view: LeaseState


@message
class ReconcileAck:
    sessions: list[SessionHolding]


# ---- generations ---------------------------------------------------------------------------------------------------


@message
class AppendContent:
    """`blocks` is a postcard vector of u32: the session's whole token stream."""

    command_id: U64
    session_id: U64
    epoch: U64
    blocks: bytes
    spans: list[TokenRange] = attrs.Factory(list)
    media_refs: list[Bytes32] = attrs.Factory(list)


@message
class Budgets:
    """0 is none."""

    max_new_tokens: U64 = 0
    max_wall_ms: U64 = 0


@message
class GenerateReq:
    command_id: U64
    session_id: U64
    epoch: U64
    generation_id: U64
    budgets: Budgets
    policy_ref: U64 = 0


@message
class ResumeReq:
    command_id: U64
    session_id: U64
    epoch: U64
    generation_id: U64
    budgets: Budgets
    policy_ref: U64 = 0


@message
class ParkReq:
    command_id: U64
    session_id: U64
    epoch: U64
    generation_id: U64


@message
class GenerateCancel:
    session_id: U64
    generation_id: U64


class EventPayload(Choice):
    """What a generation brought; nodes send Tokens and Finish."""


@variant("Tokens", newtype=True)
class TokensPayload(EventPayload):
    ids: Tokens


@variant("Segment")
class SegmentPayload(EventPayload):
    kind: SegmentKind
    data: bytes


@variant("Usage")
class UsagePayload(EventPayload):
    input_tokens: U64
    output_tokens: U64


@variant("Finish")
class FinishPayload(EventPayload):
    """`reason` is an engine's finish, or one of the FINISH_ constants."""

    reason: U32


@message
class TokenEvent:
    """`event_seq` counts from 0 within a generation."""

    session_id: U64
    epoch: U64
    generation_id: U64
    event_seq: U64
    payload: EventPayload


@message
class TokenEvents:
    events: list[TokenEvent]


@message
class WatermarkAck:
    """`watermark` is the last contiguous event_seq committed."""

    session_id: U64
    epoch: U64
    generation_id: U64
    watermark: U64


# ---- transfers and pipeline stages ---------------------------------------------------------------------------------


@message
class XferBegin:
    transfer_id: U64
    total_len: U64
    checksum: U64
    content_type: U32
    content_hash: Bytes32


@message
class XferChunk:
    transfer_id: U64
    offset: U64
    data: bytes


@message
class XferEnd:
    transfer_id: U64


@message
class XferAbort:
    transfer_id: U64
    reason: U32


@message
class StateShip:
    envelope: bytes
    transfer_id: U64


@message
class StateFetch:
    envelope: bytes
    transfer_id: U64


@message
class BlobFetch:
    content_hash: Bytes32


@message
class StageForwardReq:
    request_id: U64
    tokens: Tokens
    start_layer: U32
    end_layer: U32
    hidden_in: bytes | None


@message
class StageForwardResp:
    """Exactly one of `hidden` and `token`; neither when the stage failed or was busy."""

    request_id: U64
    hidden: bytes | None
    token: U32 | None


MESSAGES: dict[int, type] = {
    0x0001: Hello,
    0x0002: HelloAckF,
    0x0003: Reconcile,
    0x0004: ReconcileAck,
    0x0005: SessionAssign,
    0x0006: SessionRevoke,
    0x0007: PolicyUpdate,
    0x0008: LeaseRenew,
    0x0009: LeaseGrant,
    0x000A: AppendContent,
    0x000B: GenerateReq,
    0x000C: ParkReq,
    0x000D: ResumeReq,
    0x000E: TokenEvents,
    0x000F: WatermarkAck,
    0x0010: XferBegin,
    0x0011: XferChunk,
    0x0012: XferEnd,
    0x0013: XferAbort,
    0x0014: StateShip,
    0x0015: StateFetch,
    0x0016: BlobFetch,
    0x0017: NodeStatus,
    0x0018: GenerateCancel,
    0x0019: StageForwardReq,
    0x001A: StageForwardResp,
    0x8001: Telemetry,
    0x8002: KeepAlive,
}
"""Message type to class; a variant of a union travels under its union's type."""
