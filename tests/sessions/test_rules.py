"""Every rule of section 5 by example, and the effect of each record after a restart."""

import json
from collections.abc import Sequence

import pytest

from superfluid.link import events as ev
from superfluid.sessions import errors, rules
from superfluid.sessions.rebase import rebase, trim
from superfluid.sessions.state import Call, Tail
from superfluid.sessions.store import Record, Store
from tests.sessions.conftest import OpenStore

PARAMS = ev.GenParams(0.5, 1.0, 0.0, 7, 3)
CASCADE, REROOT = ev.Descendants.Cascade, ev.Descendants.Reroot


class Dialect:
    """1 begins a stream, 2 separates, 3 opens after input, 4 after a finished turn."""

    def prologue(self, role: int | None = None) -> list[int]:
        return [1]

    def separator(self) -> list[int]:
        return [2]

    def opener(self, after_finished: bool, thinking: bool | None = None) -> list[int]:
        return [4] if after_finished else [3]


DIALECT = Dialect()


class Desk:
    """A store, with each operation committed at once."""

    def __init__(self, open_store: OpenStore) -> None:
        self._open = open_store
        self.store: Store = open_store()

    def again(self) -> None:
        self.store = self._open()

    def do(self, records: Sequence[Record]) -> list[ev.Event]:
        commit = self.store.stage(records)
        self.store.flush()
        return commit.result()

    def leave(self, refusal: errors.SessionError) -> list[ev.Body]:
        return [event.body for event in self.do(refusal.records)]

    def make(self, planned: tuple[int, list[Record]]) -> int:
        self.do(planned[1])
        return planned[0]

    def create(self, parent: int | None = None) -> int:
        return self.make(rules.create(self.store, parent, PARAMS))

    def say(self, session: int, text: str = "hi", role: int = 1, turn: Sequence[int] = (10, 11)) -> ev.Event:
        return self.do(rules.append_message(self.store, session, role, text, turn, DIALECT))[0]

    def reply(self, session: int, *bodies: ev.Body, finish: int = 1) -> list[ev.Event]:
        """A generation that says [20] and `bodies`."""
        started = rules.begin_generation(self.store, session, 9, 0, DIALECT, None, 0)
        last = ev.Generated([20], "ok", 0, finish)
        return self.do([*started.records, *((session, body) for body in [*bodies, last])])

    def call(self, session: int, name: str = "f") -> int:
        """A session that waits for the result of a call; its id."""
        self.say(session)
        return next(
            event.event_id
            for event in self.reply(session, ev.ToolUse(name, "{}"))
            if isinstance(event.body, ev.ToolUse)
        )

    def tokens(self, session: int) -> list[int]:
        return self.store.session(session).tokens().tolist()


@pytest.fixture
def desk(open_store: OpenStore) -> Desk:
    return Desk(open_store)


class TestSpans:
    def test_prologue_then_separator_only_after_a_finished_turn(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.say(session)
        desk.reply(session, finish=1)
        desk.say(session)
        desk.reply(session, finish=0)
        desk.say(session)
        assert desk.tokens(session) == [1, 10, 11, 10, 11, 3, 20, 2, 10, 11, 3, 20, 10, 11]

    def test_records_without_tokens_do_not_count(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.reply(session)
        desk.do(rules.set_meta(desk.store, session, 0, "t", None))
        desk.do(rules.append_block(desk.store, session, 1, 4, "{}", [], DIALECT))
        desk.do([(session, ev.ToolUse("f", "{}"))])
        assert rules.opening(desk.store.session(session).state, DIALECT) == [4]
        desk.say(session)
        assert desk.tokens(session) == [1, 10, 11, 3, 20, 2, 10, 11]

    def test_append_is_verbatim(self, desk: Desk) -> None:
        session = desk.create()
        desk.do(rules.append(desk.store, session, None, [5]))
        assert desk.tokens(session) == [5]
        assert rules.begin_generation(desk.store, session, 1, 0, DIALECT, None, 0).records == []
        for text, span in ((None, []), ("", [])):
            with pytest.raises(errors.ProtocolMisuse, match=r"^protocol: "):
                rules.append(desk.store, session, text, span)

    def test_system_comes_first(self, desk: Desk) -> None:
        session = desk.create()
        (event,) = desk.do(rules.append_system(desk.store, session, None, ["{}"], [9], DIALECT))
        assert event.body == ev.Message(0, "", [1, 9])
        with pytest.raises(errors.SystemNotFirst, match=f"session {session} already has a prompt"):
            rules.append_system(desk.store, session, "x", [], [9], DIALECT)
        child = desk.make(rules.fork(desk.store, session, 2, None))
        with pytest.raises(errors.SystemNotFirst):
            rules.append_system(desk.store, child, "x", [], [9], DIALECT)
        with pytest.raises(errors.ProtocolMisuse):
            rules.append_system(desk.store, session, None, [], [9], DIALECT)

    def test_unknown_roles_and_kinds(self, desk: Desk) -> None:
        session = desk.create()
        with pytest.raises(
            errors.UnknownRole, match=r"unknown message role 3 \(known: 0 system, 1 user, 2 assistant, and"
        ):
            rules.append_message(desk.store, session, 3, "x", [1], DIALECT)
        with pytest.raises(errors.UnknownRole):
            rules.append_block(desk.store, session, 4, 1, "{}", [1], DIALECT)
        with pytest.raises(errors.UnknownBlockKind, match="unknown block kind 8"):
            rules.append_block(desk.store, session, 3, 8, "{}", [1], DIALECT)
        with pytest.raises(errors.ProtocolMisuse, match="codec has no chat dialect"):
            rules.append_message(desk.store, session, 1, "x", None, DIALECT)


class TestGenerating:
    def test_order_of_refusals(self, desk: Desk) -> None:
        store = desk.store

        def begin(session: int, max_tokens: int = 5, window: int = 0) -> rules.Prologue:
            return rules.begin_generation(store, session, max_tokens, window, DIALECT, 7, 0)

        session = desk.create()
        with pytest.raises(errors.UnknownSession, match="unknown session 9"):
            begin(9)
        with pytest.raises(errors.EmptySession, match=f"session {session} has no content to generate from"):
            begin(session)
        store.activity.busy = {session}
        (request,) = [ev.PermissionRequest(0, "may I?")]
        asked = desk.do([(session, request)])[0]
        with pytest.raises(errors.PermissionPending, match="permission request; answer it before"):
            begin(session)
        desk.do(rules.respond_permission(store, session, asked.event_id, True))
        desk.do([(session, ev.Message(1, "x", [5] * 10))])
        with pytest.raises(errors.StreamTooLong, match=r"context length is 9 tokens, .* request has 10 tokens"):
            begin(session, 0, 9)
        assert begin(session, 0).records == []
        with pytest.raises(errors.SessionBusy, match=f"session {session} is generating"):
            begin(session)
        store.activity.busy = set()
        with pytest.raises(errors.StreamTooLong, match="has 11 tokens"):
            begin(session, 5, 10)
        started = begin(session, 5, 11)
        assert [body for _, body in started.records] == [ev.GenerationFingerprint(7), ev.GenerationPrompt([3])]
        assert started.opener == [3]
        store.activity.purging.add(session)
        with pytest.raises(errors.PurgedSession):
            begin(session)

    def test_a_fingerprint_is_said_once(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        for _ in range(2):
            started = rules.begin_generation(desk.store, session, 5, 0, DIALECT, 7, 0)
            desk.do([*started.records, (session, ev.Generated([20], "", 0, 1))])
            desk.say(session)
        desk.again()
        started = rules.begin_generation(desk.store, session, 5, 0, DIALECT, 7, 0)
        assert [body for _, body in started.records] == [ev.GenerationPrompt([3])]
        kinds = [type(event.body) for event in desk.store.session(session).events()]
        assert kinds.count(ev.GenerationFingerprint) == 1
        assert desk.store.session(session).fingerprint == 7

    def test_an_open_turn_goes_on_from_its_opener(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.reply(session, finish=0)
        desk.again()
        assert rules.begin_generation(desk.store, session, 5, 0, DIALECT, None, 0).opener == []
        desk.do([(session, ev.Generated([21], "", 1, 0)), (session, ev.Generated([], "", 0, 4))])
        found = desk.store.session(session)
        assert (found.turn_tokens().tolist(), found.last_finish, found.tail) == ([3, 20, 21], 4, Tail.OPEN_TURN)
        desk.reply(session, finish=1)
        assert found.turn_tokens().tolist() == []

    def test_leases_that_ran_out_expire_even_when_it_is_refused(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        desk.do([(session, ev.ToolLease(call, 50))])
        desk.do(rules.request_permission(desk.store, session, 0, "?"))

        def begin(now: int, leases: bool) -> rules.Prologue:
            return rules.begin_generation(desk.store, session, 5, 0, DIALECT, None, now, leases)

        for now, leases, left in ((50, False, []), (49, True, []), (50, True, [ev.ToolExpired(call, "lease elapsed")])):
            with pytest.raises(errors.PermissionPending) as refusal:
                begin(now, leases)
            assert desk.leave(refusal.value) == left
        assert desk.store.session(session).ledger[call].state == Call.EXPIRED


class TestToolLedger:
    def test_a_result_does_not_answer_a_request_for_permission(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        asked = desk.do(rules.request_permission(desk.store, session, call, "?"))[0].event_id
        desk.do([(session, ev.ToolResult(call, "done", [1]))])
        with pytest.raises(errors.PermissionPending) as refusal:
            rules.begin_generation(desk.store, session, 5, 0, DIALECT, None, 0, False)
        assert str(refusal.value) == (f"session {session} has an open permission request; answer it before generating")
        desk.do(rules.respond_permission(desk.store, session, asked, False))
        rules.begin_generation(desk.store, session, 5, 0, DIALECT, None, 0, False)

    def test_one_terminal_event_per_call(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        (event,) = desk.do(rules.tool_result(desk.store, session, call, "42", [30], DIALECT, 0))
        assert event.body == ev.ToolResult(call, "42", [2, 30])
        for attempt in (
            lambda: rules.tool_result(desk.store, session, call, "43", [30], DIALECT, 0),
            lambda: rules.tool_outcome(desk.store, session, call, 1, ""),
            lambda: rules.request_tool_cancel(desk.store, session, call),
            lambda: rules.tool_result(desk.store, session, 99, "", [30], DIALECT, 0),
        ):
            with pytest.raises(errors.UnknownToolCall, match=r"tool call \d+ is unknown or already closed"):
                attempt()

    @pytest.mark.parametrize(
        ("outcome", "state", "late"), [(1, Call.FAILED, Call.FAILED), (2, Call.CANCELLED, Call.LATE_EFFECT)]
    )
    def test_a_late_result_is_recorded_and_refused(self, desk: Desk, outcome: int, state: Call, late: Call) -> None:
        session = desk.create()
        call = desk.call(session)
        desk.do(rules.request_tool_cancel(desk.store, session, call))
        entry = desk.store.session(session).ledger[call]
        assert (entry.state, entry.cancel_requested) == (Call.CANCEL_REQUESTED, True)
        assert list(desk.store.session(session).open_calls) == [call]
        desk.do(rules.tool_outcome(desk.store, session, call, outcome, "why"))
        assert desk.store.session(session).ledger[call].state == state
        before = desk.tokens(session)
        for times in (1, 2):
            with pytest.raises(errors.ToolLateEffect, match="already reached a terminal outcome") as refusal:
                rules.tool_result(desk.store, session, call, "é!", [30], DIALECT, 0)
            assert desk.leave(refusal.value) == [ev.ToolReconciliation(call, "late result: 3 bytes")]
            desk.again()
            entry = desk.store.session(session).ledger[call]
            assert (entry.state, entry.late_effects) == (late, times)
        assert desk.tokens(session) == before

    def test_a_result_after_its_lease_expires_the_call(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        desk.do([(session, ev.ToolLease(call, 100))])
        assert rules.tool_result(desk.store, session, call, "x", [30], DIALECT, 100)
        with pytest.raises(errors.ToolLeaseExpired, match=f"tool call {call}'s executor lease expired") as refusal:
            rules.tool_result(desk.store, session, call, "x", [30], DIALECT, 101)
        assert desk.leave(refusal.value) == [ev.ToolExpired(call, "lease expired")]
        desk.again()
        entry = desk.store.session(session).ledger[call]
        assert (entry.state, entry.lease_deadline_unix_ms) == (Call.EXPIRED, 100)
        with pytest.raises(errors.ToolLateEffect):
            rules.tool_result(desk.store, session, call, "x", [30], DIALECT, 0)

    def test_only_the_ancestor_closes_an_inherited_call(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        child = desk.make(rules.fork(desk.store, session, call + 1, None))
        with pytest.raises(errors.InheritedToolCall, match=f"tool call {call} belongs to an ancestor's timeline"):
            rules.tool_result(desk.store, child, call, "x", [30], DIALECT, 0)
        assert desk.store.session(child).ledger == {}
        with pytest.raises(errors.ProtocolMisuse):
            rules.tool_outcome(desk.store, session, call, 3, "")


class TestPermissions:
    def test_a_request_is_answered_once(self, desk: Desk) -> None:
        session = desk.create()
        call = desk.call(session)
        request = desk.do(rules.request_permission(desk.store, session, call, "?"))[0].event_id
        assert desk.store.session(session).open_permissions == {request: call}
        desk.again()
        desk.do(rules.respond_permission(desk.store, session, request, False))
        for unknown in (request, 99):
            with pytest.raises(errors.UnknownPermission, match=f"permission request {unknown} is unknown or already"):
                rules.respond_permission(desk.store, session, unknown, True)
        with pytest.raises(errors.UnknownToolCall):
            rules.request_permission(desk.store, session, 99, "?")


class TestFields:
    def test_meta_is_compare_and_set(self, desk: Desk) -> None:
        session = desk.create()
        desk.do(rules.set_meta(desk.store, session, 0, "one", None))
        with pytest.raises(errors.MetaConflict, match=f"session {session} metadata version is 1, command expected 0"):
            rules.set_meta(desk.store, session, 0, "two", None)
        desk.do(rules.set_meta(desk.store, session, 1, None, True))
        for _ in range(2):
            found = desk.store.session(session)
            assert (found.title, found.archived, found.meta_version) == ("one", True, 2)
            desk.again()

    def test_qos_and_pin(self, desk: Desk) -> None:
        session = desk.create()
        with pytest.raises(errors.ProtocolMisuse):
            rules.set_qos(desk.store, session, 4, False)
        desk.do(rules.set_qos(desk.store, session, 0, True))
        desk.do(rules.pin(desk.store, session, 60, 1000))
        for _ in range(2):
            found = desk.store.session(session)
            assert (found.qos_class, found.batch_invariant, found.pin_deadline) == (0, True, 1060)
            desk.again()
        desk.do(rules.pin(desk.store, session, 0, 5000))
        assert desk.store.session(session).pin_deadline == 0


class TestBranches:
    def test_a_fork_shares_what_lies_below(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.reply(session)
        desk.do(rules.set_qos(desk.store, session, 0, True))
        desk.do(rules.set_meta(desk.store, session, 0, "parent", True))
        child = desk.make(rules.fork(desk.store, session, 3, None))
        desk.do(rules.set_qos(desk.store, session, 3, False))
        for _ in range(2):
            parent, found = desk.store.session(session), desk.store.session(child)
            assert found.events()[:3] == parent.events()[:3]
            assert found.events()[3].body == ev.Forked(session, 3, PARAMS)
            assert (found.parent, found.fork_at, found.title, found.archived) == (session, 3, None, False)
            assert (found.qos_class, found.batch_invariant) == (0, True)
            assert found.tokens().tolist() == [1, 10, 11, 3]
            assert found.state.tail is Tail.OPENER
            assert found.params == PARAMS
            desk.again()
        limit = desk.store.session(session).n_events
        for at in (0, limit + 1):
            with pytest.raises(errors.ForkPoint, match=rf"fork point {at} is outside .* \(1..={limit}\)"):
                rules.fork(desk.store, session, at, None)

    def test_created_with_a_parent_inherits_nothing(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        child = desk.create(session)
        assert (desk.store.session(child).parent, desk.tokens(child)) == (session, [])
        with pytest.raises(errors.UnknownSession):
            rules.create(desk.store, 99, PARAMS)

    @pytest.mark.parametrize(
        ("edits", "why"),
        [
            ([], "no edits"),
            ([ev.Drop(0, 1)], "event 0"),
            ([ev.Drop(2, 2)], "is empty"),
            ([ev.Drop(2, 99)], "beyond"),
            ([ev.Drop(2, 4), ev.Drop(3, 5)], "overlaps"),
            ([ev.Drop(3, 4), ev.Drop(1, 2)], "overlaps"),
        ],
    )
    def test_bad_edits_commit_nothing(self, desk: Desk, edits: list[ev.Edit], why: str) -> None:
        session = desk.create()
        desk.say(session)
        desk.reply(session)
        desk.reply(session)
        with pytest.raises(errors.RebaseSpec, match=f"rebase edit spec invalid: .*{why}"):
            rebase(desk.store, session, edits, None)
        with pytest.raises(errors.UnknownRole):
            rebase(desk.store, session, [ev.Replace(1, 2, 3, "x")], None)
        assert desk.store.session_ids() == [session]

    def test_rebase_commits_the_rest_again(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)  # 1
        kept = desk.call(session)  # 2 message, 3 opener, 4 use, 5 generated
        desk.do(rules.tool_result(desk.store, session, kept, "kept", [30], DIALECT, 0))  # 6
        dropped = desk.call(session)  # 7 message, 8 opener, 9 use, 10 generated
        desk.do(rules.tool_result(desk.store, session, dropped, "orphan", [31], DIALECT, 0))  # 11
        desk.do(rules.set_meta(desk.store, session, 0, "t", None))  # 12
        assert (kept, dropped) == (4, 9)
        edits: list[ev.Edit] = [ev.Replace(1, 2, 1, "new"), ev.Drop(9, 10)]
        child = desk.make(rebase(desk.store, session, edits, None, lambda edit, before: [40 + edit.role], DIALECT))
        for _ in range(2):
            bodies = [event.body for event in desk.store.session(child).events()[1:13]]
            assert bodies[:11] == [
                ev.Rebased(session, 1, PARAMS, edits),
                ev.Message(1, "new", [1, 41]),
                ev.Message(1, "hi", [10, 11]),
                ev.GenerationPrompt([3]),
                ev.ToolUse("f", "{}"),
                ev.Generated([20], "ok", 0, 1),
                ev.ToolResult(5, "kept", [2, 30]),
                ev.Message(1, "hi", [10, 11]),
                ev.GenerationPrompt([3]),
                ev.Generated([20], "ok", 0, 1),
                ev.Message(3, "orphan", [2, 31]),
            ]
            assert desk.store.session(child).ledger[5].state == Call.SUCCEEDED
            desk.again()
        assert desk.store.session(child).title is None

    def test_rebase_moves_the_offset_of_an_image(self, desk: Desk) -> None:
        session = desk.create()
        desk.do([(session, ev.Appended(None, [8, 8, 8, 8]))])  # 1
        payload = json.dumps({"blob": "ab", "n_tokens": 2, "offset": 6, "post_text": "é"})
        desk.do([(session, ev.Appended(None, [9, 9, 7, 7, 9])), (session, ev.Block(1, 7, payload, []))])  # 2, 3
        child = desk.make(
            rebase(desk.store, session, [ev.Replace(1, 2, 1, "x")], None, lambda edit, before: [5], DIALECT)
        )
        block = desk.store.session(child).events()[-1].body
        assert isinstance(block, ev.Block)
        assert block.payload == '{"blob":"ab","n_tokens":2,"offset":4,"post_text":"é"}'
        assert desk.tokens(child)[4:6] == [7, 7]

    def test_trim(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.reply(session)
        whole = desk.make(trim(desk.store, session, 4))
        short = desk.make(trim(desk.store, session, 2))
        assert desk.store.session(whole).events()[4].body == ev.Forked(session, 4, PARAMS)
        assert desk.store.session(short).events()[2:][0].body == ev.Rebased(session, 2, PARAMS, [ev.Drop(2, 4)])
        assert desk.tokens(short) == [1, 10, 11]
        for at in (0, 5):
            with pytest.raises(errors.ForkPoint):
                trim(desk.store, session, at)

    def test_a_long_chain_of_forks(self, desk: Desk) -> None:
        session = desk.create()
        for turn in range(1500):
            desk.store.stage([(session, ev.Appended(None, [turn]))])
            desk.store.flush()
            session = desk.make(rules.fork(desk.store, session, desk.store.session(session).n_events, None))
        desk.again()
        assert desk.tokens(session) == list(range(1500))


class TestPurge:
    def family(self, desk: Desk) -> tuple[int, int, int, int]:
        root = desk.create()
        desk.say(root)
        call = desk.call(root)
        desk.do(rules.set_meta(desk.store, root, 0, "secret", None))
        child = desk.make(rules.fork(desk.store, root, call, None))
        grandchild = desk.make(rules.fork(desk.store, child, call + 1, None))
        linked = desk.create(root)
        return root, child, grandchild, linked

    def test_reroot(self, desk: Desk) -> None:
        root, child, grandchild, linked = self.family(desk)
        kept = {one: desk.store.session(one).events() for one in (child, grandchild)}
        call = next(iter(desk.store.session(root).ledger))
        with pytest.raises(errors.GenerationConflict, match=f"session {root} generation is 0, command expected 1"):
            rules.purge(desk.store, root, 1, REROOT)
        assert rules.purge_targets(desk.store, root, 0, REROOT) == [root]
        done = desk.do(rules.purge(desk.store, root, 0, REROOT))
        assert [type(event.body) for event in done] == [ev.ToolExpired, ev.Rerooted, ev.Rerooted, ev.Purged]
        assert done[0].body == ev.ToolExpired(call, "purged")
        assert isinstance(done[1].body, ev.Rerooted)
        assert done[1].body.prefix == [(event.event_id, event.body) for event in kept[child][:call]]
        assert done[2].body == ev.Rerooted(root, [])
        assert done[3].body == ev.Purged(1, REROOT)
        for _ in range(2):
            with pytest.raises(errors.PurgedSession, match=f"session {root} was purged"):
                desk.store.session(root)
            assert desk.store.session_ids() == [child, grandchild, linked]
            assert [desk.store.session(one).parent for one in (child, grandchild, linked)] == [None, child, None]
            for one, events in kept.items():
                assert desk.store.session(one).events()[: len(events)] == events
            assert desk.store.session(child).fork_at == call
            desk.again()
        assert desk.create() == linked + 1

    def test_cascade(self, desk: Desk) -> None:
        root, child, grandchild, linked = self.family(desk)
        other = desk.create()
        targets = rules.purge_targets(desk.store, root, 0, CASCADE)
        assert targets == [grandchild, linked, child, root]
        done = desk.store.stage(rules.purge(desk.store, root, 0, CASCADE))
        assert [one.session.id for one in done.staged if isinstance(one.event.body, ev.Purged)] == targets
        desk.store.flush()
        for _ in range(2):
            assert desk.store.session_ids() == [other]
            desk.again()
        with pytest.raises(errors.PurgedSession):
            desk.store.stage([(root, ev.Appended(None, [1]))])

    def test_a_crash_before_the_commit_point_leaves_everyone(self, desk: Desk) -> None:
        root, child, _, linked = self.family(desk)
        desk.do(rules.purge(desk.store, root, 0, REROOT)[:-1])
        desk.again()
        assert desk.store.session(root).title == "secret"
        assert desk.store.session(child).parent == root
        assert desk.store.session(linked).parent == root
        desk.do(rules.purge(desk.store, root, 0, REROOT))
        assert desk.store.session(child).parent is None

    def test_a_child_whose_parent_is_gone_reads_its_own_prefix(self, desk: Desk) -> None:
        prefix = [(0, ev.Created(None, PARAMS)), (1, ev.Message(1, "old", [1, 2]))]
        root = desk.create()
        child = desk.store.new_session()
        desk.do([(root, ev.Appended(None, [9])), (root, ev.Appended(None, [9]))])
        desk.do([(child, ev.Forked(root, 2, PARAMS)), (child, ev.Appended(None, [3]))])
        desk.do([(child, ev.Rerooted(root, prefix)), (root, ev.Purged(1, REROOT))])
        desk.store.close()
        from superfluid.sessions import records
        from tests.sessions.test_log_format import frames_of

        log = desk.store.path
        kept = [(session, event) for session, event in frames_of(log.read_bytes()) if session != root]
        log.write_bytes(records.MAGIC + b"".join(records.frame(session, event, 2) for session, event in kept))
        desk.again()
        found = desk.store.session(child)
        assert [(event.event_id, event.epoch, event.ts_unix_ms, event.body) for event in found.events()[:2]] == [
            (event_id, 0, 0, body) for event_id, body in prefix
        ]
        assert found.tokens().tolist() == [1, 2, 3]
        assert found.n_tokens == 3

    def test_new_work_is_fenced(self, desk: Desk) -> None:
        session = desk.create()
        desk.say(session)
        desk.store.activity.purging.add(session)
        for attempt in (
            lambda: desk.say(session),
            lambda: rules.append(desk.store, session, None, [1]),
            lambda: rules.request_permission(desk.store, session, 0, ""),
            lambda: rules.fork(desk.store, session, 1, None),
            lambda: rebase(desk.store, session, [ev.Drop(1, 2)], None),
        ):
            with pytest.raises(errors.PurgedSession):
                attempt()
        desk.store.activity.busy = {session}
        with pytest.raises(errors.SessionBusy):
            desk.say(session)


def test_a_purged_session_is_told_before_anything_else_is_looked_at(desk: Desk) -> None:
    session, store = desk.create(), desk.store
    desk.say(session)
    desk.do(rules.purge(store, session, 0, CASCADE))
    for attempt in (
        lambda: rules.append(store, session, None, []),
        lambda: rules.append_message(store, session, 9, "x", None, DIALECT),
        lambda: rules.append_system(store, session, None, [], None, DIALECT),
        lambda: rules.append_block(store, session, 9, 99, "{", None, DIALECT),
        lambda: rules.tool_outcome(store, session, 9, 9, ""),
        lambda: rules.set_qos(store, session, 9, False),
        lambda: rules.set_meta(store, session, 9, None, None),
        lambda: rules.purge(store, session, 9, CASCADE),
        lambda: rules.fork(store, session, 99, None),
        lambda: rebase(store, session, [], None),
        lambda: trim(store, session, 99),
    ):
        with pytest.raises(errors.PurgedSession):
            attempt()


def test_listing_needs_no_decoding(desk: Desk) -> None:
    session = desk.create()
    desk.say(session)
    desk.reply(session)
    caller = desk.create()
    desk.call(caller)
    desk.again()
    before = desk.store.session(session)
    summary = before.summary()
    assert (summary.events, summary.tokens, summary.open_tool_calls) == (5, 5, 0)
    assert not before.folded
    assert desk.store.session(caller).summary().open_tool_calls == 1
