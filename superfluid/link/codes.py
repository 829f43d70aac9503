"""Status codes and enumerations that travel in plans, events and replies; the names are part of messages."""

from enum import IntEnum


class Status(IntEnum):
    Ok = 0
    Fatal = -1
    RejectBadStride = -100
    RejectBadAlignment = -101
    RejectBounds = -102
    RejectBadRefGeneration = -103
    RejectUnknownLane = -104
    RejectDuplicateLane = -105
    RejectIllegalCombination = -106
    RejectBudget = -107
    RejectStaleSeed = -108
    RejectHostRules = -110
    RejectTransferLocked = -111
    RejectStaleNonce = -112
    NeedsReplan = -113
    RejectBadStruct = -114
    Busy = -120
    BufferTooSmall = -121
    StaleSizing = -122
    OutOfBoundary = -123
    EnvelopeMismatch = -124
    Checksum = -125
    IdentityMismatch = -126
    Unsupported = -127
    RegistrationRefused = -128
    UnknownHandle = -129
    SeedUnservable = -130
    RingLayout = -131
    RejectCertUnmatched = -140


def status_name(code: int) -> str:
    """The name of a status code in messages; `status <n>` for one without a name."""
    try:
        return Status(code).name
    except ValueError:
        return f"status {code}"


class Sampling(IntEnum):
    GREEDY = 0
    SAMPLED = 1
    HOST = 2


class PlanFlag(IntEnum):
    DRAIN = 1
    CAPTURE_OK = 2
    PARTIAL_EMITS = 4


class TickStatus(IntEnum):
    OK = 0
    SHED = 1
    LANE_ERRORS = 2
    FATAL = 3


class AdmitStatus(IntEnum):
    ADMITTED = 1
    REJECTED = 2


class FaultCode(IntEnum):
    UNSPECIFIED = 0
    GRAMMAR = 1
    BOUNDS = 2
    STRATEGY = 3
    MEMORY = 4
    INTERNAL = 5
    MEDIA = 6


class OpState(IntEnum):
    PENDING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class Encoding(IntEnum):
    LOSSLESS = 0
    Q8 = 1
    Q4 = 2


class SpaceKind(IntEnum):
    PAGED_KV = 1
    RING_KV = 2
    BLOB = 3
    DEPTH_PAGED_KV = 4
    ENCODER_CACHE = 5


class CacheClass(IntEnum):
    RESIDENT = 1
    SHARED_PREFIX = 2
    HOST_EXPORT = 4


SPACE_NO_OPERATIONS = 1  # space flag bit 0
SPACE_NOT_CACHED = 2  # space flag bit 1
FORK_EAGER = 1  # fork flag bit 0
FORK_PRIVATE = 1 << 16  # fork flag bit 16, superfluid's own: a copy for one request
SHED_PREFILL = 1
SHED_EVICTION = 2
PARAM_IGNORE_EOS = 1  # SamplingParams.flags bit 0
MAX_ALTERNATIVES = 20  # logprob alternatives of a token
