"""The harness notices: each broken engine here fails the case that is about what it breaks."""

from collections.abc import Callable
from typing import Any

import pytest

from superfluid.engines.contract import CASES, ContractViolation, NotApplicable
from superfluid.engines.engine import EngineError
from superfluid.engines.executor import envelope
from superfluid.engines.mock import MockEngine, cache, lanes, operations, plan, state, states, strategies, workloads
from superfluid.link import linkw
from superfluid.link.codes import SHED_PREFILL
from tests.engines.mock_subject import make_mock

Patch = Callable[[pytest.MonkeyPatch], None]


def swap(owner: Any, name: str, made: Callable[[Any], Any]) -> Patch:
    """Replace an attribute by what `made` makes of it."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, made(getattr(owner, name)))

    return patch


def nothing(_: Any) -> Any:
    return lambda *arguments, **fields: None


def after(change: Callable[[linkw.TickEvents], None]) -> Callable[[Any], Any]:
    """Changes the events of every tick."""

    def made(tick: Any) -> Any:
        def changed(self: MockEngine, *arguments: Any) -> linkw.TickEvents:
            events: linkw.TickEvents = tick(self, *arguments)
            change(events)
            return events

        return changed

    return made


def moves_before_it_refuses(tick: Any) -> Any:
    def changed(self: MockEngine, plan: linkw.TickPlan, on_emit: Any = None) -> linkw.TickEvents:
        try:
            return tick(self, plan, on_emit)  # type: ignore[no-any-return]
        except EngineError:
            self._last_seq = plan.plan_seq
            raise

    return changed


def counts_refused_plans(tick: Any) -> Any:
    def changed(self: MockEngine, plan: linkw.TickPlan, on_emit: Any = None) -> linkw.TickEvents:
        try:
            return tick(self, plan, on_emit)  # type: ignore[no-any-return]
        except EngineError:
            self.ticks += 1
            raise

    return changed


def always_streams(tick: Any) -> Any:
    def changed(self: MockEngine, plan: linkw.TickPlan, on_emit: Any = None) -> linkw.TickEvents:
        plan.flags |= 4
        return tick(self, plan, on_emit)  # type: ignore[no-any-return]

    return changed


def forgets_the_shed_of_prefill(events: linkw.TickEvents) -> None:
    events.shed.entries = [entry for entry in events.shed.entries if entry.kind != SHED_PREFILL]


def leaks_faulted_lanes(fault: Any) -> Any:
    def changed(self: MockEngine, lane: lanes.Lane, code: int, events: linkw.TickEvents) -> None:
        leaked = self._sequences.create()
        leaked.lengths = dict(lane.sequence.lengths)
        fault(self, lane, code, events)

    return changed


def twice(pump: Any) -> Any:
    def changed(self: Any) -> list[linkw.OpComplete]:
        ended: list[linkw.OpComplete] = pump(self)
        self._to_tick += ended
        return ended

    return changed


def overwrites(snapshot: Any) -> Any:
    def changed(self: Any, handle: int, space: int, position: int, out: memoryview, gen: int) -> int:
        out[:1] = b"x"
        return snapshot(self, handle, space, position, out, gen)  # type: ignore[no-any-return]

    return changed


BROKEN: dict[str, tuple[str, Patch]] = {
    "plan_seq may stay": (
        "plan_seq_must_grow",
        swap(plan.Judge, "judge", lambda judge: lambda self, p, last, refuse: judge(self, p, -1, refuse)),
    ),
    "a refused plan uses its plan_seq": (
        "plan_seq_must_grow",
        swap(MockEngine, "tick", moves_before_it_refuses),
    ),
    "refused plans count as ticks": ("a_lease_ends_after_its_ticks", swap(MockEngine, "tick", counts_refused_plans)),
    "leases never end": ("a_lease_ends_after_its_ticks", swap(cache.PrefixCache, "sweep", nothing)),
    "streams unasked": ("tokens_stream_out_during_the_tick", swap(MockEngine, "tick", always_streams)),
    "emits in another order": (
        "tokens_stream_out_during_the_tick",
        swap(MockEngine, "tick", after(lambda events: events.emits.sort(key=lambda emit: emit.lane_tag))),
    ),
    "no logprobs": ("logprobs", swap(MockEngine, "tick", after(lambda events: events.logprobs.clear()))),
    "no shed entries": (
        "prefill_is_cut_to_the_budget",
        swap(MockEngine, "tick", after(forgets_the_shed_of_prefill)),
    ),
    "contradicting lists pass": ("lists_that_contradict_each_other", swap(plan.Judge, "_check_lists", nothing)),
    "any commit passes": ("host_lanes", swap(plan.Judge, "_check_commits", nothing)),
    "operations lock nothing": ("a_running_operation_locks_its_lane", swap(plan.Judge, "_check_locks", nothing)),
    "room without end": (
        "a_plan_that_never_fits",
        swap(plan.Judge, "_make_room", lambda _: lambda *arguments: []),
    ),
    "replays speak": (
        "a_resumed_lane_replays_its_decoded_tail",
        swap(lanes.Lane, "replaying", lambda _: property(lambda self: False)),
    ),
    "draws by lane, not by position": (
        "a_resumed_lane_replays_its_decoded_tail",
        swap(lanes.Lane, "counter", lambda _: property(lambda self: self.drawn)),
    ),
    "yield ignored": ("a_yield_ends_decode_after_a_round", swap(MockEngine, "_yields", lambda _: lambda self: False)),
    "a fault leaks": ("a_fault_takes_one_lane_only", swap(MockEngine, "_fault", leaks_faulted_lanes)),
    "eviction past pins": (
        "a_lease_ends_after_its_ticks",
        swap(
            cache.PrefixCache,
            "evict",
            lambda evict: lambda self, entries: evict(self, list(self)),
        ),
    ),
    "seeds forever": ("a_published_prompt_seeds_the_next_lane", swap(cache.PrefixCache, "consume", nothing)),
    "sequences stay": (
        "publishing_what_is_cached_strands_nothing",
        swap(state.SequenceTable, "drop", nothing),
    ),
    "completions twice": ("an_operation_is_reported_once", swap(operations.Operations, "pump", twice)),
    "a refused export writes": ("exports_are_sized_first", swap(operations.Operations, "snapshot", overwrites)),
    "damage goes unseen": (
        "states_that_are_refused",
        swap(envelope, "_CHECKSUMS", lambda _: {envelope.CHECKSUM_XXH3: lambda data: 0}),
    ),
    "every lock is forgotten": (
        "a_running_operation_is_busy",
        swap(state.SequenceTable, "idle", lambda _: lambda self, handle, bare=True: self.get(handle)),
    ),
    "taint is forgotten": (
        "precision_that_was_lost_stays_marked",
        swap(states, "TAINT_QUANTIZED", lambda _: 0),
    ),
    "the first certificate wins": (
        "the_certificate_of_an_admit",
        swap(strategies, "max", lambda _: lambda fitting, key: fitting[0]),
    ),
    "registration stays open": ("registration_fails_closed", swap(strategies.Strategies, "_check", nothing)),
    "media anywhere": (
        "placeholders_must_lie_in_one_chunk",
        swap(workloads.Media, "consume", lambda _: lambda *arguments: True),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, patch = BROKEN[name]
    case = next(case for case in CASES if case.name == wanted)
    try:
        case.run(make_mock)
    except NotApplicable:
        pytest.fail("the case does not apply to the mock")
    monkeypatch.setattr(strategies, "max", max, raising=False)
    patch(monkeypatch)
    with pytest.raises((ContractViolation, EngineError)):
        case.run(make_mock)
