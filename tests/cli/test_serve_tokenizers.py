"""Models whose tokenizer is not a GGUF file's, served by workers that third parties ship."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import echo_runtimes
from tests.cli.conftest import RunCommand
from tests.cli.server import Server, text_of
from tests.codec.test_tokenizer_library import compiled as compiled

ROOT = Path(__file__).resolve().parents[2]
ASKED = "Grüße, <|end|> and <|s|> are text \U0001f600"  # content forms no marker, whatever the tokenizer parses


@pytest.fixture
def distribution(tmp_path: Path) -> dict[str, str]:
    """An environment in which a distribution with the runtime `echo-directory` is installed."""
    folder = tmp_path / "site/echo-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[superfluid.runtimes]\n{echo_runtimes.ENTRY_POINT}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(ROOT)])}


@pytest.fixture
def echo_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the runtime `echo-file`, whose worker is `bin/superfluid-worker-echo-file` beside it."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/superfluid-worker-echo-file"
    lines = [
        f"#!{sys.executable}", "import sys", f"sys.path.insert(0, {str(ROOT)!r})",
        "from superfluid.worker.worker_main import main", "from tests.cli.echo_runtimes import EchoFile",
        "sys.exit(main(EchoFile()))",
    ]  # fmt: skip
    program.write_text("\n".join(lines))
    program.chmod(0o700)
    monkeypatch.setenv("SUPERFLUID_WORKER_ECHO_FILE", str(program))
    model = tmp_path / "plain"
    model.write_text("ECHO")
    return model


def check_answers(server: Server, model: str) -> None:
    status, body = server.chat(model, ASKED, max_tokens=200)
    assert status == 200, body
    (choice,) = body["choices"]
    assert choice["message"]["content"] == f"You said: {ASKED}"
    assert choice["finish_reason"] == "stop"
    assert text_of(list(server.stream(model, ASKED, max_tokens=200))) == f"You said: {ASKED}"
    with server.client() as client:
        session = client.session()
        session.user(ASKED)
        assert session.generate(200).text == f"You said: {ASKED}"
        session.user(f"{ASKED}!")
        assert session.generate(200).text == f"You said: {ASKED}!"


def test_a_hugging_face_directory(tmp_path: Path, distribution: dict[str, str]) -> None:
    model = echo_runtimes.write_directory(tmp_path / "echo")
    with Server(tmp_path / "home", model, "--port", "0", environment=distribution) as server:
        server.ready()
        check_answers(server, "echo")
        assert server.stop() == 0


def test_a_tokenizer_library(tmp_path: Path, echo_file: Path, compiled: Callable[..., Path]) -> None:
    (tmp_path / "lib").mkdir()
    shutil.copy(compiled(), tmp_path / "lib/libtoy.so")
    with Server(tmp_path / "home", echo_file, "--port", "0") as server:
        server.ready()
        check_answers(server, "plain")
        assert server.stop() == 0


def test_a_tokenizer_library_that_is_not_there(superfluid: RunCommand, tmp_path: Path, echo_file: Path) -> None:
    done = superfluid("serve", echo_file, "--port", "0")
    assert done.code == 4
    program = tmp_path / "bin/superfluid-worker-echo-file"
    lack = f"its tokenizer library 'toy' is not found beside {program} or in ../lib"
    assert f"superfluid: runtime echo-file cannot be used here: {lack}\n" in done.err
    assert not (tmp_path / "home").exists()
    listed = superfluid("runtimes")
    assert f"echo-file: {lack}\n" in listed.out


def test_a_library_that_refuses_the_model(tmp_path: Path, echo_file: Path, compiled: Callable[..., Path]) -> None:
    shutil.copy(compiled(), tmp_path / "bin/libtoy.so")
    other = echo_file.rename(tmp_path / "other")
    with Server(tmp_path / "home", other, "--port", "0") as server:
        server.said(f"the tokenizer of {other} does not open: .* no vocabulary in other$")
        assert server.wait() == 1
