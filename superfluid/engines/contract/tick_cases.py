"""Tick contract, cases 1 to 9, 14 and 16 to 19."""

import math
import struct
from typing import Any

from superfluid.engines.contract.cases import New, case
from superfluid.engines.contract.driver import BUDGET, Driver, need
from superfluid.link import linkw
from superfluid.link.codes import (
    MAX_ALTERNATIVES,
    PARAM_IGNORE_EOS,
    SHED_PREFILL,
    AdmitStatus,
    OpState,
    PlanFlag,
    Sampling,
    Status,
    TickStatus,
)
from superfluid.link.linkw import LaneCommit, LaneDecode, LanePrefill, LaneRetire

SAMPLED = linkw.SamplingParams(temperature=0.9, flags=PARAM_IGNORE_EOS)


@case
def admit_prefill_and_decode_in_one_tick(new: New) -> None:
    d = new()
    events = d.start(1, [1, 2, 3, 4], decode=3)
    result = events.admit_results[0]
    d.equal((result.lane_tag, result.status, result.reject_code), (1, AdmitStatus.ADMITTED, 0), "admit result")
    d.equal((result.cert_id, result.granted_class), (0, 2), "certificate and class without a strategy")
    d.status(events, TickStatus.OK, "of a plain tick")
    emit = d.emit(events, 1)
    d.equal((emit.n_tokens, emit.finish), (3, 0), "tokens and finish")
    d.equal(d.subject.lane_tokens(1), [1, 2, 3, 4, *d.tokens(events, 1)], "committed tokens")
    d.true(emit.logits_row.generation == 0, "no logits row of a lane that is not host")
    d.equal(events.faults, [], "faults")


@case
def the_same_prompt_and_seed_give_the_same_tokens(new: New) -> None:
    for fields in ({}, {"sampling": Sampling.SAMPLED, "params": SAMPLED, "rng_counter_base": 77}):
        first, second = new(), new()
        prompt = first.prompt(21)
        tokens = first.generate(1, prompt, 9, **fields)
        second.generate(5, second.prompt(10, salt=3), 4)
        second.same(second.generate(2, prompt, 9, **fields), tokens, "tokens on another engine and lane")


@case
def a_tick_cut_into_pieces_gives_the_same_tokens(new: New) -> None:
    d = new()
    prompt = d.prompt(21)
    fields: dict[str, Any] = {"sampling": Sampling.SAMPLED, "params": SAMPLED, "rng_counter_base": 5}
    whole = d.generate(1, prompt, 9, **fields)
    d.start(2, prompt, count=8, **fields)
    d.tick(prefills=[LanePrefill(2, 8, 13)])
    pieces = [token for count in (1, 3, 0, 5) for token in d.decode(2, count)]
    d.same(pieces, whole, "tokens of a lane decoded in pieces")
    d.same(d.subject.lane_tokens(2), prompt + whole, "committed tokens")


@case
def plan_seq_must_grow(new: New) -> None:
    d = new()
    d.tick(plan_seq=5)
    d.refused(Status.RejectIllegalCombination, "an equal plan_seq", plan_seq=5)
    d.refused(Status.RejectIllegalCombination, "a smaller plan_seq", plan_seq=4)
    d.refused(Status.RejectUnknownLane, "a decode of nothing", plan_seq=6, decodes=[LaneDecode(1, 1)])
    d.equal(d.tick(plan_seq=6).emits, [], "emits of an empty plan; the refused plan_seq may be used again")
    d.tick(plan_seq=100)


@case
def lists_that_contradict_each_other(new: New) -> None:
    d = new()
    prompt = d.prompt(6)
    d.start(1, prompt)
    admit = d.admit(2, prompt)
    commit, prefill, decode = LaneCommit(1, 1, 1), LanePrefill(1, 6, 0), LaneDecode(1, 1)
    retire = LaneRetire(1)
    twice, both = Status.RejectDuplicateLane, Status.RejectIllegalCombination
    d.refused(twice, "two admits", admits=[admit, admit])
    d.refused(twice, "two commits", commits=[commit, commit])
    d.refused(twice, "two prefills", prefills=[prefill, prefill])
    d.refused(twice, "two decodes", decodes=[decode, decode])
    d.refused(twice, "two retires", retires=[retire, retire])
    d.refused(both, "admit and retire", admits=[admit], retires=[LaneRetire(2)])
    d.refused(both, "admit and commit", admits=[admit], commits=[LaneCommit(2, 1, 1)])
    d.refused(both, "commit and retire", commits=[commit], retires=[retire])
    d.refused(both, "decode and retire", decodes=[decode], retires=[retire])
    d.refused(both, "prefill and retire", prefills=[prefill], retires=[retire])
    d.refused(both, "admit of a live lane", admits=[d.admit(1, prompt)])
    d.still_works(1)


@case
def unknown_lanes(new: New) -> None:
    d = new()
    d.start(1, d.prompt(6))
    unknown = Status.RejectUnknownLane
    d.refused(unknown, "commit", commits=[LaneCommit(9, 1, 1)])
    d.refused(unknown, "decode", decodes=[LaneDecode(9, 1)])
    d.refused(unknown, "prefill", prefills=[LanePrefill(9, 0, 1)])
    d.refused(unknown, "retire", retires=[LaneRetire(9)])
    d.still_works(1)


@case
def the_batch_bounds_decode_lanes(new: New) -> None:
    d = new()
    prompt = d.prompt(6)
    d.start(1, prompt)
    d.start(2, prompt)
    over = Status.RejectBudget
    d.refused(over, "max_decode_lanes over the batch, no decodes", max_decode_lanes=d.can.max_batch + 1)
    both = [LaneDecode(1, 1), LaneDecode(2, 1)]
    d.refused(over, "two decodes in a plan of one", max_decode_lanes=1, decodes=both)
    d.tick(max_decode_lanes=d.can.max_batch)
    d.still_works(1)


@case
def prompt_references(new: New) -> None:
    d = new()
    prompt = d.prompt(6)
    d.start(1, prompt)
    good = d.stage(prompt)

    def admit(**fields: int) -> list[linkw.LaneAdmit]:
        ref = linkw.TokenRef(good.ring_id, good.index, good.count, good.generation)
        for name, value in fields.items():
            setattr(ref, name, value)
        return [linkw.LaneAdmit(2, ref)]

    stale, bounds = Status.RejectBadRefGeneration, Status.RejectBounds
    d.refused(stale, "another generation", admits=admit(generation=good.generation + 1))
    d.refused(stale, "generation 0", admits=admit(generation=0))
    d.refused(bounds, "an unknown ring", admits=admit(ring_id=77))
    d.refused(bounds, "a slot past the ring", admits=admit(index=1 << 20))
    d.refused(bounds, "a count that is not the span's", admits=admit(count=good.count + 1))
    d.refused(bounds, "a token outside the vocabulary", admits=[d.admit(2, [d.subject.vocab_size])])
    d.refused(Status.RejectIllegalCombination, "an empty prompt", admits=[d.admit(2, [])])
    d.still_works(1)
    d.tick(admits=admit())


@case
def drain_admits_nothing(new: New) -> None:
    d = new()
    prompt = d.prompt(6)
    d.start(1, prompt)
    d.refused(Status.RejectIllegalCombination, "an admit", flags=PlanFlag.DRAIN, admits=[d.admit(2, prompt)])
    events = d.tick(flags=PlanFlag.DRAIN, decodes=[LaneDecode(1, 2)])
    d.equal(len(d.tokens(events, 1)), 2, "tokens of a lane in decode while draining")


@case
def host_lanes(new: New) -> None:
    d = new()
    need(d.can.host_logits, "no host logits")
    prompt = d.prompt(6)
    host = d.admit(1, prompt, sampling=Sampling.HOST)
    prefill = LanePrefill(1, 0, 6)
    many = [LaneDecode(1, 2)]
    d.refused(Status.RejectHostRules, "a grant of 2 with the admit", admits=[host], prefills=[prefill], decodes=many)
    d.start(2, prompt, decode=1)
    events = d.tick(admits=[host], prefills=[prefill], decodes=[LaneDecode(1, 1)])
    emit = d.emit(events, 1)
    nonce = emit.logits_row.generation
    d.equal((emit.n_tokens, emit.finish), (0, 0), "tokens and finish of a host lane")
    d.true(nonce != 0, "a host lane's row has a nonce")
    d.true(len(d.subject.rings[linkw.RING_LOGITS].read_row(emit.logits_row)) > 0, "the row can be read")
    d.refused(Status.RejectHostRules, "a decode without the commit", decodes=[LaneDecode(1, 1)])
    d.refused(Status.RejectStaleNonce, "another nonce", commits=[LaneCommit(1, 5, nonce + 1)])
    d.refused(
        Status.RejectBounds, "a token outside the vocabulary", commits=[LaneCommit(1, d.subject.vocab_size, nonce)]
    )
    d.refused(Status.RejectHostRules, "a grant of 2", commits=[LaneCommit(1, 5, nonce)], decodes=many)
    d.refused(Status.RejectIllegalCombination, "a commit to another lane", commits=[LaneCommit(2, 5, nonce)])
    events = d.tick(commits=[LaneCommit(1, 5, nonce)], decodes=[LaneDecode(1, 1)])
    fresh = d.emit(events, 1).logits_row.generation
    d.true(fresh not in (0, nonce), "a decode after the commit gives a row with a nonce of its own")
    d.equal(d.subject.lane_tokens(1), [*prompt, 5], "committed tokens")
    d.tick(commits=[LaneCommit(1, 6, fresh)])
    d.refused(Status.RejectHostRules, "a commit with no row pending", commits=[LaneCommit(1, 7, fresh)])
    d.equal(d.subject.lane_tokens(1), [*prompt, 5, 6], "committed tokens")


@case
def prefill_is_cut_to_the_budget(new: New) -> None:
    d = new()
    prompt = d.prompt(100)
    whole = d.generate(9, prompt, 2)
    admit, chunk = d.admit(1, prompt), [LanePrefill(1, 0, 100)]
    d.refused(
        Status.RejectIllegalCombination,
        "a decode of a lane whose prompt is cut",
        prefill_token_budget=10,
        admits=[admit],
        prefills=chunk,
        decodes=[LaneDecode(1, 1)],
    )
    events = d.tick(prefill_token_budget=10, admits=[admit], prefills=chunk)
    d.status(events, TickStatus.SHED, "of a cut prefill")
    d.equal(events.shed.prefill_chunks_dropped, 1, "prefill chunks dropped")
    shed = [(entry.lane_tag, entry.kind, entry.tokens) for entry in events.shed.entries]
    d.equal(shed, [(1, SHED_PREFILL, 90)], "shed entries")
    illegal = Status.RejectIllegalCombination
    d.refused(illegal, "a prefill that starts too early", prefills=[LanePrefill(1, 9, 91)])
    d.refused(illegal, "a prefill that starts too late", prefills=[LanePrefill(1, 11, 89)])
    d.refused(Status.RejectBounds, "a prefill past the prompt", prefills=[LanePrefill(1, 10, 91)])
    events = d.tick(prefills=[LanePrefill(1, 10, 90)], decodes=[LaneDecode(1, 2)])
    d.status(events, TickStatus.OK, "of the rest")
    d.same(d.tokens(events, 1), whole, "tokens after a cut prefill")


@case
def the_budget_is_dealt_in_plan_order(new: New) -> None:
    d = new()
    a, b, c = d.prompt(8), d.prompt(8, salt=2), d.prompt(8, salt=3)
    events = d.tick(
        prefill_token_budget=12,
        admits=[d.admit(1, a), d.admit(2, b), d.admit(3, c)],
        prefills=[LanePrefill(2, 0, 8), LanePrefill(1, 0, 8), LanePrefill(3, 0, 8)],
        decodes=[LaneDecode(2, 1)],
    )
    shed = {entry.lane_tag: entry.tokens for entry in events.shed.entries}
    d.equal(shed, {1: 4, 3: 8}, "tokens dropped per lane")
    d.equal(events.shed.prefill_chunks_dropped, 2, "prefill chunks dropped")
    events = d.tick(prefills=[LanePrefill(1, 4, 4), LanePrefill(3, 0, 8)], decodes=[LaneDecode(1, 1)])
    d.status(events, TickStatus.OK, "of the rest")


@case
def a_fault_takes_one_lane_only(new: New) -> None:
    d = new()
    prompt, other = d.prompt(40), d.prompt(40, salt=2)
    expected = d.generate(9, other, 4)
    empty = d.allocated()
    d.start(1, prompt)
    d.start(2, other)
    d.subject.inject_fault(1)
    events = d.tick(decodes=[LaneDecode(1, 4), LaneDecode(2, 4)])
    d.status(events, TickStatus.LANE_ERRORS, "with a faulted lane")
    d.equal([fault.lane_tag for fault in events.faults], [1], "faulted lanes")
    d.equal([emit.lane_tag for emit in events.emits], [2], "lanes with an emit")
    d.same(d.tokens(events, 2), expected, "tokens of the other lane")
    d.refused(Status.RejectUnknownLane, "a decode of a faulted lane", decodes=[LaneDecode(1, 1)])
    d.equal(d.engine.lane_sequence(1), None, "sequence of a faulted lane")
    d.retire(1, publish=True)
    d.refused(Status.RejectUnknownLane, "a second retire", retires=[LaneRetire(1)])
    d.equal(d.offers(prompt), [], "offers of what a faulted lane held")
    d.retire(2)
    d.equal(d.allocated(), empty, "bytes allocated when both lanes are gone")
    d.equal(len(d.tokens(d.start(1, prompt, decode=2), 1)), 2, "tokens of the tag admitted again")


@case
def a_yield_ends_prefill_at_a_step_boundary(new: New) -> None:
    step = 16
    d = new(prefill_step_tokens=step)
    control = d.subject.control
    need(d.can.yields and control is not None, "cannot yield")
    assert control is not None
    prompt, ready = d.prompt(100), d.prompt(9, salt=4)
    whole, other = d.generate(9, prompt, 3), d.generate(9, ready, 8)
    d.start(2, ready)
    control.yield_requested = True
    events = d.tick(
        admits=[d.admit(1, prompt)],
        prefills=[LanePrefill(1, 0, 100)],
        decodes=[LaneDecode(1, 3), LaneDecode(2, 3)],
    )
    d.status(events, TickStatus.SHED, "of a tick that yielded in prefill")
    d.equal([(e.lane_tag, e.kind) for e in events.shed.entries], [(1, SHED_PREFILL)], "shed entries")
    left = events.shed.entries[0].tokens
    d.equal(left, 100 - step, "tokens left after one micro-batch")
    d.equal((d.emit(events, 1).n_tokens, d.emit(events, 1).finish), (0, 0), "emit of the lane whose prompt was cut")
    got = d.tokens(events, 2)
    d.true(len(got) < 3, "a ready lane decodes no whole grant when asked to yield")
    control.yield_requested = False
    events = d.tick(
        prefills=[LanePrefill(1, 100 - left, left)], decodes=[LaneDecode(1, 3), LaneDecode(2, 8 - len(got))]
    )
    d.same(d.tokens(events, 1), whole, "tokens of the lane that was cut")
    d.same(got + d.tokens(events, 2), other, "tokens of the lane beside it")


@case
def a_yield_ends_decode_after_a_round(new: New) -> None:
    d = new()
    control = d.subject.control
    need(d.can.yields and control is not None, "cannot yield")
    assert control is not None
    prompts = {tag: d.prompt(9, salt=tag) for tag in (1, 2)}
    whole = {tag: d.generate(9, prompt, 6) for tag, prompt in prompts.items()}
    for tag, prompt in prompts.items():
        d.start(tag, prompt)
    got: dict[int, list[int]] = {1: [], 2: []}
    control.yield_requested = True
    for _ in range(2):
        events = d.tick(decodes=[LaneDecode(tag, 6 - len(got[tag])) for tag in got])
        for tag, tokens in got.items():
            more = d.tokens(events, tag)
            d.true(1 <= len(more) < 6 - len(tokens), f"a yielded tick decodes a round, not {len(more)} tokens")
            tokens += more
    control.yield_requested = False
    events = d.tick(decodes=[LaneDecode(tag, 6 - len(got[tag])) for tag in got])
    for tag, tokens in got.items():
        d.same(tokens + d.tokens(events, tag), whole[tag], "tokens across yields")


@case
def tokens_stream_out_during_the_tick(new: New) -> None:
    d = new()
    prompts = {tag: d.prompt(8, salt=tag) for tag in (3, 1, 2)}
    for tag, prompt in prompts.items():
        d.start(tag, prompt)
    streamed: dict[int, list[int]] = {tag: [] for tag in prompts}

    def on_emit(lanes: list[tuple[int, list[int]]]) -> None:
        for tag, tokens in lanes:
            d.true(tokens, "no partial emit is empty")
            streamed[tag] += tokens

    decodes = [LaneDecode(2, 4), LaneDecode(3, 0), LaneDecode(1, 2)]
    events = d.tick(on_emit, decodes=decodes)
    d.true(not any(streamed.values()), "no partial emits unless the plan asks for them")
    d.equal([emit.lane_tag for emit in events.emits], [2, 3, 1], "emits in the order of the plan's decodes")
    events = d.tick(on_emit, flags=PlanFlag.PARTIAL_EMITS, decodes=decodes)
    d.equal(streamed, {tag: d.tokens(events, tag) for tag in streamed}, "partial emits, joined")


@case
def a_finished_lane_stays_until_it_is_retired(new: New) -> None:
    d = new()
    end_next = d.subject.end_next
    need(end_next is not None, "no way to end a sequence")
    assert end_next is not None
    prompt = d.prompt(8)
    d.start(1, prompt, decode=2, params=linkw.SamplingParams())
    end_next(1)
    events = d.tick(decodes=[LaneDecode(1, 5)])
    emit = d.emit(events, 1)
    d.equal((emit.n_tokens, emit.finish), (1, 1), "tokens and finish: the ending token is part of the emit")
    d.refused(Status.RejectIllegalCombination, "a decode of a finished lane", decodes=[LaneDecode(1, 1)])
    d.refused(Status.RejectIllegalCombination, "an admit of a finished lane's tag", admits=[d.admit(1, prompt)])
    d.equal(len(d.subject.lane_tokens(1)), 11, "committed tokens")
    d.retire(1)
    d.refused(Status.RejectUnknownLane, "a decode of a retired lane", decodes=[LaneDecode(1, 1)])


@case
def logprobs(new: New) -> None:
    d = new()
    prompt = d.prompt(8)
    for asked in (0, 3, 200):
        events = d.start(1, prompt, decode=4, want_logprobs=True, top_logprobs=asked)
        tokens = d.tokens(events, 1)
        records = [record for record in events.logprobs if record.lane_tag == 1]
        d.equal(len(records), len(tokens), "logprob records: one per token")
        for token, record in zip(tokens, records, strict=True):
            _check_logprob(d, token, record, asked)
        d.retire(1)


def _check_logprob(d: Driver, token: int, record: linkw.LaneLogprob, asked: int) -> None:
    value = _float(record.logprob_bits)
    d.true(math.isfinite(value) and value < 1e-6, f"a logprob of {value}")
    d.equal(len(record.top_logprob_bits), len(record.top_ids), "values of the alternatives")
    d.true(len(record.top_ids) <= min(asked, MAX_ALTERNATIVES), f"{len(record.top_ids)} alternatives, {asked} asked")
    if not d.can.alternatives or not asked:
        return
    d.equal(len(record.top_ids), min(asked, MAX_ALTERNATIVES, d.subject.vocab_size), "alternatives")
    values = [_float(bits) for bits in record.top_logprob_bits]
    d.true(values == sorted(values, reverse=True), "alternatives by value, down")
    d.equal(record.top_ids[0], token, "the best alternative of a greedy lane is its token")
    d.equal(values[0], value, "its value")


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


@case
def a_running_operation_locks_its_lane(new: New) -> None:
    d = new()
    need(d.can.sequences, "no sequences")
    length = d.unit
    prompt = d.prompt(length)
    d.start(1, [*prompt, 1], count=length)
    d.start(2, d.prompt(8, salt=2))
    sequence = d.engine.lane_sequence(1)
    assert sequence is not None
    space = d.spaces[0].space_id
    size, sizing = d.engine.space_export_size(sequence, space, 0, length, 0)
    op = d.engine.space_snapshot(sequence, space, length, memoryview(bytearray(size)), sizing)
    if d.engine.op_poll(op).state not in (OpState.PENDING, OpState.RUNNING):
        need(False, "operations end when they are submitted")
    locked = Status.RejectTransferLocked
    d.refused(locked, "a prefill", prefills=[LanePrefill(1, length, 1)])
    d.refused(locked, "a retire", retires=[LaneRetire(1)])
    d.equal(len(d.decode(2, 1)), 1, "tokens of another lane")
    d.finish(op)
    events = d.tick(prefills=[LanePrefill(1, length, 1)], decodes=[LaneDecode(1, 1)])
    d.equal(len(d.tokens(events, 1)), 1, "tokens after the operation ended")


@case
def no_budget_is_left_over(new: New) -> None:
    d = new()
    events = d.tick(prefill_token_budget=0, admits=[d.admit(1, d.prompt(5))], prefills=[LanePrefill(1, 0, 5)])
    d.equal(events.shed.entries[0].tokens, 5, "tokens dropped by a budget of 0")
    events = d.tick(prefill_token_budget=BUDGET, prefills=[LanePrefill(1, 0, 5)], decodes=[LaneDecode(1, 0)])
    d.equal((d.emit(events, 1).n_tokens, d.emit(events, 1).finish), (0, 0), "emit of a grant of 0")
