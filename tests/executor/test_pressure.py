"""Random plans over small pools: whatever is accepted runs without a fault, and every lane says what it would alone."""

import random
from typing import Any

import pytest

from superfluid.engines.engine import EngineError, Status
from superfluid.link import linkw
from tests.executor.rig import Rig, greedy

POOLS: dict[str, dict[str, Any]] = {
    "private": {"cells_total": 260, "max_seqs": 9},
    "followed": {"cells_total": 260, "max_seqs": 7, "takeover_preferred": True, "page_size_tokens": 1},
    "exported": {"cells_total": 260, "cache_resident_cells": 70, "cache_exported_cells": 150},
    "streams": {"max_seqs": 6, "takeover_preferred": True, "seed_min_tokens": 16, "cache_exported_cells": 200},
    "shared": {"cells_total": 260, "copy_shares_cells": True, "cache_resident_cells": 90, "page_size_tokens": 1},
    "head only": {"cells_total": 600, "head_only": True, "page_size_tokens": 1, "cache_exported_cells": 300},
    "drafted": {"cells_total": 260, "verify_rows": True, "max_seqs": 9},
}


def surprising(tokens: list[int]) -> int | None:
    return None if len(tokens) % 5 == 0 else 3 + len(tokens) % 4


class Crowd:
    """A daemon that plans at random and knows what every lane must say."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(**options, max_seq_len=200, max_batch=4, prefill_step_tokens=24, script=surprising)
        self.drafts = bool(options.get("verify_rows"))
        if self.drafts:
            params = b"throughput_gate=0,min_yield=0"
            capability = linkw.CapabilityReq(1, params)
            self.rig.engine.strategy_register(
                linkw.StrategyRegister("prompt-lookup", "1", bytes(32), bytes(32), capabilities=[capability])
            )
        self.head_only = bool(options.get("head_only"))
        self.lanes: dict[int, list[int]] = {}  # what was said so far, prompt first
        self.done: dict[int, int] = {}  # prompt tokens prefilled
        self.prompts: dict[int, int] = {}
        self.past: list[list[int]] = [[self.random.randrange(1, 250) for _ in range(40)]]
        self.tag = 0
        self.accepted = self.seeded = 0

    def said_alone(self, stream: list[int], count: int) -> list[int]:
        out = list(stream)
        for _ in range(count):
            scripted = surprising(out)
            out.append(greedy(out, 1)[0] if scripted is None else scripted)
        return out[len(stream) :]

    def prompt(self) -> list[int]:
        base = self.random.choice(self.past)
        cut = max(self.random.randrange(1, len(base) + 1) for _ in range(2))
        tail = [self.random.randrange(1, 250) for _ in range(self.random.randrange(1, 50))]
        return [*base[:cut], *tail][:150]

    def seed(self, prompt: list[int]) -> tuple[int, int]:
        offers = self.rig.offers(prompt)
        if not offers or self.random.random() < 0.2:
            return 0, 0
        length = self.random.choice(offers)[0]
        if length == len(prompt) and self.random.random() < 0.5:
            return 0, 0
        try:
            seed = self.rig.acquire(prompt, length)
        except EngineError as error:
            assert error.status == Status.SeedUnservable
            return 0, 0
        return seed, length

    def tick(self) -> None:
        rnd, rig = self.random, self.rig
        admits, prefills, decodes, retires = [], [], [], []
        fresh: dict[int, list[int]] = {}
        done = dict(self.done)
        gone = [tag for tag in self.lanes if rnd.random() < 0.12]
        retires = [linkw.LaneRetire(tag, rnd.random() < 0.8) for tag in gone]
        seeds: list[int] = []
        while len(self.lanes) + len(fresh) - len(gone) < 4 and rnd.random() < 0.6:
            self.tag += 1
            prompt = self.prompt()
            seed, length = self.seed(prompt)
            seeds += [seed] if seed else []
            self.seeded += bool(seed)
            fresh[self.tag], done[self.tag] = prompt, length
            admits.append(rig.admit(self.tag, prompt, seed_handle=seed, strategy_slot=int(self.drafts)))
        budget = rnd.choice([10, 40, 4096])
        left = budget
        for tag in [*self.lanes, *fresh]:
            if tag in gone or rnd.random() < 0.1:
                continue
            n = self.prompts.get(tag) or len(fresh[tag])
            count = n - done[tag]
            if count:
                prefills.append(linkw.LanePrefill(tag, done[tag], count))
                done[tag] += min(count, left)
                left -= min(count, left)
            if done[tag] == n and rnd.random() < 0.8:
                decodes.append(linkw.LaneDecode(tag, rnd.randrange(0, 7), rnd.choice([0, 0, 2])))
        rig.control.yield_requested = rnd.random() < 0.2
        try:
            events = rig.tick(
                admits=admits, prefills=prefills, decodes=decodes, retires=retires, prefill_token_budget=budget
            )
        except EngineError as error:
            assert error.status == Status.NeedsReplan, error
            for seed in seeds:
                rig.engine.seed_release(seed)
            if not admits and self.lanes:
                self.drop(rnd.choice(list(self.lanes)))
            return
        self.accepted += 1
        assert not events.faults, events.faults
        for tag in gone:
            self.past.append(self.lanes.pop(tag))
            self.past = self.past[-6:]
            del self.done[tag], self.prompts[tag]
        for tag, prompt in fresh.items():
            self.lanes[tag], self.prompts[tag] = list(prompt), len(prompt)
        short = {entry.lane_tag: entry.tokens for entry in events.shed.entries if entry.kind == 1}
        for tag in self.lanes:
            asked = next((p.token_offset + p.token_count for p in prefills if p.lane_tag == tag), done[tag])
            self.done[tag] = asked - short.get(tag, 0)
        for emit in events.emits:
            tokens = rig.tokens(events, emit.lane_tag)
            stream = self.lanes[emit.lane_tag]
            assert tokens == self.said_alone(stream, len(tokens)), emit
            stream += tokens
            if emit.finish:
                self.drop(emit.lane_tag)

    def drop(self, tag: int) -> None:
        self.rig.retire(tag, publish=False)
        del self.lanes[tag], self.done[tag], self.prompts[tag]

    def check(self) -> None:
        core, fake = self.rig.engine._core, self.rig.fake
        assert core.sequences.live == len(fake.sequences)
        for tag, stream in self.lanes.items():
            held = fake.tokens(core.lanes[tag].sequence.seq)
            assert held == stream[: len(held)]
        for entry in core.cache._pool:
            assert fake.tokens(entry.seq) == entry.tokens.tolist()
        assert core.cache.exported_cells == sum(entry.length for entry in core.cache._exports)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", POOLS)
def test_random_plans(pool: str, seed: int) -> None:
    crowd = Crowd(POOLS[pool], seed)
    for _ in range(120):
        crowd.tick()
        crowd.check()
    assert crowd.accepted > 40 and crowd.seeded > 2
    for tag in list(crowd.lanes):
        crowd.drop(tag)
    rig = crowd.rig
    for _ in range(66):
        rig.tick()
    rig.engine.cache_evict(1 << 62, linkw.ShedPolicy())
    assert not rig.fake.sequences and rig.offers(crowd.past[-1]) == []
    assert rig.tick().mem.allocated_bytes == 0
