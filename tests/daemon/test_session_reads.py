"""Sessions behind the API: their tools type calls whenever the model was started, and long ones are read in turns."""

from typing import Any

import trio

from superfluid.daemon.model import Model
from superfluid.daemon.sessions import READ_AT_ONCE, read_tool
from superfluid.link import events as ev
from tests.daemon.conftest import MakeModel

SLOW = [["--mock-round-delay", "0.01"]]


async def test_declared_tools_type_calls_after_a_restart(mock_model: MakeModel) -> None:
    tool = '{"name": "weather", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}}'
    known = [read_tool(0, tool)]
    first = mock_model(SLOW)
    async with trio.open_nursery() as life:
        await life.start(first.run)
        session = await first.sessions.create(None, ev.GenParams())
        await first.sessions.append_system(session, "You help.", [tool])
        child = await first.sessions.fork(session, 2, None)
        assert await tools_of_lane(first, session) == known
        life.cancel_scope.cancel()
    second = mock_model(SLOW)
    async with trio.open_nursery() as life:
        await life.start(second.run)
        assert await tools_of_lane(second, session) == known
        await second.sessions.purge(session, 0, ev.Descendants.Reroot)
        assert await second.store.compact_behind() > 0
        assert await tools_of_lane(second, child) == known
        life.cancel_scope.cancel()


async def tools_of_lane(model: Model, session: int) -> list[dict[str, Any]]:
    generation = await model.sessions.generate(session, 100)
    while not model.scheduler.lanes:
        await trio.lowlevel.checkpoint()
    (lane,) = model.scheduler.lanes
    tools = lane.ticket.job.tools
    model.sessions.cancel(session)
    await generation.collect()
    return list(tools)


async def test_a_long_session_is_read_in_turns(mock_model: MakeModel, nursery: trio.Nursery) -> None:
    model = mock_model()
    await nursery.start(model.run)
    session = await model.sessions.create(None, ev.GenParams())
    bodies: list[ev.Body] = [ev.Appended(None, [n]) for n in range(3 * READ_AT_ONCE)]
    await model.store.commit([(session, body) for body in bodies])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as beside:
        beside.start_soon(others)
        inspection = await model.sessions.inspect(session)
        beside.cancel_scope.cancel()
    assert turns >= 2
    assert [event.body for event in inspection.events[1:]] == bodies
    assert await model.sessions.read(session, len(bodies)) == inspection.events[-1:]
    assert await model.sessions.read(session, 1 << 63) == []
