"""The tokenizer of a model, by what its runtime's check report says of where it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superfluid.codec.tokenizer import Tokenizer
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.search import LLAMA, find_library

# A server has models of one or two sources: the others' packages stay out of its memory.


def open_tokenizer(model: Path, source: Mapping[str, Any], worker: Path) -> Tokenizer:
    """The tokenizer of the model at `model`; `source` is the report's `tokenizer`, `worker` the worker's program.

    Raises TokenizerError.
    """
    match source.get("from"):
        case "huggingface":
            from superfluid.codec.tokenizers.huggingface import HuggingFaceTokenizer

            return HuggingFaceTokenizer.open(model)
        case "library" if source.get("name") == LLAMA:
            return _of_llama(model)
        case "library":
            from superfluid.codec.tokenizers.library import LibraryTokenizer

            path = find_library(str(source.get("name")), worker)
            if path is None:
                raise TokenizerError(f"its tokenizer library {source.get('name')!r} is not found beside {worker}")
            return LibraryTokenizer.open(path, model)
        case "engine":
            return _of_bundle(model)
    raise TokenizerError(f"tokenizers from {source.get('from')!r} are not known here")


def _of_llama(model: Path) -> Tokenizer:
    from superfluid.codec.tokenizers.gguf import GgufTokenizer
    from superfluid.llama.library import LibraryError, LoadError
    from superfluid.llama.vocab import Vocab

    try:
        return GgufTokenizer(Vocab.open(model))
    except (LibraryError, LoadError) as error:
        raise TokenizerError(str(error)) from None


def _of_bundle(model: Path) -> Tokenizer:
    from superfluid.codec.tokenizers.huggingface import HuggingFaceTokenizer, ModelFiles

    files = ModelFiles.of_bundle(model) if model.is_file() else None
    if files is None:
        raise TokenizerError(f"{model} carries no tokenizer, and an engine's own is not served")
    return HuggingFaceTokenizer(files)
