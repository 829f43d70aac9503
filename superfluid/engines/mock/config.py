"""What a mock engine is: its sizes, its spaces, its record, and the knobs tests turn."""

from collections.abc import Callable, Mapping, Sequence

import attrs
from xxhash import xxh3_64_intdigest

from superfluid.link import linkw
from superfluid.link.codes import SpaceKind

RECORD = (
    '{"descriptor_version":1,"architecture":"mock","backend":"mock","workload":{"causal_generation":true,'
    '"embedding":true,"speech_to_text":true},"modalities":{"image_encode":true,"gemma_audio_encode":true,'
    '"whisper_transcribe":true,"whisper_translate":true},"state":{"recurrent_snapshot":"no recurrent state in this '
    'architecture"}}'
)
KV_SPACE, BLOB_SPACE = 1, 2
N_LAYERS = 24  # of forward_stage
ROW_WIDTH = 8  # floats of a host lane's row

RINGS = [
    linkw.RingSpec(linkw.RING_IN, linkw.RingKind.Tokens, 16 + 4096 * 4, 64),
    linkw.RingSpec(linkw.RING_OUT, linkw.RingKind.Tokens, 16 + 1024 * 4, 256),
    linkw.RingSpec(linkw.RING_LOGITS, linkw.RingKind.Logits, 16 + 64 * 4, 32),
]
"""The rings the mock worker announces."""

Script = Sequence[int] | Callable[[int, Sequence[int]], Sequence[int]]
"""Tokens every lane answers with, or a function of (lane tag, prompt) that gives them."""


def default_spaces() -> list[linkw.StateSpaceDesc]:
    return [
        linkw.StateSpaceDesc(
            KV_SPACE, SpaceKind.PAGED_KV, 1, bytes_per_token=64, page_size_tokens=16, fork_cost_class=1, name="kv.full"
        ),
        linkw.StateSpaceDesc(
            BLOB_SPACE,
            SpaceKind.BLOB,
            1,
            blob_bytes=4096,
            fork_cost_class=2,
            fork_cost_bytes=4096,
            snapshot_cadence=2,
            snapshot_interval_tokens=32,
            name="gdn.blob",
        ),
    ]


def default_certificates() -> dict[str, list[linkw.ExactnessCert]]:
    """What `prompt-lookup` is certified for: seed path invariant, greedy lanes only; ids are given when granted."""
    return {
        "prompt-lookup": [
            linkw.ExactnessCert(
                0,
                exactness=2,
                sampling_modes=1,
                param_domain=1,
                grammar_allowed=False,
                logit_bias_allowed=False,
                verification_shape_class=1,
            )
        ]
    }


@attrs.define
class MockConfig:
    """Defaults are the engine every implementation of the mock has."""

    max_batch: int = 8
    vocab_size: int = 32000
    pool_bytes: int = 1 << 20
    lease_ticks: int = 8
    kernel_caps: int = 7
    tap_layers: int = 32
    architecture: str = "mock-arch"
    bundle_fingerprint: int = 0xBA5E0001
    record: str = RECORD
    spaces: list[linkw.StateSpaceDesc] = attrs.Factory(default_spaces)
    certificates: Mapping[str, list[linkw.ExactnessCert]] = attrs.Factory(default_certificates)
    image_token: int | None = None
    eos_token: int = 2  # ends a script
    prefill_step_tokens: int = 512  # prompt tokens between two looks at the yield word

    def compat_identity(self, space: linkw.StateSpaceDesc) -> bytes:
        """32 bytes that a state of `space` must carry to be taken back."""
        identity = (
            int(space.kind).to_bytes(4, "little")
            + space.version_tag.to_bytes(8, "little")
            + self.bundle_fingerprint.to_bytes(8, "little")
        )
        return xxh3_64_intdigest(identity).to_bytes(8, "little") + bytes(24)


@attrs.define
class Knobs:
    """What a test may change while the engine runs."""

    script: Script | None = None
    delay: float = 0.0  # seconds every tick takes
    round_delay: float = 0.0  # seconds every step (micro-batch of prefill, round of decode) takes
    finishes: dict[int, int] = attrs.Factory(dict)  # lane tag: the finish its next token ends it with
    faults: dict[int, int] = attrs.Factory(dict)  # lane tag: the fault of its next decode
    refuse_admit: Callable[[linkw.LaneAdmit], int | None] | None = None  # a status code refuses that admit alone
    yield_after: Callable[[int], bool] | None = None  # asked at each step boundary, given the steps of the tick
    die_after: int | None = None  # ticks after which the runtime breaks, for good
    on_step: Callable[[], None] | None = None  # called before every step
