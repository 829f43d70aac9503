"""A start that fails: it leaves the sessions as they are, and says why where the operator looks."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from superfluid.api.http.listener import CannotListen, listen
from tests.cli.server import Server


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: a socket's has 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        yield Path(folder)


@pytest.fixture
def last_run(home: Path, scripted_gguf: Callable[[str], Path]) -> Path:
    """The log of a run that left a session."""
    with Server(home, scripted_gguf("plain"), "--port", "0", "--max-context", "512").ready() as server:
        with server.client() as client:
            client.session(system="You are brief.")
        assert server.stop() == 0
    return home / "sessions" / "wal.log"


@pytest.fixture
def cut_short(tmp_path: Path, scripted_gguf: Callable[[str], Path]) -> Path:
    """A model file whose end is missing."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(scripted_gguf("plain").read_bytes()[:-4096])
    return path


@pytest.fixture
def taken_socket(home: Path) -> Iterator[Path]:
    path = home / "taken.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_it_appends_nothing_to_the_log(
    last_run: Path, cut_short: Path, taken_socket: Path, scripted_gguf: Callable[[str], Path], home: Path
) -> None:
    before = last_run.read_bytes()
    plain = scripted_gguf("plain")
    for model, flags, code in (
        (cut_short, (), 1),
        (plain, ("--tool-call-parser", "json", "--dialect", "atem"), 2),
        (plain, ("--socket", taken_socket), 1),
        (plain, ("--log-dir", "/dev/null"), 1),
    ):
        with Server(home, model, "--port", "0", "--max-context", "512", *flags) as server:
            assert server.wait() == code, "\n".join(server.lines)
        assert last_run.read_bytes() == before, flags


@pytest.fixture
def two_logs(home: Path, scripted_gguf: Callable[[str], Path]) -> dict[Path, bytes]:
    """The files of the logs of a run that served two models: the default's with a torn end, the other's empty."""
    models = ("--model", scripted_gguf("plain"), "--model", scripted_gguf("text_tool"))
    with Server(home, *models, "--port", "0", "--max-context", "512").ready() as server:
        with server.client() as client:
            client.session(system="You are brief.")
        assert server.stop() == 0
    with (home / "sessions" / "wal.log").open("ab") as log:
        log.write(b"cut")
    return logs(home)


def logs(home: Path) -> dict[Path, bytes]:
    """Everything but the locks that belongs to a log of any model, and its bytes."""
    found = sorted((home / "sessions").rglob("wal.log*"))
    return {path: path.read_bytes() for path in found if path.suffix != ".lock"}


Further = Callable[[Path, Path, Path], tuple[tuple[str | Path, ...], int]]


@pytest.mark.parametrize(
    "further",
    [
        pytest.param(lambda plain, other, cut: (("--model", other, "--model", cut), 1), id="model-cut-short"),
        pytest.param(lambda plain, other, cut: (("--model", other, "--fim-model", plain), 2), id="fim-without-markers"),
        pytest.param(lambda plain, other, cut: (("--model", other, "--socket", cut), 1), id="socket-is-a-file"),
    ],
)
def test_a_further_model_that_fails_leaves_every_log_as_it_was(
    two_logs: dict[Path, bytes],
    cut_short: Path,
    scripted_gguf: Callable[[str], Path],
    home: Path,
    further: Further,
) -> None:
    plain = scripted_gguf("plain")
    flags, code = further(plain, scripted_gguf("text_tool"), cut_short)
    for afresh in ((), ("--sessions-cache",), ("--sessions-cache",)):
        with Server(home, "--model", plain, *flags, "--port", "0", "--max-context", "512", *afresh) as server:
            assert server.wait() == code, "\n".join(server.lines)
        assert logs(home) == two_logs


def test_a_further_models_log_that_is_damaged_leaves_the_others_as_they_were(
    two_logs: dict[Path, bytes], scripted_gguf: Callable[[str], Path], home: Path
) -> None:
    (other,) = (home / "sessions" / "models").glob("*/wal.log")
    damaged = two_logs[other] + b"\xff" * 30
    other.write_bytes(damaged)
    models = ("--model", scripted_gguf("plain"), "--model", scripted_gguf("text_tool"))
    with Server(home, *models, "--port", "0", "--max-context", "512") as server:
        server.said(f"{other} is damaged at byte 8")
        assert server.wait() == 1
    assert logs(home) == two_logs | {other: damaged}


def test_runs_that_came_to_nothing_do_not_replace_the_log_that_was_put_aside(
    last_run: Path, scripted_gguf: Callable[[str], Path], home: Path
) -> None:
    before = last_run.read_bytes()
    for _ in range(2):
        with Server(home, scripted_gguf("plain"), "--port", "0", "--max-context", "512", "--sessions-cache") as server:
            server.ready().process.kill()
            server.process.wait()
        assert last_run.with_name("wal.log.prev").read_bytes() == before


def test_with_a_log_file_the_reason_is_on_stderr_too(home: Path, cut_short: Path) -> None:
    log = home / "serve.log"
    with Server(home, cut_short, "--port", "0", "--max-context", "512", "--log-file", log) as server:
        assert server.wait() == 1
        reason = server.said(r"^superfluid: .*cut\.gguf.*|^superfluid: .*(worker|model).*")[0]
    assert reason in log.read_text()
    assert [line for line in server.lines if "runtime llamacpp serves" in line] == []


def test_with_a_log_file_a_server_that_is_ready_lets_go_of_stderr(
    home: Path, scripted_gguf: Callable[[str], Path]
) -> None:
    """Whoever waits for the end of its stderr is not kept waiting."""
    log = home / "serve.log"
    with Server(home, scripted_gguf("plain"), "--port", "0", "--max-context", "512", "--log-file", log) as server:
        server.ended()
        assert "openai api on http://" in log.read_text()
        assert server.stop() == 0
    assert server.lines == [""]


def test_an_address_that_is_taken_meanwhile_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as told:
            listen("127.0.0.1", port)
    assert str(told.value) == f"127.0.0.1:{port}: Address already in use"
