"""What a purge leaves on the disk: nothing of the session, in any file and in any form."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trio

from superfluid.daemon.generation import GenerateOptions, SamplingRequest
from superfluid.daemon.model import Model
from superfluid.link import events as ev
from superfluid.link.postcard import encode_tokens
from superfluid.scheduler.keeping import KeepSettings, ParkMode
from superfluid.sessions.errors import LogIOError
from superfluid.sessions.store import now_unix_ms
from tests.daemon.test_resume import GREEDY, serving

REROOT, CASCADE = ev.Descendants.Reroot, ev.Descendants.Cascade
WORTH_ANYTHING = KeepSettings(worth_seconds=0.0)
AT_ONCE = KeepSettings(ParkMode.ALWAYS, worth_seconds=0.0)
SECRET = " ".join(f"the {n}th door opens with {n * 7919}" for n in range(1, 25))
OPEN = " ".join(f"anyone may know that {n} is a number" for n in range(1, 25))


@pytest.fixture(scope="module")
def model_file(scripted_gguf: Callable[[str], Path]) -> Path:
    return scripted_gguf("plain")


def holding(model: Model, store: Path, text: str) -> set[str]:
    """Files below a store that hold the text, or the middle of its tokens."""
    ids = model.tokenizer.encode(text)[20:40]
    wanted = (text[40:80].encode(), np.array(ids, "<u4").tobytes(), encode_tokens(ids)[1:])
    files = [path for path in store.rglob("*") if path.is_file()]
    return {str(path.relative_to(store).parent / path.suffix) for path in files if has(path.read_bytes(), wanted)}


def has(data: bytes, wanted: tuple[bytes, ...]) -> bool:
    return any(one in data for one in wanted)


async def chat(model: Model, text: str) -> int:
    """A session as an HTTP route makes it, with a reply."""
    bodies = await model.render([{"role": "user", "content": text}], [], {})
    options = GenerateOptions(SamplingRequest(temperature=0.0), 8, ignore_eos=True)
    (started,) = await model.begin_all(bodies, [options])
    assert (await started.generation.collect())[2].reason is None
    assert started.session is not None
    await model.keeper.flush()
    return started.session


async def converse(model: Model, text: str) -> int:
    """A session of the session API, with a reply and a picture."""
    session = await model.sessions.create(None, GREEDY)
    blob = await model.sessions.put_media(text.encode())
    await model.sessions.append_message(session, 1, text)
    await model.sessions.append_block(session, 1, 7, json.dumps({"blob": blob}))
    await (await model.sessions.generate(session, 8)).collect()
    await model.keeper.flush()
    return session


async def test_nothing_of_a_purged_session_stays(tmp_path: Path, model_file: Path) -> None:
    async with serving(tmp_path, model_file, AT_ONCE) as model:
        going = [await chat(model, SECRET), await converse(model, SECRET)]
        kept = [await chat(model, OPEN), await converse(model, OPEN)]
        before = holding(model, tmp_path, SECRET)
        assert before == holding(model, tmp_path, OPEN) == {".log", "cache/.kv", "media"}
        parks = {path.name for path in (tmp_path / "park").iterdir()}
        assert parks == {f"{going[1]}.park", f"{kept[1]}.park"}
        for session in going:
            await model.sessions.purge(session, 0, REROOT)
        await model.keeper.flush()
        assert holding(model, tmp_path, SECRET) == {".log", "media"}
        assert await model.store.compact_behind() > 0
        assert holding(model, tmp_path, SECRET) == set()
        assert holding(model, tmp_path, OPEN) == before
        assert {path.name for path in (tmp_path / "park").iterdir()} == {f"{kept[1]}.park"}
        await model.sessions.purges.purge_untouched(0.0, now_unix_ms())  # the rest that HTTP made, for its age
        assert model.sessions.session_ids() == [kept[1]]
        assert holding(model, tmp_path, OPEN) == {".log", "media"}


async def test_a_file_goes_with_the_last_that_has_it(tmp_path: Path, model_file: Path) -> None:
    async with serving(tmp_path, model_file, WORTH_ANYTHING) as model:
        first = await chat(model, SECRET)
        child = await model.sessions.fork(first, model.store.session(first).n_events, None)
        short = await model.sessions.fork(first, 1, None)
        other = await model.sessions.create(first, GREEDY)  # a child in the tree alone
        await model.sessions.purge(first, 0, REROOT)
        assert "cache/.kv" in holding(model, tmp_path, SECRET)
        for session in (short, other):
            await model.sessions.purge(session, 0, REROOT)
        assert "cache/.kv" in holding(model, tmp_path, SECRET)
        await model.sessions.purge(child, 0, REROOT)
        assert "cache/.kv" not in holding(model, tmp_path, SECRET)
        second = await chat(model, SECRET)
        await model.sessions.fork(second, 1, None)
        await model.sessions.purge(second, 0, CASCADE)
        assert "cache/.kv" not in holding(model, tmp_path, SECRET)
        assert await model.store.compact_behind() > 0
        assert holding(model, tmp_path, SECRET) == set()


async def test_with_the_disk_tier_off_its_files_go_too(tmp_path: Path, model_file: Path) -> None:
    async with serving(tmp_path, model_file, WORTH_ANYTHING) as model:
        session, other = await chat(model, SECRET), await chat(model, OPEN)
    (tmp_path / "park").mkdir()
    (tmp_path / f"park/{other}.park.tmp").write_text(SECRET)  # half written in a crash
    async with serving(tmp_path, model_file, KeepSettings(ParkMode.NEVER, disk_budget=0)) as model:
        assert holding(model, tmp_path, SECRET) == {".log", "cache/.kv"}
        await model.sessions.purge(session, 0, REROOT)
        assert holding(model, tmp_path, SECRET) == {".log"}
        assert holding(model, tmp_path, OPEN) == {".log", "cache/.kv"}


async def test_a_file_that_cannot_be_deleted_stops_the_purge(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, model_file, WORTH_ANYTHING) as model:
        session = await chat(model, SECRET)

        def refuse(files: object) -> None:
            raise OSError("read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr(model.keeper.disk, "erase", refuse)
            with pytest.raises(LogIOError, match="read-only"):
                await model.sessions.purge(session, 0, REROOT)
        assert model.sessions.session_ids() == [session]
        await model.sessions.purge(session, 0, REROOT)
        assert holding(model, tmp_path, SECRET) == {".log"}


async def test_a_blob_that_a_living_session_names_stays(tmp_path: Path, model_file: Path) -> None:
    async with serving(tmp_path, model_file, KeepSettings(ParkMode.NEVER, disk_budget=0)) as model:
        first, second = await converse(model, SECRET), await model.sessions.create(None, GREEDY)
        blob = await model.sessions.put_media(SECRET.encode())
        await model.sessions.put_media(b"of no session yet")
        await model.sessions.append_block(second, 1, 7, json.dumps({"blob": blob}))
        await model.sessions.append_block(first, 1, 7, json.dumps({"blob": "../wal.log"}))
        await model.sessions.purge(first, 0, REROOT)
        await model.store.compact_behind()
        assert holding(model, tmp_path, SECRET) == {"media"}
        await model.sessions.purge(second, 0, REROOT)
        await model.store.compact_behind()
        assert [path.name for path in (tmp_path / "media").iterdir()] != [blob]
        assert len(list((tmp_path / "media").iterdir())) == 1
        with trio.fail_after(10):
            assert await model.sessions.collect_media() == (0, 1)
