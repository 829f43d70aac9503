"""A model and its workers: deaths, respawns and their limit, retirement, reloads, changed records."""

import os
import signal
from pathlib import Path

import pytest
import trio

from superfluid.daemon import supervisor
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model, ModelFailed, gen_params
from superfluid.scheduler.generation import Ended, Failure
from tests.daemon.conftest import TOKENS, MakeModel, generate, starts

DIES = ["--mock-die-after", "0"]
HEALTHY: list[str] = []


def worker_pid(model: Model) -> int:
    """The one child process of this one that serves `model`."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = [int(pid) for pid in children if b"--frames-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


def served(ended: Ended) -> bool:
    return ended.error_code is None and ended.tokens_generated == TOKENS


async def retired(model: Model) -> None:
    while model.supervisor.retired is None:
        await trio.lowlevel.checkpoint()


async def test_a_worker_that_dies_between_ticks_is_replaced(mock_model: MakeModel, nursery: trio.Nursery) -> None:
    model = mock_model()
    await nursery.start(model.run)
    before, _ = await generate(model)
    os.kill(worker_pid(model), signal.SIGKILL)
    after, ended = await generate(model)
    assert served(ended)
    assert [event.body for event in after] == [event.body for event in before]
    assert model.metrics.worker_respawns_total == 1


async def test_a_death_in_a_tick_fails_its_lanes_and_the_next_request_is_served(
    mock_model: MakeModel, nursery: trio.Nursery
) -> None:
    model = mock_model([DIES, HEALTHY])
    await nursery.start(model.run)
    events, ended = await generate(model)
    assert not events
    assert ended.error_code == Failure.WORKER_DIED
    assert ended.reason is not None
    assert "exited with 70" in ended.reason  # its last words are quoted
    assert "told to break" in ended.reason
    _, ended = await generate(model)
    assert served(ended)


async def test_three_respawns_without_a_good_tick_retire_the_model_and_a_request_reloads_it(
    mock_model: MakeModel, nursery: trio.Nursery, tmp_path: Path
) -> None:
    model = mock_model([DIES, DIES, DIES, DIES, HEALTHY])
    await nursery.start(model.run)
    session = await model.sessions.create(None, gen_params(model.settle(GenerateOptions())))
    for _ in range(3):
        _, ended = await generate(model)
        assert ended.error_code == Failure.WORKER_DIED
    _, ended = await generate(model)
    await retired(model)
    assert starts(tmp_path) == 4
    assert model.metrics.worker_respawns_total == 3
    await model.ensure_serving()  # a request: it loads at once
    assert starts(tmp_path) == 5
    _, ended = await generate(model)
    assert served(ended)
    assert session in model.sessions.session_ids()  # the store stays the same


async def test_a_good_tick_starts_the_count_anew(mock_model: MakeModel, nursery: trio.Nursery, tmp_path: Path) -> None:
    model = mock_model([["--mock-die-after", "3"]])
    await nursery.start(model.run)
    while starts(tmp_path) < 5:
        await generate(model)
    assert model.metrics.worker_respawns_total >= 4
    await model.ensure_serving()
    assert model.supervisor.retired is None


async def test_a_retired_model_says_why_and_a_failed_reload_has_a_pause(
    mock_model: MakeModel, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = mock_model([HEALTHY, "no weights today", "no weights today", "no weights today", "still none", HEALTHY])
    await nursery.start(model.run)
    os.kill(worker_pid(model), signal.SIGKILL)
    _, ended = await generate(model)  # queued while the respawns fail
    assert ended.error_code == Failure.RETIRED
    assert ended.reason is not None
    assert ended.reason.startswith("generation failed: worker exited with 3: no weights today")
    assert "loads again on its next request" in ended.reason
    with pytest.raises(ModelFailed, match="still none"):
        await model.ensure_serving()
    with pytest.raises(ModelFailed, match="still none") as refused:  # not tried again yet
        await model.ensure_serving()
    assert 0 < refused.value.retry_after <= supervisor.RELOAD_PAUSE
    assert starts(tmp_path) == 5
    monkeypatch.setattr(model.supervisor, "_not_before", 0.0)  # the pause is over
    await model.ensure_serving()
    assert model.loaded
    _, ended = await generate(model)
    assert served(ended)


async def test_a_job_queued_just_after_the_retirement_loads_the_model_again(
    mock_model: MakeModel, nursery: trio.Nursery
) -> None:
    model = mock_model([DIES, DIES, DIES, DIES, HEALTHY])
    await nursery.start(model.run)
    for _ in range(4):
        await generate(model)
    await retired(model)
    _, ended = await generate(model)  # without asking `ensure_serving` first, as a request that was on its way does
    assert served(ended)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ('{"runtime":{"id":"mock","version":"2"},"serving":{"park_lossy":"not now"}}', "runtime.version, serving.park"),
        ('""', "the whole record"),
    ],
)
async def test_a_changed_record_retires_the_model(
    mock_model: MakeModel, nursery: trio.Nursery, after: str, said: str
) -> None:
    first = '{"runtime":{"id":"mock","version":"1"},"serving":{"park_lossy":true}}'
    model = mock_model([["--mock-record", first], ["--mock-record", after]])
    await nursery.start(model.run)
    os.kill(worker_pid(model), signal.SIGKILL)
    _, ended = await generate(model)
    assert ended.error_code == Failure.RETIRED
    assert said in (ended.reason or "")
    await model.ensure_serving()  # it is that model now
    _, ended = await generate(model)
    assert served(ended)


async def test_other_limits_go_on_serving(mock_model: MakeModel, nursery: trio.Nursery) -> None:
    lives = [["--mock-record", f'{{"limits":{{"max_seq_len":{limit}}}}}'] for limit in (1024, 512)]
    model = mock_model(lives)
    await nursery.start(model.run)
    assert model.window == 1024
    os.kill(worker_pid(model), signal.SIGKILL)
    _, ended = await generate(model)
    assert served(ended)
    assert model.window == 512


async def test_a_first_load_that_fails_says_the_last_words(mock_model: MakeModel) -> None:
    model = mock_model(["one\ntwo\nthree\n\nfour"])
    with pytest.RaisesGroup(
        pytest.RaisesExc(ModelFailed, match="^worker exited with 3: two / three / four$"), flatten_subgroups=True
    ):
        await model.run()


async def test_no_worker_and_no_zombie_is_left(mock_model: MakeModel) -> None:
    model = mock_model()
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        pid = worker_pid(model)
        nursery.cancel_scope.cancel()
    assert not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240 (no disk is behind it)
