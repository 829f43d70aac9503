"""Calls while they are written: the same fragments for every slicing, and together the arguments that were read."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.conversation import compact
from superfluid.codec.toolcalls.fragments import Fragment, reader
from superfluid.codec.toolcalls.typed import ToolSchemas
from superfluid.codec.toolcalls.wires import DelimitedWire, GlmWire, JsonWire, RawWire, Wire

QWEN = DelimitedWire("<function=", ">\n<", "parameter=", ">\n", "\n</parameter>\n<")
MINIMAX = DelimitedWire('<invoke name="', '">\n<', 'parameter name="', '">', "</parameter>\n<")
BARE = DelimitedWire("<f=", ">", "<k=", ">", "")
TOOLS = ToolSchemas(
    [
        {
            "name": "f",
            "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}},
        }
    ]
)


def slices(text: str, cuts: Sequence[int]) -> list[str]:
    points = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(points)]


def stream(wire: Wire, pieces: Sequence[str]) -> tuple[dict[int, tuple[str, str]], list[int], list[Fragment]]:
    """({call: (name, all its arguments)}, calls that were not read, the fragments before the end)."""
    read = reader(wire, TOOLS)
    running = [fragment for piece in pieces for fragment in read.feed(piece)]
    verdict = read.end(wire.read("".join(pieces), TOOLS) or [])
    calls: dict[int, tuple[str, str]] = {}
    for fragment in [*running, *verdict.fragments]:
        if fragment.call not in calls:
            assert fragment.name is not None, "a call opens with its name"
            calls[fragment.call] = fragment.name, ""
        else:
            assert fragment.name is None
        name, arguments = calls[fragment.call]
        calls[fragment.call] = name, arguments + fragment.arguments
    return calls, verdict.unread, running


JSON_RUNS = [
    '\n{"name": "f", "arguments": {"s": "a \\"b\\" {[, \\u00e9", "n": [1, {"x": null}]}}\n',
    '{"arguments": {"s": 1}, "name": "f"}',
    '{"name": "f"}',
    '{"name": "f", "arguments": "{\\"s\\": 1}"}',
    '{"name": "f", "arguments": null, "id": 7}',
    '{"name": "f", "arguments": {"s": [1, 2 , ] , }, }',
    '{"name": "f", "arguments": {"s": "cut \\',
    '{"name": "f", "arguments": {"s": "cut ',
    '{"name": "f", "arguments": {"s": ["cut", {"a": 1,',
    '{"name": "f", "arguments": {"s": "x"}',
    '```json\n{"name": "f", "parameters": {"s": 1}}\n```',
    'Well: {"id": [1, {"name": "no"}], "name": "f", "arguments": {}} indeed',
    '{"tool_name": "f", "parameters": {"name": "g"}}',
    '{"type": "function", "function": {"name": "f", "arguments": {"s": 1}}}',
    '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
    '{"f": {"s": "x"}}',
    '{"name": " f ", "args": {"s": 1}}',
    '{"nested": {"name": "x", "arguments": {}}, "name": "f", "arguments": {"deep": {"arguments": [{}]}}}',
    '{"name": "f", "arguments": {"a": true, "b": -1.5e3, "c": "\\\\"}, "done": true}',
    "{\"name\": \"f\", \"arguments\": {}}}",
]  # fmt: skip
DELIMITED_RUNS = [
    (QWEN, "\n<function=f>\n<parameter=s>\n8080\n</parameter>\n<parameter=n>\n 3\n</parameter>\n</function>\n"),
    (QWEN, "<function=f>\n<parameter=s>\na\n b\n</parameter>\n<parameter=s>\nagain\n</parameter>\n</function>"),
    (QWEN, "<function=f>\n</function>\n"),
    (QWEN, "<function=f>\n<parameter=n>\nfour\n</parameter>\n<parameter=o>\n{\"a\": 1}\n</parameter>\n</function>"),
    (QWEN, "<function=f>\n<parameter=s>\ncut off"),
    (QWEN, "<function=f>\n<parameter=s>\none\n</parameter>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>"),
    (QWEN, '{"name": "f", "arguments": {"s": "json all the same"}}'),
    (MINIMAX, '<invoke name="f">\n<parameter name="s">x</parameter>\n<parameter name="n">1</parameter>\n</invoke>\n'
              '<invoke name="g">\n<parameter name="y">[1, 2]</parameter>\n</invoke>\n'),
    (BARE, "<f=f><k=s>one<k=n>2"),
]  # fmt: skip
CUTS = st.lists(st.integers(0, 400), max_size=40)


@pytest.mark.parametrize("text", JSON_RUNS)
def test_json_fragments_are_the_arguments(text: str) -> None:
    check_whole(JsonWire(), text)
    check_whole(RawWire(), text)


@pytest.mark.parametrize(("wire", "text"), DELIMITED_RUNS)
def test_delimited_fragments_are_the_arguments(wire: Wire, text: str) -> None:
    check_whole(wire, text)


def check_whole(wire: Wire, text: str) -> None:
    tools = ToolSchemas([{"name": "f"}]) if text.startswith('{"f"') else TOOLS
    expected = wire.read(text, tools)
    assert expected, text
    by_character = stream(wire, list(text))
    at_once = stream(wire, [text])
    assert by_character[:2] == at_once[:2]
    calls, unread, _ = by_character
    assert not unread
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == [
        (call.name, json.loads(call.arguments_json)) for call in expected
    ]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(JsonWire(), text) for text in JSON_RUNS] + DELIMITED_RUNS), CUTS, st.integers(0, 400))
def test_slices_change_nothing(case: tuple[Wire, str], cuts: list[int], length: int) -> None:
    """Also for calls that stop anywhere: where a call opened, and what was sent of it."""
    wire, text = case
    text = text[: max(1, length % (len(text) + 1))]
    one, other = stream(wire, slices(text, cuts)), stream(wire, list(text))
    assert one[:2] == other[:2]
    assert [(f.call, f.name, f.at) for f in one[2] if f.name] == [(f.call, f.name, f.at) for f in other[2] if f.name]
    for call, (_, arguments) in one[0].items():
        if call not in one[1]:
            json.loads(arguments)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), CUTS, st.booleans(), st.integers(0, 500))
def test_any_arguments(arguments: dict[str, Any], cuts: list[int], ascii_only: bool, cut: int) -> None:
    text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=1 if cut % 2 else None)
    calls, unread, running = stream(JsonWire(), slices(text, cuts))
    assert not unread
    assert json.loads(calls[0][1]) == arguments
    assert running[0].at == text.index('"f"') + 3
    # a call that is cut either was read, and then whole, or counts as unread
    part = text[: cut % (len(text) + 1)]
    calls, unread, _ = stream(JsonWire(), slices(part, cuts))
    read = JsonWire().read(part, TOOLS)
    if read is None:
        assert unread == list(calls)
    else:
        assert json.loads(calls[0][1]) == json.loads(read[0].arguments_json)


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet='{}[]",:\\ nametorgus1é', max_size=60), CUTS)
def test_noise_never_fails(text: str, cuts: list[int]) -> None:
    for wire in (JsonWire(), QWEN):
        assert stream(wire, slices(text, cuts))[:2] == stream(wire, [text])[:2]


def test_what_runs_ahead() -> None:
    """A call is announced by its name, and its arguments follow as they are written."""
    read = reader(JsonWire(), TOOLS)
    text = '{"name": "f", "arguments": {"s": "long'
    assert read.feed(text[:11]) == []
    assert read.feed(text[11:13]) == [Fragment(0, "f", "", 12)]
    assert read.feed(text[13:]) == [Fragment(0, None, '{"s": "long')]
    assert read.feed("er\\") == [Fragment(0, None, "er")]
    assert read.feed('n"') == [Fragment(0, None, '\\n"')]
    delimited = reader(QWEN, TOOLS)
    assert delimited.feed("\n<function=f>\n<par") == [Fragment(0, "f", "", 15)]
    assert delimited.feed("ameter=s>\n8080\n</parameter>\n<") == [Fragment(0, None, '{"s":"8080"')]
    assert delimited.feed("parameter=n>\n7\n</parameter>\n<") == [Fragment(0, None, ',"n":7')]
    assert reader(GlmWire(), TOOLS).feed("f<arg_key>s</arg_key>") == []


def test_a_call_that_reads_otherwise_than_it_was_announced_is_unread() -> None:
    text = '{"name": "f", "name": "g", "arguments": {}}'
    assert JsonWire().read(text, TOOLS)[0].name == "g"  # type: ignore[index]
    assert stream(JsonWire(), [text])[1] == [0]


def test_long_calls_take_linear_time() -> None:
    """By steps, not by the clock: no piece makes the reader look at what came before again."""
    wide = compact({"name": "f", "arguments": {"s": "x" * 200_000}})
    calls, _, _ = stream(JsonWire(), [wide[i : i + 4] for i in range(0, len(wide), 4)])
    assert len(calls[0][1]) > 200_000
    read = reader(QWEN, TOOLS)
    read.feed("<function=f>\n<parameter=s>\n")
    for _ in range(20_000):
        read.feed("yyyy")
        assert len(read._scanner._pending) < 32  # type: ignore[attr-defined]
    assert read.feed("\n</parameter>\n<")[0].arguments == '{"s":"' + "y" * 80_000 + '"'


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        (r"\ud800", "\ufffd"),
        (r"\ud800x\udc00", "\ufffdx\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\uD83D\ud83d\uDE00", "\ufffd\U0001f600"),
        (r"\ud800\n\u00e9", "\ufffd\n\u00e9"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_half_a_surrogate_pair_is_no_text(written: str, sent: str, cut: bool) -> None:
    text = f'{{"name": "f", "arguments": {{"a": "{written}' + ("" if cut else '"}}')
    for size in (1, 3, len(text)):
        calls, unread, _ = stream(JsonWire(), [text[at : at + size] for at in range(0, len(text), size)])
        assert not unread
        arguments = calls[0][1]
        arguments.encode()
        assert json.loads(arguments) == {"a": sent}
