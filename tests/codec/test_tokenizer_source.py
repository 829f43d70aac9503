"""Which tokenizer a runtime's report asks for."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.codec.tokenizers.huggingface import HuggingFaceTokenizer
from superfluid.codec.tokenizers.library import LibraryTokenizer
from superfluid.codec.tokenizers.search import missing_library
from superfluid.codec.tokenizers.source import open_tokenizer
from tests.codec.test_huggingface import small
from tests.codec.test_tokenizer_library import compiled as compiled


def test_every_source(shared: Path, tmp_path: Path, compiled: Callable[..., Path]) -> None:
    worker = tmp_path / "superfluid-worker-x"
    gguf = shared / "data/vocab/ggml-vocab-gpt-2.gguf"
    assert isinstance(open_tokenizer(gguf, {"from": "library", "name": "llama"}, worker), GgufTokenizer)
    folder = small(tmp_path, tokenizer_config={"eos_token": "<|end|>"})
    assert isinstance(open_tokenizer(folder, {"from": "huggingface"}, worker), HuggingFaceTokenizer)
    toy = {"from": "library", "name": "toy"}
    assert missing_library(toy, worker) == "toy"
    with pytest.raises(TokenizerError, match="its tokenizer library 'toy' is not found beside"):
        open_tokenizer(Path("plain"), toy, worker)
    shutil.copy(compiled(), tmp_path / "libtoy.so")
    assert missing_library(toy, worker) is None
    assert isinstance(open_tokenizer(Path("plain"), toy, worker), LibraryTokenizer)


def test_an_engines_own_only_where_its_bundle_carries_one(tmp_path: Path) -> None:
    bundle = tmp_path / "m.base"
    tokenizer = (small(tmp_path) / "tokenizer.json").read_text()
    header = json.dumps({"tokenizer": {"tokenizer.json": tokenizer}, "config": {"eos_token_id": 256}}).encode()
    bundle.write_bytes(b"BASE" + bytes(4) + struct.pack("<Q", len(header)) + header)
    assert isinstance(open_tokenizer(bundle, {"from": "engine"}, tmp_path), HuggingFaceTokenizer)
    with pytest.raises(TokenizerError, match="carries no tokenizer, and an engine's own is not served"):
        open_tokenizer(tmp_path, {"from": "engine"}, tmp_path)
    with pytest.raises(TokenizerError, match="tokenizers from None are not known"):
        open_tokenizer(bundle, {}, tmp_path)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("no")
    with pytest.raises(TokenizerError):
        open_tokenizer(path, {"from": "library", "name": "llama"}, tmp_path)
