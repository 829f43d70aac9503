"""The examples, run as their readers run them."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.serving import Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 120.0  # seconds


def run(name: str, *arguments: str | Path, given: str = "", isolated: bool = False, home: Path | None = None) -> str:
    """Run an example; what it prints."""
    done = subprocess.run(
        [sys.executable, *(["-I", "-S"] if isolated else []), EXAMPLES / name, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | ({"SUPERFLUID_HOME": str(home)} if home else {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fanout(served: Callable[[str], Server], tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A lighthouse stands by the sea. " * 20)
    out = run("fanout.py", document, "What stands?", "Where?", "--socket", served("plain").path)
    assert out.split("\n# ") == ["", "What stands?\nHello, world.\n", "Where?\nHello, world.\n"]


def test_fanout_has_questions_of_its_own(served: Callable[[str], Server], tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A lighthouse stands by the sea. " * 20)
    assert run("fanout.py", document, "--socket", served("plain").path).count("Hello, world.") == 3
    done = subprocess.run([sys.executable, EXAMPLES / "fanout.py"], capture_output=True, text=True, timeout=LIMIT)
    assert done.stderr.endswith("the following arguments are required: document\n")


def pull_the_plug(model: Path, max_tokens: int) -> tuple[int, int]:
    """Of the replies, greedy and with a seed: those continued as if never cut, and those that were over before."""
    out = run("pull_the_plug.py", model, "--max-tokens", str(max_tokens))
    return out.count("the very ones of a whole run"), out.count("over before")


def test_pull_the_plug(scripted_gguf: Callable[[str], Path]) -> None:
    assert pull_the_plug(scripted_gguf("loop"), 3000) == (2, 0)


@pytest.mark.soak
def test_pull_the_plug_with_a_large_vocabulary(tiny_gguf: Path) -> None:
    assert pull_the_plug(tiny_gguf, 500) == (2, 0)


def test_the_editor_is_plain_python_in_under_100_lines(served: Callable[[str], Server], tmp_path: Path) -> None:
    (tmp_path / "superfluid.sock").symlink_to(served("plain").path)
    out = run("editor.py", "Be", "friendlier.", given="Dear sir,\n", isolated=True, home=tmp_path)
    assert out == "Hello, world.\n"
    source = (EXAMPLES / "editor.py").read_text()
    assert len(source.splitlines()) < 100
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself(name: str) -> None:
    assert (ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or "").count("\n") >= 2
