"""The scheduler over the real log: what a caller was given is on disk, in order, and replays."""

from pathlib import Path

import trio

from superfluid.link.events import Created, Generated, GenParams, Message
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Committed, Provisional
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.scheduler.planner import Settings
from superfluid.sessions.store import Store
from tests.scheduler.conftest import MakeBench
from tests.scheduler.doubles import WordCodec, job


async def test_what_was_delivered_is_in_the_log(make_bench: MakeBench, tmp_path: Path) -> None:
    store = await trio.to_thread.run_sync(Store.open, tmp_path)
    config = SchedulerConfig(settings=Settings(decode_budget=40))
    scheduler = Scheduler(store, WordCodec(), config, ModelMetrics(), "mock")
    given: dict[int, list[int]] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        sessions = [store.new_session() for _ in range(4)]
        for session in sessions:
            await store.commit([(session, Created(None, GenParams())), (session, Message(1, "hi", [session, 2, 3]))])
        nursery.start_soon(scheduler.run, make_bench.link())

        async def consume(session: int) -> None:
            asked = job(session, max_tokens=100, want_provisional=True)
            asked.stream = list(store.session(session).tokens())
            shown = committed = ""
            async with scheduler.submit(asked) as generation:
                async for item in generation:
                    if isinstance(item, Provisional):
                        shown += item.text
                    elif isinstance(item, Committed):
                        for event in item.events:
                            assert store.session(session).events(event.event_id)[0] == event
                            assert isinstance(event.body, Generated)
                            committed += event.body.text
                            given.setdefault(session, []).extend(event.body.span)
                        assert shown.startswith(committed)
            assert shown == committed

        async with trio.open_nursery() as consumers:
            for session in sessions:
                consumers.start_soon(consume, session)
        nursery.cancel_scope.cancel()
    store.close()
    again = await trio.to_thread.run_sync(Store.open, tmp_path)
    for session in sessions:
        replayed = [event.body for event in again.session(session).events()]
        assert isinstance(replayed[0], Created)
        assert [t for body in replayed if isinstance(body, Generated) for t in body.span] == given[session]
        assert len(given[session]) == 100
    again.close()
