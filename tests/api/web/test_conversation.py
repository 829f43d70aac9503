"""A recorded conversation with another implementation, asked again of this one over the web as it was recorded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.scheduler import planner
from tests.api.test_conversation import matches
from tests.api.web.serving import SiteThread


def test_a_recorded_conversation_gets_the_same_replies(
    shared: Path, home: Path, scripted_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # where a tick ends, and a run of tokens with it, else depends on how fast this machine is just now
    monkeypatch.setitem(planner.LEAST, True, planner.FLOOR[True])
    lines = (shared / "data/golden/session_conversation.jsonl").read_text().splitlines()
    wrong: list[str] = []
    with SiteThread(home, scripted_gguf("text_tool")) as site:
        for number, line in enumerate(lines, 1):
            entry = json.loads(line)
            reply = site.post(entry["path"], entry["request"])
            got = reply.events if entry["path"] == "/web/stream" else reply.json
            if reply.status != entry["status"] or not matches(entry["response"], got):
                wrong.append(f"line {number}: {line[:200]}\n  wanted {entry['response']}\n  got    {got}")
    assert not wrong, "\n".join(wrong)
    assert number == len(lines)
