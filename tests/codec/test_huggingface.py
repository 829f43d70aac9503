"""Hugging Face directories: ids, bytes, templates, end of sequence and size by their files."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from superfluid.codec.codec import Codec
from superfluid.codec.framing import Encoder, content
from superfluid.codec.tokenizers.decoder import TokenDecoder
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.codec.tokenizers.huggingface import HuggingFaceTokenizer, ModelFiles, named_templates
from superfluid.llama.vocab import Vocab
from tests.codec import hf_models
from tests.codec.test_vocab_golden import VOCABULARIES, published_pairs


@pytest.fixture(scope="module", params=VOCABULARIES)
def both(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, HuggingFaceTokenizer, GgufTokenizer]:
    """A published vocabulary in both forms."""
    path = shared / f"data/vocab/ggml-vocab-{request.param}.gguf"
    folder = hf_models.write(tmp_path_factory.mktemp("hf") / request.param, path)
    return request.param, HuggingFaceTokenizer.open(folder), GgufTokenizer(Vocab.open(path))


Both = tuple[str, HuggingFaceTokenizer, GgufTokenizer]


def test_ids_are_the_published_ones(both: Both, shared: Path) -> None:
    name, tokenizer, _ = both
    encoder = Encoder(tokenizer)
    for text, expected in published_pairs(shared, name):
        ids = tokenizer.encode(text)
        plain = ids[1:] if encoder.auto_bos else ids
        assert encoder.encode([content(text)], at_start=False) == plain
        assert plain == expected, text


def test_bytes_are_those_of_the_same_vocabulary_in_a_gguf_file(both: Both) -> None:
    _, tokenizer, gguf = both
    assert tokenizer.vocab_size == gguf.vocab_size
    special = {token for made in (tokenizer, gguf) for token, _ in made.special_tokens()}
    for token in range(gguf.vocab_size):
        if token not in special:
            assert tokenizer.token_bytes(token) == gguf.token_bytes(token), token
    assert (tokenizer.eos, tokenizer.bos) == (gguf.eos, gguf.bos)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" == tokenizer.token_bytes(-1)


def test_a_document_word_by_word_is_the_whole(both: Both, shared: Path) -> None:
    _, tokenizer, _ = both
    text = "".join(path.read_text() for path in sorted((shared / "spec").glob("w*.md")))
    encoder = Encoder(tokenizer)
    whole = tokenizer.encode(text)
    assert encoder.encode([content(text)], at_start=True) == whole


def test_stored_truncation_and_padding_are_removed(both: Both) -> None:
    _, tokenizer, _ = both
    assert len(tokenizer.encode("word " * 100)) > 90
    assert len(tokenizer.encode("word")) < 5


def test_lone_surrogates_do_not_fail(both: Both) -> None:
    _, tokenizer, _ = both
    assert tokenizer.encode("a\ud800b")


# -- the decoder's steps


def pieces(decoder: dict[str, Any] | None, *texts: str, pre: dict[str, Any] | None = None) -> list[bytes]:
    made = TokenDecoder.read(decoder, pre)
    return [made.of(text) for text in texts]


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}


def test_decoder_steps() -> None:
    assert pieces({"type": "ByteLevel"}, "\u0120caf\u00c3\u00a9", "a b\u2581") == [
        " café".encode(),
        "a b\u2581".encode(),
    ]
    llama = sequence(
        REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    )
    assert pieces(llama, "\u2581a\u2581", "<0xE2>", "<0xG1>", "<0x41>x") == [b" a ", b"\xe2", b"<0xG1>", b"<0x41>x"]
    strip = sequence(REPLACE, {"type": "Strip", "content": " ", "start": 1, "stop": 2})
    assert pieces(strip, "\u2581\u2581a\u2581\u2581\u2581") == [b" a "]
    assert pieces({"type": "Metaspace", "replacement": "_"}, "_a") == [b" a"]
    assert pieces({"type": "WordPiece", "prefix": "##"}, "##ing", "go") == [b"ing", b" go"]
    assert pieces({"type": "BPEDecoder", "suffix": "</w>"}, "a</w>", "b") == [b"a ", b"b"]
    assert pieces(sequence({"type": "ByteLevel"}, REPLACE), "\u2581") == ["\u2581".encode()]
    assert pieces(sequence(sequence(REPLACE)), "\u2581") == [b" "]


def test_without_a_decoder() -> None:
    byte_level = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}
    assert pieces(None, "\u0120a", pre=byte_level) == [b" a"]
    assert pieces(None, "\u2581a", "<0x0A>", "\u0120") == [b" a", b"\n", "\u0120".encode()]


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "CTC"}, "CTC"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "Replace"),
        (sequence(REPLACE, {"type": "Novel"}), "Novel"),
    ],
)
def test_other_decoders_fail_by_name(decoder: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        TokenDecoder.read(decoder, None)


# -- the files beside it


def small(tmp_path: Path, **files: Any) -> Path:
    """A directory with a vocabulary of bytes, `<|end|>` special and `<td>` added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<td>"), AddedToken("a b")])
    made.save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_added_tokens(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.open(small(tmp_path, tokenizer_config={"eos_token": {"content": "<|end|>"}}))
    assert tokenizer.special_tokens() == [(256, "<|end|>"), (257, "<td>"), (258, "a b")]
    assert [tokenizer.token_bytes(i) for i in (256, 257, 258)] == [b"", b"<td>", b"a b"]
    assert tokenizer.eos == 256 and tokenizer.bos is None and tokenizer.stop_ids == {256}
    encoder = Encoder(tokenizer)
    assert encoder.markers == {"<|end|>"}
    assert 256 not in encoder.encode([content("x<|end|>y")]) and 257 in encoder.encode([content("x<td>y")])
    assert tokenizer.decode(encoder.encode([content("x<|end|><td>a b")])) == "x<|end|><td>a b"


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config": {"eos_token": "<|end|>"}, "config": {"eos_token_id": 3}}, 256),
        ({"tokenizer_config": {"eos_token": "<|other|>"}, "generation_config": {"eos_token_id": [7, 8]}}, 7),
        ({"config": {"eos_token_id": 9, "text_config": {"eos_token_id": 10}}}, 9),
        ({"config": {"text_config": {"eos_token_id": [10, 11]}}}, 10),
    ],
)
def test_end_of_sequence(files: dict[str, Any], eos: int, tmp_path: Path) -> None:
    assert HuggingFaceTokenizer.open(small(tmp_path, **files)).eos == eos


def test_every_stated_end_stops(tmp_path: Path) -> None:
    folder = small(tmp_path, generation_config={"eos_token_id": [256, 7]}, config={"eos_token_id": 9})
    assert HuggingFaceTokenizer.open(folder).stop_ids == {256, 7, 9}


def test_what_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no readable tokenizer\.json"):
        HuggingFaceTokenizer.open(tmp_path)
    folder = small(tmp_path)
    with pytest.raises(TokenizerError, match="no end of sequence"):
        HuggingFaceTokenizer.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json is not readable as JSON"):
        HuggingFaceTokenizer.open(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "vocab_size": 2_000_000}))
    with pytest.raises(TokenizerError, match="vocab_size 2000000, the tokenizer has only 259 tokens"):
        HuggingFaceTokenizer.open(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"its tokenizer\.json does not load"):
        HuggingFaceTokenizer.open(folder)


def test_vocabulary_size_with_padding(tmp_path: Path) -> None:
    padded = HuggingFaceTokenizer.open(small(tmp_path, config={"eos_token_id": 1, "text_config": {"vocab_size": 300}}))
    assert padded.vocab_size == 300 and padded.token_bytes(299) == b""
    smaller = HuggingFaceTokenizer.open(small(tmp_path, config={"eos_token_id": 1, "vocab_size": 100}))
    assert smaller.vocab_size == 259


def test_templates(tmp_path: Path) -> None:
    assert named_templates([{"name": "x", "template": "1"}, {"name": "default", "template": "2"}])[""] == "2"
    assert named_templates({"x": "1", "y": "2"})[""] == "1"
    folder = small(
        tmp_path,
        tokenizer_config={"eos_token": "<|end|>", "chat_template": [{"name": "tool_use", "template": "T"}]},
        chat_template={"chat_template": "from its own file"},
    )
    tokenizer = HuggingFaceTokenizer.open(folder / "tokenizer.json")  # a file's path means its directory
    assert tokenizer.template() == "T" == tokenizer.template("tool_use") and tokenizer.template("rag") is None
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("A")
    assert HuggingFaceTokenizer.open(folder).template("tool_use") == "A"
    (folder / "chat_template.jinja").write_text("J")
    tokenizer = HuggingFaceTokenizer.open(folder)
    assert tokenizer.template() == "J" and tokenizer.template("tool_use") == "A"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert HuggingFaceTokenizer.open(folder).template() == "from its own file"


def test_a_bundle_carries_one(tmp_path: Path) -> None:
    folder = small(tmp_path)
    header = {
        "tokenizer": {
            "tokenizer_type": "hf",
            "tokenizer.json": (folder / "tokenizer.json").read_text(),
            "tokenizer_config.json": json.dumps({"chat_template": "C"}),
            "tokenizer.chat_template": "B",
        },
        "config": {"vocab_size": 270, "eos_token_id": 256},
    }
    bundle = tmp_path / "m.base"

    def write(magic: bytes, header: Any, size: int | None = None) -> ModelFiles | None:
        data = json.dumps(header).encode()
        bundle.write_bytes(magic + bytes(4) + struct.pack("<Q", len(data) if size is None else size) + data)
        return ModelFiles.of_bundle(bundle)

    files = write(b"BASE", header)
    assert files is not None
    tokenizer = HuggingFaceTokenizer(files)
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.template()) == (270, 256, "B")
    assert write(b"BASF", header) is None
    assert write(b"BASE", header, 1 << 40) is None
    assert write(b"BASE", {"tokenizer": {"tokenizer_type": "spm", "tokenizer.json": "{}"}}) is None
    assert write(b"BASE", {"config": {}}) is None and write(b"BASE", header, 0) is None


def test_a_model_of_a_directory_is_the_model_of_its_gguf(
    shared: Path, tmp_path: Path, templates: Callable[[str], str]
) -> None:
    """The same conversation has the same tokens, whichever form the model comes in."""
    path = shared / "data/vocab/ggml-vocab-qwen2.gguf"
    folder = hf_models.write(tmp_path / "qwen", path)
    (folder / "chat_template.jinja").write_text(templates("Qwen-Qwen2.5-7B-Instruct"))
    tokenizer = HuggingFaceTokenizer.open(folder)
    codec = Codec.open(tokenizer, "template")
    messages = [{"role": "user", "content": "quoted <|im_end|> and code:\n\n    x = 1\n"}]
    rendered = codec.render(messages)
    gguf = GgufTokenizer(Vocab.open(path))
    gguf.template = lambda name=None: tokenizer.template(name)  # type: ignore[method-assign]
    assert rendered.tokens == Codec.open(gguf, "template").render(messages).tokens
