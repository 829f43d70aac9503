"""JSON from clients is read with a bound on its nesting."""

import json

import pytest

from superfluid.codec.blocks import FILE_DIFF, block_text
from superfluid.codec.json_text import MAX_NESTING, NestedTooDeep, check_nesting, read_json


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
