"""Drives one engine under test: plans with the harness's defaults, and checks that say what went wrong."""

from collections.abc import Callable, Iterable, Sequence
from math import lcm
from typing import Any, TypeVar

import numpy as np

from superfluid.engines.contract.subject import Abilities, ContractViolation, EngineUnderTest, NotApplicable
from superfluid.engines.engine import EngineError, OnEmit, TokenArray
from superfluid.link import linkw
from superfluid.link.codes import PARAM_IGNORE_EOS, OpState, SpaceKind, Status, TickStatus, status_name

BUDGET = 4096
DECODE_LANES = 8
EVERYTHING = 0xFFFFFFFFFFFFFFFF
ENVELOPE_BYTES = 136
MAX_PUMPS = 1000  # an operation that has not ended by then hangs

T = TypeVar("T")


class Driver:
    """One engine, its plan counter, and shorthands; tokens are lists of ids."""

    def __init__(self, subject: EngineUnderTest) -> None:
        self.subject = subject
        self.engine = subject.engine
        self.can: Abilities = subject.abilities
        self.seq = 0
        spaces = [space for space in self.engine.state_spaces() if space.kind != SpaceKind.ENCODER_CACHE]
        self.spaces = spaces
        self.page = lcm(*(max(1, space.page_size_tokens) for space in spaces))
        self.step = lcm(self.page, *(max(1, space.snapshot_interval_tokens) for space in spaces))

    # ---- tokens and records

    def prompt(self, length: int, salt: int = 1) -> list[int]:
        """`length` ids that differ between salts from the first on."""
        usable = min(self.subject.vocab_size, 200) - 1
        return [1 + (salt * 37 + i * 7 + i * i) % usable for i in range(length)]

    @property
    def unit(self) -> int:
        """The prompt length of the prefix cases: whole pages and snapshots, at least 64."""
        return -(-64 // self.step) * self.step

    def stage(self, tokens: Sequence[int]) -> linkw.TokenRef:
        return self.subject.rings[linkw.RING_IN].push_tokens(tokens)

    def admit(self, tag: int, tokens: Sequence[int], **fields: Any) -> linkw.LaneAdmit:
        """Greedy, best effort, end of sequence ignored."""
        params = fields.pop("params", None) or linkw.SamplingParams(flags=PARAM_IGNORE_EOS)
        return linkw.LaneAdmit(tag, self.stage(tokens), params=params, **fields)

    def plan(self, **fields: Any) -> linkw.TickPlan:
        lanes = min(DECODE_LANES, self.can.max_batch)
        fields = {"prefill_token_budget": BUDGET, "max_decode_lanes": lanes, **fields}
        return linkw.TickPlan(fields.pop("plan_seq", self.seq + 1), **fields)

    # ---- ticks

    def tick(self, on_emit: OnEmit | None = None, **fields: Any) -> linkw.TickEvents:
        plan = self.plan(**fields)
        try:
            events = self.engine.tick(plan, on_emit)
        except EngineError as error:
            raise ContractViolation(f"a legal plan was refused: {error}\n{plan}") from error
        self.seq = plan.plan_seq
        self.equal(events.plan_seq, plan.plan_seq, "the events' plan_seq")
        return events

    def refused(self, status: int, what: str, **fields: Any) -> None:
        """The plan answers `status`, and leaves the plan sequence as it was."""
        plan = self.plan(**fields)
        self.refuses(status, what, self.engine.tick, plan)

    def refuses(
        self, statuses: int | Iterable[int], what: str, call: Callable[..., object], *arguments: object
    ) -> None:
        """`call(*arguments)` answers one of `statuses`."""
        allowed = [statuses] if isinstance(statuses, int) else list(statuses)
        names = " or ".join(f"{status_name(status)} ({int(status)})" for status in allowed)
        try:
            got = call(*arguments)
        except EngineError as error:
            if error.status not in allowed:
                raise ContractViolation(f"{what}: {names} expected, got {error} ({error.status})") from error
            return
        raise ContractViolation(f"{what}: {names} expected, but it was accepted: {got!r}")

    def start(
        self, tag: int, tokens: Sequence[int], decode: int = 0, at: int = 0, count: int | None = None, **fields: Any
    ) -> linkw.TickEvents:
        """Admit and prefill (from `at`, to the end unless `count` says) and decode in one tick."""
        count = len(tokens) - at if count is None else count
        return self.tick(
            admits=[self.admit(tag, tokens, **fields)],
            prefills=[linkw.LanePrefill(tag, at, count)] if count else [],
            decodes=[linkw.LaneDecode(tag, decode)] if decode else [],
        )

    def decode(self, tag: int, count: int) -> list[int]:
        return self.tokens(self.tick(decodes=[linkw.LaneDecode(tag, count)]), tag)

    def retire(self, *tags: int, publish: bool = False) -> linkw.TickEvents:
        return self.tick(retires=[linkw.LaneRetire(tag, publish) for tag in tags])

    def generate(self, tag: int, tokens: Sequence[int], count: int, **fields: Any) -> list[int]:
        """The lane's tokens, run cold and whole; the lane is gone after."""
        got = self.tokens(self.start(tag, tokens, count, **fields), tag)
        self.retire(tag)
        return got

    def publish(self, tokens: Sequence[int], tag: int = 9000) -> None:
        """Cache a prompt through a lane."""
        self.start(tag, tokens)
        self.retire(tag, publish=True)

    # ---- reading events

    def emit(self, events: linkw.TickEvents, tag: int) -> linkw.LaneEmit:
        found = [emit for emit in events.emits if emit.lane_tag == tag]
        self.equal(len(found), 1, f"emits of lane {tag}")
        return found[0]

    def tokens(self, events: linkw.TickEvents, tag: int) -> list[int]:
        emit = self.emit(events, tag)
        if not emit.n_tokens:
            return []
        self.equal(emit.token_ref.count, emit.n_tokens, "token_ref.count")
        ids: list[int] = self.subject.rings[linkw.RING_OUT].read_tokens(emit.token_ref).tolist()
        return ids

    def allocated(self) -> int:
        """Pool bytes in use, after an empty tick."""
        return self.tick().mem.allocated_bytes

    # ---- cache and sequences

    def array(self, tokens: Sequence[int]) -> TokenArray:
        return np.asarray(tokens, np.uint32)

    def offers(self, tokens: Sequence[int], space_id: int | None = None) -> list[int]:
        """Lengths that every space serves: paged ones every page up to their longest offer, others what they offer."""
        kinds = {space.space_id: space.kind for space in self.spaces}
        served: list[set[int]] = []
        for match in self.engine.space_match(linkw.ALL_SPACES, self.array(tokens)):
            lengths = {candidate.prefix_len for candidate in match.candidates}
            if kinds.get(match.space_id) == SpaceKind.PAGED_KV and not self.can.head_only:
                page = self.page
                lengths = set(range(page, max(lengths, default=0) + 1, page))
            served.append(lengths)
        return sorted(set.intersection(*served), reverse=True) if served else []

    def acquire(self, tokens: Sequence[int], length: int, determinism: int = 0) -> int:
        return self.engine.seed_acquire(self.array(tokens), length, determinism)

    def bare(self, tokens: Sequence[int], tag: int = 9100, flags: int = 0) -> int:
        """A bare sequence of exactly these tokens: the fork of a lane that stopped prefilling there."""
        if not self.can.sequences:
            raise NotApplicable("no sequences")
        self.start(tag, [*tokens, 1], count=len(tokens))
        lane = self.engine.lane_sequence(tag)
        self.true(lane is not None, f"lane {tag} has a sequence")
        assert lane is not None
        child = self.engine.seq_fork(lane, flags)
        self.retire(tag)
        return child

    def finish(self, op: int) -> linkw.OpComplete:
        """Pump until the operation ended; its report."""
        for _ in range(MAX_PUMPS):
            for done in self.engine.pump():
                if done.op == op:
                    return done
        raise ContractViolation(f"operation {op} did not end in {MAX_PUMPS} pumps")

    def export(self, sequence: int, space_id: int, end: int, encoding: int = 0) -> bytes:
        """A sealed state of [0, end) (of the boundary `end` for a blob), as a snapshot or a lossy demotion."""
        start = end if self.kind(space_id) == SpaceKind.BLOB else 0
        size, sizing = self.engine.space_export_size(sequence, space_id, start, end, encoding)
        out = bytearray(size)
        if encoding:
            op = self.engine.space_demote(sequence, space_id, start, end, encoding, memoryview(out), sizing)
        else:
            op = self.engine.space_snapshot(sequence, space_id, end, memoryview(out), sizing)
        done = self.finish(op)
        self.equal(done.state, OpState.DONE, f"state of export operation {op} (error {done.error})")
        self.equal(done.bytes_moved, size, "bytes moved by an export: exactly what was sized")
        return bytes(out)

    def restore(self, sequence: int, space_id: int, sealed: bytes) -> None:
        done = self.finish(self.engine.space_restore(sequence, space_id, memoryview(sealed)))
        self.equal(done.state, OpState.DONE, f"state of a restore (error {done.error})")

    def kind(self, space_id: int) -> int:
        return next(space.kind for space in self.spaces if space.space_id == space_id)

    def evict_everything(self) -> int:
        return self.engine.cache_evict(EVERYTHING, linkw.ShedPolicy())

    # ---- checks

    def equal(self, got: T, expected: T, what: str) -> None:
        if got != expected:
            raise ContractViolation(f"{what}: {expected!r} expected, got {got!r}")

    def true(self, condition: object, what: str) -> None:
        if not condition:
            raise ContractViolation(f"not so: {what}")

    def same(self, got: list[int], expected: list[int], what: str) -> None:
        """Tokens of one stream that was run in two ways; an inexact engine may differ where it rounds otherwise."""
        if self.can.exact:
            self.equal(got, expected, what)
        else:
            self.equal(len(got), len(expected), f"number of {what}")

    def status(self, events: linkw.TickEvents, expected: TickStatus, what: str) -> None:
        self.equal(TickStatus(events.tick_status), expected, f"tick status {what}")

    def still_works(self, tag: int) -> None:
        """After a refusal: the lane answers as if nothing had been asked."""
        self.equal(len(self.decode(tag, 1)), 1, "tokens of a decode after a refusal")


def need(condition: object, what: str) -> None:
    """Leave the case where the engine cannot do it."""
    if not condition:
        raise NotApplicable(what)


REFUSED_ADOPT = (Status.OutOfBoundary, Status.SeedUnservable)
