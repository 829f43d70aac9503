"""Every published template gives what `tests/data/templates.json` says, which was reviewed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.codec.template_golden import GOLDEN, MORE_TOKENS, describe
from tests.codec.template_models import NAMES, model

ENTRIES = [(name, ()) for name in NAMES] + [(name, tuple(more)) for name, more in MORE_TOKENS.items()]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize(("name", "more"), ENTRIES)
def test_a_template_is_as_reviewed(
    name: str, more: tuple[str, ...], golden: dict[str, Any], templates: Callable[[str], str]
) -> None:
    entry = f"{name}, with {' '.join(more)}" if more else name
    made = json.loads(json.dumps(describe(model(name, templates, more))))
    assert made == golden[entry], "review it, then run python -m tests.codec.template_golden"


def test_the_golden_file_is_whole(golden: dict[str, Any]) -> None:
    assert len(golden) == len(ENTRIES) == 26
    for name, entry in golden.items():
        if entry["dialect"] == "template":
            assert "different" not in entry["conversations"], name
