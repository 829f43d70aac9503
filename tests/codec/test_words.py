"""Texts cut and encoded word by word give the ids of one native call; native calls stay bounded."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec import literals
from superfluid.codec.framing import Encoder, content, framing
from superfluid.codec.literals import literal_pattern, occurrences
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.codec.words import BLOCK, GROUP, Cuts, WordEncoder
from superfluid.link.ids import AT_ONCE, packed
from superfluid.llama.vocab import Vocab
from tests import models

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "qwen2"]
ALPHABET = "ab Zé9,.;:'\"!?()<>|/\n\n  \t-_日\u3002\u0301\U0001f600\r{}"


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, shared: Path) -> GgufTokenizer:
    return GgufTokenizer(Vocab.open(shared / f"data/vocab/ggml-vocab-{request.param}.gguf"))


def native(tokenizer: GgufTokenizer, text: str) -> list[int]:
    return tokenizer.vocab.encode(text, add_special=False, parse_special=True)


def test_the_published_vocabularies_can_be_cut(tokenizer: GgufTokenizer) -> None:
    words = tokenizer.cuts.split(b"One two,\nthree(four.five)\nFive six\nseven")
    assert {b"One", b" two", b"(four", b".five", b" six", b"\nseven"} <= set(words)
    assert b"".join(words) == b"One two,\nthree(four.five)\nFive six\nseven"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(ALPHABET, max_size=12), st.text(max_size=6)), min_size=1, max_size=40))
def test_word_by_word_is_the_whole(opened: dict[str, tuple[GgufTokenizer, WordEncoder]], parts: list[str]) -> None:
    for tokenizer, words in opened.values():
        text = "".join(parts)
        assert words.encode(text) == native(tokenizer, text)
        assert words.encode(text * 3) == native(tokenizer, text * 3)


@pytest.fixture(scope="module")
def opened(shared: Path) -> dict[str, tuple[GgufTokenizer, WordEncoder]]:
    """Every published vocabulary with a memory of words that the tests share."""
    found = {}
    for name in VOCABULARIES:
        tokenizer = GgufTokenizer(Vocab.open(shared / f"data/vocab/ggml-vocab-{name}.gguf"))
        found[name] = tokenizer, WordEncoder(partial(native, tokenizer), tokenizer.cuts, tokenizer.table)
    return found


def document(shared: Path) -> str:
    """Prose, tables and code of a third of a million characters."""
    return "".join(path.read_text() for path in sorted((shared / "spec").glob("*.md")))


def test_a_long_document_is_the_whole(tokenizer: GgufTokenizer, shared: Path) -> None:
    text = document(shared)
    text = re.sub(r"<[|/\w][^<>\s]{0,30}>", "", text)  # quoted markers would parse
    whole = native(tokenizer, text)
    words = WordEncoder(partial(native, tokenizer), tokenizer.cuts, tokenizer.table)
    assert words.encode(text) == whole
    assert words.encode(text) == whole  # out of the memory
    around = tokenizer.vocab.encode("")
    assert tokenizer.encode(text) == around + whole


@settings(max_examples=200, deadline=None)
@given(st.text("<|a>b ", max_size=60), st.integers(1, 9))
def test_a_search_in_windows_finds_what_one_search_does(text: str, window: int) -> None:
    markers = ["<|a|>", "<|a", "a>", "|", "<|b|><|b|>"]
    pattern = literal_pattern(markers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(literals, "WINDOW", window)
        found = [match.span() for match in occurrences(pattern, max(map(len, markers)), text)]
    assert found == [match.span() for match in pattern.finditer(text)]


def test_very_many_ids_are_a_lists_equal() -> None:
    ids = packed([1, 2, 3])
    assert ids == [1, 2, 3]
    assert ids == [1, 2, 3]
    assert ids != [1, 2]
    assert ids[1:] == [2, 3] and ids[-1] == 3
    one, four = [1], [4]
    assert ids + four == [1, 2, 3, 4] == one + packed([2, 3, 4])
    more = [0]
    more += ids
    more += [4]
    assert more == [0, 1, 2, 3, 4]


class Counting:
    """A native encode that notes how much it was asked for."""

    def __init__(self, tokenizer: GgufTokenizer) -> None:
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def __call__(self, text: str) -> list[int]:
        self.sizes.append(len(text))
        return native(self.tokenizer, text)


def test_known_words_are_not_encoded_again(tokenizer: GgufTokenizer) -> None:
    count = Counting(tokenizer)
    words = WordEncoder(count, tokenizer.cuts, tokenizer.table)
    text = " ".join(f"word number {n % 50} of the text," for n in range(4000))
    words.encode(text)
    assert sum(count.sizes) < 1000
    count.sizes.clear()
    words.encode(text)
    assert sum(count.sizes) <= (len("word") if tokenizer.cuts.lead else 0)  # its beginning may be like no other's
    words.encode(text + " ")
    assert sum(count.sizes) < 100  # white space at its end is


@pytest.mark.parametrize("name", ["deepseek-llm", "gpt-4o", "tekken", "qwen2"])
@pytest.mark.parametrize("unit", ["a", " ", "!", "7", "日", "\U0001f600", "aB", "\n", "\n ", "a\u0301"])
def test_runs_that_overflow_a_native_stack_are_cut(name: str, unit: str, bpe: Callable[[str], GgufTokenizer]) -> None:
    """These pre-tokenizers recurse per character: a call with the whole run would end the process."""
    tokenizer = bpe(name)
    text = unit * (60_000 // len(unit))
    parts = tokenizer.cuts.blocks(text)
    assert "".join(parts) == text and max(map(len, parts)) <= BLOCK
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(Encoder(tokenizer).encode([content(text)])) == text


@pytest.fixture(scope="session")
def bpe(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufTokenizer]:
    """`bpe(pre)`: Qwen 2's vocabulary under another family's pre-tokenizer."""
    opened: dict[str, GgufTokenizer] = {}
    folder = tmp_path_factory.mktemp("pre")

    def open_pre(name: str) -> GgufTokenizer:
        if name not in opened:
            source = shared / "data/vocab/ggml-vocab-qwen2.gguf"
            path = models.write_vocabulary(folder / f"{name}.gguf", source, pre=name)
            opened[name] = GgufTokenizer(Vocab.open(path))
        return opened[name]

    return open_pre


@pytest.mark.parametrize("unit", ["\U0001f600", "\n", "日", "x\U0001f600 ", "\u3002\n"])
def test_native_calls_stay_short_for_byte_fallback(
    unit: str, opened: dict[str, tuple[GgufTokenizer, WordEncoder]]
) -> None:
    """The byte fallback of sentencepiece vocabularies is quadratic in the text of one call."""
    tokenizer, _ = opened["llama-spm"]
    text = unit * (100_000 // len(unit))
    assert max(map(len, tokenizer.cuts.blocks(text))) <= BLOCK
    assert tokenizer.decode(tokenizer.encode(text)).removeprefix(" ") == text


def test_a_forced_cut_spares_special_strings(opened: dict[str, tuple[GgufTokenizer, WordEncoder]]) -> None:
    tokenizer, _ = opened["qwen2"]
    marker = "<|im_start|>"
    (token,) = tokenizer.encode(marker)
    for shift in range(len(marker)):
        text = "x" * (BLOCK - shift) + marker + "y" * BLOCK
        ids = tokenizer.encode(text)
        assert ids.count(token) == 1


def test_groups_of_unknown_words_bound_a_call(tokenizer: GgufTokenizer) -> None:
    count = Counting(tokenizer)
    words = WordEncoder(count, tokenizer.cuts, tokenizer.table)
    text = " ".join(f"w{n}x" for n in range(20_000))
    ids = words.encode(text)
    assert max(count.sizes) <= GROUP + 64
    assert tokenizer.decode(ids).removeprefix(" ") == text


def test_a_vocabulary_whose_tokens_reach_across_is_not_cut_there() -> None:
    class Table:
        size = 3
        of = staticmethod([b"q w", b"x\n", b"a"].__getitem__)

    cuts = Cuts.learn(lambda text: list(text.encode()), Table(), [])  # type: ignore[arg-type]
    assert cuts.split(b"q w c d\n\nx\ny") == [b"q w", b" c", b" d", b"\n\nx\ny"]


def test_a_tokenizer_that_adds_to_every_text_is_never_cut() -> None:
    class Table:
        size = 0

    cuts = Cuts.learn(lambda text: [1, *text.encode(), 2], Table(), [])  # type: ignore[arg-type]
    assert not cuts.pairs and cuts.split(b"a b") == [b"a b"]
    assert WordEncoder(lambda text: [7], cuts, Table()).encode("a b " * 100) == [7]  # type: ignore[arg-type]


def test_markers_inside_words_stay_framing(tokenizer: GgufTokenizer) -> None:
    encoder = Encoder(tokenizer)
    marker = next(iter(sorted(encoder.markers)))
    text = f"Some words, then {marker} and more of them. " * 40
    assert encoder.encode([framing(text)], at_start=False) == native(tokenizer, text)


def test_what_is_forgotten_meanwhile_is_encoded_again(
    tokenizer: GgufTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads on a memory of which every call forgets the older half."""
    monkeypatch.setattr("superfluid.codec.words.REMEMBERED", 1)
    shared = WordEncoder(partial(native, tokenizer), tokenizer.cuts, tokenizer.table)
    texts = [" ".join(f"w{n * k} of {k}," for n in range(300)) + f" {'long' * 30} end" for k in range(1, 9)]
    expected = [native(tokenizer, text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(shared.encode, texts * 4)) == expected * 4


@pytest.mark.parametrize("length", [0, 1, AT_ONCE, 2 * AT_ONCE + 7])
def test_ids_are_packed_in_steps(length: int) -> None:
    made = packed(list(range(length)))
    assert made.typecode == "I"
    assert made.tolist() == list(range(length))
