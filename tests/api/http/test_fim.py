"""Fill-in-the-middle over /v1/completions, with the official client and without."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from superfluid.daemon.fim import FimService
from superfluid.scheduler.fim import Rate
from tests.api.http.conftest import Reply, call
from tests.api.http.listening import Site, SiteThread
from tests.fim_models import MIDDLES, write_fim

COMPLETIONS = "/v1/completions"
PREFIX, SUFFIX = "def add(a, b):\n", "\n\nprint(add(1, 2))\n"
PROMPT = len(PREFIX) + len(SUFFIX) + 3  # tokens: a byte each, and the markers


@pytest.fixture(scope="module")
def thread(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteThread]:
    folder = tmp_path_factory.mktemp("fim")
    paths = [write_fim(shared, name, folder / f"fim-{name}.gguf") for name in MIDDLES]
    with tempfile.TemporaryDirectory(prefix="sf-") as home:
        thread = SiteThread(Path(home), paths)
        thread.start()
        yield thread
        thread.stop()


@pytest.fixture
def fims(thread: SiteThread) -> Site:
    """The site; nothing is remembered and nobody has asked."""
    configure(thread)
    return thread.site


def configure(thread: SiteThread, rate: Rate | None = None, deadline_ms: int = 0) -> None:
    """Begin anew with other settings of the daemon."""
    daemon = thread.site.daemon
    thread.run(lambda: set_fim(daemon, FimService(daemon.metrics, rate or Rate(0), deadline_ms)))


async def set_fim(daemon: Any, service: FimService) -> None:
    daemon.fim = service
    for result in daemon.metrics.fim_completions_total:
        daemon.metrics.fim_completions_total[result] = 0


@pytest.fixture
def client(fims: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fims.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def counts(site: Site) -> dict[str, int]:
    return {name: n for name, n in site.daemon.metrics.fim_completions_total.items() if n}


def ask(site: Site, model: str = "fim-add", **fields: Any) -> Reply:
    body = {"model": model, "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, **fields}
    return call(site, "POST", COMPLETIONS, body)


# ---- answers


def test_the_official_client_gets_a_middle_and_then_the_same_from_the_cache(fims: Site, client: openai.OpenAI) -> None:
    for cached in (False, True):
        reply = client.completions.create(model="fim-add", prompt=PREFIX, suffix=SUFFIX, temperature=0)
        assert reply.object == "text_completion"
        assert reply.id.startswith("cmpl-superfluid-")
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("return a + b", "stop", 0)
        assert choice.logprobs is None
        usage = reply.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (PROMPT, 3, PROMPT + 3)
        assert usage.prompt_tokens_details is None
        assert reply.model == "fim-add"
        assert reply.model_extra == {"superfluid": {"cached": cached, "expired": False, "served_by": "fim-add"}}
    assert counts(fims) == {"generated": 1, "cached": 1}
    assert fims.model.store.session_ids() == []


def test_a_stream(fims: Site, client: openai.OpenAI) -> None:
    for cached in (False, True):
        stream = client.completions.create(model="fim-utf8", prompt="", suffix="", temperature=0, stream=True)
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "café ok"
        assert all("�" not in chunk.choices[0].text for chunk in chunks)
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all("superfluid" not in (chunk.model_extra or {}) for chunk in chunks[:-1])
        told = {"cached": cached, "expired": False, "served_by": "fim-utf8"}
        assert chunks[-1].model_extra == {"superfluid": told}
        assert all(chunk.usage is None for chunk in chunks)
    (last,) = [
        chunk.usage
        for chunk in client.completions.create(
            model="fim-utf8", prompt="", suffix="", stream=True, stream_options={"include_usage": True}, temperature=0
        )
        if chunk.usage
    ]
    assert last.to_dict() == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_middle_that_ends_within_a_character(fims: Site) -> None:
    assert ask(fims, "fim-cut").json["choices"][0]["text"] == "caf�"
    assert "".join(e["choices"][0]["text"] for e in ask(fims, "fim-cut", stream=True).events) == "caf�"


def test_the_order_of_the_prompt(fims: Site) -> None:
    """Suffix first the prompt ends in the prefix, whose last newline leads to the middle marker, and on."""
    for mode, tokens in (("psm", 3), ("SPM", 4), ("spm", 4), ("PSM", 3)):
        body = ask(fims, fim_mode=mode).json
        assert body["choices"][0]["text"] == "return a + b"
        assert body["usage"]["completion_tokens"] == tokens
    assert counts(fims) == {"generated": 2, "cached": 2}


def test_only_greedy_answers_are_kept(fims: Site) -> None:
    for fields in ({"temperature": 0.5}, {"temperature": None}, {"logit_bias": {"70": -1}}):
        for _ in range(2):
            body = ask(fims, **fields).json
            assert body["superfluid"]["cached"] is False
    assert ask(fims).json["superfluid"]["cached"] is False
    assert ask(fims, max_tokens=2).json["superfluid"]["cached"] is False
    again = ask(fims, max_tokens=2, seed=5, stream=True).events
    assert again[-1]["superfluid"]["cached"] is True
    assert again[-1]["choices"][0]["finish_reason"] == "length"
    for _ in range(2):  # made, then kept or made again
        (choice,) = ask(fims, stop=" + ").json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("return a", "stop")


def test_limits(fims: Site) -> None:
    assert ask(fims, "fim-loop").json["usage"]["completion_tokens"] == 128
    body = ask(fims, "fim-loop", max_tokens=0, n=2).json
    assert body["usage"]["completion_tokens"] == 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    body = ask(fims, "fim-loop", max_tokens=6, ignore_eos=True).json
    assert body["choices"][0] == {
        "index": 0,
        "text": "tick tock tick tock ",
        "logprobs": None,
        "finish_reason": "length",
    }
    refused = ask(fims, "fim-loop", prompt="x" * 5000)
    assert refused.status == 400
    assert refused.json["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens, but your request has " in refused.json["error"]["message"]


def test_text_forms_no_marker(fims: Site) -> None:
    marked = "<|fim_middle|>"
    body = ask(fims, prompt=marked, suffix=marked).json
    assert body["choices"][0]["text"] == "return a + b"
    assert body["usage"]["prompt_tokens"] == 2 * len(marked) + 3


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"fim_mode": "middle"}, "fim_mode", "invalid_value"),
        ({"fim_mode": 1}, "fim_mode", None),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
        ({"prompt": [1, 2]}, "prompt", None),
        ({"suffix": 3}, "suffix", None),
        ({"temperature": -1}, "temperature", None),
    ],
)
def test_what_is_refused_names_its_field_and_takes_no_turn(
    thread: SiteThread, fims: Site, fields: dict[str, Any], param: str, code: str | None
) -> None:
    configure(thread, Rate(1, 1))
    refused = ask(fims, **fields)
    assert refused.status == 400
    error = refused.json["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
    assert ask(fims).status == 200  # the one turn there is


def test_a_null_suffix_is_none_and_headers_choose_no_class(fims: Site) -> None:
    refused = ask(fims, suffix=None, fim_mode="psm")
    assert refused.json["error"]["code"] == "unsupported_parameter"
    body = {"model": "fim-add", "prompt": "", "suffix": ""}
    assert call(fims, "POST", COMPLETIONS, body, x_superfluid_qos="background").status == 200
    assert ask(fims, "no-such").json["error"]["code"] == "model_not_found"


def test_a_client_that_asks_too_often_waits(thread: SiteThread, fims: Site) -> None:
    configure(thread, Rate(0.5, 2))
    assert [ask(fims, "no-such").status, ask(fims).status] == [404, 200]
    refused = ask(fims, "no-such")
    assert refused.status == 429
    error = refused.json["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "completion_rate_limited")
    wait = int(error["message"].removeprefix("completion rate limit exceeded; retry in ").removesuffix(" ms"))
    assert 0 < wait <= 2000
    assert wait <= int(refused.headers["retry-after"]) * 1000 < wait + 1000
    raw = {"model": "fim-add", "prompt": "x", "max_tokens": 1}
    assert call(fims, "POST", COMPLETIONS, raw).status == 200  # raw completions are not counted
    assert counts(fims)["throttled"] == 1
    assert 'superfluid_fim_completions_total{result="throttled"} 1' in call(fims, "GET", "/metrics").body.decode()


# ---- deadlines and clients that leave


def test_one_that_is_not_ready_in_time_expires(thread: SiteThread, fims: Site) -> None:
    configure(thread, deadline_ms=1)
    body = ask(fims, "fim-loop", max_tokens=4000).json
    assert body["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert body["superfluid"] == {"cached": False, "expired": True, "served_by": "fim-loop"}
    assert body["usage"]["completion_tokens"] == 0
    events = ask(fims, "fim-loop", max_tokens=4000, stream=True).events
    assert events[-1]["superfluid"]["expired"] is True
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert counts(fims) == {"expired": 2}
    raw = call(fims, "POST", COMPLETIONS, {"model": "fim-loop", "prompt": "x\n", "max_tokens": 4000}).json
    assert raw["choices"][0]["finish_reason"] == "length"
    assert raw["usage"]["completion_tokens"] < 4000
    configure(thread, deadline_ms=60_000)
    assert ask(fims).json["superfluid"]["expired"] is False


def test_a_client_that_leaves_stops_its_lane(thread: SiteThread, fims: Site, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="fim-loop", prompt="", suffix="", temperature=0, stream=True, max_tokens=4000
    ) as stream:
        assert next(iter(stream)).choices[0].text
    (loop,) = [model for model in fims.daemon.models if model.name == "fim-loop"]

    async def idle() -> None:
        with trio.fail_after(30):
            await loop.scheduler.wait_idle()

    thread.run(idle)
    assert loop.metrics.decode_tokens_total < 4000 + 1000
    assert ask(fims, "fim-loop", prompt="", suffix="", max_tokens=4000).json["superfluid"]["cached"] is False
