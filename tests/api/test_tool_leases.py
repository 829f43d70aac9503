"""`--tool-lease-ms`: a call has a lease in the log, not in the reply, and expires when its time is up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from superfluid.daemon.model import Model, ModelConfig
from superfluid.link import events as ev
from superfluid.observe.metrics import ModelMetrics
from superfluid.sessions import errors
from superfluid.sessions.store import now_unix_ms
from tests.daemon.test_resume import runtime_of

TOOL = '{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}'


async def called(model: Model) -> tuple[int, list[type], int]:
    """A session whose model has called a tool: (session, what the reply was told, the call's id)."""
    session = await model.sessions.create(None, ev.GenParams())
    await model.sessions.append_system(session, None, [TOOL])
    await model.sessions.append_message(session, 1, "How is the weather?")
    events, _, _ = await (await model.sessions.generate(session, 200)).collect()
    ((call, _, _),) = model.sessions.open_tool_calls(session)
    return session, [type(event.body) for event in events], call


@pytest.mark.parametrize("lease_ms", [0, 60_000, 1])
async def test_calls_are_leased(tmp_path: Path, scripted_gguf: Callable[[str], Path], lease_ms: int) -> None:
    path = scripted_gguf("text_tool")
    runtime = await trio.to_thread.run_sync(runtime_of, path)
    config = ModelConfig("tool", path, runtime, tmp_path, max_context=4096, tool_lease_ms=lease_ms)
    model = Model(config, ModelMetrics())
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        session, told, call = await called(model)
        assert ev.ToolUse in told
        assert ev.ToolLease not in told
        leases = [event.body for event in await model.sessions.read(session, 0) if isinstance(event.body, ev.ToolLease)]
        assert [lease.call_id for lease in leases] == ([call] if lease_ms else [])
        if leases:
            assert 0 < leases[0].deadline_unix_ms - lease_ms <= now_unix_ms()
        if lease_ms == 1:
            while now_unix_ms() <= leases[0].deadline_unix_ms:
                await trio.lowlevel.checkpoint()
            await (await model.sessions.generate(session, 1)).collect()
            assert model.sessions.open_tool_calls(session) == []
            late = (errors.ToolLateEffect, "already reached a terminal outcome")
            with pytest.raises(late[0], match=late[1]):
                await model.sessions.append_tool_result(session, call, "sunny")
            assert model.sessions.ledger(session)[0][1].state == 5
        else:
            await model.sessions.append_tool_result(session, call, "sunny")
        nursery.cancel_scope.cancel()
