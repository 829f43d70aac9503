"""The tools of a session are what types the arguments of its calls, whenever its model was started."""

from typing import Any

import trio

from superfluid.daemon.model import Model
from superfluid.daemon.sessions import read_tool
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
