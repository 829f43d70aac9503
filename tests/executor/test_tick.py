import json

import pytest

from superfluid.engines.engine import EngineError, EngineFatal, FaultCode, Status, TickStatus
from superfluid.engines.executor.core import PrefillRate
from superfluid.engines.primitives import CapacityError, FatalError
from superfluid.link import linkw
from tests.executor.rig import Rig, greedy, some


def test_admit_prefill_decode_in_one_tick() -> None:
    rig = Rig()
    tokens, events = rig.start(7, [1, 2, 3, 4], 3)
    assert tokens == greedy([1, 2, 3, 4], 3)
    assert events.tick_status == TickStatus.OK
    assert events.admit_results == [linkw.AdmitResult(7, 1, 0, 0, 2)]
    assert [(e.n_tokens, e.finish) for e in events.emits] == [(3, 0)]
    assert len(rig.engine.lane_tokens(7)) == 7
    assert rig.decode(7, 4) == greedy([1, 2, 3, 4], 7)[3:]


def test_the_last_prompt_token_is_held_back_when_the_lane_does_not_decode() -> None:
    rig = Rig()
    rig.start(1, [5, 6, 7])
    assert rig.fake.steps[-1].tokens == 2
    assert rig.decode(1, 2) == greedy([5, 6, 7], 2)
    assert [step.tokens for step in rig.fake.steps] == [2, 1, 1]


def test_publish_match_and_seed() -> None:
    rig = Rig()
    prompt = some(64)
    rig.publish(1, prompt)
    assert rig.offers([*prompt, 9]) == [(64, 0)]
    seed = rig.acquire([*prompt, 9], 64)
    tokens, _ = rig.start(2, [*prompt, 9], 1, seed=seed, offset=64)
    assert tokens == greedy([*prompt, 9], 1)
    assert rig.fake.steps[-1].tokens == 1
    assert len(rig.engine.lane_tokens(2)) == 66
    assert rig.refused(admits=[rig.admit(3, [*prompt, 9], seed_handle=seed)]) == Status.RejectStaleSeed


def test_a_whole_prompt_seed_feeds_the_last_token_again() -> None:
    rig = Rig()
    prompt = some(64)
    rig.publish(1, prompt)
    seed = rig.acquire(prompt, 64)
    events = rig.tick(admits=[rig.admit(2, prompt, seed_handle=seed)], decodes=[linkw.LaneDecode(2, 3)])
    assert rig.tokens(events, 2) == greedy(prompt, 3)


def test_budget_cuts_a_prefill_and_says_so() -> None:
    rig = Rig()
    prompt = some(100)
    admit, prefill = rig.admit(1, prompt), linkw.LanePrefill(1, 0, 100)
    assert (
        rig.refused(admits=[admit], prefills=[prefill], decodes=[linkw.LaneDecode(1, 1)], prefill_token_budget=10)
        == Status.RejectIllegalCombination
    )
    rig.seq -= 1
    events = rig.tick(admits=[admit], prefills=[prefill], prefill_token_budget=10)
    assert events.tick_status == TickStatus.SHED
    assert events.shed.prefill_chunks_dropped == 1
    assert events.shed.entries == [linkw.ShedEntry(1, 1, 0, 0, 90)]
    events = rig.tick(prefills=[linkw.LanePrefill(1, 10, 90)], decodes=[linkw.LaneDecode(1, 2)])
    assert rig.tokens(events, 1) == greedy(prompt, 2)


def test_replay_in_one_grant_or_in_pieces() -> None:
    prompt = some(20)
    for grants in ([12], [3, 3, 6], [5, 7], [5, 1, 6], [4, 1, 7], [1] * 12):
        rig = Rig()
        tokens, _ = rig.start(1, prompt, grants[0], decode_replay=5)
        for grant in grants[1:]:
            tokens += rig.decode(1, grant)
        assert tokens == greedy(prompt, 7), grants
        assert all(step.tokens == 1 for step in rig.fake.steps[1:])


def test_host_lane() -> None:
    rig = Rig()
    _, events = rig.start(1, [1, 2], 1, sampling=2)
    row = events.emits[0].logits_row
    assert row.generation and events.emits[0].n_tokens == 0
    assert int(rig.logits.read_row(row).argmax()) == greedy([1, 2], 1)[0]
    assert rig.refused(decodes=[linkw.LaneDecode(1, 1)]) == Status.RejectHostRules
    assert rig.refused(commits=[linkw.LaneCommit(1, 3, row.generation + 1)]) == Status.RejectStaleNonce
    events = rig.tick(commits=[linkw.LaneCommit(1, 3, row.generation)], decodes=[linkw.LaneDecode(1, 1)])
    fresh = events.emits[0].logits_row
    assert fresh.generation != row.generation
    assert rig.engine.lane_tokens(1) == [1, 2, 3]
    assert int(rig.logits.read_row(fresh).argmax()) == greedy([1, 2, 3], 1)[0]


def test_a_fault_stops_its_own_lane() -> None:
    rig = Rig()
    rig.start(1, [1, 2])
    rig.start(2, [3, 4])
    rig.engine.inject_fault(1, FaultCode.STRATEGY)
    events = rig.tick(decodes=[linkw.LaneDecode(1, 2), linkw.LaneDecode(2, 2)])
    assert events.tick_status == TickStatus.LANE_ERRORS
    assert events.faults == [linkw.LaneFault(1, FaultCode.STRATEGY)]
    assert [emit.lane_tag for emit in events.emits] == [2]
    assert rig.tokens(events, 2) == greedy([3, 4], 2)
    assert rig.refused(decodes=[linkw.LaneDecode(1, 1)]) == Status.RejectUnknownLane
    rig.retire(1)
    assert rig.refused(retires=[linkw.LaneRetire(1)]) == Status.RejectUnknownLane
    assert len(rig.fake.sequences) == 1


def test_a_step_without_room_faults_its_lanes_only() -> None:
    rig = Rig(max_batch=2)
    rig.start(1, [1, 2])
    rig.start(2, [3, 4])
    rig.fake.fail_next("step", CapacityError("no cells"))
    events = rig.tick(decodes=[linkw.LaneDecode(1, 2)])
    assert events.faults == [linkw.LaneFault(1, FaultCode.MEMORY)]
    assert rig.decode(2, 2) == greedy([3, 4], 2)


def test_yield_ends_prefill_and_rounds() -> None:
    rig = Rig(prefill_step_tokens=16)
    rig.start(1, [1, 2, 3])
    rig.control.yield_requested = True
    long = some(40)
    events = rig.tick(
        admits=[rig.admit(2, long)],
        prefills=[linkw.LanePrefill(2, 0, 40)],
        decodes=[linkw.LaneDecode(1, 5), linkw.LaneDecode(2, 5)],
    )
    assert [(emit.lane_tag, emit.n_tokens) for emit in events.emits] == [(1, 1), (2, 0)]
    assert events.shed.entries == [linkw.ShedEntry(2, 1, 0, 0, 24)]
    rig.control.yield_requested = False
    events = rig.tick(prefills=[linkw.LanePrefill(2, 16, 24)], decodes=[linkw.LaneDecode(1, 4), linkw.LaneDecode(2, 5)])
    assert rig.tokens(events, 2) == greedy(long, 5)
    assert rig.tokens(events, 1) == greedy([1, 2, 3], 5)[1:]


def test_partial_emits_join_to_the_result() -> None:
    rig = Rig()
    rig.start(1, [1, 2])
    events = rig.tick(
        admits=[rig.admit(2, [8, 9])],
        prefills=[linkw.LanePrefill(2, 0, 2)],
        decodes=[linkw.LaneDecode(1, 3), linkw.LaneDecode(2, 3)],
        flags=4,
    )
    for tag in (1, 2):
        said = [token for call in rig.partial for lane, tokens in call for token in tokens if lane == tag]
        assert said == rig.tokens(events, tag)
    assert [[lane for lane, _ in call] for call in rig.partial] == [[2], [1, 2], [1, 2], [1]]


def test_the_window_ends_a_lane() -> None:
    rig = Rig(max_seq_len=8)
    tokens, events = rig.start(1, some(6), 5)
    assert (len(tokens), events.emits[0].finish) == (2, 2)
    assert rig.refused(decodes=[linkw.LaneDecode(1, 1)]) == Status.RejectIllegalCombination
    tokens, events = rig.start(2, some(8), 5)
    assert (tokens, events.emits[0].finish) == ([], 2)
    assert rig.refused(admits=[rig.admit(3, some(9))]) == Status.RejectBudget


def test_logprobs() -> None:
    rig = Rig()
    tokens, events = rig.start(1, [1, 2], 2, want_logprobs=True, top_logprobs=3)
    assert [len(record.top_ids) for record in events.logprobs] == [3, 3]
    assert [record.top_ids[0] for record in events.logprobs] == tokens
    assert events.logprobs[0].logprob_bits == events.logprobs[0].top_logprob_bits[0]


def test_head_only_runtimes_hold_back_and_leave_checkpoints() -> None:
    rig = Rig(head_only=True, page_size_tokens=1)
    prompt = some(200)
    tokens, _ = rig.start(1, prompt, 3)
    assert tokens == greedy(prompt, 3)
    assert rig.offers(prompt) == [(199, 0)]
    seed = rig.acquire(prompt, 199)
    tokens, _ = rig.start(2, prompt, 3, seed=seed, offset=199)
    assert tokens == greedy(prompt, 3)
    rig.retire(1)
    assert rig.offers([*prompt, *tokens, 1]) == [(203, 0), (199, 0)]


SCHEMA = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}'


def test_a_grammar_holds_a_lane_and_ends_it() -> None:
    rig = Rig()
    grammar = rig.engine.grammar_create(SCHEMA)
    tokens, events = rig.start(1, [1, 2], 60, grammar_handle=grammar)
    assert events.emits[0].finish == 3
    text = b"".join(rig.fake.vocabulary().token_bytes[token] for token in tokens)
    assert json.loads(text)["a"] in (True, False)
    assert rig.refused(admits=[rig.admit(2, [1], grammar_handle=grammar)]) == Status.RejectIllegalCombination
    rig.engine.grammar_free(grammar)
    with pytest.raises(EngineError):
        rig.engine.grammar_free(grammar)
    rig.retire(1)
    assert rig.refused(admits=[rig.admit(2, [1], grammar_handle=grammar)]) == Status.RejectIllegalCombination


def test_a_grammar_goes_on_after_its_replay() -> None:
    rig = Rig()
    grammar = rig.engine.grammar_create(SCHEMA)
    whole, _ = rig.start(1, [1, 2], 60, grammar_handle=grammar)
    rig.retire(1)
    prompt = [1, 2, *whole[:3]]
    assert (
        rig.refused(admits=[rig.admit(2, prompt, grammar_handle=grammar, grammar_replay=4)])
        == rig.refused(admits=[rig.admit(2, prompt, grammar_replay=3)])
        == rig.refused(admits=[rig.admit(2, prompt, grammar_handle=grammar, grammar_replay=6)])
        == Status.RejectIllegalCombination
    )
    rest, _ = rig.start(2, prompt, 60, grammar_handle=grammar, grammar_replay=3)
    assert rest == whole[3:]


def test_a_logit_bias_outlives_its_handle() -> None:
    rig = Rig()
    bias = rig.engine.logit_bias_create([42, 5000, -1], [100.0, 1.0, 1.0])
    tokens, _ = rig.start(1, [1, 2], 2, logit_bias_handle=bias)
    rig.engine.logit_bias_free(bias)
    assert tokens + rig.decode(1, 1) == [42, 42, 42]
    assert rig.refused(admits=[rig.admit(2, [1], logit_bias_handle=bias)]) == Status.RejectIllegalCombination


@pytest.mark.parametrize("draws", [False, True])
def test_device_sampling_says_what_the_host_would(draws: bool) -> None:
    params = linkw.SamplingParams(0.8, top_k=20, flags=1)
    plain, device = Rig(), Rig(engine_sampling=True, engine_draws=draws)
    for sampling in (0, 1):
        said = [
            rig.start(1, [1, 2], 6, params=params, sampling=sampling, rng_counter_base=2**64 - 2)[0]
            for rig in (plain, device)
        ]
        assert said[0] == said[1]
        plain.retire(1)
        device.retire(1)
    assert device.fake.calls["step_sampled"] == (10 if draws else 5)


def test_a_draw_depends_on_its_place_in_the_stream_alone() -> None:
    params = linkw.SamplingParams(0.9, repeat_penalty=1.2, presence_penalty=0.3, flags=1)
    rig = Rig()
    prompt = some(12)
    whole, _ = rig.start(1, prompt, 10, params=params, sampling=1, rng_counter_base=77)
    for cut in (1, 4, 9):
        stream = [*prompt, *whole[:cut]]
        rest, _ = rig.start(
            cut + 1, stream, 10 - cut, params=params, sampling=1, rng_counter_base=77 + cut, decode_replay=cut
        )
        rest += rig.decode(cut + 1, cut) if cut < 10 else []
        assert rest[: 10 - cut] == whole[cut:]


def test_latency_and_rate_size_the_steps() -> None:
    rate = PrefillRate()
    assert rate.step_tokens(512, True) == rate.step_tokens(512, False) == 128 and rate.synchronous(512, False)
    assert rate.step_tokens(0, True) == rate.step_tokens(0, False) == 0 and rate.step_tokens(64, False) == 64
    rate.measured(127, 9)
    assert rate.seconds is None
    rate.measured(1000, 1)
    assert rate.step_tokens(512, True) == 256 and rate.step_tokens(512, False) == 512
    assert rate.step_tokens(0, True) == 256 and rate.step_tokens(64, True) == 64
    rate.measured(1000, 11)
    assert rate.seconds == pytest.approx(0.004) and rate.step_tokens(512, True) == 128
    assert rate.step_tokens(512, False) == 128 and rate.step_tokens(0, False) == 0
    assert rate.synchronous(512, False) and not rate.synchronous(64, False) and rate.synchronous(64, True)


def test_an_emit_that_the_ring_cannot_hold_faults_the_lane() -> None:
    rig = Rig()
    rig.start(1, [1, 2])
    events = rig.tick(decodes=[linkw.LaneDecode(1, 1030)])
    assert events.faults == [linkw.LaneFault(1, FaultCode.BOUNDS)] and not events.emits


def test_a_broken_runtime_ends_the_worker() -> None:
    rig = Rig()
    rig.start(1, [1, 2])
    rig.fake.fail_next("step", FatalError("gone"))
    with pytest.raises(EngineFatal):
        rig.decode(1, 1)


def test_the_record() -> None:
    record = json.loads(Rig(verify_rows=True, export_encodings=(0, 1)).engine.capability_descriptor() or "")
    assert record["serving"]["speculation_strategies"] == ["prompt-lookup"]
    assert record["serving"]["park_lossy"] is True and record["state"]["rollback"] is True
    assert record["serving"]["tick_yield"] == "a tick's prefill is one step"
    record = json.loads(Rig(verify_rows=True, head_only=True).engine.capability_descriptor() or "")
    assert record["serving"]["speculation_strategies"] == []


def test_lanes_that_retire_together_feed_their_held_back_tokens_in_one_step() -> None:
    rig = Rig(page_size_tokens=1)
    prompts = {1: some(5, 1), 2: some(9, 2), 3: some(3, 3), 4: some(4, 4)}
    streams = {tag: prompt + rig.start(tag, prompt, 4)[0] for tag, prompt in prompts.items()}
    steps = len(rig.fake.steps)
    rig.tick(retires=[linkw.LaneRetire(tag, tag != 4) for tag in prompts])
    assert [step.tokens for step in rig.fake.steps[steps:]] == [3]
    for tag in (1, 2, 3):
        assert (len(streams[tag]), 0) in rig.offers(streams[tag])
    assert rig.offers(streams[4]) == []


def test_held_back_tokens_that_find_no_room_together_are_fed_as_far_as_they_do() -> None:
    rig = Rig(page_size_tokens=1)
    streams = {tag: some(5, tag) + rig.start(tag, some(5, tag), 3)[0] for tag in (1, 2)}
    rig.fake.fail_next("step", CapacityError("no cells for two"))
    rig.fake.fail_next("step", CapacityError("nor for the first"), after=1)
    rig.tick(retires=[linkw.LaneRetire(tag, True) for tag in streams])
    assert max(length for length, _ in rig.offers(streams[1])) == len(streams[1]) - 1
    assert max(length for length, _ in rig.offers(streams[2])) == len(streams[2])


def test_a_fault_on_held_back_tokens_leaves_none_of_their_states_behind() -> None:
    rig = Rig(page_size_tokens=1)
    streams = {tag: some(5, tag) + rig.start(tag, some(5, tag), 3)[0] for tag in (1, 2)}
    rig.fake.fail_next("step")
    rig.tick(retires=[linkw.LaneRetire(tag, True) for tag in streams])
    assert rig.offers(streams[1]) == rig.offers(streams[2]) == []
    assert rig.fake.sequences == []
