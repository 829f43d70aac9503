"""A dialect or a parser that the model cannot serve ends `serve` before it listens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tool-call-parser", "glm"), "--tool-call-parser glm refused: this model's dialect writes calls on the wire "
         "json, not glm"),
        (("--dialect", "atem"), "--dialect atem refused: "),
    ],
)  # fmt: skip
def test_what_the_model_cannot_serve_is_refused_at_the_start(
    superfluid: RunCommand, scripted_gguf: Callable[[str], Path], words: tuple[str, ...], message: str
) -> None:
    done = superfluid("serve", str(scripted_gguf("tool")), "--port", "0", *words)
    assert done.code == 2
    assert f"superfluid: {message}" in done.err
    assert "Traceback" not in done.err
