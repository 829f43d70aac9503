"""JSON from clients is read with a bound on its nesting."""

import json

import pytest

from superfluid.codec.blocks import ARTIFACT, FILE_DIFF, block_text
from superfluid.codec.conversation import Call
from superfluid.codec.json_text import MAX_NESTING, NestedTooDeep, check_nesting, read_json
from superfluid.codec.toolcalls.repair import strict_loads


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded(opening: str, closing: str) -> None:
    allowed = opening * MAX_NESTING + "1" + closing * MAX_NESTING
    assert json.dumps(read_json(allowed), separators=(",", ":")) == allowed
    for depth in (MAX_NESTING + 1, 5_000, 200_000):
        with pytest.raises(NestedTooDeep):
            read_json(opening * depth + "1" + closing * depth)


def test_what_is_wide_is_not_deep() -> None:
    check_nesting([{"a": [index]} for index in range(10_000)])
    check_nesting("[" * 10_000)


def test_a_block_whose_payload_is_nested_too_deep_counts_as_having_none() -> None:
    assert block_text(FILE_DIFF, "[" * 200_000) == block_text(FILE_DIFF, "no json")


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    text = r'{"a\udc00": ["\uD800b", "\ud83d\ude00", "\\ud800", 1.5]}'
    whole = {"a\ufffd": ["\ufffdb", "\U0001f600", "\\ud800", 1.5]}
    assert read_json(text) == strict_loads(text) == Call("f", text).arguments_object() == whole
    assert block_text(ARTIFACT, r'{"title": "\ud800", "content": {"b": "\udfff"}}') == (
        '[artifact: \ufffd]\n{"b": "\ufffd"}'
    )
