"""The vocabulary-only binding against the published vocabularies and their expected token ids."""

from pathlib import Path

import pytest

from superfluid.llama.library import LoadError
from superfluid.llama.vocab import ATTR_CONTROL, Vocab

NAMES = ["gpt-2", "llama-bpe", "llama-spm", "qwen2"]


@pytest.mark.parametrize("name", NAMES)
def test_plain_encoding(shared: Path, name: str) -> None:
    path = shared / "data/vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text().split("\n__ggml_vocab_test__\n")
    expected = [[int(word) for word in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    with Vocab.open(path) as vocab:
        for text, ids in zip(texts, expected, strict=False):
            assert vocab.encode(text, add_special=False, parse_special=False) == ids


@pytest.fixture(scope="module")
def qwen(shared: Path) -> Vocab:
    return Vocab.open(shared / "data/vocab/ggml-vocab-qwen2.gguf")


def test_special_tokens(qwen: Vocab) -> None:
    (end,) = qwen.encode("<|im_end|>")
    assert qwen.text(end) == "<|im_end|>"
    assert qwen.attr(end) & ATTR_CONTROL
    assert qwen.is_eog(end)
    assert qwen.piece(end) == b"<|im_end|>"
    assert qwen.piece(end, special=False) == b""
    assert len(qwen.encode("<|im_end|>", parse_special=False)) > 1


def test_pieces_are_those_of_piece(qwen: Vocab) -> None:
    pieces = qwen.pieces()
    assert len(pieces) == qwen.n_tokens
    sample = range(0, qwen.n_tokens, 997)
    assert [pieces[token] for token in sample] == [qwen.piece(token) for token in sample]
    ids = qwen.encode("Grüße 🙂\n\tdone")
    assert b"".join(pieces[token] for token in ids).decode() == "Grüße 🙂\n\tdone"


def test_bos_is_added_where_the_family_adds_it(shared: Path) -> None:
    with Vocab.open(shared / "data/vocab/ggml-vocab-llama-spm.gguf") as vocab:
        assert vocab.encode("hello")[0] == vocab.bos == 1
        assert vocab.eos == 2


def test_metadata_and_template(qwen: Vocab) -> None:
    assert qwen.metadata("general.architecture") == "qwen2"
    assert qwen.metadata("no.such.key") is None
    assert "<|im_start|>" in (qwen.template() or "")
    assert qwen.template("no such name") is None


def test_a_token_outside_the_vocabulary(qwen: Vocab) -> None:
    with pytest.raises(IndexError, match=str(qwen.n_tokens)):
        qwen.piece(qwen.n_tokens)
    assert not qwen.is_eog(-1)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(LoadError, match=r"does not load: .+"):
        Vocab.open(path)
