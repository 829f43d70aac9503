from hypothesis import given, settings, strategies as st

from superfluid.codec.stops import StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The stop string that is completed first; of those completed together, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if s and text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def stream(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    shown = ""
    for piece in pieces:
        ready, hit = finder.feed(piece)
        shown += ready
        if hit:
            return shown, True
    return shown + finder.flush(), False


abc = st.text(alphabet="abé", max_size=5)


@settings(max_examples=300)
@given(st.lists(abc, max_size=4), st.lists(abc, max_size=8))
def test_the_same_text_is_shown_however_it_is_sliced(stops: list[str], pieces: list[str]) -> None:
    assert stream(stops, pieces) == reference("".join(pieces), stops)


@given(st.lists(abc, min_size=1, max_size=3), st.lists(abc, max_size=8))
def test_only_a_tail_that_could_begin_a_stop_string_is_held(stops: list[str], pieces: list[str]) -> None:
    finder = StopStrings(stops)
    shown = text = ""
    for piece in pieces:
        text += piece
        ready, hit = finder.feed(piece)
        shown += ready
        if hit:
            break
        held = text[len(shown) :]
        tails = [text[i:] for i in range(len(text))]
        longest = next((t for t in tails if any(s.startswith(t) and t != s for s in stops)), "")
        assert held == longest


def test_nothing_is_shown_after_a_hit() -> None:
    finder = StopStrings(["STOP", ""])
    assert finder.feed("one ST") == ("one ", False)
    assert finder.feed("OP two") == ("", True)
    assert finder.feed("more") == ("", True)


def test_a_repetitive_text_costs_its_length() -> None:
    finder = StopStrings(["a" * 5000 + "b"])
    steps = [finder.feed("a") for _ in range(20_000)]
    assert sum(len(ready) for ready, _ in steps) == 15_000
    assert finder.flush() == "a" * 5000
