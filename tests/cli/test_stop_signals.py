"""Signals that stop a server, at any point of its start and of its end."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT = 60.0  # seconds after which what a test waits for will not come
BEFORE_READY = "superfluid: SIGTERM before the server was ready"

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def signalled() -> Iterator[Run]:
    """`signalled("watched,end", model)`: what a server that signals itself at those places exits with and says."""
    with tempfile.TemporaryDirectory(prefix="sf-") as home:

        def run(places: str, model: Path) -> tuple[int, list[str]]:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.cli.signalled",
                    places,
                    str(model),
                    "--port",
                    "0",
                    "--max-context",
                    "512",
                ],
                env=os.environ | {"SUPERFLUID_HOME": home},
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            return done.returncode, done.stderr.splitlines()

        yield run


@pytest.mark.parametrize(
    "places",
    [
        "choosing",
        "swallowed",
        "loop",
        "watched",
        "loop,watched",
        "watched,teardown",
        "choosing,exit",
        "watched,exit",
        "choosing,end",
        "watched,end",
    ],
)
def test_a_start_that_is_stopped_says_so_and_exits_with_1(
    signalled: Run, scripted_gguf: Callable[[str], Path], places: str
) -> None:
    code, lines = signalled(places, scripted_gguf("plain"))
    assert code == 1
    assert lines.count(BEFORE_READY) == 1
    assert all(line.startswith("superfluid: ") for line in lines), "\n".join(lines)


@pytest.mark.parametrize(("places", "code"), [("ready", 0), ("ready,teardown", 0), ("ready,end", 0)])
def test_a_server_that_was_ready_exits_with_0(
    signalled: Run, scripted_gguf: Callable[[str], Path], places: str, code: int
) -> None:
    ended, lines = signalled(places, scripted_gguf("plain"))
    assert ended == code
    assert BEFORE_READY not in lines
    assert all(line.startswith("superfluid: ") for line in lines if not line[:1].isdigit()), "\n".join(lines)


@pytest.mark.parametrize("places", ["exit", "end"])
def test_a_start_that_was_refused_keeps_its_exit_code(signalled: Run, tmp_path: Path, places: str) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("no model")
    code, lines = signalled(places, there)
    assert code == 2
    assert len(lines) == 1
    assert "no runtime here reads" in lines[0]


def test_a_start_that_fails_still_says_why_when_it_is_stopped(
    signalled: Run, scripted_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(scripted_gguf("plain").read_bytes()[:-4096])
    code, lines = signalled("teardown", cut)
    assert code == 1
    assert BEFORE_READY in lines
    assert any("cut.gguf" in line and "serves" not in line for line in lines[lines.index(BEFORE_READY) :]), lines
