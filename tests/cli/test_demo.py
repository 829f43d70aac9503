"""What is said of the demo model's fetch where stderr is no terminal."""

from pathlib import Path

import pytest

from superfluid.cli import demo
from superfluid.cli.server_address import refusal
from superfluid.llama.demo import MODEL_BYTES, demo_path
from tests.cli.conftest import RunCommand


def put(home: Path) -> Path:
    path = demo_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(MODEL_BYTES)  # a hole: its size is all that is looked at
    return path


def test_a_model_that_is_here_is_told_by_its_path_alone(superfluid: RunCommand, tmp_path: Path) -> None:
    path = put(tmp_path / "home")
    done = superfluid("pull", "demo")
    assert (done.code, done.out, done.err) == (0, f"{path}\n", "")


def test_a_fetch_is_told_at_its_begin_and_its_end(
    superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "demo_model", lambda home, offline: put(home))
    done = superfluid("pull", "demo")
    path = demo_path(tmp_path / "home")
    assert (done.code, done.out) == (0, f"{path}\n")
    assert done.err.splitlines() == [
        "superfluid: fetching the demo model (98 MB)",
        f"superfluid: the demo model is here: {path}",
    ]


def test_an_error_reply_is_told_in_its_words() -> None:
    assert refusal(b'{"error":{"message":"Invalid or missing API key"}}') == "Invalid or missing API key"
    assert refusal(b"<html>\n") == "<html>"
