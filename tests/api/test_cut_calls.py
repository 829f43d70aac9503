"""A tool call that max_tokens cut, on the session API: read when its arguments had begun, else no call."""

import json
from collections.abc import Callable
from pathlib import Path

from superfluid.link.events import Channel, Finish, Generated, ToolParseFailure, ToolUse
from tests.api.serving import serving

CALL = '\n{"name": "get_weather", '


async def test_calls_cut_by_max_tokens(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    """The script opens a call with its name, then `"arguments": {"city": "Par`, and never ends it."""
    async with serving(home, scripted_gguf("open_tool")) as server, server.client() as client:
        bodies = {}
        for limit in (1, 2, 3, 4):
            session = await client.session()
            await session.user("hi")
            reply = await session.generate(max_tokens=limit)
            assert reply.finish == Finish.NONE  # the turn stays open
            bodies[limit] = [event.body for event in reply.events]
            assert isinstance(bodies[limit][0], Generated)
            assert bodies[limit][0].channel == Channel.TOOL_CALL
        assert [type(body) for body in bodies[1]] == [Generated]  # the marker alone is no text to read
        assert bodies[2][-1] == ToolParseFailure(CALL)
        for limit, city in ((3, "Par"), (4, "Paris")):
            call = bodies[limit][-1]
            assert isinstance(call, ToolUse)
            assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": city})


async def test_a_client_sees_one_call(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    async with serving(home, scripted_gguf("split_tool")) as server, server.client() as client:
        session = await client.session()
        await session.user("Weather?")
        first = await session.generate(4)
        branch = await session.fork()
        second = await session.generate(20)
        assert {type(event.body) for event in (*first.events, *second.events)} == {Generated, ToolUse}
        await branch.generate(20)
        for one in (session, branch):
            (call,) = await one.open_tool_calls()
            assert (call.name, call.arguments) == ("get_weather", '{"city":"Paris"}')
            assert [message.tool_calls for message in await one.messages()][-1] == [call]
            await one.tool_result(call, "sunny")
            assert await one.open_tool_calls() == []
