"""Sessions and conversations over restarts of the daemon: a real worker, a tiny model, one directory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trio

from superfluid.daemon.generation import GenerateOptions, SamplingRequest
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import Runtime, RuntimeCatalog
from superfluid.link import session_api as api
from superfluid.link.events import GenParams
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Ended
from superfluid.scheduler.keeping import KeepSettings, ParkMode
from tests import models

LENGTH, FIRST, REST = 300, 21, 40  # tokens of a prompt, of the reply before the restart, and after it
COVERED = LENGTH + FIRST - 1
GREEDY = GenParams(temperature=0.0)
SEEDED = GenParams(temperature=0.9, top_k=50, seed=1234)

ALWAYS = KeepSettings(ParkMode.ALWAYS, disk_budget=0)
NEVER = KeepSettings(ParkMode.NEVER, disk_budget=0)
WORTH_ANYTHING = KeepSettings(worth_seconds=0.0)

SESSIONS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "envelope": GREEDY,
    "payload": GREEDY,
    "short": GREEDY,
    "stale": GREEDY,
}
"""Each with a prompt of its own; the last four are named after what happens to their artifacts."""


@pytest.fixture(scope="module")
def small_gguf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a vocabulary that loads quickly."""
    path = tmp_path_factory.mktemp("small") / "small-random.gguf"
    return models.write_random(path, shared / "data/vocab/ggml-vocab-llama-spm.gguf")


@cache
def runtime_of(path: Path) -> Runtime:
    catalog = RuntimeCatalog(path.parent)
    return catalog.check(catalog.pick(path).id, path)


@asynccontextmanager
async def serving(folder: Path, path: Path, keep: KeepSettings) -> AsyncIterator[Model]:
    """One life of a daemon's model; its end is that of a drain."""
    runtime = await trio.to_thread.run_sync(runtime_of, path)
    config = ModelConfig(
        name="tiny", path=path, runtime=runtime, store=folder, max_context=2048, max_batch=4, keep=keep
    )
    model = Model(config, ModelMetrics())
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        await model.keeper.disk_scanned.wait()
        yield model
        await model.idle()
        nursery.cancel_scope.cancel()


async def generate(model: Model, session: int, n_tokens: int) -> Ended:
    end = (await (await model.sessions.generate(session, n_tokens)).collect())[2]
    assert end.reason is None
    return end


async def begin(model: Model, name: str) -> int:
    session = await model.sessions.create(None, SESSIONS[name])
    first = 7919 * list(SESSIONS).index(name)
    prompt = [(first + 104_729 * n) % 30_000 + 300 for n in range(LENGTH)]
    await model.sessions.append(session, None, prompt)
    return session


def tokens(model: Model, session: int) -> list[int]:
    found: list[int] = model.store.session(session).tokens().tolist()
    return found


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "envelope":
        data[40] ^= 1
    elif how == "payload":
        data[-1000] ^= 1
    elif how == "short":
        del data[-100:]
    else:
        data[16] ^= 1  # the digest of another stream
    path.write_bytes(data)


async def test_sessions_go_on_after_a_restart_as_if_uncut(tmp_path: Path, small_gguf: Path) -> None:
    uncut: dict[str, list[int]] = {}
    async with serving(tmp_path / "uncut", small_gguf, NEVER) as model:
        for name in SESSIONS:
            session = await begin(model, name)
            await generate(model, session, FIRST + REST)
            uncut[name] = tokens(model, session)

    folder = tmp_path / "cut"
    sessions: dict[str, int] = {}
    async with serving(folder, small_gguf, ALWAYS) as model:
        for name in SESSIONS:
            session = sessions[name] = await begin(model, name)
            await generate(model, session, FIRST)
            assert (await model.sessions.inspect(session)).tier == api.Parked(COVERED, 0)
        assert model.metrics.parks_total["lossless"] == len(SESSIONS)
    for name in ("envelope", "payload", "short", "stale"):
        damage(folder / f"park/{sessions[name]}.park", name)

    async with serving(folder, small_gguf, ALWAYS) as model:
        assert (await model.sessions.inspect(sessions["greedy"])).tier == api.Parked(COVERED, 0)
        assert (await model.sessions.inspect(sessions["short"])).tier == api.Parked(
            COVERED, 0
        )  # only the engine can tell
        warm = {name: (await generate(model, sessions[name], REST)).warm_prefix for name in SESSIONS}
        assert {name: tokens(model, sessions[name]) for name in SESSIONS} == uncut
        whole = dict.fromkeys(("greedy", "seeded"), COVERED)
        assert warm == {**dict.fromkeys(SESSIONS, 0), **whole}
        assert model.metrics.resumes_total == 2
        assert model.metrics.prefill_tokens_total == 2 + 4 * LENGTH  # the replies were decoded again
        assert (await model.sessions.inspect(sessions["stale"])).tier == api.Parked(COVERED + REST, 0)


async def test_sessions_park_by_default_at_a_drain(tmp_path: Path, small_gguf: Path) -> None:
    async with serving(tmp_path, small_gguf, WORTH_ANYTHING) as model:
        session = await begin(model, "greedy")
        await generate(model, session, FIRST)
        assert not (tmp_path / "park").exists()
        assert (await model.sessions.inspect(session)).tier == api.Parked(COVERED, 0)
    assert [path.name for path in (tmp_path / "park").iterdir()] == [f"{session}.park"]
    async with serving(tmp_path, small_gguf, WORTH_ANYTHING) as model:
        assert (await generate(model, session, 4)).warm_prefix == COVERED


async def test_a_sliding_window_resumes_whole(tmp_path: Path, shared: Path) -> None:
    path = models.write_random(tmp_path / "window.gguf", shared / "data/vocab/ggml-vocab-llama-spm.gguf", window=128)
    async with serving(tmp_path / "uncut", path, NEVER) as model:
        session = await begin(model, "greedy")
        await generate(model, session, FIRST + REST)
        uncut = tokens(model, session)
    async with serving(tmp_path / "cut", path, ALWAYS) as model:
        session = await begin(model, "greedy")
        await generate(model, session, FIRST)
    async with serving(tmp_path / "cut", path, ALWAYS) as model:
        assert (await generate(model, session, REST)).warm_prefix == COVERED
        assert tokens(model, session) == uncut


# ---- conversations over HTTP


async def reply(model: Model, messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The text of a reply, and how much of its prompt was warm."""
    options = GenerateOptions(SamplingRequest(temperature=0.0), 24, ignore_eos=True)
    (started,) = await model.begin_all(await model.render(messages, [], {}), [options])
    events, _, end = await started.generation.collect()
    assert end.reason is None
    return "".join(getattr(event.body, "text", "") for event in events), end.warm_prefix


async def test_a_conversation_sent_again_after_a_restart_is_warm(tmp_path: Path, tiny_gguf: Path) -> None:
    words = " ".join(f"item {n} of the list" for n in range(80))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": "Which one?"}]
    async with serving(tmp_path, tiny_gguf, WORTH_ANYTHING) as model:
        first, warm = await reply(model, messages)
        assert warm == 0
    assert not (tmp_path / "park").exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    async with serving(tmp_path / "cold", tiny_gguf, NEVER) as model:
        cold, _ = await reply(model, messages)
    async with serving(tmp_path, tiny_gguf, WORTH_ANYTHING) as model:
        again, warm = await reply(model, messages)
        assert again == cold
        assert warm > 350
        assert model.metrics.disk_seeds_total == 1
