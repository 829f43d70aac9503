"""libllama's ids of the published vocabularies, and documents through them."""

from pathlib import Path

import pytest

from superfluid.codec.framing import Encoder, content
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.llama.vocab import Vocab

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "qwen2"]


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, shared: Path) -> GgufTokenizer:
    return GgufTokenizer(Vocab.open(shared / f"data/vocab/ggml-vocab-{request.param}.gguf"))


def published_pairs(shared: Path, vocabulary: str) -> list[tuple[str, list[int]]]:
    """Texts and their ids, without BOS."""
    name = shared / f"data/vocab/ggml-vocab-{vocabulary}.gguf"
    texts = Path(f"{name}.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{name}.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.fixture
def pairs(request: pytest.FixtureRequest, shared: Path) -> list[tuple[str, list[int]]]:
    return published_pairs(shared, request.node.callspec.params["tokenizer"])


def test_ids_are_the_published_ones(tokenizer: GgufTokenizer, pairs: list[tuple[str, list[int]]]) -> None:
    encoder = Encoder(tokenizer)
    assert len(pairs) > 40
    for text, expected in pairs:
        ids = tokenizer.encode(text)
        assert (ids[1:] if encoder.auto_bos else ids) == expected, text
        assert encoder.encode([content(text)], at_start=False) == expected


def test_text_comes_back(tokenizer: GgufTokenizer, pairs: list[tuple[str, list[int]]]) -> None:
    for text, expected in pairs:
        shown = tokenizer.decode(expected)
        assert shown == text or shown == " " + text  # sentencepiece puts a space in front


def test_special_tokens_print_nothing(tokenizer: GgufTokenizer) -> None:
    encoder = Encoder(tokenizer)
    for text in encoder.markers:
        assert encoder.specials[text] in tokenizer.encode(f"a{text}b")
    assert tokenizer.stop_ids
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert all(tokenizer.token_bytes(i) == b"" for i in tokenizer.stop_ids)
