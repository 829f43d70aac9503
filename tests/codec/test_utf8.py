from itertools import pairwise

from hypothesis import given, settings, strategies as st

from superfluid.codec.utf8 import Utf8Stream, decode_utf8


def read(data: bytes, cuts: list[int]) -> str:
    stream = Utf8Stream()
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    return "".join(stream.feed(data[a:b]) for a, b in pairwise(edges)) + stream.flush()


@settings(max_examples=200)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_slices_do_not_matter(data: bytes, cuts: list[int]) -> None:
    assert read(data, cuts) == decode_utf8(data)


@given(st.text(max_size=20))
def test_every_prefix_gives_every_complete_character(text: str) -> None:
    data = text.encode("utf-8", "replace")
    for n in range(len(data) + 1):
        shown = Utf8Stream().feed(data[:n])
        assert data.startswith(shown.encode()) and n - len(shown.encode()) < 4


def test_a_byte_that_cannot_continue_is_replaced_at_once() -> None:
    stream = Utf8Stream()
    assert stream.feed(b"\xff") == "\ufffd"
    assert stream.feed(b"\xe0") == ""
    assert stream.feed(b"\x80") == "\ufffd\ufffd"  # E0 80 is no beginning of a character
    assert stream.feed(b"\xf0\x9f") == ""
    assert stream.feed(b"a") == "\ufffda"
    assert stream.feed(b"\xf0\x9f\x99") == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_every_short_sequence_is_read_as_a_whole_one() -> None:
    leads = [b"", b"a", b"\x80", *(bytes([n]) for n in range(0xC0, 0x100))]
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xED, 0xFF]
    for lead in leads:
        for second in edges:
            for third in edges:
                data = lead + bytes([second, third])
                for size in range(len(data) + 1):
                    assert read(data[:size], list(range(4))) == decode_utf8(data[:size])


def test_half_a_surrogate_pair_is_replaced_at_once() -> None:
    assert Utf8Stream().feed(b"x\xed\xa0") == "x\ufffd\ufffd"
    assert Utf8Stream().feed(b"x\xed\x9f") == "x"
