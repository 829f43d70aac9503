"""Fixtures that several rooms' tests share."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
import pytest

from superfluid.llama.demo import DemoError, demo_model
from tests import models
from tests.api.serving import Server, ServerThread

# One thread per model: threads that wait for each other by spinning stall when other processes want the cores too.
os.environ.setdefault("OMP_THREAD_LIMIT", "1")

# The processes that the tests start would compile every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test data that lies beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared test data at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model (SmolLM2-135M-Instruct), fetched once per user."""
    try:
        return demo_model(Path(platformdirs.user_cache_dir("superfluid")))
    except DemoError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def scripted_gguf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`scripted_gguf(name)`: the file of a model whose greedy reply is that script."""
    folder = tmp_path_factory.mktemp("scripted")

    def write(name: str) -> Path:
        path = folder / f"scripted-{name}.gguf"
        return path if path.exists() else models.write_scripted(shared, name, path)

    return write


@pytest.fixture(scope="session")
def tiny_gguf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model (2 layers, width 64) with Qwen 2's vocabulary and template."""
    path = tmp_path_factory.mktemp("tiny") / "tiny-random.gguf"
    return models.write_random(path, shared / "data/vocab/ggml-vocab-qwen2.gguf")


@pytest.fixture(scope="session")
def served(scripted_gguf: Callable[[str], Path]) -> Iterator[Callable[[str], Server]]:
    """`served(name)`: a server of the scripted model of that name, with its session socket; all tests share it."""
    running: dict[str, ServerThread] = {}
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:  # short, as a socket's path must be

        def serve(name: str) -> Server:
            if name not in running:
                home = Path(folder, name)
                home.mkdir()
                running[name] = ServerThread(home, scripted_gguf(name))
                running[name].start()
            return running[name].server

        yield serve
        for thread in running.values():
            thread.stop()
