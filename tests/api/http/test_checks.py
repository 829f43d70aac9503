"""Who may ask, on which routes, with what: the checks that every route shares."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from superfluid.api.http.errors import ApiError
from superfluid.api.http.security import Access
from tests.api.http.conftest import call
from tests.api.http.listening import Site, SiteThread

CHAT = "/v1/chat/completions"


def error_of(site: Site, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str]]:
    reply = call(site, method, path, body, **headers)
    assert set(reply.json) == {"error"}
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    return reply.status, reply.json["error"]


# ---- routes


def test_unknown_routes_and_methods(site: Site) -> None:
    assert error_of(site, "GET", "/nowhere")[0] == 404
    assert error_of(site, "POST", "/v1//tokenize", b"{}")[0] == 404
    for method in ("GET", "OPTIONS", "DELETE", "PUT"):
        reply = call(site, method, CHAT)
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"
        assert reply.json["error"]["type"] == "invalid_request_error"
    assert set(call(site, "POST", "/health", b"{}").headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert "access-control-allow-origin" not in call(site, "OPTIONS", CHAT).headers


def test_head_is_answered_on_get_routes(site: Site) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/props"):
        head, get = call(site, "HEAD", path), call(site, "GET", path)
        assert head.status == get.status == 200
        assert head.body == b""
        assert int(head.headers["content-length"]) > 0
    head = call(site, "HEAD", CHAT)
    assert (head.status, head.headers["allow"]) == (405, "POST")


def test_unknown_queries_are_ignored(site: Site) -> None:
    assert call(site, "GET", "/v1/models?beta=true").status == 200


def test_slots_are_not_saved(site: Site) -> None:
    status, error = error_of(site, "POST", "/slots/0/save", {})
    assert (status, error["code"]) == (501, "route_retired")
    assert all(word in error["message"] for word in ("WAL", "prefix cache", "--park"))


# ---- models, tokens, pages


def test_models(site: Site) -> None:
    listed = call(site, "GET", "/v1/models").json
    names = [entry["id"] for entry in listed["data"]]
    assert names == sorted(names)
    assert "scripted-plain" in names
    entry = call(site, "GET", "/v1/models/scripted-plain").json
    assert entry["meta"] == {"n_ctx": 4096}
    assert entry["loaded"] is True
    assert entry["architecture"] == {"input_modalities": ["text"]}
    assert entry["runtime"]["id"] == "llamacpp"
    assert set(entry["capabilities"]["dialect"]) == {
        "enable_thinking", "reasoning_effort", "reasoning_effort_levels", "fim", "fim_model"
    }  # fmt: skip
    for path in ("org%2Fname", "org/name", "org//name"):
        status, error = error_of(site, "GET", f"/v1/models/{path}")
        assert (status, error["code"]) == (404, "model_not_found")
        assert path.replace("%2F", "/") in error["message"]


def test_props(site: Site) -> None:
    props = call(site, "GET", "/props?model=scripted-plain").json
    assert props["max_request_bytes"] == 104857600
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["temperature"] == 1.0
    assert props["capabilities"]["runtime"]["id"] == "llamacpp"
    assert "im_start" in props["chat_template"]
    assert error_of(site, "GET", "/props?model=nobody")[1]["code"] == "model_not_found"


def test_tokens(site: Site) -> None:
    made = call(site, "POST", "/v1/tokenize", {"text": "ignored", "content": "Hé<|im_end|>"}).json
    assert made == {"tokens": [72, 195, 169, 258], "count": 4}
    back = call(site, "POST", "/v1/detokenize", {"tokens": [72, 195, 169], "model": "scripted-loop"}).json
    assert back == {"text": "Hé"}
    for bad in ([True], [-1], [10**9], "72", None, [1.5]):
        assert error_of(site, "POST", "/v1/detokenize", {"tokens": bad})[1]["param"] == "tokens"
    assert error_of(site, "POST", "/v1/tokenize", {})[0] == 400


def test_metrics_page(site: Site) -> None:
    call(site, "POST", CHAT, {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}]})
    for path in ("/metrics", "/v1/metrics"):
        reply = call(site, "GET", path)
        assert reply.headers["content-type"] == "text/plain; version=0.0.4"
        families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
        assert families["superfluid_ticks"].type == "counter"
        made = {s.labels["model"]: s.value for s in families["superfluid_decode_tokens"].samples}
        assert made["scripted-plain"] > 0
        assert families["superfluid_ttft_seconds"].type == "histogram"


def test_task_dump(site: Site) -> None:
    text = call(site, "GET", "/v1/tasks").body.decode()
    assert "scheduler:scripted-plain" in text
    assert "request:" in text
    tree = call(site, "GET", "/v1/tasks", Accept="application/json").json
    assert {"name", "state", "frames", "children"} <= set(tree)


def test_health_counts_models(site: Site) -> None:
    body = call(site, "GET", "/health").json
    assert body["status"] == "ok"
    assert body["models_loaded"] == body["models_known"] == len(site.daemon.models)


# ---- bodies


def test_any_content_type_is_json(site: Site) -> None:
    body = json.dumps({"text": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert call(site, "POST", "/v1/tokenize", body, Content_Type=kind).status == 200


DEEP = b'{"tools":' * 900 + b"1" + b"}" * 900


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"a":NaN}', b'"\xff"', b'{"model":"\\ud800"}', b"\xff", DEEP, b"[" * 100_000]
)
def test_what_is_not_a_json_object(site: Site, body: bytes) -> None:
    status, error = error_of(site, "POST", CHAT, body)
    assert status == 400
    assert error["message"].startswith("invalid request: ")


def test_a_null_is_an_absent_field(site: Site) -> None:
    nulls = dict.fromkeys(("temperature", "n", "stop", "tools", "stream", "logit_bias", "response_format", "seed"))
    ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert call(site, "POST", CHAT, ask | nulls).status == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": None}, "model", "missing required field: model"),
        ({"model": 7}, "model", "a string"),
        ({"messages": []}, "messages", "messages must be non-empty"),
        ({"messages": "hi"}, "messages", "an array"),
        ({"messages": [7]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls", "array"),
        ({"n": 129}, "n", "n must be between 1 and 128"),
        ({"n": -1}, "n", "n must be between 1 and 128"),
        ({"n": 2**32}, "n", "n must be between 1 and 128"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 1.5}, "top_p", "between 0 and 1"),
        ({"top_k": -1}, "top_k", "between"),
        ({"top_k": 1.5}, "top_k", "an integer"),
        ({"min_p": True}, "min_p", "a number"),
        ({"seed": -1}, "seed", "between"),
        ({"seed": 2**64}, "seed", ""),
        ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty must be in [-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "frequency_penalty must be in [-2, 2]"),
        ({"repetition_penalty": -1}, "repetition_penalty", "at least 0"),
        ({"max_tokens": 2**32}, "max_tokens", "between"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": [1]}, "stop", "strings"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[5]", "a number"),
        ({"stream_options": 7}, "stream_options", "an object"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"tools": 7}, "tools", "an array"),
        ({"tools": [7]}, "tools[0]", "an object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"function" (no other tools are served), got \'web_'),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "no other tools are served"),
        ({"tools": [{"type": "function", "function": 7}]}, "tools[0].function", "an object, got 7"),
        ({"tools": [{"name": "f"}, {"description": "d"}]}, "tools[1].name", "a non-empty string, got None"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "non-empty"),
        ({"tools": [{"function": {"name": ["f"]}}]}, "tools[0].function.name", "a non-empty string, got ['f']"),
    ],
)
def test_fields_are_named(site: Site, fields: dict[str, object], param: str, words: str) -> None:
    ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}]}
    status, error = error_of(site, "POST", CHAT, ask | fields)
    assert status == 400
    assert error["param"] == param
    assert words in error["message"]


def test_both_ends_of_a_range_are_in_it(site: Site) -> None:
    ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for fields in (
        {"presence_penalty": 2, "frequency_penalty": -2, "top_p": 1, "min_p": 0, "n": 0, "seed": 2**64 - 1},
        {"temperature": 1e300, "top_p": 0, "min_p": 1, "top_k": 2**32 - 1, "repeat_penalty": 1e300, "seed": 0},
        {"stop": ["", "x"], "n": 128, "max_tokens": 0},
    ):
        assert call(site, "POST", CHAT, ask | fields).status == 200


def test_order_of_checks(site: Site) -> None:
    """Body and fields, ranges, class headers, model, constraint: the first that fails is told."""
    wrong = {"model": "nobody", "messages": [{"role": "user", "content": "hi"}], "tool_choice": "required"}
    assert error_of(site, "POST", CHAT, wrong | {"n": 500}, x_superfluid_qos="royal")[1]["param"] == "n"
    assert "royal" in error_of(site, "POST", CHAT, wrong, x_superfluid_qos="royal")[1]["message"]
    assert error_of(site, "POST", CHAT, wrong)[1]["code"] == "model_not_found"
    assert error_of(site, "POST", CHAT, wrong | {"model": "scripted-plain"})[1]["param"] == "tool_choice"


def test_class_headers(site: Site) -> None:
    ask = {"model": "scripted-plain", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for value in ("Interactive", "BACKGROUND", "0", "3", "agent"):
        assert call(site, "POST", CHAT, ask, x_superfluid_qos=value).status == 200
    status, error = error_of(site, "POST", CHAT, ask, x_superfluid_qos="9")
    assert status == 400
    assert "interactive, completion, agent, background" in error["message"]
    assert (
        "expected true or false"
        in error_of(site, "POST", CHAT, ask, x_superfluid_batch_invariant="maybe")[1]["message"]
    )
    status, error = error_of(site, "POST", CHAT, ask, x_superfluid_batch_invariant="Yes")
    assert (status, error["type"]) == (403, "invalid_request_error")
    assert "--http-allow-batch-invariant" in error["message"]


# ---- keys


@pytest.fixture(scope="module")
def keyed(scripted_gguf: Callable[[str], Path]) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="sf-") as home:
        thread = SiteThread(Path(home), [scripted_gguf("plain")], api_key="sesame")
        yield thread.start()
        thread.stop()


def test_every_route_but_health_wants_the_key(keyed: Site) -> None:
    for method, path in (
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("PUT", CHAT),
    ):
        status, error = error_of(keyed, method, path)
        assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert error["message"] == "Invalid or missing API key"
    assert call(keyed, "GET", "/health").status == 200


def test_both_ways_to_show_the_key(keyed: Site) -> None:
    assert call(keyed, "GET", "/v1/models", Authorization="Bearer sesame").status == 200
    assert call(keyed, "GET", "/v1/models", X_Api_Key="sesame").status == 200
    assert call(keyed, "GET", "/v1/models", X_Api_Key="sesame", Authorization="Bearer no").status == 200
    for wrong in ("bearer sesame", "Bearer  sesame", "Bearer sesame2", "Basic sesame", "sesame"):
        assert call(keyed, "GET", "/v1/models", Authorization=wrong).status == 401


def test_place_comes_before_the_key(keyed: Site) -> None:
    assert call(keyed, "GET", "/v1/models", Origin="http://evil.example").status == 403


# ---- places: Host and Origin


@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "https://LOCALHOST.:1", "http://a.localhost:3000", "http://127.9.9.9", "http://[::1]:80"],
)
def test_pages_of_this_machine_may_ask(site: Site, origin: str) -> None:
    assert call(site, "GET", "/health", Origin=origin).status == 200


@pytest.mark.parametrize(
    "origin",
    ["", "null", "http://192.168.1.5", "http://127.0.0.1.evil.example", "http://localhost@evil.example", "http://[::1", "http://127.0.0.1:x"],
)  # fmt: skip
def test_foreign_pages_may_not(site: Site, origin: str) -> None:
    status, error = error_of(site, "GET", "/health", Origin=origin)
    assert (status, error["type"], error["code"]) == (403, "permission_error", "origin_refused")


def test_a_loopback_listener_answers_a_loopback_host(site: Site) -> None:
    assert call(site, "GET", "/health", Host="localhost.:99").status == 200
    assert error_of(site, "GET", "/health", Host="evil.example")[1]["code"] == "origin_refused"


def allowed(access: Access, host: str | None, origin: str | None = None, credential: str | None = None) -> bool:
    try:
        access.check_place(host, origin, credential)
    except ApiError as error:
        assert error.code == "origin_refused"
        return False
    return True


def test_places_off_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    open_to_all, with_key = Access("0.0.0.0"), Access("0.0.0.0", "k")
    for host in ("10.1.2.3:8453", "[fe80::1]", "localhost", "box.lan", "box.local", None):
        assert allowed(open_to_all, host)
    assert not allowed(open_to_all, "evil.example")
    assert not allowed(open_to_all, "box")
    assert allowed(with_key, "evil.example")
    with pytest.raises(ApiError, match="--api-key"):
        open_to_all.check_place("evil.example", None, None)


def test_the_consoles_own_origin() -> None:
    open_to_all, with_key = Access("0.0.0.0"), Access("0.0.0.0", "k")
    assert allowed(with_key, "box.lan:8453", "http://box.lan:8453", "any")
    assert allowed(with_key, "box.lan", "https://BOX.lan:443", "any")
    assert allowed(with_key, "box.lan:80", "http://box.lan", "any")
    assert not allowed(with_key, "box.lan:8453", "http://box.lan:8453")
    assert not allowed(with_key, "box.lan:8453", "http://box.lan:8454", "any")
    assert not allowed(open_to_all, "10.0.0.1:8453", "http://10.0.0.1:8453", "any")
