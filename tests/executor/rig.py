"""An executor over fake primitives with real rings, and plans in few words."""

from typing import Any

import numpy as np

from superfluid.engines.engine import EngineError, Sampling
from superfluid.engines.executor import Executor
from superfluid.link import linkw
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring, ring_specs
from tests.engines.fake_primitives import FakePrimitives, row_of

IGNORE_EOS = linkw.SamplingParams(flags=1)


class Rig:
    """`primitives` options by keyword."""

    def __init__(self, **options: Any) -> None:
        self.fake = FakePrimitives(**options)
        self.engine = Executor(self.fake)
        of = self.fake.describe()
        self.inbound, self.outbound, self.logits = map(
            Ring.create, ring_specs(of.max_seq_len + 8, of.vocab_size, of.max_batch)
        )
        for ring in (self.inbound, self.outbound, self.logits):
            self.engine.attach_ring(ring)
        self.control = Control.create()
        self.engine.attach_control(self.control)
        self.seq = 0
        self.partial: list[list[tuple[int, list[int]]]] = []

    def admit(self, tag: int, prompt: list[int], **fields: Any) -> linkw.LaneAdmit:
        fields.setdefault("params", IGNORE_EOS)
        return linkw.LaneAdmit(tag, self.inbound.push_tokens(prompt), **fields)

    def plan(self, **fields: Any) -> linkw.TickPlan:
        self.seq += 1
        fields.setdefault("prefill_token_budget", 4096)
        fields.setdefault("max_decode_lanes", self.fake.describe().max_batch)
        return linkw.TickPlan(self.seq, **fields)

    def tick(self, **fields: Any) -> linkw.TickEvents:
        return self.engine.tick(self.plan(**fields), self.partial.append)

    def refused(self, **fields: Any) -> int:
        """The status a plan is refused with."""
        try:
            self.tick(**fields)
        except EngineError as error:
            return error.status
        raise AssertionError("the plan was accepted")

    def start(
        self, tag: int, prompt: list[int], grant: int | None = None, seed: int = 0, offset: int = 0, **fields: Any
    ):
        """Admit, prefill whole and (with a grant) decode a lane in one tick; its tokens and the events."""
        end = max(len(prompt) - fields.get("decode_replay", 0), offset)
        events = self.tick(
            admits=[self.admit(tag, prompt, seed_handle=seed, **fields)],
            prefills=[linkw.LanePrefill(tag, offset, end - offset)] if end > offset else [],
            decodes=[] if grant is None else [linkw.LaneDecode(tag, grant)],
        )
        return self.tokens(events, tag), events

    def decode(self, tag: int, grant: int) -> list[int]:
        return self.tokens(self.tick(decodes=[linkw.LaneDecode(tag, grant)]), tag)

    def retire(self, tag: int, publish: bool = True) -> linkw.TickEvents:
        return self.tick(retires=[linkw.LaneRetire(tag, publish)])

    def tokens(self, events: linkw.TickEvents, tag: int) -> list[int]:
        for emit in events.emits:
            if emit.lane_tag == tag:
                return self.outbound.read_tokens(emit.token_ref).tolist()
        return []

    def offers(self, span: list[int]) -> list[tuple[int, int]]:
        """(length, tier) of what the cache offers."""
        (space,) = self.engine.space_match(1, ids(span))
        return [(offer.prefix_len, offer.resident_tier) for offer in space.candidates]

    def acquire(self, span: list[int], length: int, determinism: int = 0) -> int:
        return self.engine.seed_acquire(ids(span), length, determinism)

    def publish(self, tag: int, prompt: list[int]) -> None:
        """Run a lane that does nothing but leave its prompt in the cache."""
        self.start(tag, prompt)
        self.retire(tag)


def ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.uint32)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What a greedy lane over the fake's rows says."""
    stream = list(prompt)
    for _ in range(count):
        stream.append(int(row_of(stream).argmax()))
    return stream[len(prompt) :]


def some(count: int, salt: int = 0) -> list[int]:
    """A prompt of `count` ids that shares nothing with one of another salt."""
    return [(7 * i + 31 * salt + i * i * (salt + 1)) % 250 for i in range(count)]


__all__ = ["Rig", "Sampling", "greedy", "ids", "some"]
