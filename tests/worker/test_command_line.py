"""A worker's command line: commands, flags, and exit codes."""

import json
from pathlib import Path

import pytest

from superfluid.worker.command_line import CommandLine, UsageError, parse
from superfluid.worker.worker_main import find_runtime, main, workerd
from tests.kit.toy_runtime import Toy

STREAMS = ["--frames-fd", "3", "--fd-channel-fd", "4"]


def read(*argv: str) -> CommandLine:
    return parse(Toy(), argv)


def test_serving() -> None:
    line = read("--threads", "4", "--model", "a", "--model", "/m.toy", "--max-batch", "2", *STREAMS, "--repack", "off")
    assert line.command == "serve"
    assert (line.frames_fd, line.fd_channel_fd) == (3, 4)
    assert line.args.model == Path("/m.toy")  # a later one wins
    assert (line.args.max_context, line.args.max_batch, line.args.kv_bits) == (4096, 2, 0)
    assert line.args.options == {"threads": 4, "repack": False}
    assert line.args.flags == {}


def test_the_window_is_at_least_512() -> None:
    assert read("--model", "m", "--max-context", "16", *STREAMS).args.window == 512
    assert read("--model", "m", "--max-context", "513", *STREAMS).args.window == 513


@pytest.mark.parametrize(
    "argv", [["--toy-lib", "x", "check", "--scale", "2"], ["check", "--toy-lib", "x", "--scale", "2"]]
)
def test_options_ride_before_or_after_the_command(argv: list[str]) -> None:
    line = read(*argv)
    assert line.command == "check"
    assert line.args.flags == {"--toy-lib": "x"}
    assert line.args.options == {"scale": 2.0}


def test_a_value_may_look_like_a_command_or_a_flag() -> None:
    assert read("--model", "check", *STREAMS).command == "serve"
    assert read("check", "--model", "--odd").args.model == Path("--odd")


def test_plans_and_pulls() -> None:
    request = read(
        "plan", "--untested", "--backend", "CUDA", "--from", "u", "--sha256", "AB", "--version", "V"
    ).plan_request
    assert (request.version, request.backend, request.source, request.sha256, request.untested) == (
        "V", "cuda", "u", "ab", True
    )  # fmt: skip
    line = read("pull", "--no-extras", "org/model:q4", "--file", "f", "--offline")
    assert line.name == "org/model:q4"
    assert line.given == {"--no-extras": None, "--file": "f", "--offline": None}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "more"], "unexpected argument more"),
        (["check", "check"], "unexpected argument check"),
        (["bogus"], "unexpected argument bogus"),
        (["check", "--model"], "--model needs a value"),
        (["check", "--no-such-flag", "x"], "unknown flag --no-such-flag"),
        (["check", "--model=x", "y"], "unknown flag --model=x"),
        (["check", "--venv", "x"], "unknown flag --venv"),
        (["check", "--frames-fd", "3"], "unknown flag --frames-fd"),
        (["check", "--kv-bits", "8"], "--kv-bits 8: toys have no cache"),
        (["check", "--threads", "900"], "--threads: 0 to 512 expected, got 900"),
        (["--model", "x", "--max-context", "0", *STREAMS], "--max-context: at least 1 expected, got 0"),
        (["--model", "x"], "serving needs --frames-fd and --fd-channel-fd"),
        (STREAMS, "serving needs --model"),
        (["install", "--into", "x"], "install needs --plan"),
        (["pull"], "pull needs a model id (org/model[:tag])"),
        (["pull", "a/b", "c/d"], "unexpected argument c/d"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(*argv)
    assert str(caught.value) == message
    assert main(Toy(), argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"superfluid-worker-toy: {message}\nusage: superfluid-worker-toy ")


def test_kv_bits_of_0_are_always_taken() -> None:
    assert read("check", "--kv-bits", "0").args.kv_bits == 0


# ---- commands


def answer(capsys: pytest.CaptureFixture[str], *argv: str, toy: Toy | None = None) -> tuple[int, str, str]:
    code = main(toy or Toy(), argv)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "version") == (0, "toy 1.0\n", "")
    assert answer(capsys, "version", toy=Toy("no libtoy")) == (1, "", "superfluid-worker-toy: no libtoy\n")


def test_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.toy").write_bytes(b"TOYS")
    code, out, _ = answer(capsys, "check", "--model", str(tmp_path / "a.toy"))
    assert code == 0 and json.loads(out)["model"]["reads"] is True
    code, out, _ = answer(capsys, "check", "--model", str(tmp_path / "b"))
    assert code == 1 and "no such file" in json.loads(out)["model"]["reads"]
    code, out, _ = answer(capsys, "check", toy=Toy("no libtoy"))
    assert code == 1 and json.loads(out)["available"] == "no libtoy"


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "compat", "--json")
    assert (code, json.loads(out)) == (0, {"tested": ["2.0", "1.0"]})
    code, out, _ = answer(capsys, "versions")
    found = json.loads(out)
    assert code == 0 and set(found) == {"host", "describe", "versions", "unlisted"}
    assert found["versions"][0]["plan"]["version"] == "2.0"
    assert found["versions"][1] == {"version": "1.0", "error": "1.0 has no build for this host"}
    assert found["unlisted"] is None
    code, out, _ = answer(capsys, "plan", "--backend", "CPU")
    assert code == 0 and json.loads(out)["plans"] == [{"id": "toy", "version": "2.0", "backend": "cpu"}]
    code, out, err = answer(capsys, "plan", "--version", "1.0")
    assert (code, out) == (1, "") and "1.0 has no build for this host" in err


def test_installs_and_pulls(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "install", "--into", "/x", "--plan", "{}")
    assert (code, out) == (1, "") and "not installed by its worker" in err
    code, out, _ = answer(capsys, "pull", "org/m", "--offline", "--no-extras")
    assert (code, out) == (0, "/models/org/m/offline-[('no-extras', None)]\n")


# ---- superfluid-workerd


def test_commands_need_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert workerd(["check"]) == 2
    assert "check needs --engine" in capsys.readouterr().err
    assert workerd(["check", "--engine"]) == 2
    assert workerd(["check", "--engine", "nowhere"]) == 2
    assert "no runtime 'nowhere' here (have: " in capsys.readouterr().err


def test_an_unknown_runtime_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="mock"):
        find_runtime("nowhere")
