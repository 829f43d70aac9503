from itertools import pairwise

from hypothesis import given, settings, strategies as st

from superfluid.codec.channels import REASONING, TEXT, TOOL_CALL, Pair, PairSplitter, Router, Run
from tests.codec.byte_tokenizer import ByteTokenizer

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>", "<channel|>", "<end>"]
tokenizer = ByteTokenizer(MARKERS, silent=["<end>"])
THINK, UNTHINK, CALL, UNCALL, CHANNEL, UNCHANNEL, END = range(256, 263)
PAIRS = (
    Pair(THINK, UNTHINK, REASONING),
    Pair(CHANNEL, UNCHANNEL, REASONING, (ord("t"), ord("h"), ord("\n"))),
    Pair(CALL, UNCALL, TOOL_CALL),
)


def router() -> Router:
    return Router(lambda: PairSplitter(tokenizer.table, PAIRS, [END]))


def ids(text: str) -> list[int]:
    return tokenizer.encode(text)


def test_runs_of_a_reply_with_everything() -> None:
    lane = router()
    reply = ids("<think>why</think>so <tool_call>{}</tool_call>\n<tool_call>[]</tool_call><end>")
    runs = lane.commit(reply, last=True)
    assert runs == [
        Run(ids("<think>why</think>"), "why", REASONING, True),
        Run(ids("so "), "so ", TEXT, False),
        Run(ids("<tool_call>{}</tool_call>"), "{}", TOOL_CALL, True),
        Run(ids("\n"), "\n", TEXT, False),
        Run(ids("<tool_call>[]</tool_call>"), "[]", TOOL_CALL, True),
        Run(ids("<end>"), "", TEXT, False),
    ]
    assert lane.ended


def test_other_markers_inside_are_dropped_from_the_text() -> None:
    runs = router().commit(ids("a</think>b<think>c<tool_call>d</tool_call>e</think>f"))
    assert [(r.text, r.channel) for r in runs] == [("ab", TEXT), ("cde", REASONING), ("f", TEXT)]


def test_a_channel_name_is_kept_out_only_when_it_follows_token_by_token() -> None:
    assert router().commit(ids("<|channel>th\nx<channel|>y"))[0].text == "x"
    assert router().commit(ids("<|channel>thx<channel|>y"))[0].text == "thx"
    assert router().commit(ids("<|channel>th<channel|>y"))[0].text == "th"
    assert router().commit(ids("<|channel>th"), last=True)[0].text == "th"


def test_what_follows_a_terminator_in_its_tick_is_in_the_span_and_not_shown() -> None:
    lane = router()
    assert lane.provisional(ids("a<end>b")) == [(TEXT, "a", False)]
    assert lane.commit(ids("a<end>b")) == [Run(ids("a<end>b"), "a", TEXT, False)]
    assert lane.provisional(ids("c")) == []


def test_a_character_cut_by_a_tick_is_completed_in_the_next_event() -> None:
    lane = router()
    first, second = "é".encode()
    assert lane.commit([97, first])[0].text == "a"
    assert lane.commit([second, 98])[0].text == "éb"
    assert lane.commit([99, first], last=True)[0].text == "c\ufffd"


def test_flush_gives_what_was_pending() -> None:
    lane = router()
    lane.commit([0xF0, 0x9F])
    assert lane.flush() == "\ufffd"
    assert lane.flush() == ""


token_streams = st.lists(st.sampled_from([97, 98, 10, 0xC3, 0xA9, 0xFF, *ids("th\n"), *range(256, 263)]), max_size=24)


@settings(max_examples=300)
@given(token_streams, st.lists(st.integers(0, 24), max_size=6))
def test_slices_do_not_matter(tokens: list[int], cuts: list[int]) -> None:
    whole = router()
    expected = whole.commit(tokens)
    tail = whole.flush()

    edges = sorted({0, len(tokens), *(min(c, len(tokens)) for c in cuts)})
    lane = router()
    runs = [run for a, b in pairwise(edges) for run in lane.commit(tokens[a:b])]
    assert [t for run in runs for t in run.span] == tokens
    assert flat(runs, lane.flush()) == flat(expected, tail)
    assert sum(run.closes for run in runs) == sum(run.closes for run in expected)


def flat(runs: list[Run], tail: str) -> list[tuple[int, str]]:
    """(channel, text), neighbours merged; only the text of a name still held may move to a later run."""
    merged: list[tuple[int, str]] = []
    for channel, text in [*((r.channel, r.text) for r in runs), (-1, tail)]:
        if merged and merged[-1][0] == channel:
            merged[-1] = (channel, merged[-1][1] + text)
        elif text:
            merged.append((channel, text))
    return merged


@settings(max_examples=300)
@given(token_streams, st.integers(0, 24))
def test_provisional_text_is_a_prefix_of_the_committed(tokens: list[int], ahead: int) -> None:
    lane = router()
    shown = [p for token in tokens[:ahead] for p in lane.provisional([token])]
    committed = [(r.channel, r.text) for r in lane.commit(tokens)]
    for channel in (TEXT, REASONING, TOOL_CALL):
        early = "".join(text for c, text, _ in shown if c == channel)
        assert "".join(text for c, text in committed if c == channel).startswith(early)


def test_a_forced_call_starts_in_the_call_channel() -> None:
    splitter = PairSplitter(tokenizer.table, PAIRS)
    splitter.open_channel(TOOL_CALL)
    segments = splitter.feed(ids("<tool_call>{}</tool_call>x"))
    assert [(s.data, s.channel, s.closes) for s in segments] == [(b"{}", TOOL_CALL, True), (b"x", TEXT, False)]
