import re

from hypothesis import given, settings, strategies as st

from superfluid.codec.framing import Encoder, Piece, content, framing, is_marker_shaped, joined, literal_pattern
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer

MARKERS = ["<|a|>", "<|a|><|b|>", "<|b|>", "[MASK]", "<td>", "<eos>"]


def encoder(**kwargs: object) -> Encoder:
    return Encoder(ByteTokenizer(MARKERS, silent=["<|a|>", "<eos>"], **kwargs))  # type: ignore[arg-type]


def test_what_counts_as_a_marker() -> None:
    assert encoder().markers == {"<|a|>", "<|a|><|b|>", "<|b|>", "[MASK]", "<eos>"}
    assert "<td>" in Encoder(ByteTokenizer(MARKERS), "uses <td> as framing").markers
    assert is_marker_shaped("<x|>") and is_marker_shaped("/nothink") and not is_marker_shaped("<|>")
    assert not is_marker_shaped("<td>") and not is_marker_shaped("<｜x｜>x")


def test_content_without_markers_is_one_encode_of_the_whole() -> None:
    tokenizer = chatml_tokenizer()
    made = Encoder(tokenizer)
    tokenizer.encoded.clear()
    ids = made.encode([framing("<|im_start|>user\n"), content("a <td> b"), framing("<|im_end|>\n")])
    assert ids == tokenizer.encode("<|im_start|>user\na <td> b<|im_end|>\n")
    assert ids[0] == tokenizer.ids["<|im_start|>"]


def test_a_marker_in_content_is_split_and_stays_text() -> None:
    tokenizer = chatml_tokenizer()
    made = Encoder(tokenizer)
    tokenizer.encoded.clear()
    ids = made.encode([framing("<|im_start|>"), content("x<|im_end|>y"), framing("<|im_end|>")])
    asked = tokenizer.encoded
    assert [text for text in asked if text in ("x", "<|im_", "end|>", "y")] == ["x", "<|im_", "end|>", "y"]
    assert ids.count(tokenizer.ids["<|im_end|>"]) == 1


def test_an_occurrence_that_begins_in_framing_touches_the_content_it_ends_in() -> None:
    made = encoder()
    ids = made.encode([framing("<|"), content("a|>x"), framing("y")])
    assert ids == list(b"<|a|>xy")


def test_one_bos_leads_whatever_the_template_writes() -> None:
    tokenizer = ByteTokenizer(["<s>", "<|x|>"], silent=["<s>"], bos="<s>", auto_bos=True)
    made = Encoder(tokenizer)
    assert made.auto_bos
    for pieces in (
        [framing("<s>a")],
        [framing("a")],
        [framing("<s>"), content("<|x|>"), framing("b")],
        [content("<s>"), framing("b")],
    ):
        ids = made.encode(pieces)
        assert ids[0] == 256 and ids.count(256) == 1
    assert made.encode([framing("a")], at_start=False) == [97]
    assert made.encode([framing("")]) == []


@settings(max_examples=300)
@given(st.lists(st.tuples(st.text("<|ab>[MASK]eo td", max_size=8), st.booleans()), max_size=6))
def test_content_never_forms_a_marker(parts: list[tuple[str, bool]]) -> None:
    made = encoder()
    pieces = [
        Piece(text if is_content else text.replace("<", "(").replace("[", "("), is_content)
        for text, is_content in parts
    ]
    ids = made.encode(pieces)
    specials = {made.specials[m] for m in made.markers}
    assert not specials & set(ids)
    tokenizer = made.tokenizer
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.spell(ids) == joined(pieces)


@settings(max_examples=200)
@given(st.sets(st.text("ab<", min_size=1, max_size=4), max_size=6), st.text("ab<", max_size=20))
def test_the_trie_finds_the_longest_at_each_start(words: set[str], text: str) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")
    assert literal_pattern(words).findall(text) == plain.findall(text)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.text("<|ab>[MASK", max_size=5), st.booleans()), max_size=5))
def test_texts_that_cannot_form_a_marker_need_no_protection(parts: list[tuple[str, bool]]) -> None:
    made = encoder()
    pieces = [Piece(*part) for part in parts]
    if made.could_form_marker([p.text for p in pieces if p.content]):
        return
    as_framing = made.encode([framing(joined(pieces))])
    assert made.encode(pieces) == as_framing


def test_quoted_markers_are_encoded_once_however_often_they_come() -> None:
    tokenizer = chatml_tokenizer()
    made = Encoder(tokenizer)
    tokenizer.encoded.clear()
    made.encode([content("<|im_end|>" * 1000)])
    assert tokenizer.encoded == ["<|im_", "end|>"]


def test_many_markers_cost_no_more_than_their_depth() -> None:
    made = Encoder(ByteTokenizer([f"<|reserved_{i}|>" for i in range(2000)]))
    text = "<|reserved_" * 20_000
    assert made.marker_pattern.search(text) is None
    assert len(made.encode([content("<|reserved_7|>" * 2000)])) == 2000 * len("<|reserved_7|>")
