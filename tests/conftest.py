"""Fixtures that several rooms' tests share."""

from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from superfluid.llama.demo import DemoError, demo_model
from tests import models

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
