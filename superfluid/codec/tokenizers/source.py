"""The tokenizer of a model, by what its runtime's check report says of where it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superfluid.codec.tokenizer import Tokenizer
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.codec.tokenizers.huggingface import HuggingFaceTokenizer, ModelFiles
from superfluid.codec.tokenizers.library import LibraryTokenizer, find_library
from superfluid.llama.library import LibraryError, LoadError
from superfluid.llama.vocab import Vocab

LLAMA = "llama"  # the library that is here: libllama's vocabulary is opened through its own binding


def missing_library(source: Mapping[str, Any], worker: Path) -> str | None:
    """The name of the tokenizer library that a worker's report asks for and that is in none of its places."""
    name = source.get("name")
    if source.get("from") != "library" or name == LLAMA or find_library(str(name), worker) is not None:
        return None
    return str(name)


def open_tokenizer(model: Path, source: Mapping[str, Any], worker: Path) -> Tokenizer:
    """The tokenizer of the model at `model`; `source` is the report's `tokenizer`, `worker` the worker's program.

    Raises TokenizerError.
    """
    match source.get("from"):
        case "huggingface":
            return HuggingFaceTokenizer.open(model)
        case "library" if source.get("name") == LLAMA:
            try:
                return GgufTokenizer(Vocab.open(model))
            except (LibraryError, LoadError) as error:
                raise TokenizerError(str(error)) from None
        case "library":
            path = find_library(str(source.get("name")), worker)
            if path is None:
                raise TokenizerError(f"its tokenizer library {source.get('name')!r} is not found beside {worker}")
            return LibraryTokenizer.open(path, model)
        case "engine":
            files = ModelFiles.of_bundle(model) if model.is_file() else None
            if files is None:
                raise TokenizerError(f"{model} carries no tokenizer, and an engine's own is not served")
            return HuggingFaceTokenizer(files)
    raise TokenizerError(f"tokenizers from {source.get('from')!r} are not known here")
