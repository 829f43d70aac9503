from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.llama.vocab import Vocab


@pytest.fixture(scope="session")
def templates(shared: Path) -> Callable[[str], str]:
    """`templates(name)`: the source of a published chat template."""
    return lambda name: (shared / "data/chat_templates" / f"{name}.jinja").read_text()


@pytest.fixture(scope="session")
def scripted(scripted_gguf: Callable[[str], Path]) -> Callable[[str], Codec]:
    """`scripted(name)`: the codec of a scripted model, on libllama's vocabulary."""
    opened: dict[str, Codec] = {}

    def open_codec(name: str) -> Codec:
        if name not in opened:
            opened[name] = Codec.open(GgufTokenizer(Vocab.open(scripted_gguf(name))))
        return opened[name]

    return open_codec
