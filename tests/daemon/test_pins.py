"""Pins of sessions, from the log to the engine's leases and over a restart."""

from collections.abc import Callable
from pathlib import Path

import trio

from superfluid.daemon.model import Model
from superfluid.link import events as ev
from superfluid.scheduler.keeping import KeepSettings, ParkMode
from tests.daemon.test_resume import GREEDY, serving

NEVER = KeepSettings(ParkMode.NEVER, disk_budget=0)
HOUR_MS = 3_600_000


async def settled(model: Model) -> int:
    """Pins that hold a lease."""
    while model.scheduler.pins.due:
        await trio.lowlevel.checkpoint()
    return model.metrics.pins_held


async def say(model: Model, session: int, text: str) -> None:
    await model.sessions.append_message(session, 1, text)
    await (await model.sessions.generate(session, 8)).collect()


async def test_a_pin_holds_a_lease_until_it_is_cleared_and_after_a_restart(
    tmp_path: Path, scripted_gguf: Callable[[str], Path]
) -> None:
    path = scripted_gguf("plain")
    text = "something to remember for a good while, and then some more of it " * 4
    async with serving(tmp_path, path, NEVER) as model:
        first, second = [await model.sessions.create(None, GREEDY) for _ in range(2)]
        await model.sessions.pin(first, HOUR_MS)
        await say(model, first, text)
        assert await settled(model) == 1
        held = model.metrics.pinned_bytes
        assert held > 0
        await say(model, first, "go on")
        assert await settled(model) == 1
        assert model.metrics.pinned_bytes >= held
        await say(model, second, "not the same at all")
        await model.sessions.pin(second, HOUR_MS)
        assert await settled(model) == 2
        await model.sessions.pin(second, 0)
        assert await settled(model) == 1
        third = await model.sessions.create(None, GREEDY)
        await model.sessions.pin(third, 1)
    async with serving(tmp_path, path, NEVER) as model:
        assert await settled(model) == 0
        assert (await model.sessions.inspect(first)).pin_deadline_unix_ms > 0
        await say(model, first, "still there?")
        assert await settled(model) == 1
        await model.sessions.purge(first, 0, ev.Descendants.Reroot)
        assert await settled(model) == 0
