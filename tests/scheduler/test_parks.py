"""Parked sessions: kept as they end, written off the tick path, resumed by a later run, never wrong."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from superfluid.engines.mock.config import MockConfig, default_spaces
from superfluid.link import linkw
from superfluid.link.codes import SPACE_NO_OPERATIONS, Status
from superfluid.scheduler import parks
from superfluid.scheduler.classes import Class
from superfluid.scheduler.exports import EXPORT_BURST, EXPORT_SHARE, ExportBudget
from superfluid.scheduler.generation import Failure
from superfluid.scheduler.keeping import SPARE_SECONDS, KeepSettings, ParkMode
from superfluid.scheduler.loop import SchedulerConfig
from superfluid.scheduler.rates import Rates
from superfluid.sessions import park
from superfluid.sessions.files import Files
from superfluid.shm.segment import Segment
from tests.scheduler.doubles import MockLink
from tests.scheduler.keeping import PAGE, Daemon, daemon, end_of, paged, prompt, turn

ALWAYS = KeepSettings(ParkMode.ALWAYS, disk_budget=0)


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "park")) if (folder / "park").exists() else []


def stream_of(run: Daemon, session: int, start: list[int]) -> list[int]:
    return start + run.store.tokens(session)


async def park_one(folder: Path, length: int = 200, settings: KeepSettings = ALWAYS) -> list[int]:
    """A session that one run parks; its stream."""
    async with daemon(folder, settings) as run:
        await run.run(turn(1, prompt(length)))
        await run.keeper.flush()
        return stream_of(run, 1, prompt(length))


# ---- parking


async def test_an_idle_session_is_written_after_five_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with daemon(tmp_path) as run:
        await run.run(turn(1, prompt(200)))
        assert run.metrics.parks_total == {"lossless": 1, "lossy": 0}
        assert run.keeper.tier(1) == (192, 0)
        assert listing(tmp_path) == []
        await trio.sleep(parks.IDLE_SECONDS - 0.1)
        assert listing(tmp_path) == []
        await trio.sleep(0.2)
        await run.keeper.flush()
        assert listing(tmp_path) == ["1.park"]
        assert run.keeper.tier(1) == (192, 0)
        head = run.keeper.parks.artifacts.head(1)
        assert head is not None
        assert head.fits(prompt(200))
        assert (tmp_path / "park/1.park").read_bytes()[:8] == park.MAGIC_2
        assert not run.keeper.parks._waiting


async def test_a_session_that_goes_on_is_not_idle(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with daemon(tmp_path) as run:
        await run.run(turn(1, prompt(200)))
        await trio.sleep(4)
        run.link.tick_s = 3.0
        await run.run(turn(1, stream_of(run, 1, prompt(200)), 4))
        assert listing(tmp_path) == []
        assert run.keeper.tier(1) == (208, 0)  # the newer state replaced the one that waited
        assert len(run.keeper.parks._waiting) == 1
        await trio.sleep(6)
        await run.keeper.flush()
        assert listing(tmp_path) == ["1.park"]


async def test_what_is_not_worth_half_a_second_is_not_kept(tmp_path: Path) -> None:
    async with daemon(tmp_path) as run:
        await run.run(turn(1, prompt(40)))
        run.scheduler.rates.prefill_s = None  # nothing is known of its worth
        await run.run(turn(2, prompt(200, start=1000)))
        assert run.metrics.parks_total["lossless"] == 0
        assert run.metrics.exports_skipped_total == 0
        assert run.keeper.tier(1) is None


async def test_exports_keep_within_their_time(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with daemon(tmp_path, KeepSettings(disk_budget=0)) as run:
        run.link.op_s = 0.3
        for session in range(1, 4):
            await run.run(turn(session, prompt(200, start=1000 * session)))
        assert run.metrics.parks_total["lossless"] == 1  # the second one would take more than is left
        assert run.metrics.exports_skipped_total == 2
        await trio.sleep(10)
        await run.run(turn(4, prompt(200, start=4000)))
        assert run.metrics.parks_total["lossless"] == 2


@pytest.mark.parametrize("fails", [False, True])
async def test_exports_take_a_fiftieth_of_the_time_and_the_burst(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, fails: bool
) -> None:
    costs = (0.05, 0.11, 0.02, 0.16)
    async with daemon(tmp_path, KeepSettings(disk_budget=0)) as run:
        begun, spent = trio.current_time(), 0.0
        run.link.op_failure = Status.Busy if fails else None
        for session in range(1, 121):
            run.link.op_s = costs[session % len(costs)]
            run.link.requests.clear()
            await run.run(turn(session, prompt(200, start=200 * session), 1))
            spent += run.link.op_s * sum(isinstance(request, linkw.Snapshot) for request in run.link.requests)
            # what an export turns out to take over its estimate is paid back before the next one
            assert spent <= EXPORT_BURST + EXPORT_SHARE * (trio.current_time() - begun) + max(costs)
            await trio.sleep(1)
        assert spent >= EXPORT_SHARE * (trio.current_time() - begun)
        assert run.metrics.exports_skipped_total > 60
        assert run.metrics.parks_total["lossless"] == (0 if fails else 120 - run.metrics.exports_skipped_total)


def test_the_budget_fills_with_a_fiftieth_of_the_time() -> None:
    budget, rates = ExportBudget(), Rates(prefill_s=0.001)
    assert budget.worth(501, rates)
    assert not budget.worth(500, rates)
    assert budget.worth(10_000, Rates()) is None
    assert budget.affords(1000, 0.0)
    budget.measure(1000, 1_000_000, 0.4)
    budget.charge(0.4, 0.0)
    assert budget.affords(249, 0.0)
    assert not budget.affords(251, 0.0)
    assert not budget.affords(1000, 14.9)
    assert budget.affords(1000, 15.1)
    assert not budget.affords(1300, 10_000.0)  # more than was ever saved up


async def test_park_writes_at_once_and_whatever_it_is_worth(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS, prefill_s=None) as run:
        await run.run(turn(1, prompt(40)))
        await run.keeper._writer.wait_idle()
        assert listing(tmp_path) == ["1.park"]
        await run.run(turn(2, prompt(10), 4))  # under a page
        await run.run(turn(3, prompt(200), native=False))  # over HTTP
        await run.run(turn(None, prompt(200), raw=True))
        await run.keeper.flush()
        assert listing(tmp_path) == ["1.park"]


async def test_no_park_leaves_what_is_there_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = await park_one(tmp_path)
    async with daemon(tmp_path, KeepSettings(ParkMode.NEVER, disk_budget=0)) as run:
        assert "1 parked sessions are left alone" in caplog.text
        end = await run.run(turn(1, [*stream, 5]))
        await run.run(turn(2, prompt(200, start=5000)))
        await run.keeper.flush()
        assert end.warm_prefix == 0
        assert run.keeper.tier(1) is None
    assert listing(tmp_path) == ["1.park"]


async def test_a_preempted_lane_parks_and_an_http_one_leaves_nothing(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS, config=SchedulerConfig(max_batch=1)) as run:
        agent = run.scheduler.submit(turn(1, prompt(100), 200, native=False, klass=Class.BACKGROUND))
        while not run.link.plans:
            await trio.lowlevel.checkpoint()
        urgent = run.scheduler.submit(turn(2, prompt(50, start=9000), 4, klass=Class.INTERACTIVE))
        await end_of(urgent)
        assert run.metrics.preemptions_total == 1
        assert run.keeper.tier(1) is not None
        assert (await end_of(agent)).tokens_generated == 200
        await run.keeper.flush()
        assert listing(tmp_path) == ["2.park"]
        assert run.metrics.parks_total["lossless"] == 2


async def test_a_lossy_park_is_not_published(tmp_path: Path) -> None:
    settings = KeepSettings(ParkMode.ALWAYS, lossy=True, disk_budget=0)
    async with daemon(tmp_path, settings, config=SchedulerConfig(max_batch=1)) as run:
        await run.run(turn(1, prompt(200)))
        assert run.metrics.parks_total == {"lossless": 0, "lossy": 1}
        assert run.keeper.tier(1) == (192, 1)
        assert [retire.publish_to_cache for plan in run.link.plans for retire in plan.retires] == [False]
        again = await run.run(turn(1, stream_of(run, 1, prompt(200))))
        assert again.warm_prefix == 192
        assert run.metrics.resumes_total == 1


async def test_a_chosen_seed_does_not_go_on_from_a_lossy_state(tmp_path: Path) -> None:
    settings = KeepSettings(ParkMode.ALWAYS, lossy=True, disk_budget=0)
    async with daemon(tmp_path, settings, config=SchedulerConfig(max_batch=1)) as run:
        chosen = run.scheduler.submit(turn(1, prompt(100), 200, klass=Class.BACKGROUND, seed=7, seed_chosen=True))
        while not run.link.plans:
            await trio.lowlevel.checkpoint()
        await end_of(run.scheduler.submit(turn(2, prompt(10, start=9000), 4, klass=Class.INTERACTIVE)))
        assert run.keeper.tier(1) is None
        await end_of(chosen)
        assert run.keeper.tier(1) is not None  # at its end it may


async def test_a_space_without_operations_refuses_the_park(tmp_path: Path) -> None:
    engine = paged()
    engine.spaces[0].flags = SPACE_NO_OPERATIONS
    async with daemon(tmp_path, ALWAYS, engine=engine) as run:
        await run.run(turn(1, prompt(200)))
        assert run.metrics.unservable_park_refusals_total == 1
        assert run.metrics.parks_total["lossless"] == 0
    engine = paged(record='{"serving": {"park_lossless": "not here"}}')
    async with daemon(tmp_path, ALWAYS, engine=engine) as run:
        await run.run(turn(1, prompt(200)))
        assert run.keeper.tier(1) is None


# ---- resuming


async def test_a_later_run_resumes_without_prefilling(tmp_path: Path) -> None:
    async with daemon(tmp_path / "uncut") as run:
        await run.run(turn(1, prompt(200), 8))
        await run.run(turn(1, stream_of(run, 1, prompt(200)), 30))
        uncut = run.store.tokens(1)
    stream = await park_one(tmp_path)
    async with daemon(tmp_path, ALWAYS) as run:
        assert run.keeper.tier(1) == (192, 0)
        end = await run.run(turn(1, stream, 30))
        assert end.warm_prefix == 192
        assert run.metrics.resumes_total == 1
        assert run.metrics.warm_prefix_tokens_total == 192
        assert run.metrics.prefill_tokens_total == len(stream) - 192
        assert stream[200:] + run.store.tokens(1) == uncut
        assert run.keeper.tier(1) == ((len(stream) + 29) // PAGE * PAGE, 0)


async def test_a_warm_cache_is_not_replaced(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS) as run:
        await run.run(turn(1, prompt(200)))
        await run.keeper.flush()
        end = await run.run(turn(1, [*stream_of(run, 1, prompt(200)), 7]))
        assert end.warm_prefix >= 192
        assert run.metrics.resumes_total == 0


async def test_a_stale_artifact_resumes_cold(tmp_path: Path) -> None:
    stream = await park_one(tmp_path)
    async with daemon(tmp_path, KeepSettings(disk_budget=0), prefill_s=None) as run:
        end = await run.run(turn(1, [77, *stream[1:]]))
        assert (end.warm_prefix, end.tokens_generated) == (0, 8)
        assert (await run.run(turn(1, stream[:100]))).warm_prefix == 0  # shorter than what it covers
        assert not [request for request in run.link.requests if isinstance(request, linkw.Restore)]


@pytest.mark.parametrize("at", [0, 8, 30, 40, 60, 150, 300, -1])
async def test_a_damaged_artifact_resumes_cold(tmp_path: Path, at: int) -> None:
    stream = await park_one(tmp_path)
    path = tmp_path / "park/1.park"
    data = bytearray(path.read_bytes())
    data[at] ^= 0x5A
    path.write_bytes(data)
    async with daemon(tmp_path, KeepSettings(disk_budget=0), prefill_s=None) as run:
        live = len(list(run.link.engine._sequences))
        end = await run.run(turn(1, stream))
        assert (end.warm_prefix, end.tokens_generated) == (0, 8)
        assert run.metrics.resumes_total == 0
        assert run.keeper.tier(1) is None or at in (8, 30)
        assert len(list(run.link.engine._sequences)) <= live + 1  # nothing but what was published


@pytest.mark.parametrize("size", [0, 20, 32, 40, 200, 1000])
async def test_a_cut_artifact_resumes_cold(tmp_path: Path, size: int) -> None:
    stream = await park_one(tmp_path)
    os.truncate(tmp_path / "park/1.park", size)
    async with daemon(tmp_path, KeepSettings(disk_budget=0), prefill_s=None) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 0
        assert run.keeper.tier(1) is None


async def test_an_artifact_that_vanishes_resumes_cold(tmp_path: Path) -> None:
    stream = await park_one(tmp_path)
    async with daemon(tmp_path, KeepSettings(disk_budget=0), prefill_s=None) as run:
        (tmp_path / "park/1.park").unlink()
        assert run.keeper.tier(1) is None
        assert (await run.run(turn(1, stream))).warm_prefix == 0


async def test_another_engine_does_not_take_it(tmp_path: Path) -> None:
    stream = await park_one(tmp_path)
    async with daemon(tmp_path, KeepSettings(disk_budget=0), engine=paged(bundle_fingerprint=5), prefill_s=None) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 0
    assert listing(tmp_path) == ["1.park"]  # the engine it is of may come back
    async with daemon(tmp_path, ALWAYS) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 192


async def test_several_spaces_are_parked_and_adopted_together(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS, engine=MockConfig()) as run:
        await run.run(turn(1, prompt(200), 30))
        await run.keeper.flush()
        stream = stream_of(run, 1, prompt(200))
    assert (tmp_path / "park/1.park").read_bytes()[:8] == park.MAGIC_3
    async with daemon(tmp_path, ALWAYS, engine=MockConfig()) as run:
        assert run.keeper.tier(1) == (224, 0)
        assert (await run.run(turn(1, stream))).warm_prefix == 224
        assert run.metrics.resumes_total == 1
        restored = [request.space_id for request in run.link.requests if isinstance(request, linkw.Restore)]
        assert restored == [1, 2]
    fewer = MockConfig(spaces=[*default_spaces(), linkw.StateSpaceDesc(3, 3, 1, blob_bytes=64, name="more")])
    async with daemon(tmp_path, KeepSettings(disk_budget=0), engine=fewer, prefill_s=None) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 0  # a space of it is not in the artifact


async def test_a_full_engine_makes_room_for_a_state(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS, engine=paged(pool_bytes=64 * 450)) as run:
        await run.run(turn(1, prompt(200)))
        await run.run(turn(2, prompt(280, start=5000)))  # pushes the first one's state out of the engine's cache
        end = await run.run(turn(1, stream_of(run, 1, prompt(200))))
        assert end.warm_prefix == 192
        assert [request for request in run.link.requests if isinstance(request, linkw.CacheEvictReq)]


async def test_parks_outlive_the_worker(tmp_path: Path) -> None:
    spare = MockLink(paged())
    async with daemon(tmp_path, spare=spare) as run:
        await run.run(turn(1, prompt(200)))
        run.link.die_at = 0
        assert (await run.run(turn(2, prompt(30, start=5000)))).error_code == Failure.WORKER_DIED
        end = await run.run(turn(1, stream_of(run, 1, prompt(200))))
        assert end.warm_prefix == 192
        assert run.metrics.resumes_total == 1
    spare.close()


async def test_a_directory_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "park").symlink_to("park")  # reading it fails, for root too
    (tmp_path / "cache").symlink_to("cache")
    async with daemon(tmp_path, KeepSettings(ParkMode.ALWAYS)) as run:
        assert (await run.run(turn(1, prompt(200)))).tokens_generated == 8
        await run.run(turn(2, prompt(200, 1000), native=False))
        await run.keeper.flush()
        assert run.keeper.tier(1) is None
    assert "is not written" in caplog.text


# ---- the memory of exports


async def test_the_memory_of_an_export_is_used_again(tmp_path: Path) -> None:
    async with daemon(tmp_path, ALWAYS) as run:
        first = await memory_of_a_turn(run, prompt(200))
        stream = stream_of(run, 1, prompt(200))
        for _ in range(4):
            assert await memory_of_a_turn(run, stream) is first
            stream = stream_of(run, 1, prompt(200))
    assert first.fd < 0
    async with daemon(tmp_path, ALWAYS) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 208


async def memory_of_a_turn(run: Daemon, stream: list[int]) -> Segment:
    """The one segment that lies unused after a turn of session 1."""
    await run.run(turn(1, stream, 4))
    await run.keeper.flush()
    (spare,) = run.keeper._spares._spares
    return spare.segment


async def test_a_longer_states_memory_leaves_no_trace_in_a_shorter_ones_file(tmp_path: Path) -> None:
    for name in ("alone", "after"):
        (tmp_path / name).mkdir()
    await park_one(tmp_path / "alone", 180)
    async with daemon(tmp_path / "after", ALWAYS) as run:
        await run.run(turn(2, prompt(240, 1000)))
        await run.keeper.flush()
        await run.run(turn(1, prompt(180)))
        await run.keeper.flush()
    alone, after = (tmp_path / name / "park/1.park" for name in ("alone", "after"))
    assert alone.read_bytes() == after.read_bytes()


async def test_a_state_that_waits_keeps_its_memory(tmp_path: Path) -> None:
    async with daemon(tmp_path) as run:
        await run.run(turn(1, prompt(200)))
        stream = stream_of(run, 1, prompt(200))
        await run.run(turn(2, prompt(200, 1000)))
        await run.run(turn(3, prompt(200, 2000)))
        await run.keeper.flush()
    async with daemon(tmp_path) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 192


async def test_memory_that_is_not_used_is_given_back(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with daemon(tmp_path, ALWAYS) as run:
        await run.run(turn(1, prompt(200)))
        await run.keeper.flush()
        assert run.keeper._spares.size > 0
        await trio.sleep(2 * SPARE_SECONDS)
        assert run.keeper._spares.size == 0


# ---- a disk that is slow, or full


class FullDisk(Files):
    """Writes of more than a few bytes fail while `full`."""

    full = False

    def write_behind(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.full and offset + len(data) > 100:
            os.pwrite(descriptor, data[:50], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_behind(descriptor, data, offset)


async def test_a_full_disk_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FullDisk()
    async with daemon(tmp_path, ALWAYS, files=files) as run:
        await run.run(turn(1, prompt(200)))
        await run.keeper.flush()
        before = (tmp_path / "park/1.park").read_bytes()
        files.full = True
        stream = stream_of(run, 1, prompt(200))
        assert (await run.run(turn(1, stream, 50))).tokens_generated == 50
        await run.keeper.flush()
        assert "No space left on device" in caplog.text
        assert listing(tmp_path) == ["1.park"]
        assert (tmp_path / "park/1.park").read_bytes() == before
        stream = stream_of(run, 1, prompt(200))
    async with daemon(tmp_path, ALWAYS) as run:
        assert (await run.run(turn(1, stream))).warm_prefix == 192


async def test_a_writer_that_is_behind_drops_the_artifact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with daemon(tmp_path, ALWAYS) as run:
        held = trio.Event()
        run.keeper._writer._limiter.acquire_on_behalf_of_nowait(held)  # the thread does not come free
        for session in range(1, 8):
            assert (await run.run(turn(session, prompt(40, start=100 * session)))).tokens_generated == 8
        assert "the park of session 6 is dropped" in caplog.text
        run.keeper._writer._limiter.release_on_behalf_of(held)
        await run.keeper.flush()
        assert listing(tmp_path) == [f"{session}.park" for session in range(1, 6)]


async def test_the_oldest_is_written_first_when_too_much_waits(tmp_path: Path) -> None:
    async with daemon(tmp_path) as run:
        run.keeper.parks._most_waiting = 30_000  # two states of 192 tokens
        for session in range(1, 4):
            await run.run(turn(session, prompt(200, start=1000 * session)))
        await run.keeper._writer.wait_idle()
        assert listing(tmp_path) == ["1.park"]


async def test_the_directory_keeps_within_its_budget(tmp_path: Path) -> None:
    async with daemon(tmp_path, KeepSettings(ParkMode.ALWAYS, park_budget=30_000, disk_budget=0)) as run:
        for session in range(1, 5):
            await run.run(turn(session, prompt(200, start=1000 * session)))
            await run.keeper.flush()
            if (tmp_path / f"park/{session}.park").exists():
                os.utime(tmp_path / f"park/{session}.park", (session, session))
        assert listing(tmp_path) == ["3.park", "4.park"]
        assert run.keeper.tier(1) is None
        run.keeper.purged(3)
        await run.keeper.flush()
        assert listing(tmp_path) == ["4.park"]


@pytest.mark.parametrize("more", [b"\0", b"more"])
async def test_an_artifact_with_more_than_its_state_resumes_cold(
    tmp_path: Path, more: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await park_one(tmp_path)
    with (tmp_path / "park/1.park").open("ab") as file:
        file.write(more)
    async with daemon(tmp_path, ALWAYS) as run:
        assert (await run.run(turn(1, [*stream, 5]))).warm_prefix == 0
        assert "where its state has" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
async def test_what_is_no_regular_file_is_no_artifact(tmp_path: Path, kind: str) -> None:
    stream = await park_one(tmp_path)
    path = tmp_path / "park/1.park"
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    assert park.Parks(tmp_path / "park", 0).read(1, np.array(stream, np.uint32)) is None
    async with daemon(tmp_path, ALWAYS) as run:
        assert run.keeper.tier(1) is None
        assert (await run.run(turn(1, [*stream, 5]))).warm_prefix == 0
