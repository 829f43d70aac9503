"""Declared tools are where their system turn is: over restarts, branches, purges and compactions."""

from pathlib import Path

from hypothesis import given, strategies as st

from superfluid.link import events as ev
from superfluid.sessions import records, rules
from superfluid.sessions.compact import compact_closed
from superfluid.sessions.declared import MARK, Declaring, tools_of
from superfluid.sessions.rebase import rebase, trim
from superfluid.sessions.store import Record, Store
from tests.sessions.conftest import OpenStore
from tests.sessions.test_rules import DIALECT

TOOLS = ('{"name":"weather"}', '{"name": "time", "parameters": {}}')
SPAN = [1, 9, 9]


def do(store: Store, records: list[Record]) -> list[ev.Event]:
    commit = store.stage(records)
    store.flush()
    return commit.result()


def made(store: Store, planned: tuple[int, list[Record]]) -> int:
    do(store, planned[1])
    return planned[0]


def with_tools(store: Store) -> int:
    session = made(store, rules.create(store, None, ev.GenParams()))
    do(store, [(session, ev.PermissionRequest(0, "may I?"))])
    (event,) = do(store, rules.append_system(store, session, "You help.", TOOLS, [9, 9], DIALECT))
    assert event.body == ev.Message(0, "You help.", SPAN)  # what others see of it
    do(store, [(session, ev.Message(1, "hi", [5])), (session, ev.Message(1, "there", [6]))])
    return session


def declared(store: Store, session: int) -> tuple[int, tuple[str, ...]]:
    return store.session(session).declared()


def test_they_survive_restarts_and_branches(open_store: OpenStore) -> None:
    store = open_store()
    session = with_tools(store)
    plain = made(store, rules.create(store, session, ev.GenParams()))
    do(store, rules.append_system(store, plain, "No tools.", [], [9], DIALECT))
    empty = made(store, rules.create(store, None, ev.GenParams()))
    fork = made(store, rules.fork(store, session, 4, None))
    early = made(store, rules.fork(store, session, 2, None))
    later = made(store, rebase(store, fork, [ev.Replace(3, 4, 1, "ho")], None, lambda edit, before: [7], DIALECT))
    moved = made(store, rebase(store, session, [ev.Drop(1, 2)], None))
    grand = made(store, rules.fork(store, moved, 4, None))
    without = made(store, rebase(store, session, [ev.Drop(2, 3)], None))
    instead = made(store, rebase(store, session, [ev.Replace(2, 3, 0, "x")], None, lambda edit, before: [7], DIALECT))
    cut = made(store, trim(store, session, 3))
    for _ in range(2):
        at_two = [session, fork, later, moved, grand, cut]
        assert [declared(store, one) for one in at_two] == [(2, TOOLS)] * len(at_two)
        for one in (plain, empty, early, without, instead):
            assert declared(store, one) == (0, ())
        assert store.session(moved).events()[2].body == ev.Message(0, "You help.", SPAN)
        store = open_store()


def test_they_outlive_the_parent_and_go_with_the_last_child(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    session = with_tools(store)
    child = made(store, rules.fork(store, session, 4, None))
    do(store, rules.purge(store, session, 0, ev.Descendants.Reroot))
    assert store.compact() > 0
    assert declared(store, child) == (2, TOOLS)
    store = open_store()
    assert declared(store, child) == (2, TOOLS)
    do(store, rules.purge(store, child, 0, ev.Descendants.Cascade))
    store.close()
    assert compact_closed(tmp_path / "s") is not None
    assert MARK not in (tmp_path / "s/wal.log").read_bytes()


@given(st.binary(max_size=40), st.lists(st.text(max_size=5), min_size=1, max_size=3))
def test_what_others_put_behind_a_body_is_ignored(behind: bytes, tools: list[str]) -> None:
    message = ev.Message(0, "s", SPAN)

    def payload(more: bytes) -> bytes:
        return records.frame(1, ev.Event(3, 1, 0, message), 2, more)[records.HEADER.size :]

    known = Declaring(message, tuple(tools)).behind()
    assert tools_of(payload(known + behind), 2) == (message, tuple(tools))
    for cut in range(len(known)):
        assert tools_of(payload(known[:cut]), 2)[0] == message
    if not behind.startswith(MARK):
        assert tools_of(payload(behind), 2) == (message, ())
    assert records.event(payload(behind), 2)[1].body == message
    data = records.MAGIC + records.frame(1, ev.Event(3, 1, 0, message), 2, known)
    index, end, stop = records.scan(data, len(records.MAGIC), 2)
    assert (index.tokens.tolist(), end, stop) == ([3], len(data), records.Stop.END)
