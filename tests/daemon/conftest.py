"""Models whose workers are real processes, with lives that a test writes down."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import Runtime, WorkerProgram
from superfluid.link.events import Event, Message, Role
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Ended
from tests.daemon import worker_lives

Lives = list[list[str] | str]
MakeModel = Callable[..., Model]
TOKENS = 4  # of a reply
VOCABULARY = "300"  # tokens that a mock may answer with; the scripted models have more


@pytest.fixture
def mock_model(tmp_path: Path, scripted_gguf: Callable[[str], Path]) -> MakeModel:
    """`mock_model(lives)`: a model with a real tokenizer (of the file `path`), whose worker is the mock engine in a
    process of its own."""

    def make(lives: Lives | None = None, path: Path | None = None, **config: Any) -> Model:
        file = tmp_path / "lives.json"
        file.write_text(json.dumps([[]] if lives is None else lives))
        program = (sys.executable, worker_lives.__file__, str(file), "mock")
        worker = WorkerProgram("mock", program, "test", worker_lives.__file__)
        tokenizer = {"from": "library", "name": "llama"}  # of the file that it is given
        runtime = Runtime(worker, {"runtime": {"id": "mock"}, "available": True, "tokenizer": tokenizer})
        settings = ModelConfig(
            name="mocked",
            path=path or scripted_gguf("plain"),
            runtime=runtime,
            store=tmp_path / "sessions",
            options=["--mock-vocab", VOCABULARY],
            max_context=2048,
            **config,
        )
        return Model(settings, ModelMetrics())

    return make


def starts(tmp_path: Path) -> int:
    """How often the worker of `mock_model` was started."""
    return (tmp_path / "lives.starts").stat().st_size


async def generate(model: Model, tokens: int = TOKENS, prompt: str = "hello") -> tuple[list[Event], Ended]:
    """A fresh session with `prompt`, and what `tokens` tokens of reply made of it."""
    span = model.tokenizer.encode(prompt)
    options = GenerateOptions(max_tokens=tokens, ignore_eos=True)
    (started,) = await model.begin_all([Message(Role.USER, prompt, span)], [options])
    events, _, ended = await started.generation.collect()
    return events, ended
