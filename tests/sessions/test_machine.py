"""Random operations against a plain model of the rules, with a kill and a replay between any two steps."""

import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from superfluid.link import events as ev
from superfluid.sessions import errors, rules
from superfluid.sessions.rebase import rebase, trim
from superfluid.sessions.store import Record, Store
from tests.sessions.faulty import UnsyncedFiles
from tests.sessions.test_rules import DIALECT

LEASED = 1_000_030  # a deadline in the middle of the times that a run sees


@attrs.define
class Model:
    """A session, told naively: its whole list of events, and what is not in it."""

    id: int
    parent: int | None
    fork_at: int
    events: list[tuple[int, ev.Body]]  # (epoch, body)
    qos: tuple[int, bool] = (2, False)
    epoch: int = 1
    generation: int = 0
    purged: bool = False

    def add(self, body: ev.Body) -> None:
        self.events.append((self.epoch, body))
        if isinstance(body, ev.QosSet):
            self.qos = (body.class_, body.batch_invariant)

    @property
    def bodies(self) -> list[ev.Body]:
        return [body for _, body in self.events]

    def own(self) -> list[tuple[int, ev.Body]]:
        return list(enumerate(self.bodies))[self.fork_at :]

    def tokens(self) -> list[int]:
        return [token for body in self.bodies for token in getattr(body, "span", [])]

    def spanned(self) -> ev.Body | None:
        return next((body for body in reversed(self.bodies) if getattr(body, "span", None)), None)

    def finished(self) -> bool:
        last = self.spanned()
        return isinstance(last, ev.Generated) and last.finish == 1

    def lead(self) -> list[int]:
        return [1] if not self.tokens() else [2] if self.finished() else []

    def ledger(self) -> dict[int, list[Any]]:
        """Id to [state, cancel requested, lease, late effects]."""
        calls: dict[int, list[Any]] = {}
        for event_id, body in self.own():
            if isinstance(body, ev.ToolUse):
                calls[event_id] = [0, False, None, 0]
            call = calls.get(getattr(body, "call_id", -1))
            if call is None:
                continue
            if isinstance(body, ev.ToolResult):
                call[0] = 2
            elif isinstance(body, ev.ToolExpired):
                call[0] = 5
            elif isinstance(body, ev.ToolOutcome):
                call[0] = 2 + body.outcome
            elif isinstance(body, ev.ToolCancelRequested):
                call[0], call[1] = 1, True
            elif isinstance(body, ev.ToolReconciliation):
                call[0], call[3] = 6 if call[0] == 4 else call[0], call[3] + 1
            elif isinstance(body, ev.ToolLease):
                call[2] = body.deadline_unix_ms
        return calls

    def open_calls(self) -> list[int]:
        return [call for call, (state, *_) in self.ledger().items() if state < 2]

    def permissions(self) -> set[int]:
        found: set[int] = set()
        for event_id, body in self.own():
            if isinstance(body, ev.PermissionRequest):
                found.add(event_id)
            elif isinstance(body, ev.PermissionResponse):
                found.discard(body.request_id)
        return found

    def meta(self) -> tuple[int, str | None, bool]:
        version, title, archived = 0, None, False
        for _, body in self.own():
            if isinstance(body, ev.MetaUpdated):
                version = body.version
                title = title if body.title is None else body.title
                archived = archived if body.archived is None else body.archived
        return version, title, archived


Planned = list[Record]


def names(body: ev.Body) -> str | None:
    """What a rebase carries unchanged, by its text; a result whose call was dropped is a message of role 3 then."""
    if isinstance(body, ev.ToolUse):
        return body.name
    if isinstance(body, ev.Generated) or (isinstance(body, ev.Message) and body.role != ev.Role.TOOL):
        return body.text
    return None


@attrs.define
class Tally:
    """What all runs of the machine did together: `kills` of a process, each followed by a replay, among the steps."""

    runs: int = 0
    steps: int = 0
    kills: int = 0
    compactions: int = 0


class SessionMachine(RuleBasedStateMachine):
    tally: ClassVar[Tally] = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.lives = count()
        self.now = 1_000_000
        self.models: dict[int, Model] = {}
        self.worked_on: Model | None = None
        self.store = self.open(self.folder / "0")

    def clock(self) -> int:
        self.now += 1
        return self.now

    def open(self, directory: Path) -> Store:
        return Store.open(directory, UnsyncedFiles(), self.clock)

    def teardown(self) -> None:
        self.tally.runs += 1
        self.store.close()
        shutil.rmtree(self.folder)

    # choosing

    @property
    def live(self) -> list[Model]:
        return [model for model in self.models.values() if not model.purged]

    def pick(self, choice: int) -> Model:
        models = list(self.models.values())
        return models[choice % len(models)]

    def pick_caller(self, choice: int) -> Model:
        """One with tool calls, when there is one."""
        models = [model for model in self.models.values() if model.ledger()] or list(self.models.values())
        return models[choice % len(models)]

    # doing

    def expect(self, model: Model, attempt: Callable[[], Any], expected: type[Exception] | list[ev.Body] | None) -> Any:
        """Run a rule; `expected`: the refusal, the bodies, or None when the test looks at the result itself."""
        if model.purged:
            expected = errors.PurgedSession
        else:
            self.worked_on = model
        try:
            planned = attempt()
        except errors.SessionError as refusal:
            assert type(refusal) is expected, f"{refusal!r} instead of {expected}"
            self.commit(refusal.records)
            return None
        assert not isinstance(expected, type), f"{planned} instead of {expected}"
        records = planned[1] if isinstance(planned, tuple) else planned
        if expected is not None:
            assert [body for _, body in records] == expected
        self.commit(records)
        return planned

    def commit(self, records: list[Record]) -> None:
        commit = self.store.stage(records)
        self.store.flush()
        assert len(commit.result()) == len(records)
        for session, body in records:
            self.apply(session, body)

    def apply(self, session: int, body: ev.Body) -> None:
        if isinstance(body, ev.Created):
            self.models[session] = Model(session, body.parent, 0, [])
        elif isinstance(body, ev.Forked | ev.Rebased):
            parent = self.models[body.parent]
            self.models[session] = Model(
                session, parent.id, body.fork_at, parent.events[: body.fork_at], qos=parent.qos
            )
        model = self.models[session]
        model.add(body)
        if isinstance(body, ev.Purged):
            model.purged, model.generation = True, body.generation
            for child in self.models.values():
                if child.parent == session and not child.purged:
                    assert body.descendants is ev.Descendants.Reroot
                    child.parent = None

    choice = st.integers(0, 11)

    @initialize()
    def first(self) -> None:
        self.create(0, False)

    @rule(choice=choice, child=st.booleans())
    def create(self, choice: int, child: bool) -> None:
        if child and self.models:
            parent = self.pick(choice)
            self.expect(parent, lambda: rules.create(self.store, parent.id, ev.GenParams(seed=choice)), None)
        else:
            self.commit(rules.create(self.store, None, ev.GenParams(seed=choice))[1])

    @rule(choice=choice, span=st.lists(st.integers(100, 70000), max_size=5))
    def append(self, choice: int, span: list[int]) -> None:
        model = self.pick(choice)
        expected = [ev.Appended("t", span)] if span else errors.ProtocolMisuse
        if model.purged and not span:
            return
        self.expect(model, lambda: rules.append(self.store, model.id, "t", span), expected)

    @rule(choice=choice, role=st.integers(0, 2), text=st.text(max_size=4))
    def message(self, choice: int, role: int, text: str) -> None:
        model = self.pick(choice)
        self.expect(
            model,
            lambda: rules.append_message(self.store, model.id, role, text, [50, 51], DIALECT),
            [ev.Message(role, text, [*model.lead(), 50, 51])],
        )

    @rule(choice=choice, kind=st.integers(1, 7), visible=st.booleans())
    def block(self, choice: int, kind: int, visible: bool) -> None:
        model = self.pick(choice)
        turn = [60] if visible else []
        span = [*model.lead(), 60] if visible else []
        payload = "{}" if kind != 7 else f'{{"offset":{len(model.tokens()) + len(model.lead())}}}'
        self.expect(
            model,
            lambda: rules.append_block(self.store, model.id, 1, kind, payload, turn, DIALECT),
            [ev.Block(1, kind, payload, span)],
        )

    @rule(
        choice=choice,
        finish=st.sampled_from([0, 1, 1, 2, 4]),
        calls=st.integers(0, 2),
        lease=st.booleans(),
        leases=st.booleans(),
        window=st.sampled_from([0, 0, 0, 30]),
    )
    def generate(self, choice: int, finish: int, calls: int, lease: bool, leases: bool, window: int) -> None:
        model = self.pick(choice)
        if not model.purged and not model.tokens():
            self.message(choice, 1, "hi")
        stream = len(model.tokens())
        last = model.spanned()
        opener = [4] if model.finished() else [3] if isinstance(last, ev.Message | ev.ToolResult | ev.Block) else []
        known = any(isinstance(body, ev.GenerationFingerprint) for body in model.bodies)
        expired: list[ev.Body] = [
            ev.ToolExpired(call, "lease elapsed")
            for call in model.open_calls()
            if leases and model.ledger()[call][2] is not None and model.ledger()[call][2] <= self.now
        ]
        refusal: type[Exception] | None = None
        if model.permissions():
            refusal = errors.PermissionPending
        elif not stream:
            refusal = errors.EmptySession
        elif window and stream + len(opener) > window:
            refusal = errors.StreamTooLong
        bodies: list[ev.Body] = [*expired, *([] if known else [ev.GenerationFingerprint(7)])]
        bodies += [ev.GenerationPrompt(opener)] if opener else []
        begun = self.expect(
            model,
            lambda: rules.begin_generation(self.store, model.id, 5, window, DIALECT, 7, self.now, leases).records,
            refusal or bodies,
        )
        if begun is None:
            return
        said: list[Record] = []
        for _ in range(calls):
            said.append((model.id, ev.Generated([80, 81], "call", 2, 0)))
            event_id = len(model.events) + len(said)
            said += [(model.id, body) for body in rules.tool_calls("f", "{}", event_id, 0, LEASED if lease else 0)]
        self.commit([*said, (model.id, ev.Generated([90] if finish < 4 else [], "x", 0, finish))])

    @rule(choice=choice, call=choice, content=st.text(max_size=3))
    def tool_result(self, choice: int, call: int, content: str) -> None:
        model = self.pick_caller(choice)
        calls = model.ledger()
        call_id = [*calls, *calls, 0, 999][call % (2 * len(calls) + 2)]
        state, _, lease, _ = calls.get(call_id, (None, False, None, 0))
        expected: type[Exception] | list[ev.Body]
        if call_id < model.fork_at:
            expected = errors.InheritedToolCall
        elif state is None or state == 2:
            expected = errors.UnknownToolCall
        elif state > 2:
            expected = errors.ToolLateEffect
        elif lease is not None and self.now > lease:
            expected = errors.ToolLeaseExpired
        else:
            expected = [ev.ToolResult(call_id, content, [*model.lead(), 70])]
        self.expect(
            model,
            lambda: rules.tool_result(self.store, model.id, call_id, content, [70], DIALECT, self.now),
            expected,
        )

    @rule(choice=choice, call=choice, outcome=st.integers(0, 2))
    def tool_outcome(self, choice: int, call: int, outcome: int) -> None:
        """Outcome 0 stands for a request to cancel."""
        model = self.pick_caller(choice)
        calls = [*model.ledger(), 999]
        call_id = calls[call % len(calls)]
        unknown = call_id not in model.open_calls()
        if outcome:
            bodies: list[ev.Body] = [ev.ToolOutcome(call_id, outcome, "why")]
            attempt = lambda: rules.tool_outcome(self.store, model.id, call_id, outcome, "why")  # noqa: E731
        else:
            bodies = [ev.ToolCancelRequested(call_id)]
            attempt = lambda: rules.request_tool_cancel(self.store, model.id, call_id)  # noqa: E731
        self.expect(model, attempt, errors.UnknownToolCall if unknown else bodies)

    @rule(choice=choice, call=choice)
    def request_permission(self, choice: int, call: int) -> None:
        model = self.pick_caller(choice)
        calls = [0, 0, 999, *model.ledger()]
        call_id = calls[call % len(calls)]
        unknown = call_id and call_id not in model.open_calls()
        self.expect(
            model,
            lambda: rules.request_permission(self.store, model.id, call_id, "?"),
            errors.UnknownToolCall if unknown else [ev.PermissionRequest(call_id, "?")],
        )

    @rule(choice=choice, which=choice)
    def respond_permission(self, choice: int, which: int) -> None:
        model = self.pick(choice)
        requests = sorted(model.permissions()) or [999]
        request = requests[which % len(requests)]
        known = request in model.permissions()
        self.expect(
            model,
            lambda: rules.respond_permission(self.store, model.id, request, True),
            [ev.PermissionResponse(request, True)] if known else errors.UnknownPermission,
        )

    @rule(
        choice=choice,
        behind=st.booleans(),
        title=st.none() | st.text(max_size=3),
        archived=st.none() | st.booleans(),
    )
    def set_meta(self, choice: int, behind: bool, title: str | None, archived: bool | None) -> None:
        model = self.pick(choice)
        version = model.meta()[0]
        self.expect(
            model,
            lambda: rules.set_meta(self.store, model.id, version + behind, title, archived),
            errors.MetaConflict if behind else [ev.MetaUpdated(version + 1, title, archived)],
        )

    @rule(choice=choice, qos_class=st.integers(0, 3), batch_invariant=st.booleans(), ttl=st.integers(0, 5))
    def set_fields(self, choice: int, qos_class: int, batch_invariant: bool, ttl: int) -> None:
        model = self.pick(choice)
        self.expect(
            model,
            lambda: rules.set_qos(self.store, model.id, qos_class, batch_invariant),
            [ev.QosSet(qos_class, batch_invariant)],
        )
        self.expect(
            model,
            lambda: rules.pin(self.store, model.id, ttl, 5),
            [ev.Pinned(5 + ttl if ttl else 0)],
        )

    @precondition(lambda self: len(self.models) < 12)
    @rule(choice=choice, at=st.integers(0, 40))
    def fork(self, choice: int, at: int) -> None:
        model = self.pick(choice)
        inside = 1 <= at <= len(model.events)
        self.expect(
            model,
            lambda: rules.fork(self.store, model.id, at, None),
            None if inside else errors.ForkPoint,
        )

    @precondition(lambda self: len(self.models) < 12)
    @rule(choice=choice, at=st.integers(1, 30), length=st.integers(1, 4), replace=st.booleans())
    def rebase(self, choice: int, at: int, length: int, replace: bool) -> None:
        model = self.pick(choice)
        edit = ev.Replace(at, at + length, 1, "new") if replace else ev.Drop(at, at + length)
        bad = at + length > len(model.events)
        before = list(model.bodies)
        made = self.expect(
            model,
            lambda: rebase(self.store, model.id, [edit], None, lambda edit, before: [40], DIALECT),
            errors.RebaseSpec if bad else None,
        )
        if made is None:
            return
        said = [names(body) for body in before[at + length :]]
        child = self.models[made[0]]
        carried = [names(body) for body in child.bodies[at + 1 + replace :]]
        assert [name for name in carried if name is not None] == [name for name in said if name is not None]
        assert child.bodies[:at] == before[:at]

    @precondition(lambda self: len(self.models) < 12)
    @rule(choice=choice, at=st.integers(1, 30))
    def trim(self, choice: int, at: int) -> None:
        model = self.pick(choice)
        made = self.expect(
            model,
            lambda: trim(self.store, model.id, at),
            None if at <= len(model.events) else errors.ForkPoint,
        )
        if made is not None:
            assert len(self.models[made[0]].events) == at + 1

    @precondition(lambda self: len(self.live) > 2)
    @rule(choice=choice, reroot=st.booleans(), behind=st.booleans())
    def purge(self, choice: int, reroot: bool, behind: bool) -> None:
        model = self.pick(choice)
        mode = ev.Descendants.Reroot if reroot else ev.Descendants.Cascade
        self.expect(
            model,
            lambda: rules.purge(self.store, model.id, model.generation + behind, mode),
            errors.GenerationConflict if behind else None,
        )

    @rule(choice=choice, tail=st.integers(0, 400), seed=st.integers(0, 99))
    def kill(self, choice: int, tail: int, seed: int) -> None:
        """The process dies with records staged, some bytes of them in the file; the next one takes over."""
        self.tally.kills += 1
        model = self.pick(choice)
        lost = b""
        if not model.purged:
            commit = self.store.stage([(model.id, ev.Appended("lost", [1] * 20)), (model.id, ev.Appended("lost", [2]))])
            chunks = b"".join(commit.chunks)
            lost = chunks[: random.Random(seed).randrange(len(commit.chunks[0]))]
        directory = self.folder / str(next(self.lives) + 1)
        directory.mkdir()
        for path in (self.store.path, self.store.path.with_name("wal.log.store-id")):
            shutil.copy(path, directory / path.name)
        with (directory / "wal.log").open("ab") as log:
            log.write(lost + bytes(tail if seed % 3 == 0 else 0))
        named, old = self.store.store_id, self.store
        self.store = self.open(directory)
        assert self.store.store_id == named
        old.close()
        shutil.rmtree(old.directory)
        for one in sorted(self.live, key=lambda one: one.id):
            one.epoch += 1
            one.add(ev.EpochBump())

    @precondition(lambda self: any(model.purged for model in self.models.values()))
    @rule(choice=choice)
    def compact(self, choice: int) -> None:
        """What live sessions have stays as it is; nothing more is to be had from a second compaction."""
        kept = {model.id: self.store.session(model.id).events() for model in self.live}
        self.tally.compactions += 1
        self.store.compact()
        assert {model.id: self.store.session(model.id).events() for model in self.live} == kept
        assert self.store.compact() == 0
        self.worked_on = self.pick(choice)

    # looking

    @invariant()
    def agrees(self) -> None:
        self.tally.steps += 1
        assert self.store.session_ids() == sorted(model.id for model in self.live)
        for model in self.live:
            found = self.store.session(model.id)
            assert (found.n_events, found.epoch, found.parent) == (len(model.events), model.epoch, model.parent)
            assert (found.qos_class, found.batch_invariant) == model.qos
            assert (found.meta_version, found.title, found.archived) == model.meta()
            assert found.n_tokens == len(model.tokens())

    @rule(choice=choice)
    def read(self, choice: int) -> None:
        self.worked_on = self.pick(choice)

    @invariant()
    def reads_back(self) -> None:
        model, self.worked_on = self.worked_on, None
        if model is None or model.purged:
            return
        found = self.store.session(model.id)
        events = found.events()
        assert [(event.epoch, event.body) for event in events] == model.events
        assert [event.event_id for event in events] == list(range(len(events)))
        cursor = len(events) // 2
        assert found.events(cursor) == events[cursor:]
        assert found.tokens().tolist() == model.tokens()
        ledger = {
            call: [entry.state, entry.cancel_requested, entry.lease_deadline_unix_ms, entry.late_effects]
            for call, entry in found.ledger.items()
        }
        assert ledger == model.ledger()
        assert set(found.open_permissions) == model.permissions()
        finishes = [body.finish for body in model.bodies if isinstance(body, ev.Generated)]
        assert found.last_finish == (finishes[-1] if finishes else 0)


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


@pytest.mark.soak
def test_ten_thousand_steps(capsys: pytest.CaptureFixture[str]) -> None:
    tally = SessionMachine.tally = Tally()
    run_state_machine_as_test(
        SessionMachine, settings=settings(max_examples=250, stateful_step_count=100, deadline=None)
    )
    with capsys.disabled():
        print(
            f"\nsession machine: {tally.steps} steps in {tally.runs} runs, {tally.kills} of them kills with a replay, "
            f"{tally.compactions} compactions; every state agreed with the model"
        )
    assert tally.steps >= 10_000
