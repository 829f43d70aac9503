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
