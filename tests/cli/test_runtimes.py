"""`superfluid runtimes`: the table, its JSON, and who serves a model."""

import json
from pathlib import Path

import pytest

from superfluid.cli.runtimes import COLUMNS
from tests.cli.conftest import RunCommand
from tests.cli.test_serve_start import READY, REPORT, worker

NAMES = ["threads", "base", "repack", "flash", "lib"]


def test_the_table(superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program = worker(tmp_path, REPORT, monkeypatch)
    done = superfluid("runtimes")
    assert done.code == 0
    lines = done.out.splitlines()
    assert " ".join(lines[0].split()) == " ".join(COLUMNS)
    assert lines[1].startswith("llamacpp  ready ")
    assert lines[1].endswith("built in")
    assert lines[2].startswith("other     not installed  -")
    assert lines[2].endswith(f"environment: ~/{program.name}")
    assert lines[3:] == ["other: there is no such chip here", "installed runtimes: ~/home/runtimes"]
    assert not [line for line in lines if line != line.rstrip()]


def test_json(superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = worker(tmp_path, None, monkeypatch)
    done = superfluid("runtimes", "--json")
    llamacpp, other = json.loads(done.out)
    assert (llamacpp["id"], llamacpp["state"], llamacpp["ready"]) == ("llamacpp", "ready", True)
    assert llamacpp["aliases"] == ["llama.cpp", "llama-cpp"]
    assert llamacpp["reads"] == "a GGUF file"
    assert llamacpp["tokenizer_source"] == "library"
    assert llamacpp["worker"]["source"] == "built in"
    assert {"id", "describe", "file"} == llamacpp["formats"][0].keys()
    assert "threads" in [option["name"] for option in llamacpp["options"]]
    assert None not in llamacpp.values()
    assert (other["id"], other["state"]) == ("other", "broken")
    assert "library not found" in other["ready"]
    assert other["worker"] == {"path": str(program), "source": "environment"}


def test_who_serves_a_model(superfluid: RunCommand, tiny_gguf: Path) -> None:
    done = superfluid("runtimes", tiny_gguf)
    assert done.code == 0
    assert done.out.startswith(f"{tiny_gguf}: a GGUF file\n")
    assert "llamacpp serves it" in done.out
    shown = json.loads(superfluid("runtimes", tiny_gguf, "--json").out)
    assert (shown["model"], shown["format"], shown["serves"]) == (str(tiny_gguf), "gguf", "llamacpp")
    assert shown["runtimes"][0]["reads_model"] is True
    assert shown["runtimes"][0]["model_facts"]["architecture"] == "llama"


def test_a_model_that_nothing_serves(superfluid: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    done = superfluid("runtimes", tmp_path / "notes.txt")
    assert done.code == 1
    assert "no runtime here reads" in done.out
    shown = superfluid("runtimes", tmp_path / "notes.txt", "--json")
    assert shown.code == 1
    assert "no runtime here reads" in json.loads(shown.out)["serves"]["none"]
    assert superfluid("runtimes", "/not/there").code == 2


def test_the_options_of_a_runtime(superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(tmp_path, READY, monkeypatch)
    lines = superfluid("runtime", "options", "other").out.splitlines()
    assert lines[0].split() == ["OPTION", "TAKES", "DEFAULT"]
    assert [line.split()[0] for line in lines[1:]] == [f"--other-{name}" for name in NAMES]
    assert "int, 0 to 512" in lines[1]
    assert "auto|on" in lines[4]
    shown = json.loads(superfluid("runtime", "options", "o", "--json").out)
    assert shown["runtime"] == "other"
    assert [option["name"] for option in shown["options"]] == NAMES
    for name, code in (("nope", 2), ("No", 2), ("other@1", 2)):
        assert superfluid("runtime", "options", name).code == code
