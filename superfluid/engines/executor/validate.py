"""A plan is judged whole before anything moves; the first failure, in this order, is the answer."""

from collections.abc import Iterable

import attrs
import numpy as np

from superfluid.engines.engine import EngineError, PlanFlag, Sampling, Status
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import STREAM_ROOM, Chunk, GrammarSlot, Lane
from superfluid.engines.executor.leases import Lease
from superfluid.engines.executor.room import Room, plan_room
from superfluid.engines.primitives import TokenArray
from superfluid.link import linkw
from superfluid.shm.ring import OutOfBounds, StaleReference


@attrs.define
class Work:
    """A plan that will run: its lanes found, its new lanes made (not yet started), its budget dealt."""

    retires: list[tuple[int, Lane | None, bool]]
    commits: list[tuple[Lane, int]]
    admits: list[Lane]
    chunks: list[Chunk]
    decodes: list[tuple[Lane, int]]  # in plan order, with their grants
    room: Room


def validate(core: Core, plan: linkw.TickPlan) -> Work:
    """Raises EngineError -100 to -114."""
    _check_lists(plan)
    if plan.plan_seq <= core.plan_seq:
        raise _illegal(f"plan_seq {plan.plan_seq} after {core.plan_seq}; it must grow")
    if plan.max_decode_lanes > core.max_batch:
        raise EngineError(
            Status.RejectBudget, f"max_decode_lanes {plan.max_decode_lanes} of a batch of {core.max_batch}"
        )
    if plan.flags & PlanFlag.DRAIN and plan.admits:
        raise _illegal(f"{len(plan.admits)} admits in a draining plan")
    admits = _Admits(core)
    for admit in plan.admits:
        admits.check(admit)
    lanes = core.lanes | {lane.tag: lane for lane in admits.lanes}
    commits = [_check_commit(core, commit) for commit in plan.commits]
    chunks = _deal_budget(lanes, plan)
    decodes = _check_decodes(lanes, chunks, plan)
    retires: list[tuple[int, Lane | None, bool]] = []
    for retire in plan.retires:
        lane = core.lanes.get(retire.lane_tag)
        if lane is None and retire.lane_tag not in core.faulted:
            raise _unknown(retire.lane_tag)
        retires.append((retire.lane_tag, lane, retire.publish_to_cache))
    room = plan_room(core, plan.shed_policy, admits.lanes, chunks, decodes, retires, {c.lane_tag for c in plan.commits})
    return Work(retires, commits, admits.lanes, chunks, decodes, room)


def _illegal(reason: str) -> EngineError:
    return EngineError(Status.RejectIllegalCombination, reason)


def _unknown(tag: int) -> EngineError:
    return EngineError(Status.RejectUnknownLane, f"no lane {tag}")


def _check_lists(plan: linkw.TickPlan) -> None:
    admits = _distinct("admits", (item.lane_tag for item in plan.admits))
    commits = _distinct("commits", (item.lane_tag for item in plan.commits))
    prefills = _distinct("prefills", (item.lane_tag for item in plan.prefills))
    decodes = _distinct("decodes", (item.lane_tag for item in plan.decodes))
    retires = _distinct("retires", (item.lane_tag for item in plan.retires))
    for one, other, what in (
        (admits, retires, "admitted and retired"),
        (admits, commits, "admitted and committed"),
        (commits, retires, "committed and retired"),
        (decodes, retires, "decoded and retired"),
        (prefills, retires, "prefilled and retired"),
    ):
        if both := one & other:
            raise _illegal(f"lane {min(both)} is {what} in one plan")
    if admits & decodes:
        hosts = {item.lane_tag for item in plan.admits if item.sampling == Sampling.HOST}
        for decode in plan.decodes:
            if decode.lane_tag in hosts:
                _check_host_grant(decode)
    if len(plan.decodes) > plan.max_decode_lanes:
        raise EngineError(
            Status.RejectBudget, f"{len(plan.decodes)} decodes under max_decode_lanes {plan.max_decode_lanes}"
        )


def _distinct(name: str, tags: Iterable[int]) -> set[int]:
    seen: set[int] = set()
    for tag in tags:
        if tag in seen:
            raise EngineError(Status.RejectDuplicateLane, f"lane {tag} twice in {name}")
        seen.add(tag)
    return seen


def _check_host_grant(decode: linkw.LaneDecode) -> None:
    if decode.max_new_tokens != 1:
        raise EngineError(
            Status.RejectHostRules, f"host lane {decode.lane_tag} with a grant of {decode.max_new_tokens}; it takes 1"
        )


class _Admits:
    """Judges admits in plan order and makes their lanes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._grammars: set[int] = set()
        self._seeds: set[int] = set()
        self.lanes: list[Lane] = []

    def check(self, admit: linkw.LaneAdmit) -> None:
        core, tag = self._core, admit.lane_tag
        if tag in core.lanes:
            raise _illegal(f"lane {tag} lives already")
        prompt = self._prompt(admit.prompt)
        n = len(prompt)
        if not n:
            raise _illegal(f"lane {tag} has an empty prompt")
        if int(prompt.max()) >= core.description.vocab_size:
            raise EngineError(Status.RejectBounds, f"lane {tag}: token {prompt.max()} of {core.description.vocab_size}")
        if admit.sampling > Sampling.HOST:
            raise _illegal(f"lane {tag}: sampling {admit.sampling}")
        if admit.decode_replay >= n:
            raise EngineError(Status.RejectBounds, f"lane {tag}: a replay of {admit.decode_replay}, prompt of {n}")
        if admit.strategy_slot and not core.granted(admit.strategy_slot):
            raise _illegal(f"lane {tag}: strategy slot {admit.strategy_slot} was never granted")
        lane = Lane(tag, admit, n, n - admit.decode_replay, prompt)
        if admit.grammar_handle or admit.grammar_replay:
            self._grammar(lane, admit)
        if admit.logit_bias_handle and admit.logit_bias_handle not in core.biases:
            raise _illegal(f"lane {tag}: no logit bias {admit.logit_bias_handle}")
        if admit.seed_handle:
            lane.lease = self._seed(admit, prompt)
            seeded = len(lane.lease.tokens)
            lane.prefilled = lane.ingested = seeded
            lane.ingested = lane.lease.keep(n)
            lane.prefill_end = max(lane.prefill_end, seeded)
        if n > core.max_seq_len:
            raise EngineError(
                Status.RejectBudget, f"lane {tag}: a prompt of {n} tokens in a window of {core.max_seq_len}"
            )
        room = np.empty(min(core.max_seq_len, n + STREAM_ROOM) + 1, np.uint32)
        room[:n] = prompt
        lane.stream = room
        self.lanes.append(lane)

    def _prompt(self, ref: linkw.TokenRef) -> TokenArray:
        ring = self._core.inbound
        if ring is None or ref.ring_id != ring.spec.ring_id:
            raise EngineError(Status.RejectBounds, f"no token ring {ref.ring_id}")
        try:
            return ring.read_tokens(ref)
        except StaleReference as error:
            raise EngineError(Status.RejectBadRefGeneration, str(error)) from error
        except OutOfBounds as error:
            raise EngineError(Status.RejectBounds, str(error)) from error

    def _grammar(self, lane: Lane, admit: linkw.LaneAdmit) -> None:
        handle, replay = admit.grammar_handle, admit.grammar_replay
        slot: GrammarSlot | None = self._core.grammars.get(handle)
        if slot is None or slot.freed:
            raise _illegal(f"lane {lane.tag}: no grammar {handle}" + (f" for a replay of {replay}" if replay else ""))
        if slot.in_use or handle in self._grammars:
            raise _illegal(f"lane {lane.tag}: grammar {handle} is in use")
        if lane.host:
            raise _illegal(f"host lane {lane.tag} with a grammar")
        if replay > lane.prompt_len:
            raise _illegal(f"lane {lane.tag}: a grammar replay of {replay}, prompt of {lane.prompt_len}")
        matcher = slot.grammar.matcher()
        for token in lane.stream[lane.prompt_len - replay :].tolist():
            if not matcher.consume(token):
                raise _illegal(f"lane {lane.tag}: its grammar refuses replayed token {token}")
        self._grammars.add(handle)
        lane.grammar, lane.matcher = slot, matcher

    def _seed(self, admit: linkw.LaneAdmit, prompt: TokenArray) -> Lease:
        handle = admit.seed_handle
        lease = None if handle in self._seeds else self._core.leases.find(handle)
        if lease is None:
            raise EngineError(Status.RejectStaleSeed, f"lane {admit.lane_tag}: seed {handle} is unknown or used up")
        self._seeds.add(handle)
        if lease.determinism != admit.determinism_class:
            raise EngineError(
                Status.RejectStaleSeed, f"seed {handle} is of class {lease.determinism}, not {admit.determinism_class}"
            )
        if not np.array_equal(prompt[: len(lease.tokens)], lease.tokens):
            raise EngineError(
                Status.RejectStaleSeed,
                f"the prompt of lane {admit.lane_tag} does not start with seed {handle}'s tokens",
            )
        if self._core.head_only and len(lease.tokens) == len(prompt):
            raise _illegal(f"seed {handle} is the whole prompt, and its state cannot be cut back")
        return lease


def _check_commit(core: Core, commit: linkw.LaneCommit) -> tuple[Lane, int]:
    lane = core.lanes.get(commit.lane_tag)
    if lane is None:
        raise _unknown(commit.lane_tag)
    if not lane.host or lane.finish:
        raise _illegal(f"lane {lane.tag} takes no commits: " + ("it has finished" if lane.host else "not a host lane"))
    if not lane.nonce:
        raise EngineError(Status.RejectHostRules, f"host lane {lane.tag} has no row pending")
    if commit.logits_nonce != lane.nonce:
        raise EngineError(
            Status.RejectStaleNonce, f"lane {lane.tag}: row {lane.nonce} pends, not {commit.logits_nonce}"
        )
    if commit.token_id >= core.description.vocab_size:
        raise EngineError(Status.RejectBounds, f"token {commit.token_id} of {core.description.vocab_size}")
    return lane, commit.token_id


def _deal_budget(lanes: dict[int, Lane], plan: linkw.TickPlan) -> list[Chunk]:
    left = plan.prefill_token_budget
    chunks: list[Chunk] = []
    for prefill in plan.prefills:
        lane = lanes.get(prefill.lane_tag)
        if lane is None:
            raise _unknown(prefill.lane_tag)
        if prefill.token_offset != lane.prefilled:
            raise _illegal(f"lane {lane.tag} stands at {lane.prefilled}, its prefill at {prefill.token_offset}")
        if prefill.token_offset + prefill.token_count > lane.prefill_end:
            raise EngineError(
                Status.RejectBounds,
                f"lane {lane.tag}: prefill to {prefill.token_offset + prefill.token_count}, end {lane.prefill_end}",
            )
        count = min(prefill.token_count, left)
        left -= count
        chunks.append(Chunk(lane, count, prefill.token_count - count))
    return chunks


def _check_decodes(lanes: dict[int, Lane], chunks: list[Chunk], plan: linkw.TickPlan) -> list[tuple[Lane, int]]:
    coming = {chunk.lane.tag: chunk.count for chunk in chunks}
    committed = {commit.lane_tag for commit in plan.commits}
    decodes: list[tuple[Lane, int]] = []
    for decode in plan.decodes:
        tag = decode.lane_tag
        lane = lanes.get(tag)
        if lane is None:
            raise _unknown(tag)
        if lane.finish:
            raise _illegal(f"lane {tag} has finished; retire it")
        if lane.host:
            _check_host_grant(decode)
            if lane.nonce and tag not in committed:
                raise EngineError(Status.RejectHostRules, f"host lane {tag}: row {lane.nonce} waits for its commit")
        if lane.prefilled + coming.get(tag, 0) < lane.prefill_end:
            raise _illegal(
                f"lane {tag} is decoded with {lane.prefilled + coming.get(tag, 0)} of {lane.prefill_end} prompt tokens"
            )
        decodes.append((lane, decode.max_new_tokens))
    return decodes
