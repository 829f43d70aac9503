"""`superfluid serve` with fill-in-the-middle, as a process: the model of --fim-model on a worker of its own, limits."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from superfluid.client import Throttled
from tests.cli.conftest import RunCommand
from tests.cli.server import Server
from tests.fim_models import write_fim

MIDDLE = "return a + b"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        yield Path(folder)


@pytest.fixture
def fim_model(shared: Path, tmp_path: Path) -> Path:
    return write_fim(shared, "add", tmp_path / "fim-add.gguf", "deepseek")


def ask(server: Server, model: str, **fields: Any) -> openai.types.Completion:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(model=model, prompt="a", suffix="b", temperature=0, **fields)


def test_a_satellite_fills_in_for_every_model(
    home: Path, fim_model: Path, scripted_gguf: Callable[[str], Path]
) -> None:
    plain = scripted_gguf("plain")
    with Server(
        home, plain, "--fim-model", fim_model, "--port", 0, "--max-context", 2048, "--fim-max-context", 1024
    ) as server:
        server.ready()
        assert len(server.workers) == 2
        reply = ask(server, plain.stem)
        assert (reply.choices[0].text, reply.model) == (MIDDLE, plain.stem)
        assert reply.model_extra == {"superfluid": {"cached": False, "expired": False, "served_by": "fim-add"}}
        with server.client() as client:
            assert client.complete("a", "b", max_tokens=128).cached
        status, body = server.chat(plain.stem)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello, world.")
        assert server.chat("fim-add")[0] == 404  # it is not served by its name
        (entry,) = json.loads(server.get("/v1/models"))["data"]
        dialect = entry["capabilities"]["dialect"]
        assert (dialect["fim"], dialect["fim_model"]) == (True, "fim-add")
        assert "\nfim-add: 0 of 2 lanes, 0 waiting, fills in middles, " in server.get("/v1/tasks").decode()
        page = server.get("/metrics").decode()
        assert 'superfluid_fim_satellite_info{model="fim-add"} 1' in page
        assert "superfluid_fim_satellite_decode_tokens_total 3" in page
        assert 'superfluid_fim_completions_total{result="generated"} 1' in page
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
            ask(server, plain.stem, extra_body={"prompt": "x" * 1100})
        (dead,) = [pid for pid in server.workers if f"{fim_model}" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(dead, signal.SIGKILL)
        server.said("starting it again")
        assert ask(server, plain.stem, max_tokens=9).choices[0].text == MIDDLE
        assert server.stop() == 0
    assert not (home / "sessions" / "fim").exists()


def test_a_model_without_markers_is_no_satellite(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    plain = scripted_gguf("plain")
    with Server(home, plain, "--fim-model", plain, "--port", 0) as server:
        server.said(f"--fim-model {plain}: this model has no FIM dialect")
        assert not any("as asked for" in line for line in server.lines)
        assert server.wait() == 2


def test_the_limits_of_the_command_line(home: Path, fim_model: Path) -> None:
    limits = "--completion-rate", "0.001", "--completion-burst", "1", "--request-timeout", "60000"
    with Server(home, fim_model, "--port", 0, *limits) as server:
        server.ready()
        assert ask(server, fim_model.stem).choices[0].text == MIDDLE
        with pytest.raises(openai.RateLimitError) as refused:
            ask(server, fim_model.stem)
        assert 990 < int(refused.value.response.headers["retry-after"]) <= 1000
        with server.client() as client:
            assert client.complete("a", "b", max_tokens=128).cached
            with pytest.raises(Throttled):
                client.complete("a", "b")
        (entry,) = json.loads(server.get("/v1/models"))["data"]
        dialect = entry["capabilities"]["dialect"]
        assert (dialect["fim"], dialect["fim_model"]) == (True, None)
        server.said(r"<-- 200 POST /v1/completions \(fim\) model=fim-add prompt=5 cached=0 completion=3")
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--completion-rate", "0.0001"), "--completion-rate expects 0, or at least 0.001"),
        (("--completion-rate", "inf"), "--completion-rate expects at least 0"),
        (("--completion-burst", "0.5"), "--completion-burst expects at least 1"),
        (("--fim-max-context", "511"), "--fim-max-context expects at least 512"),
        (("--fim-max-batch", "0"), "--fim-max-batch expects 1 to 256"),
        (("--completion-deadline-ms", "-1"), "--completion-deadline-ms expects at least 0"),
        (("--fim-model", "/nowhere.gguf"), "/nowhere.gguf: no such file or directory"),
    ],
)
def test_values_that_are_wrong(
    superfluid: RunCommand, scripted_gguf: Callable[[str], Path], flags: tuple[str, ...], said: str
) -> None:
    done = superfluid("serve", scripted_gguf("plain"), "--port", 0, *flags)
    assert done.code == 2
    assert said in done.err
