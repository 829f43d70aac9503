from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.speculate import Drafter, Gate, Settings, propose
from superfluid.link import linkw
from tests.engines.fake_primitives import EOS
from tests.executor.rig import Rig, ids

ALWAYS = b"throughput_gate=0,min_yield=0,max_draft=7"
SAMPLED = {"sampling": 1, "params": linkw.SamplingParams(0.7, repeat_penalty=1.1, flags=1)}


def registration(params: bytes = ALWAYS, **fields: Any) -> linkw.StrategyRegister:
    fields.setdefault("capabilities", [linkw.CapabilityReq(1, params)])
    return linkw.StrategyRegister("prompt-lookup", "1.0.0", bytes(32), bytes(32), **fields)


def looping(tokens: list[int]) -> int | None:
    """A text that repeats itself, with a surprise every now and then."""
    n = len(tokens)
    return None if n % 17 == 0 else [3, 4, 5, 6, 7, 8, 9, 10][n % 8]


def rig(params: bytes = ALWAYS, **options: Any) -> Rig:
    made = Rig(**{"verify_rows": True, "script": looping, **options})
    grant = made.engine.strategy_register(registration(params))
    assert (grant.strategy_slot, [c.cert_id for c in grant.certificates], grant.reserved_bytes) == (1, [1], 0)
    return made


@pytest.mark.parametrize(
    "stream, k, draft",
    [
        ([1, 2, 3, 4, 9, 9, 2, 3], 3, [4, 9, 9]),
        ([5, 6, 7, 8, 5, 6, 7], 4, [8, 5, 6, 7]),
        ([1, 1, 1], 2, [1]),
        ([1, 2], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),
        ([1, 2, 7, 1, 2], 0, []),
    ],
)
def test_proposals(stream: list[int], k: int, draft: list[int]) -> None:
    assert propose(ids([*stream, 77, 78]), len(stream), k).tolist() == draft


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=24), st.integers(0, 7))
def test_proposals_are_what_followed_the_last_time(stream: list[int], k: int) -> None:
    expected: list[int] = []
    n = len(stream)
    for length in (3, 2):
        starts = [at for at in range(n - length) if stream[at : at + length] == stream[n - length :]]
        if starts:
            expected = stream[starts[-1] + length :][:k]
            break
    assert propose(ids(stream) if stream else np.zeros(1, np.uint32), n, k).tolist() == expected


@pytest.mark.parametrize("options", [{}, {"copy_shares_cells": True}, {"verify_batches": False}])
@pytest.mark.parametrize(
    "mode", [{}, {"sampling": 1, "params": linkw.SamplingParams(0.7, repeat_penalty=1.1, flags=1)}]
)
def test_drafts_change_no_token(options: dict[str, Any], mode: dict[str, Any]) -> None:
    prompts = {1: [3, 4, 5, 6, 7, 8, 9, 10, 3, 4], 2: [9, 10, 3, 4, 5]}
    said = []
    for slot in (0, 1):
        made = rig(**options)
        for tag, prompt in prompts.items():
            _, events = made.start(tag, prompt, strategy_slot=slot, rng_counter_base=5, **mode)
            assert events.admit_results == [linkw.AdmitResult(tag, 1, 0, slot, 1 if slot else 2)]
        streams: dict[int, list[int]] = {1: [], 2: []}
        steps = len(made.fake.steps)
        proposed = 0
        for tags in ((1, 2), (1,), (2,), (1, 2)):
            events = made.tick(decodes=[linkw.LaneDecode(tag, 13) for tag in tags], flags=4)
            for emit in events.emits:
                streams[emit.lane_tag] += made.tokens(events, emit.lane_tag)
                assert emit.n_tokens == 13 and emit.spec.accepted <= emit.spec.proposed
                assert emit.spec.cert_id_in_effect == slot
                proposed += emit.spec.proposed
        partial = [token for call in made.partial for tag, tokens in call for token in tokens if tag == 1]
        assert partial == streams[1]
        said.append(streams)
        assert (proposed > 0) == (slot == 1)
        if slot and not mode and not options:
            assert len(made.fake.steps) - steps < 30, "verified drafts save steps"
        for tag in (1, 2):
            lane = made.engine.lane_sequence(tag)
            assert made.fake.tokens(made.engine._core.sequences.find(lane).seq) == made.engine.lane_tokens(tag)[:-1]
    assert said[0] == said[1]


def test_overshoot_lets_a_draft_run_past_the_grant() -> None:
    for overshoot, most in ((0, 4), (5, 9)):
        made = rig()
        made.start(1, [3, 4, 5, 6, 7, 8, 9, 10, 3, 4], strategy_slot=1)
        (emit,) = made.tick(decodes=[linkw.LaneDecode(1, 4, overshoot)]).emits
        assert 4 <= emit.n_tokens <= most and (overshoot == 0 or emit.n_tokens > 4)


def test_an_ending_inside_a_draft_ends_there() -> None:
    made = rig(script=lambda tokens: [3, 4, 5, EOS][len(tokens) % 4])
    prompt = [3, 4, 5, EOS, 3, 4]
    events = made.tick(
        admits=[made.admit(1, prompt, strategy_slot=1, params=linkw.SamplingParams())],
        prefills=[linkw.LanePrefill(1, 0, 6)],
        decodes=[linkw.LaneDecode(1, 9)],
    )
    assert made.tokens(events, 1)[-1] == EOS and events.emits[0].finish == 1
    made = rig(max_seq_len=20)
    tokens, events = made.start(1, [3, 4, 5, 6, 7, 8, 9, 10, 3, 4], 16, strategy_slot=1)
    assert len(tokens) == 10 and events.emits[0].finish == 2


def test_drafts_take_no_cells_that_were_promised() -> None:
    made = rig(cells_total=40)
    made.start(1, [3, 4, 5, 6, 7, 8, 9, 10, 3, 4], strategy_slot=1)
    events = made.tick(decodes=[linkw.LaneDecode(1, 31)])
    assert events.emits[0].n_tokens == 31 and not events.faults
    assert events.emits[0].spec.proposed == 0


def test_lanes_that_cannot_be_drafted_for_are_admitted_plainly() -> None:
    made = rig()
    bias = made.engine.logit_bias_create([1], [0.0])
    for fields in (
        {"want_logprobs": True},
        {"logit_bias_handle": bias},
        {"sampling": 2},
        {"grammar_handle": made.engine.grammar_create("{}")},
    ):
        _, events = made.start(1, [3, 4, 5], strategy_slot=1, **fields)
        assert events.admit_results == [linkw.AdmitResult(1, 1, 0, 0, 2)]
        made.retire(1, publish=False)
    assert made.refused(admits=[made.admit(1, [1], strategy_slot=2)]) == Status.RejectIllegalCombination
    bare = Rig()
    assert bare.refused(admits=[bare.admit(1, [1], strategy_slot=1)]) == Status.RejectIllegalCombination


def test_registration_fails_closed() -> None:
    refused = [
        (rig(), registration(capabilities=[linkw.CapabilityReq(2, b"")])),
        (rig(), registration(target_archs=["fake"])),
        (rig(), registration(kernel_caps_required=1)),
        (rig(), registration(b"max_draft=many")),
        (Rig(), registration()),
        (Rig(verify_rows=True, head_only=True), registration()),
    ]
    for made, asked in refused:
        with pytest.raises(EngineError) as error:
            made.engine.strategy_register(asked)
        assert error.value.status == Status.RegistrationRefused


def test_settings_are_clamped() -> None:
    read = Settings.parse("max_draft=15,adaptive=0,yield_rounds=0,gate_reprobe=0,gate_reprobe_max=0,bitexact=0,x")
    assert (read.max_draft, read.adaptive, read.yield_rounds) == (7, False, 1)
    assert (read.gate_reprobe, read.gate_reprobe_max) == (1, 1)


def test_a_lane_rests_when_its_drafts_yield_too_little() -> None:
    drafter = Drafter(Settings(max_draft=4, yield_rounds=3, gate_reprobe=2, gate_reprobe_max=4))
    assert drafter.depth == 4
    rests = []
    for _ in range(3):
        for _ in range(3):
            assert not drafter.rests()
            drafter.drafted(0)
        count = 0
        while drafter.rests():
            count += 1
        rests.append(count)
    assert rests == [2, 4, 4] and drafter.depth == 2
    for _ in range(3):
        drafter.drafted(3)
    assert not drafter.rests()


def test_the_gate_follows_what_it_measures() -> None:
    gate = Gate(Settings(min_speedup=1.1, gate_reprobe=3, gate_reprobe_max=6))
    modes = []

    def run(ticks: int, drafting: float, plain: float) -> str:
        nonlocal modes
        modes = []
        for _ in range(ticks):
            modes.append("d" if gate.drafting else "p")
            gate.measured(int(1000 * (drafting if gate.drafting else plain)), 1.0, int(gate.drafting))
        return "".join(modes)

    assert run(6, 2, 1) == "ddpddd"
    assert run(7, 2, 1) == "pdddddd"
    assert run(1, 2, 1) == "p"
    assert run(4, 0.2, 1) == "dddp", "a collapse is re-decided at once"
    assert run(8, 0.2, 1) == "ppddpppp"
