"""The daemon's small parts: names, windows, records, sampling, environments, directories."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from superfluid.daemon.capabilities import differing, refusal
from superfluid.daemon.generation import Sampling, SamplingRequest, SamplingRung, settle
from superfluid.daemon.host import EngineHost, WorkerStartError, clean_environment, last_words
from superfluid.daemon.names import served_names
from superfluid.daemon.runtimes import RuntimeCatalog, RuntimeUnusable, runtime_picks
from superfluid.daemon.sizing import GIB, choose_window
from superfluid.daemon.start import ServeLock, ServeLocked, store_directory


def model_file(folder: Path, name: str, hub: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    if hub:
        (folder / "hub.json").write_text(hub)
    return folder / name


def test_names(tmp_path: Path) -> None:
    plain = model_file(tmp_path / "a", "model.gguf")
    again = model_file(tmp_path / "b", "model.gguf")
    third = model_file(tmp_path / "c", "model.gguf")
    hub = model_file(tmp_path / "d", "x.gguf", '{"id": " org/name ", "variant": "Q4_K_M"}')
    variant = model_file(tmp_path / "e", "y.gguf", '{"id": "org/name", "variant": "Q8_0"}')
    odd = model_file(tmp_path / "f", "z.gguf", "not json")
    folder = tmp_path / "MLX-Model"
    folder.mkdir()
    assert served_names([plain, again, third, hub, variant, odd, folder]) == [
        "model", "model.gguf", "c/model.gguf", "org/name", "org/name:Q8_0", "z", "MLX-Model",
    ]  # fmt: skip


SIZING = {"budget_bytes": 16 * GIB, "weight_bytes": 4 * GIB, "kv_bytes_per_token": 1 << 17, "trained_context": 131072}


@pytest.mark.parametrize(
    ("asked", "sizing", "lanes", "tokens", "sized"),
    [
        (None, SIZING, 8, 6144, True),  # 0.6 x (16 - 4 - 2) GiB / (8 x 128 KiB)
        (None, SIZING | {"trained_context": 2048}, 8, 2048, True),
        (None, SIZING | {"weight_bytes": 15 * GIB}, 8, 4096, True),  # the floor
        (None, SIZING | {"budget_bytes": 0}, 8, 8192, False),
        (None, "no device", 8, 8192, False),
        (None, None, 8, 8192, False),
        (100, SIZING, 8, 512, True),
        (10000, SIZING, 8, 10000, True),
        (10000, SIZING | {"trained_context": 2048}, 8, 2048, True),
        (10000, "no device", 8, 10000, True),
    ],
)
def test_windows(asked: int | None, sizing: Any, lanes: int, tokens: int, sized: bool) -> None:
    window = choose_window(asked, sizing, lanes)
    assert (window.tokens, window.sized) == (tokens, sized)
    assert window.why


@pytest.mark.parametrize(
    ("asked", "most", "tokens", "why"),
    [
        (None, 5000, 5000, "the most where none is asked for"),
        (None, 8192, 6144, "8 lanes in 16.0 GiB"),
        (10000, 5000, 10000, "as asked for"),
    ],
)
def test_a_window_that_nobody_asked_for_has_a_bound(asked: int | None, most: int, tokens: int, why: str) -> None:
    window = choose_window(asked, SIZING, 8, most)
    assert (window.tokens, window.why) == (tokens, why)


def test_differing_records() -> None:
    before = {"runtime": {"id": "x", "version": "1"}, "limits": {"max_seqs": 8}, "serving": {"park_lossy": True}}
    assert differing(before, before | {"limits": {"max_seqs": 4}}) == []
    after = before | {"serving": {"park_lossy": "no"}, "runtime": {"id": "x"}, "backend": "cpu"}
    assert differing(before, after) == ["backend", "runtime.version", "serving.park_lossy"]
    assert differing(before, {}) == ["the whole record"]
    nested = {"runtime": {"limits": {"a": 1}}}
    assert differing(nested, {"runtime": {"limits": {"a": 2}}}) == ["runtime.limits.a"]  # the top-level section alone


def test_refusals_of_a_record() -> None:
    record = {"load": {"kv_bits": "has no such setting", "paged_kv": False, "prefix_cache": True}, "serving": 1}
    assert refusal(record, "load", "kv_bits") == "has no such setting"
    assert refusal(record, "load", "paged_kv") == "not supported"
    assert refusal(record, "load", "prefix_cache") is None
    assert refusal(record, "load", "unknown") is None
    assert refusal(record, "serving", "x") is None


@pytest.mark.parametrize(
    ("request_", "operator", "published", "settled"),
    [
        ({}, {}, {}, {"temperature": 1.0, "top_k": 40}),
        ({"temperature": 0.0}, {}, {}, {"temperature": 0.0}),
        ({}, {}, {"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({}, {}, {"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({}, {"top_k": 7}, {"top_p": 0.95}, {"temperature": 1.0, "top_k": 7}),  # the three are one set
        ({"min_p": 0.1}, {"top_k": 7}, {}, {"temperature": 1.0, "min_p": 0.1}),
        ({}, {"repeat_penalty": 1.1}, {"repetition_penalty": 1.3}, {"top_k": 40, "repeat_penalty": 1.1}),
    ],
)
def test_sampling_is_settled_rung_by_rung(
    request_: dict[str, Any], operator: dict[str, Any], published: dict[str, Any], settled: dict[str, Any]
) -> None:
    rungs = SamplingRung(**operator), SamplingRung.published({"sampling_defaults": published})
    found = settle(SamplingRequest(**request_), *rungs)
    assert found == Sampling(**({"temperature": 1.0} | settled))


def test_credentials_stay_here() -> None:
    kept = {"PATH": "x", "HF_TOKEN_PATH": "x", "AWS_ACCESS_KEY_ID": "x", "HF_HOME": "x"}
    secret = ["HF_TOKEN", "hf_token", "GITHUBTOKEN", "A_SECRET", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MYSQL_PASSWD"]
    secret += ["OPENAI_API_KEY", "apikey", "SSH_PRIVATE_KEY", "GOOGLE_CREDENTIALS", "X_SECRET_KEY", "ACCESS_KEY"]
    assert clean_environment(kept | dict.fromkeys(secret, "x")) == kept


def test_last_words() -> None:
    assert last_words("a\n\n  b \nc\n\nd\n") == "b / c / d"
    assert last_words("") == ""


def test_one_server_per_directory(tmp_path: Path) -> None:
    sessions = tmp_path / "made" / "sessions"
    with ServeLock(sessions):
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
        with pytest.raises(ServeLocked, match="another server is already running on"), ServeLock(sessions):
            pass
    with ServeLock(sessions):
        pass


def test_store_directories(tmp_path: Path) -> None:
    assert store_directory(tmp_path, "a", default=True) == tmp_path
    first = store_directory(tmp_path, "org/name:Q4", default=False)
    assert first == tmp_path / "models" / "org_name_Q4"
    assert (first / "model-id").read_text() == "org/name:Q4"
    assert stat.S_IMODE((first / "model-id").stat().st_mode) == 0o600
    assert store_directory(tmp_path, "org/name:Q4", default=False) == first
    other = store_directory(tmp_path, "org_name/Q4", default=False)
    assert other.name.startswith("org_name_Q4-")
    assert len(other.name.rpartition("-")[2]) == 16


def test_runtime_picks() -> None:
    assert runtime_picks(["a", "b"]) == {None: "b"}
    assert runtime_picks(["a", "x=b", "/m=1.gguf=c", "auto"]) == {None: None, "x": "b", "/m=1.gguf": "c"}


@pytest.mark.parametrize("name", ["", "A", ".x", "x@", "x@--all", "x y", "x@a/b"])
def test_what_is_no_runtime_id(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeUnusable, match="is no runtime id") as refused:
        RuntimeCatalog(tmp_path).resolve(name)
    assert refused.value.exit_code == 2


def test_an_install_that_is_named(tmp_path: Path) -> None:
    program = tmp_path / "runtimes" / "odd" / "v1+cpu" / "bin" / "superfluid-worker-odd"
    program.parent.mkdir(parents=True)
    program.touch(0o700)
    catalog = RuntimeCatalog(tmp_path)
    assert "odd" in catalog.ids()
    found = catalog.find("odd@v1+cpu")
    assert found is not None
    assert (found.program, found.source) == ((str(program),), "installed: odd/v1+cpu")
    assert catalog.find("odd") is None  # none is current


async def test_a_program_that_is_being_written_is_tried_again(tmp_path: Path, autojump_clock: object) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o700)
    hosts: list[EngineHost] = []
    writing = program.open("a")

    async def spawn() -> None:
        hosts.append(await EngineHost.spawn([str(program)]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn)
        await trio.sleep(0.035)  # of the test's clock: a few tries
        assert not hosts
        writing.close()
    await hosts[0].close()
    assert hosts[0].status is not None


async def test_a_program_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerStartError, match="could not be started: No such file"):
        await EngineHost.spawn([str(tmp_path / "none")])
    assert len(os.listdir("/proc/self/fd")) == before
