"""What `superfluid serve` refuses before anything loads, and in which order."""

import fcntl
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from superfluid.cli import serve
from tests.cli.conftest import RunCommand

TAKEN = "127.0.0.1"


@attrs.frozen
class Fault:
    """Something that stops the start: flags, a model argument, the exit code, and words of the message."""

    code: int
    said: str
    flags: tuple[str, ...] = ()
    model: str | None = None


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server((TAKEN, 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def faults(tmp_path: Path, taken_port: int, tiny_gguf: Path) -> list[Fault]:
    """In the order in which they are told."""
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    (tmp_path / "file").touch()
    return [
        Fault(2, "serve has no option --max-ctx", ("--max-ctx", "1")),
        Fault(2, '--http-default-qos expects one of .*, got "fast"', ("--http-default-qos", "fast")),
        Fault(2, '--web-origin expects .*, got "here"', ("--web-origin", "here")),
        Fault(2, "--api-key is blank", ("--api-key", "")),
        Fault(2, "--max-context expects", ("--max-context", "nope")),
        Fault(2, "--socket: .* does not fit", ("--socket", f"/{'x' * 120}")),
        Fault(1, "another process listens there", ("--http", f"{TAKEN}:{taken_port}")),
        Fault(1, "org/model: no runtime here fetches models by id", model="org/model"),
        Fault(2, "nope: there is no such runtime here", ("--runtime", "nope"), "/not/there"),
        Fault(2, "/not/there: no such file or directory", model="/not/there"),
        Fault(2, "no runtime here reads .*notes.txt", model=str(text)),
        Fault(2, "--kv-bits 8: ", ("--kv-bits", "8")),
        Fault(2, "--llamacpp-threads: 0 to 512 expected, got 900", ("--llamacpp-threads", "900")),
        Fault(2, "--class-lanes: ", ("--class-lanes", "agent")),
        Fault(1, "--log-file .*: Not a directory", ("--log-file", str(tmp_path / "file" / "log"))),
        Fault(1, "Not a directory", ("--sessions", str(tmp_path / "file" / "sessions"))),
    ]


@pytest.mark.parametrize("first", range(16))
def test_the_order_of_refusals(
    superfluid: RunCommand, faults: list[Fault], tiny_gguf: Path, tmp_path: Path, first: int
) -> None:
    """With a fault and all that come after it, that fault is told, and nothing was made."""
    there = faults[first:]
    model = next((fault.model for fault in there if fault.model), str(tiny_gguf))
    flags = [flag for fault in there for flag in fault.flags]
    if "--http" not in flags:
        flags += ["--port", "0"]
    done = superfluid("serve", model, *flags)
    assert re.search(f"^superfluid: .*{there[0].said}", done.err, re.MULTILINE), done.err
    assert done.code == there[0].code
    assert "Traceback" not in done.err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("flags", "flag", "instead"),
    [
        (("--port", "{}"), "--port", "--port"),
        (("--http", "127.0.0.1:{}"), "--http", "--http"),
        (("--host", "127.0.0.1", "--port", "{}"), "--port", "--port"),
        (("--port", "0", "--web", "127.0.0.1:{}"), "--web", "--web"),
    ],
)
def test_a_taken_port_says_which_flag_names_another(
    superfluid: RunCommand, taken_port: int, flags: tuple[str, ...], flag: str, instead: str
) -> None:
    done = superfluid("serve", "/not/there", *(part.format(taken_port) for part in flags))
    assert done.code == 1
    assert done.err == (
        f"superfluid: {flag} 127.0.0.1:{taken_port}: Address already in use "
        f"(another process listens there; name another port with {instead})\n"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("foo", "http://foo"),
        ("localhost:3000", "http://localhost:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://localhost:3000/app?x#y", "http://localhost:3000"),
        ("HTTP://LocalHost:3000", "http://localhost:3000"),
        ("http://localhost:80", "http://localhost"),
        ("https://localhost:443", "https://localhost"),
        ("http://me@localhost", "http://localhost"),
        ("http://m\u00fcnchen.example", "http://xn--mnchen-3ya.example"),
        ("http://[0::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abc/page.html", "chrome-extension://abc"),
        ("http://localhost:99999", None),
        ("http://a b", None),
        ("http://", None),
        ("", None),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(superfluid: RunCommand, given: str, meant: str | None) -> None:
    done = superfluid("serve", "/not/there", "--port", "0", "--web", "127.0.0.1:0", "--web-origin", given)
    hint = f"; did you mean {meant}?" if meant else ""
    assert done.code == 2
    assert done.err == (
        "superfluid: --web-origin expects a page's origin as its browser sends it, like http://localhost:3000, "
        f'got "{given}"{hint}\n'
    )


def test_there_are_no_wildcards_in_origins(superfluid: RunCommand) -> None:
    for given in ("*", "http://*.example"):
        done = superfluid("serve", "/not/there", "--port", "0", "--web", "127.0.0.1:0", "--web-origin", given)
        assert done.code == 2
        assert done.err.endswith(f'got "{given}"; there are no wildcards\n')


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://a.example",
        "http://127.0.0.1:1",
        "https://[::1]:3000",
        "app://obsidian.md",
        "null",
    ],
)
def test_origins_that_browsers_send(superfluid: RunCommand, origin: str) -> None:
    done = superfluid("serve", "/not/there", "--port", "0", "--web", "127.0.0.1:0", "--web-origin", origin)
    assert done.err == "superfluid: /not/there: no such file or directory\n"


def test_the_demo_offline_says_how_to_name_a_model(superfluid: RunCommand) -> None:
    done = superfluid("serve", "--offline", "--port", "0")
    assert done.code == 2
    assert "superfluid serve <path to a GGUF file>" in done.err


def test_a_runtime_that_does_not_read_the_model(superfluid: RunCommand, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    done = superfluid("serve", text, "--runtime", "llama.cpp", "--port", "0")
    assert done.code == 2
    assert f"runtime llamacpp reads a GGUF file; {text} is no format that is known here" in done.err


def worker(folder: Path, report: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker of the runtime `other` that answers its check with `report`, or with an error."""
    program = folder / "superfluid-worker-other"
    answer = json.dumps(report) if report else ""
    fails = "" if report else "print('a b c\\n\\nlibrary not found', file=sys.stderr)"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint({answer!r})\n{fails}\nsys.exit({int(not report)})\n")
    program.chmod(0o700)
    monkeypatch.setenv("SUPERFLUID_WORKER_OTHER", str(program))
    return program


REPORT: dict[str, object] = {
    "runtime": {"id": "other", "version": None, "aliases": ["o"]},
    "link_w": [8],
    "available": "there is no such chip here",
    "formats": [{"id": "odd", "describe": "an odd file", "file": {"extensions": ["odd"]}}],
    "tokenizer": {"from": "library", "name": "llama"},
    "devices": [],
    "capabilities": None,
}


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        (REPORT, 4, "runtime other cannot run here: there is no such chip here"),
        (None, 4, r"did not answer its check: a b c / library not found"),
        (REPORT | {"link_w": [6, 7]}, 4, r"speaks Link W \[6, 7\], this daemon 8: update the one that is older"),
        (REPORT | {"runtime": {"id": "elsewhere"}}, 4, "answers for runtime 'elsewhere'"),
        (REPORT | {"available": True, "formats": []}, 2, "runtime other does not say what it reads"),
        (
            REPORT | {"available": True, "tokenizer": {"from": "library", "name": "odd"}}, 4,
            "its tokenizer library 'odd' is not found",
        ),
        (REPORT | {"available": True, "tokenizer": {"from": "engine"}}, 4, "its tokenizer is the engine's own, which"),
        (REPORT | {"available": True, "tokenizer": {"from": "afar"}}, 4, "its tokenizer comes from 'afar', which"),
    ],
)  # fmt: skip
def test_runtimes_that_cannot_be_used(
    superfluid: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, object] | None,
    code: int,
    said: str,
) -> None:
    worker(tmp_path, report, monkeypatch)
    (tmp_path / "model.odd").touch()
    done = superfluid("serve", tmp_path / "model.odd", "--runtime", "other", "--port", "0")
    assert re.search(f"^superfluid: .*{said}", done.err), done.err
    assert done.code == code


READY = REPORT | {
    "available": True,
    "model": {"reads": True, "path": ""},
    "options": [
        {"name": "threads", "kind": "int", "default": "0", "about": "", "least": 0, "most": 512},
        {"name": "base", "kind": "float", "default": "model", "about": "", "least": 0},
        {"name": "repack", "kind": "on-off", "default": "on", "about": ""},
        {"name": "flash", "kind": "choice", "default": "auto", "about": "", "choices": ["auto", "on"]},
        {"name": "lib", "kind": "text", "default": "install", "about": ""},
    ],
}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--other-threads", "x"), '--other-threads: an integer expected, got "x"'),
        (("--other-threads", "900"), "--other-threads: 0 to 512 expected, got 900"),
        (("--other-base=nan",), '--other-base: a number expected, got "nan"'),
        (("--other-repack", "true"), '--other-repack: on or off expected, got "true"'),
        (("--other-flash", "no"), '--other-flash: one of auto, on expected, got "no"'),
        (("--other-lib=",), "--other-lib: a value expected"),
        (("--other-lib", "a", "--other-lib=a"), "--other-lib is given twice"),
        (
            ("--other-theads", "1"),
            "no option --other-theads (did you mean --other-threads?); it takes --other-threads, ",
        ),
        (("--other-lib",), "--other-lib needs a value"),
        (("--another-x", "1"), "serve has no option --another-x"),
    ],
)
def test_options_of_runtimes_are_checked_before_anything_loads(
    superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    worker(tmp_path, READY, monkeypatch)
    (tmp_path / "model.odd").touch()
    done = superfluid("serve", tmp_path / "model.odd", "--port", "0", *flags)
    assert said in done.err
    assert done.code == 2
    assert not (tmp_path / "home").exists()


def test_an_option_of_a_runtime_that_cannot_run_cannot_be_checked(
    superfluid: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    worker(tmp_path, REPORT, monkeypatch)
    done = superfluid("serve", tiny_gguf, "--port", "0", "--other-x", "1")
    assert done.code == 2
    assert "--other-x cannot be checked: runtime other cannot run here: there is no such chip here" in done.err


def test_a_library_that_an_option_names_and_that_is_not_there(
    superfluid: RunCommand, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", "")  # the flag sets it for this process
    done = superfluid("serve", tiny_gguf, "--port", "0", "--llamacpp-lib", "/not/there.so")
    assert done.code == 4
    assert "/not/there.so: no such file or directory" in done.err


def test_a_directory_that_another_server_holds(superfluid: RunCommand, tiny_gguf: Path, tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    with (sessions / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = superfluid("serve", tiny_gguf, "--sessions", sessions, "--port", "0")
    assert done.code == 1
    assert f"superfluid: another server is already running on {sessions}; stop it" in done.err


@pytest.mark.parametrize(
    ("line", "models"),
    [
        (["a.gguf", "--model", "b.gguf"], ("a.gguf", "b.gguf")),
        (["--model", "b.gguf", "a.gguf", "--model", "c.gguf"], ("a.gguf", "b.gguf", "c.gguf")),
        (["--model", "b.gguf", "--model", "a.gguf"], ("b.gguf", "a.gguf")),
    ],
)
def test_the_bare_model_is_the_first(
    superfluid: RunCommand, monkeypatch: pytest.MonkeyPatch, line: list[str], models: tuple[str, ...]
) -> None:
    served: list[tuple[str, ...]] = []
    monkeypatch.setattr(serve, "start", lambda options: served.append(options.models) or 0)
    assert superfluid("serve", *line).code == 0
    assert served == [models]
