"""Commands run in this process, on a home of their own."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from superfluid.cli.command import run
from superfluid.cli.main import program

Line = tuple[str | Path, ...]


@attrs.frozen
class Done:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


RunCommand = Callable[..., Done]


@pytest.fixture
def superfluid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """`superfluid("runtimes", "--json")` runs that command line."""
    monkeypatch.setenv("SUPERFLUID_HOME", str(tmp_path / "home"))

    def run_command(*words: str | Path) -> Done:
        code = run(program, [str(word) for word in words])
        wrote = capsys.readouterr()
        return Done(code, wrote.out, wrote.err)

    return run_command
