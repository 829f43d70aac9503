"""Purges of a running model, for their age too, and what is erased behind them."""

from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from superfluid.daemon import purging
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model, Started
from superfluid.daemon.purging import Purges
from superfluid.link import events as ev
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.keeping import Keeper, KeepSettings, ParkMode
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.sessions import errors, rebase, rules
from superfluid.sessions.files import Files
from superfluid.sessions.store import Store
from tests.daemon.conftest import MakeModel, generate
from tests.sessions.faulty import FaultyFiles

CASCADE, REROOT = ev.Descendants.Cascade, ev.Descendants.Reroot
SLOW = [["--mock-round-delay", "0.01"]]
HUNG = [["--mock-delay", "3"]]


async def begin(model: Model) -> Started:
    """A long reply in a fresh session."""
    options = GenerateOptions(max_tokens=1500, ignore_eos=True)
    (started,) = await model.begin_all([ev.Message(1, "hi", model.tokenizer.encode("hi"))], [options])
    return started


async def test_a_running_generation_is_cancelled_and_its_subscribers_end(
    mock_model: MakeModel, nursery: trio.Nursery
) -> None:
    model = mock_model(SLOW)
    await nursery.start(model.run)
    started = await begin(model)
    assert started.session is not None
    _, subscription = model.sessions.subscribe(started.session, 0, False)
    async for message in subscription:
        if isinstance(message, ev.Event) and isinstance(message.body, ev.Generated):
            break
    child = await model.sessions.fork(started.session, 1, None)
    assert await model.sessions.purge(started.session, 0, CASCADE) == [child, started.session]
    events = [message.body async for message in subscription if isinstance(message, ev.Event)]
    assert subscription.reason == "purged"
    assert isinstance(events[-1], ev.Purged)
    assert isinstance(events[-2], ev.Generated)
    assert events[-2].finish == ev.Finish.CANCELLED
    for session in (child, started.session):
        with pytest.raises(errors.PurgedSession):
            await model.sessions.read(session, 0)
    await generate(model)  # it goes on


async def test_one_that_does_not_end_is_a_timeout_and_nothing_is_purged(
    mock_model: MakeModel, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "QUIESCE", 0.05)
    model = mock_model(HUNG)
    await nursery.start(model.run)
    started = await begin(model)
    assert started.session is not None
    child = await model.sessions.fork(started.session, 1, None)
    while model.scheduler.in_flight is None:
        await trio.lowlevel.checkpoint()
    with pytest.raises(errors.PurgeTimeout, match=f"session {started.session} did not quiesce for purge"):
        await model.sessions.purge(started.session, 0, CASCADE)
    assert model.sessions.session_ids() == [started.session, child]
    assert not model.store.activity.purging
    await model.sessions.append(child, "goes on", [])


async def test_what_is_being_purged_is_fenced(mock_model: MakeModel, nursery: trio.Nursery) -> None:
    model = mock_model(SLOW)
    await nursery.start(model.run)
    started = await begin(model)
    session = started.session
    assert session is not None
    child = await model.sessions.fork(session, 1, None)
    refused = 0

    async def ask() -> None:
        nonlocal refused
        sessions = model.sessions
        tries: list[Callable[[], Any]] = [
            lambda: sessions.append(child, "x", [5]),
            lambda: sessions.fork(session, 1, None),
            lambda: sessions.create(child, ev.GenParams()),
            lambda: sessions.generate(child, 5),
            lambda: sessions.trim(child, 1),
        ]
        assert model.store.activity.purging == {session, child}
        for one in tries:
            with pytest.raises(errors.PurgedSession):
                await one()
            refused += 1

    async with trio.open_nursery() as purges:
        purges.start_soon(model.sessions.purge, session, 0, CASCADE)
        while not model.store.activity.purging:
            await trio.lowlevel.checkpoint()
        purges.start_soon(ask)
        with pytest.raises(errors.PurgedSession):  # waits for the other, whose end it finds
            await model.sessions.purge(child, 0, REROOT)
    assert refused == 5
    assert model.sessions.session_ids() == []


async def test_the_generation_is_looked_at_before_anything_is_touched(
    mock_model: MakeModel, nursery: trio.Nursery
) -> None:
    model = mock_model(SLOW)
    await nursery.start(model.run)
    started = await begin(model)
    assert started.session is not None
    with pytest.raises(errors.GenerationConflict, match="generation is 0, command expected 1"):
        await model.sessions.purge(started.session, 1, REROOT)
    assert model.scheduler.generating(started.session)


@asynccontextmanager
async def purges_of(
    directory: Path,
    clock: Callable[[], int],
    forget: Callable[[int], None] = lambda session: None,
    files: Files | None = None,
    busy: Container[int] = frozenset(),
) -> AsyncIterator[tuple[Store, Purges]]:
    """A store with everything that purges need, and no worker."""
    store = Store.open(directory, files, clock)
    metrics = ModelMetrics()
    keeper = Keeper.open(directory, KeepSettings(ParkMode.NEVER, disk_budget=0), metrics)
    scheduler = Scheduler(store, cast("Any", None), SchedulerConfig(4), metrics, "none", keeper)
    store.activity.busy = busy
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            await nursery.start(keeper.run)
            yield store, Purges(store, scheduler, keeper, {}, forget)
            await keeper.flush()
            nursery.cancel_scope.cancel()
    finally:
        store.close()


def branches(store: Store, parent: int) -> list[list[tuple[int, ev.Body]]]:
    """The records of a child of every kind."""
    upto = store.session(parent).n_events
    return [
        rules.fork(store, parent, upto, None)[1],
        rules.fork(store, parent, 1, None)[1],
        rebase.rebase(store, parent, [ev.Drop(1, 2)], None)[1],
        rebase.trim(store, parent, 1)[1],
        rules.create(store, parent, ev.GenParams())[1],
    ]


async def make(store: Store, *bodies: ev.Body, http: bool = True) -> int:
    session = store.new_session()
    await store.commit([(session, body) for body in (ev.Created(None, ev.GenParams()), *bodies)])
    if http:
        store.http.add(session)
    return session


@pytest.mark.parametrize("kind", range(5))
async def test_children_that_are_still_being_made_go_with_their_parent(tmp_path: Path, kind: int) -> None:
    times = iter(range(1_000_000, 2_000_000))
    forgotten: list[int] = []
    async with purges_of(tmp_path / "s", lambda: next(times), forgotten.append) as (store, purges):
        parent = await make(store, *(ev.Message(1, f"secret {n}", [n]) for n in range(3)))
        durable = store.new_session()
        await store.commit([(durable, ev.Forked(parent, 3, ev.GenParams()))])
        records = branches(store, parent)[kind]
        child = records[0][0]
        made = store.stage(records)
        grandchild = store.stage(branches(store, durable)[0])
        assert not made.done
        gone = await purges.purge(parent, 0, CASCADE)
        assert made.done  # its client is told of it, and finds it purged
        assert (await made.wait())[0].body == records[0][1]
        assert sorted(gone) == sorted([parent, durable, child, grandchild.staged[0].session.id])
        assert gone[-1] == parent
        assert forgotten == gone
        assert store.session_ids() == []
        assert not store.activity.purging
        await store.compact_behind()
        assert b"secret" not in store.path.read_bytes()
    with closing(Store.open(tmp_path / "s")) as again:
        assert again.session_ids() == []


@pytest.mark.parametrize("kind", range(5))
async def test_children_that_are_still_being_made_become_roots(tmp_path: Path, kind: int) -> None:
    times = iter(range(1_000_000, 2_000_000))
    async with purges_of(tmp_path / "s", lambda: next(times)) as (store, purges):
        parent = await make(store, *(ev.Message(1, f"said {n}", [n]) for n in range(3)))
        inherited = store.session(parent).events()
        records = branches(store, parent)[kind]
        child = records[0][0]
        store.stage(records)
        assert await purges.purge(parent, 0, REROOT) == [parent]
        found = store.session(child)
        prefix = [(event.event_id, event.body) for event in inherited[: found.fork_at]]
        assert found.parent is None
        assert found.events()[-1].body == ev.Rerooted(parent, prefix)
        tokens = found.tokens().tolist()
        await store.compact_behind()
        assert store.session(child).tokens().tolist() == tokens
    with closing(Store.open(tmp_path / "s")) as again:
        assert again.session_ids() == [child]
        assert again.session(child).parent is None
        assert again.session(child).tokens().tolist() == tokens
        assert [event.body for event in again.session(child).events()[: found.fork_at]] == [body for _, body in prefix]


async def test_a_child_that_did_not_reach_the_disk_stops_the_purge(tmp_path: Path) -> None:
    times = iter(range(1_000_000, 2_000_000))
    files = FaultyFiles()
    async with purges_of(tmp_path / "s", lambda: next(times), files=files) as (store, purges):
        parent = await make(store, ev.Message(1, "said", [1]))
        files.arm("write")
        made = store.stage(branches(store, parent)[0])
        with pytest.raises(errors.LogIOError):
            await purges.purge(parent, 0, CASCADE)
        with pytest.raises(errors.LogIOError):
            await made.wait()
        await store.reopen_behind()
        assert store.session_ids() == [parent]
        assert await purges.purge(parent, 0, CASCADE) == [parent]


async def test_nobody_may_use_a_child_that_comes_to_be_in_a_purge(tmp_path: Path) -> None:
    times = iter(range(1_000_000, 2_000_000))
    async with purges_of(tmp_path / "s", lambda: next(times)) as (store, purges), trio.open_nursery() as nursery:
        parent = await make(store, ev.Message(1, "said", [1]))
        made = store.stage(branches(store, parent)[0])
        child = made.staged[0].session.id
        nursery.start_soon(purges.purge, parent, 0, CASCADE)
        while not store.activity.purging:
            await trio.lowlevel.checkpoint()
        assert store.activity.purging == {parent, child}
        await made.wait()  # the first who could know its id
        with pytest.raises(errors.PurgedSession):
            rules.append(store, child, None, [1])
        for session in (parent, child):
            with pytest.raises(errors.PurgedSession):
                rules.fork(store, session, 1, None)
            with pytest.raises(errors.PurgedSession):
                rebase.trim(store, session, 99)


async def test_a_parent_and_its_child_that_are_purged_together(tmp_path: Path) -> None:
    times = iter(range(1_000_000, 2_000_000))
    erased: dict[int, list[int]] = {}  # by length: those who were said to have it too
    async with purges_of(tmp_path / "s", lambda: next(times)) as (store, purges), trio.open_nursery() as nursery:
        parent = await make(store, ev.Message(1, "said", [1]))
        made = await store.commit(rules.fork(store, parent, 2, None)[1])
        child = parent + 1
        assert made[0].body == ev.Forked(parent, 2, store.session(parent).params)
        await store.commit([(child, ev.Message(1, "more", [2]))])

        async def erase(ids: Sequence[int], kin: Iterable[Sequence[int]]) -> None:
            erased[len(ids)] = [len(one) for one in kin]
            await trio.lowlevel.checkpoint()

        purges._keeper.erase = erase  # type: ignore[method-assign, assignment]
        for session in (child, parent):
            nursery.start_soon(purges.purge, session, 0, REROOT)
    assert store.session_ids() == []
    assert erased == {1: [], 2: []}


async def test_http_sessions_go_when_nothing_touched_them(tmp_path: Path) -> None:
    now = start = 1_000_000

    def clock() -> int:
        return now

    async with purges_of(tmp_path / "s", clock, busy={7}) as (store, purges):
        native = await make(store, http=False)
        old = await make(store)
        pinned = await make(store, ev.Pinned(start + 150_000))
        parent = await make(store)
        child = store.new_session()
        await store.commit([(child, ev.Forked(parent, 1, ev.GenParams()))])
        young = await make(store)
        busy = await make(store)
        assert busy == 7
        store.http.add(999)  # an id that a log which lost its end does not know
        now = start + 90_000
        await store.commit([(young, ev.Message(1, "still here", [1])), (old, ev.EpochBump())])
        now = start + 99_999
        await purges.purge_untouched(100.0, now)
        assert store.session_ids() == [native, old, pinned, parent, child, young, busy]
        now = start + 100_000
        await purges.purge_untouched(100.0, now)
        assert store.session_ids() == [native, pinned, child, young, busy]
        assert store.session(child).parent is None
        assert [type(event.body) for event in store.session(child).events()][:1] == [ev.Created]
        now = start + 190_000
        await purges.purge_untouched(100.0, now)
        assert store.session_ids() == [native, child, busy]


async def test_what_is_touched_while_others_are_purged_for_their_age_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000
    monkeypatch.setattr(purging, "TOGETHER", 1)
    async with purges_of(tmp_path / "s", lambda: now, lambda gone: staged.append(touch(gone))) as (store, purges):
        staged: list[object] = []
        first, child = await make(store), store.new_session()
        await store.commit([(child, ev.Forked(first, 1, ev.GenParams()))])
        store.http.add(child)
        second, third = await make(store), await make(store)

        def touch(gone: int) -> object:
            return store.stage([(second, ev.Message(1, "still here", [1]))]) if gone == third else None

        now += 100_000
        await purges.purge_untouched(100.0, now)
        assert store.session_ids() == [second]


async def test_old_sessions_are_looked_for_at_start(mock_model: MakeModel, nursery: trio.Nursery) -> None:
    first = mock_model()
    async with trio.open_nursery() as life:
        await life.start(first.run)
        await generate(first)
        kept = await first.sessions.create(None, ev.GenParams())
        life.cancel_scope.cancel()
    second = mock_model(sessions_ttl=1e-3)
    await nursery.start(second.run)
    while len(second.sessions.session_ids()) > 1:
        await trio.lowlevel.checkpoint()
    assert second.sessions.session_ids() == [kept]


async def test_a_purge_is_erased_a_little_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1_000_000, 2_000_000))
    directory = tmp_path / "s"
    send, passes = trio.open_memory_channel[int](9)
    compact = Store.compact_behind

    async def compact_and_tell(store: Store) -> int:
        saved = await compact(store)
        send.send_nowait(saved)
        return saved

    monkeypatch.setattr(Store, "compact_behind", compact_and_tell)
    monkeypatch.setattr(purging, "GATHER", 0.001)
    monkeypatch.setattr(purging, "REST", 0)
    async with purges_of(directory, lambda: next(times)) as (store, purges), trio.open_nursery() as nursery:
        for session in (1, 2):
            assert store.new_session() == session
            await store.commit([(session, ev.Created(None, ev.GenParams())), (session, ev.Message(1, "secret", [1]))])
        nursery.start_soon(purges.erase)
        with trio.fail_after(60):
            assert await passes.receive() == 0  # at the start there is nothing to take out
            (directory / "park").mkdir()
            (directory / "park/1.park").write_bytes(b"state")
            assert await purges.purge(1, 0, REROOT) == [1]
            assert await purges.purge(2, 0, REROOT) == [2]
            while b"secret" in store.path.read_bytes():
                assert await passes.receive() > 0
        nursery.cancel_scope.cancel()
    assert not list(directory.glob("park/*"))


async def test_artifacts_that_a_crash_left_go_at_start(tmp_path: Path) -> None:
    times = iter(range(1_000_000, 2_000_000))
    directory = tmp_path / "s"
    async with purges_of(directory, lambda: next(times)) as (store, purges):
        for session in (1, 2):
            assert store.new_session() == session
            await store.commit([(session, ev.Created(None, ev.GenParams()))])
        await purges.purge(1, 0, REROOT)
        (directory / "park").mkdir()
        for session in (1, 2):
            (directory / f"park/{session}.park").write_bytes(b"state")
        await purges.remove_leftovers()
    assert [path.name for path in directory.glob("park/*")] == ["2.park"]
