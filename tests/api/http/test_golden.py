"""Chat and completions against what an independent implementation answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.http.conftest import call
from tests.api.http.listening import Site

ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/tokenize"}


FREE = {"id", "created", "cached_tokens", "warm"}  # differ from run to run


def examples() -> list[dict[str, Any]]:
    path = Path(__file__).resolve().parents[4] / "shared/data/golden/http_examples.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["path"] in ROUTES]


def shape(value: Any) -> Any:
    """A body without what may differ; arguments of calls as what they say, not how."""
    if isinstance(value, dict):
        kept = {key: shape(member) for key, member in value.items() if key not in FREE}
        if isinstance(kept.get("arguments"), str):
            kept["arguments"] = json.loads(kept["arguments"])
        return kept | {key: key for key in value if key in FREE}
    return [shape(member) for member in value] if isinstance(value, list) else value


def joined(events: list[dict[str, Any]]) -> list[Any]:
    """Events with neighbouring deltas of one field joined: how a stream is cut into chunks is a matter of timing."""
    out: list[Any] = []
    for event in events:
        choice = event["choices"][0]
        target = choice.get("delta", choice)
        name = next((name for name in ("content", "reasoning_content", "text") if target.get(name)), None)
        if name and out and set(out[-1]) == set(event):
            before = out[-1]["choices"][0].get("delta", out[-1]["choices"][0])
            if before.get(name) and out[-1]["choices"][0]["finish_reason"] is None:
                before[name] += target[name]
                continue
        out.append(shape(event))
    return out


@pytest.mark.parametrize("example", examples(), ids=lambda e: f"{e['path']}-{json.dumps(e['request'])[:90]}")
def test_golden(site: Site, example: dict[str, Any]) -> None:
    request = dict(example["request"])
    reply = call(site, example["method"], example["path"], request)
    assert reply.status == example["status"], reply.body
    assert reply.headers["content-type"] == example["type"]
    if example["type"] == "application/json":
        ours, theirs = shape(reply.json), shape(example["response"])
        assert_alike(ours, theirs, request)
        return
    assert example["response"][-1] == "data: [DONE]"
    theirs_events = [json.loads(line.removeprefix("data: ")) for line in example["response"][:-1]]
    ours_list, theirs_list = joined(reply.events), joined(theirs_events)
    assert len(ours_list) == len(theirs_list)
    for one, other in zip(ours_list, theirs_list, strict=True):
        assert_alike(one, other, request)


def assert_alike(ours: Any, theirs: Any, request: dict[str, Any]) -> None:
    free = {"completion_tokens", "total_tokens"} if "stop" in request else set()  # the cancel lands when it lands
    if "tools" in request:  # how a template's tools are spelled is the codec's matter, tested there
        free = {"prompt_tokens", "total_tokens"}
    for body in (ours, theirs):
        for name in free & set(body.get("usage", ())):
            del body["usage"][name]
    assert flat(ours) == flat(theirs)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path; numbers that only differ in the last places are one."""
    if isinstance(value, dict):
        return {k: v for key, member in value.items() for k, v in flat(member, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, member in enumerate(value) for k, v in flat(member, f"{path}[{i}]").items()}
    return {path: round(value, 3) if isinstance(value, float) else value}
