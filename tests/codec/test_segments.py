from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.codec.framing import Encoder
from superfluid.codec.segments import SegmentCache
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.llama.vocab import Vocab
from tests.codec.byte_tokenizer import ByteTokenizer

BODY = " Some text,\n\n  with\tspace.\n", "\n", "", "é 你好  ", "x", " \n"


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen2"])
def test_segments_make_the_ids_of_the_whole(name: str, shared: Path) -> None:
    tokenizer = GgufTokenizer(Vocab.open(shared / f"data/vocab/ggml-vocab-{name}.gguf"))
    encoder = Encoder(tokenizer)
    for marker in sorted(encoder.markers)[:6]:
        for text in (marker.join(BODY), f"{marker}{marker}a", f"a{marker}"):
            for _ in range(2):
                whole = tokenizer.encode(text)
                if encoder.auto_bos and text.startswith(encoder.bos_text):
                    whole = whole[1:]
                assert encoder.encode_text(text, True) == whole
                assert encoder.encode_text(text, False) == (tokenizer.encode(text)[1:] if encoder.auto_bos else whole)


def test_a_marker_that_swallows_white_space_does_not_cut() -> None:
    class Swallowing(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("<|end|> ", "<|end|>").replace("<|end|>\n", "<|end|>"))

    tokenizer = Swallowing(["<|end|>", "<|x|>"])
    encoder = Encoder(tokenizer)
    text = "a<|x|>b<|end|>\nc<|x|> d"
    assert encoder.encode_text(text, True) == tokenizer.encode(text)
    tokenizer.encoded.clear()
    encoder.encode_text("q<|x|>b<|end|>\ne", True)
    assert tokenizer.encoded == ["q", "b<|end|>e"]  # "b" was part of another segment before


def test_a_turn_more_costs_the_turn(templates: Callable[[str], str]) -> None:
    tokenizer = ByteTokenizer(["<|x|>"])
    encoder = Encoder(tokenizer)
    text = "".join(f"<|x|>turn {i}" for i in range(50))
    encoder.encode_text(text, True)
    tokenizer.encoded.clear()
    assert encoder.encode_text(text + "<|x|>more", True) == [*encoder.encode_text(text, True), 256, *b"more"]
    assert tokenizer.encoded == ["more"]


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = SegmentCache(capacity=100)
    for key in "abc":
        cache.put(key * 10, array("I", range(5)))  # 10 + 20 bytes
    assert cache.get("a" * 10) == array("I", range(5))
    cache.put("d" * 10, array("I", range(5)))
    assert cache.get("b" * 10) is None and cache.get("a" * 10) is not None
