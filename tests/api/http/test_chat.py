"""Chat completions through the official client, and the parts of the answer that only raw JSON shows."""

import json
from collections.abc import Iterator
from typing import Any

import attrs
import openai
import pytest
from openai import OpenAI

from superfluid.daemon.model import Model
from superfluid.observe.metrics import ModelMetrics
from tests.api.http.conftest import call
from tests.api.http.listening import WINDOW, Site

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="scripted-plain", messages=HI, temperature=0)
    assert reply.choices[0].message.content == "Hello, world."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    for model, content in (("scripted-plain", "Hello, world."), ("scripted-bad_utf8", "a�b�")):
        whole = client.chat.completions.create(model=model, messages=HI, temperature=0)
        chunks = list(client.chat.completions.create(model=model, messages=HI, temperature=0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
        assert whole.choices[0].message.content == content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
        assert len({chunk.id for chunk in chunks}) == 1


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="nobody", messages=HI)
    assert refused.value.code == "model_not_found"
    assert "nobody" in refused.value.message
    assert "scripted-plain" in refused.value.message


def test_logprobs_join_to_the_content(client: OpenAI) -> None:
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "Hello, world."
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):  # type: ignore[call-overload]
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            own = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
            assert own.decode() == (choice.delta.content or "")
            streamed += choice.logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_logprobs_end_with_the_text_at_a_stop(client: OpenAI) -> None:
    for stream in (False, True):
        reply = client.chat.completions.create(
            model="scripted-stop", messages=HI, temperature=0, stop=["STOP"], logprobs=True, stream=stream
        )
        if stream:
            chunks = list(reply)  # type: ignore[arg-type]
            entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            entries = reply.choices[0].logprobs.content  # type: ignore[union-attr]
            text = reply.choices[0].message.content  # type: ignore[union-attr]
        assert text == "one "
        assert [entry.token for entry in entries] == ["one "]


def test_impossible_tokens_have_a_number(site: Site) -> None:
    bias = {str(token): -1e300 for token in range(256)}
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    reply = call(site, "POST", "/v1/chat/completions", ask | {"logit_bias": bias})
    assert reply.status == 200
    entries = reply.json["choices"][0]["logprobs"]["content"]
    assert all(isinstance(top["logprob"], float) for entry in entries for top in entry["top_logprobs"])


def test_bias_and_seed_and_penalties(client: OpenAI) -> None:
    world, dot = 267, ord(".")
    banned = client.chat.completions.create(
        model="scripted-plain", messages=HI, temperature=0, max_tokens=3, logit_bias={str(world): -100}
    )
    assert "world" not in (banned.choices[0].message.content or "")
    forced = client.chat.completions.create(
        model="scripted-plain", messages=HI, temperature=0, max_tokens=3, logit_bias={str(dot): 100, "x": 5, "9" * 9: 1}
    )
    assert forced.choices[0].message.content == "..."
    drawn = [
        client.chat.completions.create(
            model="scripted-plain", messages=HI, temperature=50.0, top_p=1.0, seed=7, max_tokens=12,
            presence_penalty=1, frequency_penalty=-1, extra_body={"repeat_penalty": 1.1, "min_p": 0, "top_k": 0},
        ).choices[0].message.content
        for _ in range(2)
    ]  # fmt: skip
    assert drawn[0] == drawn[1]


def test_choices_draw_their_own_seeds(site: Site) -> None:
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 100, "top_p": 1, "n": 3, "max_tokens": 12}
    choices = call(site, "POST", "/v1/chat/completions", ask).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) == 3
    events = call(site, "POST", "/v1/chat/completions", ask | {"stream": True, "temperature": 0}).events
    texts = ["", "", ""]
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["Hello, world."] * 3
    assert [("usage" in event) for event in events[-3:]] == [False, False, True]
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert events[-1]["usage"]["prompt_tokens"] == 21


def test_stop_strings(client: OpenAI) -> None:
    """The script says "one ", "ST", "OP", " two": usage counts to the token in which a stop string ends."""
    used: tuple[tuple[str | list[str], int], ...] = (("STOP", 3), (["nowhere", "TOP"], 3), (["S"], 2))
    for stop, tokens in used:
        whole = client.chat.completions.create(model="scripted-stop", messages=HI, temperature=0, stop=stop)
        stream = client.chat.completions.create(
            model="scripted-stop", messages=HI, temperature=0, stop=stop, stream=True
        )
        chunks = list(stream)
        expected = "one S" if stop == ["nowhere", "TOP"] else "one "
        assert whole.choices[0].message.content == expected
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        assert whole.usage is not None and chunks[-1].usage is not None
        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == tokens


def test_what_could_begin_a_stop_is_let_go_at_the_end(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted-stop", messages=HI, temperature=0, stop=[" two or more"], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one STOP two"


def test_limits_and_ignored_ends(client: OpenAI) -> None:
    cut = client.chat.completions.create(model="scripted-plain", messages=HI, temperature=0, max_completion_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hello, ", "length")
    none = client.chat.completions.create(model="scripted-plain", messages=HI, temperature=0, max_tokens=0)
    assert (none.choices[0].message.content, none.choices[0].finish_reason) == ("", "length")
    on = client.chat.completions.create(
        model="scripted-plain", messages=HI, temperature=0, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert on.usage is not None
    assert (on.usage.completion_tokens, on.choices[0].finish_reason) == (9, "length")


def test_cached_tokens(client: OpenAI) -> None:
    long = [{"role": "user", "content": "tell me of the sea " * 20}]
    first = client.chat.completions.create(model="scripted-plain", messages=long, temperature=0)  # type: ignore[arg-type]
    again = client.chat.completions.create(model="scripted-plain", messages=long, temperature=0)  # type: ignore[arg-type]
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert 0 < (again.usage.prompt_tokens_details.cached_tokens or 0) < again.usage.prompt_tokens


def test_warm_header(site: Site) -> None:
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0}
    reply = call(site, "POST", "/v1/chat/completions", ask)
    assert int(reply.headers["x-superfluid-warm"]) == reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_reasoning_is_apart(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted-think", messages=HI, temperature=0)
    message = whole.choices[0].message
    assert message.content == "\n\nThe answer."
    assert message.reasoning_content == "\nFirst, then.\n"  # type: ignore[attr-defined]


def test_continuous_usage_never_falls(site: Site) -> None:
    options = {"continuous_usage_stats": True}
    ask = {"model": "scripted-think", "messages": HI, "temperature": 0, "stream": True, "stream_options": options}
    events = call(site, "POST", "/v1/chat/completions", ask).events
    counts = [e["usage"]["completion_tokens"] for e in events if e["choices"][0]["delta"] and "usage" in e]
    assert len(counts) == len(events) - 2  # the role chunk has none, the last one has no delta
    assert counts == sorted(counts)
    assert events[-1]["usage"]["completion_tokens"] >= counts[-1]


def test_calls_that_nobody_wanted_are_content(site: Site) -> None:
    ask = {"model": "scripted-text_tool", "messages": HI, "temperature": 0, "tools": [TOOL], "tool_choice": "none"}
    reply = call(site, "POST", "/v1/chat/completions", ask).json
    message = reply["choices"][0]["message"]
    assert message["content"] == 'Let me look.{"name":"get_weather","arguments":{"city":"Paris"}}'
    assert "tool_calls" not in message
    assert reply["choices"][0]["finish_reason"] == "stop"
    with_tools = call(site, "POST", "/v1/chat/completions", ask | {"tool_choice": "auto"}).json
    assert with_tools["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens"]
    assert with_tools["choices"][0]["finish_reason"] == "tool_calls"


def joined_calls(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """What a client makes of a stream: the content, and the calls by index."""
    content = ""
    calls: list[dict[str, Any]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content", "")
        for entry in delta.get("tool_calls", ()):
            if entry["index"] == len(calls):
                assert entry["type"] == "function"
                assert entry["id"].startswith("call_")
                calls.append({"name": entry["function"]["name"], "arguments": ""})
            calls[entry["index"]]["arguments"] += entry["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize("script", ["text_tool", "broken_tool", "two_tools", "open_tool"])
@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"logprobs": True}])
def test_streamed_calls_add_up_to_the_whole(site: Site, script: str, more: dict[str, Any]) -> None:
    ask = {"model": f"scripted-{script}", "messages": HI, "temperature": 0, "tools": [TOOL, OTHER]}
    ask |= {"max_tokens": 12} | more
    choice = call(site, "POST", "/v1/chat/completions", ask).json["choices"][0]
    events = call(site, "POST", "/v1/chat/completions", ask | {"stream": True}).events
    content, calls = joined_calls(events)
    assert content == choice["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    read = choice["message"].get("tool_calls", [])
    if choice["finish_reason"] == "tool_calls":
        assert (
            len(calls) == len(read) == (1 if script != "two_tools" or more.get("parallel_tool_calls") is False else 2)
        )
        for streamed, whole in zip(calls, read, strict=True):
            assert streamed["name"] == whole["function"]["name"]
            assert json.loads(streamed["arguments"]) == json.loads(whole["function"]["arguments"])
    else:
        assert choice["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_calls_are_distinct_in_a_reply_of_several_choices(site: Site, stream: bool) -> None:
    ask = {"model": "scripted-two_tools", "messages": HI, "temperature": 0, "n": 3, "tools": [TOOL, OTHER]}
    reply = call(site, "POST", "/v1/chat/completions", ask | {"stream": stream})
    assert reply.status == 200, reply.body
    parts = [choice for event in (reply.events if stream else [reply.json]) for choice in event["choices"]]
    entries = [
        entry for part in parts for entry in (part.get("delta") or part.get("message", {})).get("tool_calls", ())
    ]
    ids = [entry["id"] for entry in entries if "id" in entry]
    assert len(ids) == len(set(ids)) == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_comes(site: Site, choice: object, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    blanks = {str(ord(blank)): -100 for blank in " \t\r\n"}  # this model would write them as long as it may
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0, "tools": [tool], "logit_bias": blanks}
    ask["tool_choice"] = choice
    reply = call(site, "POST", "/v1/chat/completions", ask | {"stream": stream, "max_tokens": 400})
    assert reply.status == 200, reply.body
    if stream:
        content, calls = joined_calls(reply.events)
        finish = reply.events[-1]["choices"][0]["finish_reason"]
    else:
        answer = reply.json["choices"][0]
        content, finish = answer["message"]["content"], answer["finish_reason"]
        calls = [entry["function"] for entry in answer["message"]["tool_calls"]]
    assert (content, finish) == ("", "tool_calls")
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_cut_in_its_blanks_is_text(site: Site, stream: bool) -> None:
    """The grammar lets blanks lead the call, and this model writes nothing else."""
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0, "tools": [TOOL, OTHER], "max_tokens": 5}
    reply = call(site, "POST", "/v1/chat/completions", ask | {"tool_choice": "required", "stream": stream})
    assert reply.status == 200, reply.body
    if stream:
        content, calls = joined_calls(reply.events)
        finish = reply.events[-1]["choices"][0]["finish_reason"]
    else:
        answer = reply.json["choices"][0]
        content, finish = answer["message"]["content"], answer["finish_reason"]
        calls = answer["message"].get("tool_calls", [])
    assert (calls, finish) == ([], "length")
    assert content
    assert not content.strip()


ODD_NAMES = [
    "mcp__files.read/all", "no spaces? yes", "</tool_call>", "<|im_end|>", 'quo"te', "new\nline", "\\", "\0",
    "\u00e9\u4e2d", "x" * 800,
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_any_name_can_be_demanded(site: Site, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    ask = {"model": "scripted-text_tool", "messages": HI, "temperature": 0, "max_tokens": 900, "tools": [tool, tool]}
    ask |= {"tool_choice": "required", "logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100}}
    reply = call(site, "POST", "/v1/chat/completions", ask)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [entry["function"] for entry in choice["message"]["tool_calls"]] == [{"name": name, "arguments": "{}"}]


def schema_format(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def forced(parameters: object) -> dict[str, object]:
    return {"tools": [TOOL, {"name": "f", "parameters": parameters}], "tool_choice": "required"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ({"tool_choice": "required"}, "no tools are declared"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, '"nope"'),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "schema"),
        (schema_format({"type": "no such type"}), "Invalid type: no such type"),
        (schema_format({"properties": {"a": {"not": {}}}}), 'unsupported keyword "not" at #/properties/a'),
        (schema_format({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (schema_format({"type": "array", "minItems": 2}), "an array only the items it declares"),
        (
            forced({"properties": {"a/b": {"uniqueItems": True}}}),
            'tool "f": unsupported keyword "uniqueItems" at #/properties/a~1b',
        ),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "4096"),
    ],
)
def test_refusals_come_before_a_stream(site: Site, demand: dict[str, object], words: str, stream: bool) -> None:
    ask = {"model": "scripted-plain", "messages": HI, "stream": stream} | demand
    reply = call(site, "POST", "/v1/chat/completions", ask)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_the_window_refusal_has_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="scripted-plain", messages=[{"role": "user", "content": "x" * 5000}])
    assert refused.value.code == "context_length_exceeded"
    assert "this model's maximum context length is 4096 tokens, but your request has 5019 tokens" in str(refused.value)


@pytest.mark.parametrize(("trained", "advised"), [(WINDOW, False), (2 * WINDOW, True), (None, True)])
def test_a_larger_window_is_advised_where_there_is_one(site: Site, trained: int | None, advised: bool) -> None:
    """A runtime that does not say what a model was trained for leaves it open."""
    report = site.model.config.runtime.report
    sizing = None if trained is None else {"trained_context": trained}
    runtime = attrs.evolve(site.model.config.runtime, report=report | {"model": report["model"] | {"sizing": sizing}})
    model = Model(attrs.evolve(site.model.config, runtime=runtime, max_context=WINDOW), ModelMetrics())
    assert model.window == WINDOW
    assert (model.larger_window == "--max-context") is advised


def test_a_json_object_is_held(site: Site) -> None:
    ask = {"model": "scripted-plain", "messages": HI, "temperature": 0, "max_tokens": 6}
    reply = call(site, "POST", "/v1/chat/completions", ask | {"response_format": {"type": "json_object"}})
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_media_are_judged(site: Site) -> None:
    def refusal(part: dict[str, object]) -> dict[str, str]:
        ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": [part]}]}
        reply = call(site, "POST", "/v1/chat/completions", ask)
        assert reply.status == 400
        error: dict[str, str] = reply.json["error"]
        assert error["param"] == "messages[0].content"
        return error

    fetched = refusal({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}})
    assert "not fetched" in fetched["message"]
    assert fetched["code"] == "invalid_value"
    assert refusal({"type": "image_url", "image_url": {"url": "data:image/png;base64,a?"}})["code"] == "invalid_value"
    assert refusal({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}})["code"] == "invalid_value"
    image = refusal({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert image["code"] == "unsupported_input"
    assert "does not accept images" in image["message"]


def test_unknown_parts_are_skipped(site: Site) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "novel", "x": 1}, {"type": "text", "text": "i"}]
    ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    reply = call(site, "POST", "/v1/chat/completions", ask)
    assert reply.json["usage"]["prompt_tokens"] == 21
    assert reply.json["choices"][0]["message"]["content"] == "Hello, world."
