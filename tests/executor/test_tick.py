from superfluid.engines.engine import FaultCode, Status, TickStatus
from superfluid.engines.primitives import CapacityError
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
