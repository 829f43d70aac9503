"""A purge whose process dies: every prefix of its records is a store in which it happened whole or not at all."""

from itertools import count
from pathlib import Path

import pytest

from superfluid.link import events as ev
from superfluid.sessions import errors, rules
from superfluid.sessions.records import HEADER
from superfluid.sessions.store import Record, Store
from tests.sessions.faulty import UnsyncedFiles

CASCADE, REROOT = ev.Descendants.Cascade, ev.Descendants.Reroot


def commit(store: Store, records: list[Record]) -> None:
    done = store.stage(records)
    store.flush()
    done.result()


def family(directory: Path) -> Store:
    """Session 1 with open calls; 2 and 3 its children, 4 a child of 2, 5 linked to 1, 6 beside them."""
    times = count(1_000_000)
    store = Store.open(directory, UnsyncedFiles(), lambda: next(times))
    commit(store, rules.create(store, None, ev.GenParams())[1])
    commit(store, [(1, ev.Message(1, "one", [1, 2])), (1, ev.ToolUse("f", "{}")), (1, ev.ToolUse("g", "{}"))])
    for parent, at in ((1, 2), (1, 4), (2, 3)):
        child, records = rules.fork(store, parent, at, None)
        commit(store, [*records, (child, ev.Message(1, f"of {child}", [child])), (child, ev.ToolUse("h", "{}"))])
    commit(store, rules.create(store, 1, ev.GenParams())[1])
    commit(store, rules.create(store, None, ev.GenParams())[1])
    return store


@pytest.mark.parametrize("mode", [CASCADE, REROOT])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_crash_before_the_last_record_leaves_the_session_alive(
    tmp_path: Path, mode: ev.Descendants, compacted: bool
) -> None:
    store = family(tmp_path / "whole")
    before = store.path.stat().st_size
    tree = {session.id: (session.parent, session.fork_at, session.tokens().tolist()) for session in store.live()}
    targets = rules.purge_targets(store, 1, 0, mode)
    assert targets[-1] == 1
    records = rules.purge(store, 1, 0, mode)
    assert records[-1] == (1, ev.Purged(1, mode))
    commit(store, records)
    store_id = (store.directory / "wal.log.store-id").read_bytes()
    data = store.path.read_bytes()
    store.close()
    ends = [before]
    while ends[-1] < len(data):
        ends.append(ends[-1] + HEADER.size + HEADER.unpack_from(data, ends[-1])[0])
    assert len(ends) == len(records) + 1
    for end in range(before, len(data) + 1) if not compacted else ends:
        directory = tmp_path / str(end)
        directory.mkdir()
        (directory / "wal.log").write_bytes(data[:end])
        (directory / "wal.log.store-id").write_bytes(store_id)
        store = Store.open(directory, UnsyncedFiles())
        if compacted:
            store.compact()
        done = sum(edge <= end for edge in ends) - 1  # whole records of the purge
        gone = {session for session, body in records[:done] if isinstance(body, ev.Purged)}
        assert store.session_ids() == sorted(tree.keys() - gone)
        for session in store.live():
            parent, fork_at, tokens = tree[session.id]
            rerooted = 1 in gone and parent == 1
            assert (session.parent, session.fork_at) == (None if rerooted else parent, fork_at)
            assert session.tokens().tolist() == tokens
        if 1 not in gone:  # and it can be asked for again
            commit(store, rules.purge(store, 1, 0, mode))
            with pytest.raises(errors.PurgedSession):
                store.session(1)
            assert store.session_ids() == ([6] if mode is CASCADE else [2, 3, 4, 5, 6])
        store.close()
