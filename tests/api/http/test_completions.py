"""Raw completions."""

import pytest
from openai import OpenAI

from tests.api.http.conftest import call
from tests.api.http.listening import Site

PATH = "/v1/completions"


def ask(**fields: object) -> dict[str, object]:
    return {"model": "scripted-plain", "prompt": "x\n", "temperature": 0, "max_tokens": 4} | fields


def test_official_client(site: Site) -> None:
    with OpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        whole = client.completions.create(model="scripted-plain", prompt="x\n", temperature=0, max_tokens=4)
        assert whole.choices[0].text == "Hello, world."
        stream = client.completions.create(
            model="scripted-plain", prompt="x\n", temperature=0, max_tokens=4, stream=True, echo=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == "x\nHello, world."


def test_several_prompts(site: Site) -> None:
    body = ask(prompt=["x\n", [120, 10], "yy\n"], n=2, echo=True)
    reply = call(site, "POST", PATH, body).json
    assert [c["text"] for c in reply["choices"]] == ["x\nHello, world."] * 4 + ["yy\nHello, world."] * 2
    assert [c["index"] for c in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 2 + 2 + 3
    assert reply["usage"]["completion_tokens"] == 24
    events = call(site, "POST", PATH, body | {"stream": True, "stream_options": {"include_usage": True}}).events
    texts = [""] * 6
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [c["text"] for c in reply["choices"]]
    assert [e["usage"]["prompt_tokens"] for e in events if "usage" in e] == [7]


def test_usage_only_when_asked(site: Site) -> None:
    assert not any("usage" in event for event in call(site, "POST", PATH, ask(stream=True)).events)


def test_stream_with_logprobs(site: Site) -> None:
    whole = call(site, "POST", PATH, ask(logprobs=1, echo=True)).json["choices"][0]["logprobs"]
    assert whole["text_offset"] == [2, 7, 9, 14]
    events = call(site, "POST", PATH, ask(logprobs=1, echo=True, stream=True)).events
    parts = [event["choices"][0]["logprobs"] for event in events]
    joined = {name: [x for part in parts if part for x in part[name]] for name in whole}
    assert joined == whole


def test_markers_are_text_and_thoughts_too(site: Site) -> None:
    reply = call(site, "POST", PATH, ask(model="scripted-think", max_tokens=5)).json["choices"][0]
    assert "First, then." in reply["text"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": ["a", ""]}, "prompt", None),
        ({"prompt": [1, "a"]}, "prompt", None),
        ({"prompt": [True]}, "prompt", None),
        ({"prompt": [10**6]}, "prompt", None),
        ({"prompt": {"a": 1}}, "prompt", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"suffix": "", "prompt": ""}, "suffix", "fim_unsupported"),
        ({"fim_mode": "psm"}, "fim_mode", "unsupported_parameter"),
        ({"prompt": "x" * 5000}, None, "context_length_exceeded"),
        ({"prompt": ["x\n", "x" * 5000], "stream": True}, None, "context_length_exceeded"),
    ],
)
def test_refusals(site: Site, fields: dict[str, object], param: str | None, code: str | None) -> None:
    before = set(site.daemon.models[0].store.session_ids())
    reply = call(site, "POST", PATH, ask(**fields))
    assert reply.status == 400
    assert (reply.json["error"]["param"], reply.json["error"]["code"]) == (param, code)
    assert set(site.daemon.models[0].store.session_ids()) == before
