"""A log whose syncs fail: what is refused, what is shown, and how serving goes on."""

import errno
import os

import pytest
import trio

from superfluid.daemon import model as model_module
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model, gen_params
from superfluid.link.events import Event, Message, Role
from superfluid.scheduler.generation import Committed, Ended, Failure
from superfluid.sessions.errors import LogIOError
from superfluid.sessions.files import Files
from tests.daemon.conftest import MakeModel, generate


class Disk:
    """Whether the disk takes what is synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        sync = Files.sync

        def sync_or_fail(files: Files, descriptor: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(files, descriptor)

        monkeypatch.setattr(Files, "sync", sync_or_fail)
        monkeypatch.setattr(model_module, "REOPEN_PAUSE", 0.0)


async def recovered(model: Model) -> None:
    while model.store.failed:
        await trio.lowlevel.checkpoint()


async def test_after_a_failed_sync_everything_is_refused_until_the_log_is_read_back(
    mock_model: MakeModel, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mock_model()
    disk = Disk(monkeypatch)
    await nursery.start(model.run)
    session = await model.sessions.create(None, gen_params(model.settle(GenerateOptions())))
    await model.sessions.append(session, "before", [])
    disk.full = True
    with pytest.raises(LogIOError, match=r"cannot be synced: .*No space left"):
        await model.sessions.append(session, "lost", [])
    with pytest.raises(LogIOError):
        await generate(model)
    with pytest.raises(LogIOError):
        await model.sessions.append(session, "lost too", [])
    disk.full = False
    await recovered(model)
    await model.sessions.append(session, "after", [])
    texts = [getattr(event.body, "text", None) for event in await model.sessions.read(session, 0)]
    assert [text for text in texts if text] == ["before", "after"]
    _, ended = await generate(model)
    assert ended.error_code is None


async def test_a_reply_under_way_ends_with_the_logs_error(
    mock_model: MakeModel, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mock_model([["--mock-round-delay", "0.002"]], tick_decode_budget=4)
    disk = Disk(monkeypatch)
    await nursery.start(model.run)
    options = GenerateOptions(max_tokens=2000, ignore_eos=True)
    prompt = Message(Role.USER, "hello", model.tokenizer.encode("hello"))
    (started,) = await model.begin_all([prompt], [options])
    shown: list[Event] = []
    ended: Ended | None = None
    async with started.generation as items:
        async for item in items:
            if isinstance(item, Committed):
                shown += item.events
                disk.full = True
            elif isinstance(item, Ended):
                ended = item
    assert ended is not None
    assert ended.error_code == Failure.LOG
    assert "No space left" in (ended.reason or "")
    disk.full = False
    await recovered(model)
    assert started.session is not None
    kept = await model.sessions.read(started.session, shown[0].event_id)
    assert kept[: len(shown)] == shown  # what was shown is there
    _, after = await generate(model)
    assert after.error_code is None
