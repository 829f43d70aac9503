"""The clients against a real server."""

import threading
from collections.abc import Callable

import pytest
import trio

from superfluid.client import Chunk, Descendants, Drop, Finish, Refused, Sampling
from superfluid.client.errors import ForkPoint, InvalidTool, NothingInFlight, SystemNotFirst, UnknownSession
from superfluid.link import events as ev, session_api as api
from superfluid.link.events import Generated, GenerationPrompt, ToolUse
from tests.api.serving import Server

Served = Callable[[str], Server]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def test_a_conversation(served: Served) -> None:
    with served("plain").blocking_client() as client:
        session = client.session(Sampling(seed=5), system="You are brief.")
        asked = session.user("Say hello.")
        stream = session.stream(max_tokens=50)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == "Hello, world."
        assert {chunk.kind for chunk in chunks} == {"text"}
        assert stream.reply is not None
        assert (stream.reply.text, stream.reply.finish) == ("Hello, world.", Finish.EOS)
        again = client.get(session.id)
        assert [message.text for message in again.messages()] == ["You are brief.", "Say hello.", "Hello, world."]
        assert again.sampling() == Sampling(seed=5)
        assert again.events(asked.event_id)[0] == asked
        assert session.id in client.session_ids()
        assert [summary.id for summary in client.sessions()] == [node for node, _, _ in client.tree()]
        assert "# TYPE" in client.metrics()
        with pytest.raises(RuntimeError, match="iterated once"):
            list(stream)


def test_reasoning_comes_as_its_own_kind(served: Served) -> None:
    with served("think").blocking_client() as client:
        session = client.session()
        session.user("Why?")
        chunks = list(session.stream())
        thought = "".join(chunk.text for chunk in chunks if chunk.kind == "reasoning")
        said = "".join(chunk.text for chunk in chunks if chunk.kind == "text")
        assert "First, then." in thought
        assert said.strip() == "The answer."
        message = session.messages()[-1]
        assert (message.reasoning, message.text) == (thought, said)


def test_a_tool_loop(served: Served) -> None:
    with served("text_tool").blocking_client() as client:
        session = client.session(tools=[TOOL])
        session.user("Weather?")
        reply = session.generate(max_tokens=50)
        (call,) = reply.tool_calls
        assert (call.name, call.arguments) == ("get_weather", '{"city":"Paris"}')
        assert session.open_tool_calls() == [call]
        session.tool_result(call, "rain")
        assert session.open_tool_calls() == []
        assert session.messages()[-1].tool_call_id == call.id
        with pytest.raises(SystemNotFirst):
            client.call(api.AppendSystemRequest(session.id, "late", []))
        with pytest.raises(InvalidTool, match="tool 1 is not"):
            client.session(tools=[TOOL, {"type": "retrieval"}])
        for value in ("NaN", "-Infinity", "1e999", '"\\ud800"'):
            with pytest.raises(InvalidTool, match="tool 0 is not a function declaration: not JSON"):
                client.session(tools=[f'{{"name": "f", "parameters": {{"default": {value}}}}}'])


def test_leaving_a_stream_early_cancels_it(served: Served) -> None:
    with served("loop").blocking_client() as client:
        session = client.session()
        session.user("Go.")
        stream = session.stream()
        for chunk in stream:
            assert chunk.kind == "text"
            break
        session.user("Enough.")  # the session is free at once
        assert stream.reply is not None
        assert stream.reply.finish == Finish.CANCELLED
        with session.stream() as other:
            next(iter(other))
        assert session.generate(2).tokens_generated == 2
        with pytest.raises(NothingInFlight):
            session.cancel()


def test_a_stream_may_be_cancelled_and_read_to_its_end(served: Served) -> None:
    with served("loop").blocking_client() as client:
        session = client.session()
        session.user("Go.")
        stream = session.stream()
        text = ""
        for chunk in stream:
            text += chunk.text
            if len(text) < 40:
                continue
            stream.cancel()
        assert stream.reply is not None
        assert stream.reply.text == text
        stream.cancel()  # too late to matter


def test_another_thread_may_cancel(served: Served) -> None:
    with served("loop").blocking_client() as client:
        session = client.session()
        session.user("Go.")
        started = threading.Event()

        def stop() -> None:
            started.wait()
            client.get(session.id).cancel()

        thread = threading.Thread(target=stop)
        thread.start()
        for _ in session.stream():
            started.set()
        thread.join()
        assert session.inspect().last_finish == Finish.CANCELLED


def test_branches(served: Served) -> None:
    with served("plain").blocking_client() as client:
        session = client.session(Sampling(seed=1), system="S")
        first = session.user("One.")
        session.generate()
        whole = session.fork()
        assert [one.text for one in whole.messages()] == ["S", "One.", "Hello, world."]
        session.user("Two.")
        assert [one.text for one in session.fork().messages()][-1] == "Two."
        assert client.get(session.id).fork_after(first).messages()[-1].text == "One."
        reseeded = session.fork(at=2, seed=9)
        assert reseeded.sampling() == client.get(reseeded.id).sampling() == Sampling(seed=9)
        edited = session.edit(first, "Uno.")
        assert [one.text for one in edited.messages()] == ["S", "Uno.", "Hello, world.", "Two."]
        assert [one.text for one in session.edit(first.event_id, "Uno.").trim(2).messages()] == ["S"]
        dropped = session.rebase([Drop(first.event_id, first.event_id + 1)], seed=3)
        assert [one.text for one in dropped.messages()] == ["S", "Hello, world.", "Two."]
        assert dropped.sampling().seed == 3
        assert [one.text for one in session.messages()] == ["S", "One.", "Hello, world.", "Two."]
        with pytest.raises(ForkPoint) as refused:
            session.fork(at=99)
        assert refused.value.values["at"] == 99


def test_what_a_session_says_of_itself(served: Served) -> None:
    with served("plain").blocking_client() as client:
        session = client.session()
        session.append(span=[72, 105])
        session.append("!")
        assert session.inspect().tokens == [72, 105, 33]
        assert session.set_meta(title="t") == 1
        assert session.set_meta(archived=True, expected_version=1) == 2
        assert session.id not in [summary.id for summary in client.sessions()]
        assert session.id in [summary.id for summary in client.sessions(include_archived=True)]
        session.set_qos(1)
        assert session.inspect().qos_class == 1
        assert session.pin(60_000) > 0
        assert session.pin(0) == 0
        assert isinstance(client.call(api.SetBackgroundRateRequest(1)), api.AckResponse)
        with pytest.raises(Refused, match="is no log directive"):
            client.call(api.SetLogLevelRequest("noise"))
        block = client.call(api.AppendBlockRequest(session.id, 1, 6, '{"path": "a.py"}'))
        assert isinstance(block, api.CommittedResponse)
        assert isinstance(block.event.body, ev.Block)
        with pytest.raises(Refused):
            session.purge(mode=Descendants.Cascade, expected_generation=7)


async def test_the_trio_client_does_the_same(served: Served) -> None:
    async with served("plain").client() as client:
        session = await client.session(Sampling(seed=5), system="You are brief.")
        first = await session.user("Say hello.")
        async with session.stream(50) as stream:
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == "Hello, world."
        assert stream.reply is not None
        assert stream.reply.finish == Finish.EOS
        branch = await (await session.fork_after(first)).edit(first, "Uno.")
        assert [one.text for one in await branch.messages()] == ["You are brief.", "Uno."]
        assert (await branch.generate()).text == "Hello, world."
        with pytest.raises(UnknownSession):
            await client.get(10**9).messages()
        assert branch.id in await client.session_ids()


async def test_leaving_a_trio_stream_early(served: Served) -> None:
    async with served("loop").client() as client:
        session = await client.session()
        await session.user("Go.")
        async with session.stream() as stream:
            async for chunk in stream:
                assert chunk == Chunk("text", chunk.text)
                break
        await session.user("Enough.")
        assert stream.reply is not None
        assert stream.reply.finish == Finish.CANCELLED
        with trio.CancelScope() as scope:
            async with session.stream() as cut:
                async for _ in cut:
                    scope.cancel()
        with trio.fail_after(30):
            while (await session.inspect()).tier != api.Cold():
                pass
        assert (await session.inspect()).last_finish == Finish.CANCELLED
        assert (await session.generate(2)).tokens_generated == 2


async def test_many_streams_at_once(served: Served) -> None:
    texts: list[str] = []
    async with served("plain").client() as client, trio.open_nursery() as nursery:

        async def talk() -> None:
            session = await client.session()
            await session.user("Hi.")
            async with session.stream() as stream:
                texts.append("".join([chunk.text async for chunk in stream]))

        for _ in range(12):
            nursery.start_soon(talk)
    assert texts == ["Hello, world."] * 12


def test_a_reply_is_edited_whole(served: Served) -> None:
    with served("text_tool").blocking_client() as client:
        session = client.session(system="S")
        session.user("Weather?")
        session.generate()
        events = session.events()
        reply = [event for event in events if isinstance(event.body, Generated | ToolUse)]
        assert len(reply) > 2
        openers = [event for event in events if isinstance(event.body, GenerationPrompt)]
        for event in (*reply, *openers, reply[-1].event_id):
            edited = session.edit(event, "It rains.")
            assert [one.text for one in edited.messages()] == ["S", "Weather?", "It rains."]
            assert not edited.open_tool_calls()
            kept = [type(one.body) for one in edited.events()]
            assert Generated not in kept and GenerationPrompt not in kept and ToolUse not in kept


@pytest.mark.parametrize("cuts", [[1], [2], [3], [4], [5], [1, 1, 1, 1, 1], [2, 2]])
def test_a_call_that_a_limit_cut_goes_on_as_that_call(served: Served, cuts: list[int]) -> None:
    with served("split_tool").blocking_client() as client:
        session = client.session()
        session.user("Weather?")
        for limit in (*cuts, 20):
            session.generate(limit)
        generated = [event.body for event in session.events() if isinstance(event.body, Generated)]
        assert "".join(body.text for body in generated) == '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        calls = [event.body for event in session.events() if isinstance(event.body, ToolUse)]
        assert (calls[-1].name, calls[-1].arguments) == ("get_weather", '{"city":"Paris"}')
        (call,) = session.open_tool_calls()
        assert (call.name, call.arguments) == ("get_weather", '{"city":"Paris"}')
        assert session.messages()[-1].tool_calls == [call]
