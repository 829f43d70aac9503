"""The disk tier: a conversation that a client sends again after a restart is warm."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.link import linkw
from superfluid.link.digests import prefix_digest
from superfluid.scheduler.disk import CacheFile, PrefixIndex, key_of
from superfluid.scheduler.keeping import KeepSettings, ParkMode
from tests.scheduler.doubles import MockLink
from tests.scheduler.keeping import PAGE, Daemon, daemon, end_of, paged, prompt, turn
from tests.scheduler.test_parks import FullDisk

DISK = KeepSettings(ParkMode.NEVER)


def files(folder: Path) -> list[int]:
    """Tokens each file covers."""
    if not (folder / "cache").exists():
        return []
    return sorted(int.from_bytes((folder / "cache" / name).read_bytes()[8:16], "little") for name in names(folder))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "cache"))


async def chat(run: Daemon, session: int, stream: list[int], max_tokens: int = 8) -> tuple[list[int], int]:
    """One HTTP turn: the stream after it, and how much of it was warm."""
    end = await run.run(turn(session, stream, max_tokens, native=False))
    await run.keeper.flush()
    return stream + run.store.tokens(session), end.warm_prefix


async def test_a_conversation_sent_again_after_a_restart_is_warm(tmp_path: Path) -> None:
    async with daemon(tmp_path) as run:  # HTTP turns do not park
        stream, _ = await chat(run, 1, prompt(200))
        assert run.metrics.parks_total["lossless"] == 0
        again, _ = await chat(run, 2, [*stream, 1, 2, 3], 30)
        uncut = run.store.tokens(2)
    assert files(tmp_path) == [240]
    async with daemon(tmp_path) as run:
        replayed, warm = await chat(run, 7, [*stream, 1, 2, 3], 30)
        assert warm == 208
        assert run.metrics.disk_seeds_total == 1
        assert run.metrics.resumes_total == 0
        assert run.store.tokens(7) == uncut
        assert replayed == again
        assert run.metrics.prefill_tokens_total == len(stream) + 3 - 208
        assert (await chat(run, 8, [*replayed, 9]))[1] > 208  # now from the engine's own cache
        assert run.metrics.disk_seeds_total == 1


async def test_the_file(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
    (name,) = names(tmp_path)
    assert name == f"{prefix_digest(prompt(192)):016x}.kv"
    data = (tmp_path / "cache" / name).read_bytes()
    assert data[:8] == b"SFCACHE1"
    assert np.frombuffer(data, "<u4", 192, 16).tolist() == prompt(192)
    sealed = data[16 + 4 * 192 :]
    assert int.from_bytes(sealed[:8], "little") == len(sealed) - 8 == 136 + 192 * 64


async def test_a_longer_state_replaces_what_it_covers(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        stream, _ = await chat(run, 1, prompt(200))
        stream, _ = await chat(run, 2, [*stream, *prompt(100, 7000)])
        assert files(tmp_path) == [304]
        await chat(run, 3, prompt(150))  # covered by what is there
        assert files(tmp_path) == [304]
        await chat(run, 4, [*prompt(150), *prompt(100, 8000)])
        assert files(tmp_path) == [256, 304]


async def test_another_tail_uses_the_common_beginning(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(400))
    async with daemon(tmp_path, DISK) as run:
        assert (await chat(run, 2, [*prompt(270), *prompt(50, 9000)]))[1] == 270 // PAGE * PAGE
        assert (await chat(run, 3, [*prompt(40), *prompt(50, 9500)]))[1] == 32  # from the engine's cache by now
        assert run.metrics.disk_seeds_total == 1


async def test_little_in_common_is_not_worth_reading(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(400))
    async with daemon(tmp_path, DISK) as run:
        assert (await chat(run, 2, [*prompt(45), *prompt(200, 9000)]))[1] == 0
    async with daemon(tmp_path, DISK, prefill_s=None) as run:  # as after a start: half of what was worth it once
        assert (await chat(run, 2, [*prompt(190), *prompt(200, 9000)]))[1] == 0
    async with daemon(tmp_path, DISK, prefill_s=None) as run:
        assert (await chat(run, 3, [*prompt(380), *prompt(20, 9000)]))[1] == 368


async def test_least_recently_used_files_go(tmp_path: Path) -> None:
    kept = KeepSettings(ParkMode.NEVER, disk_budget=30_000)  # two files of 192 tokens
    async with daemon(tmp_path, kept) as run:
        for session in range(1, 4):
            await chat(run, session, prompt(200, 1000 * session))
        assert len(names(tmp_path)) == 2
    async with daemon(tmp_path, kept) as run:
        assert (await chat(run, 4, prompt(200, 2000)))[1] == 192  # used: the other one goes next
        await chat(run, 5, prompt(200, 4000))
        assert len(names(tmp_path)) == 2
    async with daemon(tmp_path, kept) as run:
        assert (await chat(run, 7, prompt(200, 2000)))[1] == 192
        assert (await chat(run, 6, prompt(200, 3000)))[1] == 0
    async with daemon(tmp_path, KeepSettings(ParkMode.NEVER, disk_budget=100)) as run:
        await run.keeper.flush()
        assert names(tmp_path) == []
        await chat(run, 1, prompt(200))
        assert names(tmp_path) == []  # larger than the budget


@pytest.mark.parametrize("at", [0, 8, 20, 16 + 4 * 192, 16 + 4 * 192 + 8, 1000, -1])
async def test_a_damaged_file_is_deleted(tmp_path: Path, at: int) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
    (name,) = names(tmp_path)
    path = tmp_path / "cache" / name
    data = bytearray(path.read_bytes())
    data[at] ^= 0x5A
    path.write_bytes(data)
    (tmp_path / "cache/0000000000000000.kv.tmp").touch()
    async with daemon(tmp_path, DISK, prefill_s=None) as run:
        stream, warm = await chat(run, 2, prompt(200))
        assert (warm, len(stream)) == (0, 208)
        assert names(tmp_path) == []
        assert len(run.keeper.disk or ()) == 0


async def test_files_that_change_under_the_server(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
        await chat(run, 2, prompt(200, 1000))
    async with daemon(tmp_path, DISK, prefill_s=None) as run:
        first, second = (tmp_path / f"cache/{prefix_digest(prompt(192, at)):016x}.kv" for at in (0, 1000))
        first.unlink()
        os.truncate(second, 5000)
        assert (await chat(run, 3, prompt(200)))[1] == 0
        assert (await chat(run, 4, prompt(200, 1000)))[1] == 0
        assert names(tmp_path) == []


async def test_what_is_no_regular_file_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache/0000000000000001.kv")
    (tmp_path / "cache/0000000000000002.kv").symlink_to("/dev/zero")
    (tmp_path / "cache/0000000000000003.kv").mkdir()
    async with daemon(tmp_path, DISK) as run:
        await run.keeper.disk_scanned.wait()
        assert len(run.keeper.disk or ()) == 0
        await chat(run, 1, prompt(200))


async def test_another_model_of_the_engine(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
    async with daemon(tmp_path, DISK, engine=paged(bundle_fingerprint=3), prefill_s=None) as run:
        assert (await chat(run, 2, prompt(200)))[1] == 0
        assert names(tmp_path) == []


async def test_no_disk_tier(tmp_path: Path) -> None:
    async with daemon(tmp_path, KeepSettings(disk_budget=0)) as run:
        await chat(run, 1, prompt(200))
    async with daemon(tmp_path, engine=None) as run:
        run.scheduler.rates.prefill_s = 0.001
        await chat(run, 1, prompt(200))  # not worth it
    assert not (tmp_path / "cache").exists()


async def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    disk = FullDisk()
    disk.full = True
    async with daemon(tmp_path, DISK, files=disk) as run:
        await chat(run, 1, prompt(200))
        assert names(tmp_path) == []
        disk.full = False
        await chat(run, 2, prompt(200, 1000))
        assert files(tmp_path) == [192]


async def test_others_go_on_while_a_file_is_read(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
        await chat(run, 2, prompt(200, 1000))
    async with daemon(tmp_path, DISK, prefill_s=None) as run:
        readers = run.keeper._readers
        held = [object() for _ in range(int(readers.total_tokens))]
        for token in held:
            readers.acquire_on_behalf_of_nowait(token)  # the disk does not answer
        waiting = run.scheduler.submit(turn(3, prompt(200), native=False))
        leaving = run.scheduler.submit(turn(4, prompt(200, 1000), native=False))
        assert (await run.run(turn(5, prompt(50, 5000), native=False))).tokens_generated == 8
        assert run.scheduler.queue_depths == [0, 0, 2, 0]
        leaving.cancel()
        assert (await end_of(leaving)).tokens_generated == 0
        assert not waiting.ended
        for token in held:
            readers.release_on_behalf_of(token)
        assert (await end_of(waiting)).warm_prefix == 192
        await run.scheduler.wait_idle()
        assert not run.keeper._loads


async def test_a_job_that_waits_for_a_file_outlives_the_worker(tmp_path: Path) -> None:
    async with daemon(tmp_path, DISK) as run:
        await chat(run, 1, prompt(200))
    spare = MockLink(paged())
    async with daemon(tmp_path, DISK, prefill_s=None, spare=spare) as run:
        run.link.die_at = 0
        readers = run.keeper._readers
        held = [object() for _ in range(int(readers.total_tokens))]
        for token in held:
            readers.acquire_on_behalf_of_nowait(token)
        waiting = run.scheduler.submit(turn(2, prompt(200), native=False))
        assert (await run.run(turn(3, prompt(50, 5000), native=False))).error_code is not None
        for token in held:
            readers.release_on_behalf_of(token)
        assert (await end_of(waiting)).warm_prefix == 192
        assert [r for r in spare.requests if isinstance(r, linkw.Restore)]
    spare.close()


# ---- the index

Streams = st.lists(st.lists(st.sampled_from([1, 2, 256, 65536]), min_size=1, max_size=6), max_size=12)


@settings(max_examples=200)
@given(Streams, st.lists(st.sampled_from([1, 2, 256, 65536]), max_size=7), st.data())
def test_the_index_finds_what_a_search_finds(streams: list[list[int]], wanted: list[int], data: st.DataObject) -> None:
    index = PrefixIndex()
    kept: dict[tuple[int, ...], CacheFile] = {}
    for stream in streams:
        file = CacheFile(Path("x"), key_of(np.array(stream, np.uint32)), 1)
        assert file.ids.tolist() == stream
        index.add(file)
        kept[tuple(stream)] = file
    for gone in data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True)) if kept else []:
        index.remove(kept.pop(gone))
    assert len(index) == len(kept)

    def common(stream: tuple[int, ...]) -> int:
        return sum(1 for at in range(len(stream)) if list(stream[: at + 1]) == wanted[: at + 1])

    ids = np.array(wanted, np.uint32)
    length, found = index.longest(ids)
    assert length == max(map(common, kept), default=0)
    assert (found is None) == (length == 0)
    assert found is None or common(tuple(found.ids.tolist())) == length
    whole = sorted((stream for stream in kept if list(stream) == wanted[: len(stream)]), key=len, reverse=True)
    assert [tuple(file.ids.tolist()) for file in index.prefixes(ids)] == whole
