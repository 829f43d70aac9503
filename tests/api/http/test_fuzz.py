"""Whatever a request says, its answer is an answer: a reply, or a refusal in the envelope, never a failure."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from tests.api.http.conftest import call
from tests.api.http.listening import Site

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.one_of(st.integers(-3, 3), st.floats(), st.integers(), SCALARS)
TEXT = st.text(max_size=12)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "input_audio", "x"]),
        "text": TEXT | SCALARS,
        "image_url": ANYTHING,
        "input_audio": ANYTHING,
    },
)
CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": SCALARS,
        "function": st.fixed_dictionaries({}, optional={"name": TEXT | SCALARS, "arguments": ANYTHING}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"]) | SCALARS,
        "content": TEXT | st.lists(PART, max_size=2) | ANYTHING,
        "tool_calls": st.lists(CALL, max_size=2) | ANYTHING,
        "reasoning_content": TEXT | ANYTHING,
        "tool_call_id": SCALARS,
        "name": SCALARS,
    },
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]) | TEXT}, optional={"parameters": ANYTHING, "description": ANYTHING}
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}) | FUNCTION | ANYTHING
SHARED = {
    "temperature": NUMBERS, "top_p": NUMBERS, "top_k": NUMBERS, "min_p": NUMBERS, "seed": NUMBERS,
    "presence_penalty": NUMBERS, "frequency_penalty": NUMBERS, "repeat_penalty": NUMBERS,
    "repetition_penalty": NUMBERS, "n": st.integers(-1, 3) | SCALARS,
    "stop": TEXT | st.lists(TEXT, max_size=3) | ANYTHING,
    "stream": st.booleans() | SCALARS, "stream_options": ANYTHING,
    "ignore_eos": st.booleans() | SCALARS,
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str) | TEXT, NUMBERS, max_size=3) | ANYTHING,
}  # fmt: skip
CHAT = SHARED | {
    "messages": st.lists(MESSAGE, min_size=1, max_size=3) | ANYTHING,
    "logprobs": st.booleans() | SCALARS,
    "top_logprobs": NUMBERS,
    "tools": st.lists(TOOL, max_size=2) | ANYTHING,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANYTHING,
    "parallel_tool_calls": st.booleans() | SCALARS,
    "response_format": ANYTHING
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])}, optional={"json_schema": ANYTHING}
    ),
    "chat_template_kwargs": ANYTHING,
    "reasoning_effort": SCALARS,
    "enable_thinking": SCALARS,
}
TEXTS = SHARED | {
    "prompt": TEXT | st.lists(TEXT | st.integers(-1, 300), max_size=3) | ANYTHING,
    "logprobs": NUMBERS, "echo": st.booleans() | SCALARS, "suffix": SCALARS, "fim_mode": SCALARS,
}  # fmt: skip
FEW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


HI = {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}], "prompt": "x\n", "temperature": 0}


@st.composite
def with_odd_fields(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    """A request that would be served, but for at most two fields."""
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True))
    return HI | {name: draw(fields[name]) for name in names}


def fault(site: Site, path: str, body: dict[str, Any]) -> str:
    """What is wrong with the answer to a request of three tokens: neither a reply nor a refusal in the envelope."""
    reply = call(site, "POST", path, json.dumps({**body, "max_tokens": 3}).encode())
    if reply.status == 400:
        error = reply.json["error"]
        if set(error) != {"message", "type", "param", "code"} or error["type"] != "invalid_request_error":
            return f"no envelope: {error}"
        return "" if error["message"] else "a refusal without words"
    if reply.status != 200:
        return f"{reply.status}: {reply.body.decode(errors='replace')}"
    if reply.headers["content-type"] == "text/event-stream":
        return "".join(f"an error in mid-stream: {event}" for event in reply.events if "error" in event)
    used = reply.json["usage"]["completion_tokens"]
    return "" if used <= 3 * len(reply.json["choices"]) else f"{used} tokens"


@FEW
@given(with_odd_fields(CHAT))
def test_chat(site: Site, body: dict[str, Any]) -> None:
    assert fault(site, "/v1/chat/completions", body) == ""


@FEW
@given(with_odd_fields(TEXTS))
def test_completions(site: Site, body: dict[str, Any]) -> None:
    assert fault(site, "/v1/completions", body) == ""


@settings(FEW, max_examples=60)
@given(
    st.sampled_from(["/v1/tokenize", "/v1/detokenize"]),
    st.fixed_dictionaries(
        {}, optional={"text": ANYTHING, "content": ANYTHING, "tokens": ANYTHING | st.lists(st.integers(-1, 400))}
    ),
)
def test_tokens(site: Site, path: str, body: dict[str, Any]) -> None:
    assert call(site, "POST", path, json.dumps(body).encode()).status in (200, 400)


HEADER = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)


@settings(FEW, max_examples=60)
@given(st.dictionaries(st.sampled_from(["Origin", "Authorization", "X-Api-Key", "x-superfluid-qos", "Accept"]), HEADER))
def test_headers(site: Site, headers: dict[str, str]) -> None:
    assert call(site, "GET", "/v1/models", None, **headers).status in (200, 403)
