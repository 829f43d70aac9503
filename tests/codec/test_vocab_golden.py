"""libllama's ids of the published vocabularies, and documents through them."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.channels import PairSplitter, Router
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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_detokenizing_by_slices_is_detokenizing_whole(tokenizer: GgufTokenizer, data: st.DataObject) -> None:
    """Any ids, those with parts of characters and bytes that are none most of all."""
    odd = [i for i in range(min(tokenizer.vocab_size, 3000)) if not _is_text(tokenizer.token_bytes(i))]
    ids = data.draw(st.lists(st.sampled_from(odd) | st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    router = Router(lambda: PairSplitter(tokenizer.table, ()))
    shown, ahead = [], []
    for start, end in pairwise([0, *cuts, len(ids)]):
        ahead += [piece.text for piece in router.provisional(ids[start:end])]
        shown += [run.text for run in router.commit(ids[start:end])]
        assert "".join(shown) == "".join(ahead)
    shown.append(router.flush())
    assert "".join(shown) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def test_special_tokens_print_nothing(tokenizer: GgufTokenizer) -> None:
    encoder = Encoder(tokenizer)
    for text in encoder.markers:
        assert encoder.specials[text] in tokenizer.encode(f"a{text}b")
    assert tokenizer.stop_ids
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert all(tokenizer.token_bytes(i) == b"" for i in tokenizer.stop_ids)
