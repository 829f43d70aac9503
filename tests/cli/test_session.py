"""`superfluid session inspect` and `export` against a running server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from superfluid.cli.command import run
from superfluid.cli.main import program
from superfluid.cli.session import counted, event_lines, timestamp
from superfluid.client import Client, NotReached, Session
from superfluid.link import events as ev, postcard
from superfluid.link.session_api import Inspection
from tests.api.serving import Server

Served = Callable[[str], Server]
KEY = "sk-" + "a1" * 20


@pytest.fixture
def session(served: Served) -> Iterator[Session]:
    """A session with a message that holds a key, a reply, and an open call."""
    with served("text_tool").blocking_client() as client:
        made = client.session(system="You are brief.", tools=[{"name": "get_weather", "parameters": {}}])
        made.user(f"My key is {KEY}.")
        made.generate()
        made.set_meta(title="Wéather")
        yield made


def superfluid(*arguments: object) -> int:
    return run(program, [str(argument) for argument in arguments])


@pytest.fixture
def socket(served: Served) -> Path:
    return served("text_tool").path


def test_inspect_shows_everything_but_content(
    session: Session, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert superfluid("session", "inspect", session.id, "--socket", socket) == 0
    inspection = session.inspect()
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    about = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert about["session"] == str(session.id)
    assert about["title"] == "Wéather"
    assert about["tier"] in ("cold", "resident")
    assert about["tokens"] == str(len(inspection.tokens))
    assert f"{inspection.behavior_fingerprint:016x}" in shown
    assert inspection.store_id is not None
    assert about["store"] == inspection.store_id.hex()
    assert "7 get_weather" in shown
    events = lines[-len(inspection.events) :]
    assert [line.split()[4] for line in events] == [
        "Created", "Message", "Message", "GenerationFingerprint", "GenerationPrompt", "Generated", "Generated",
        "ToolUse", "Generated", "MetaUpdated",
    ]  # fmt: skip
    assert KEY not in shown
    assert "Paris" not in shown
    tokens = [counted(len(getattr(event.body, "span", ())), "token") for event in inspection.events]
    told = [" ".join(line.split()[5:]) for line in events]
    assert told == [
        "",
        f"system, {tokens[1]}, 14 bytes",
        f"user, {tokens[2]}, {len(KEY) + 11} bytes",
        f"digest {inspection.behavior_fingerprint:016x}",
        f"{tokens[4]}",
        f"{tokens[5]}, text, 12 bytes",
        f"{tokens[6]}, tool call, {len(inspection.events[6].body.text)} bytes",
        "get_weather, arguments 16 bytes",
        f"{tokens[8]}, text, finish eos, 0 bytes",
        "version 1, title 8 bytes",
    ]


def test_inspect_shows_texts_when_asked(session: Session, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session.assistant("one\n\x9b2Jtwo \x07")
    assert superfluid("session", "inspect", session.id, "--socket", socket, "--include-content") == 0
    lines = capsys.readouterr().out.splitlines()[-len(session.events()) :]
    assert lines[2].endswith('tokens, "My key is [REDACTED]."')
    assert lines[5].endswith('text, "Let me look."')
    assert lines[7].endswith(r'get_weather, arguments "{\"city\":\"Paris\"}"')
    assert lines[9].endswith('version 1, title "Wéather"')
    assert lines[10].endswith(r'"one\n2Jtwo \u0007"')


def test_inspect_as_json(session: Session, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert superfluid("session", "inspect", "--json", session.id, f"--socket={socket}") == 0
    shown = capsys.readouterr().out
    assert shown.startswith('{\n  "summary": {\n    "id": ')
    assert postcard.from_json(Inspection, json.loads(shown)) == session.inspect()


def test_times_and_events() -> None:
    assert timestamp(0) == "-"
    assert timestamp(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert timestamp(1 << 63) == f"{1 << 63} ms"
    bodies: list[ev.Body] = [
        ev.EpochBump(),
        ev.ToolLease(7, 1_700_000_000_123),
        ev.Block(1, 5, "{}", [1, 2], 2),
        ev.PermissionResponse(3, True),
        ev.Appended(None, [1]),
        ev.Message(9, "x", []),
    ]
    events = [ev.Event(number, 2, 0, body) for number, body in enumerate(bodies)]
    assert [line.strip() for line in event_lines(events)] == [
        "0  epoch 2  -  EpochBump",
        "1  epoch 2  -  ToolLease           call id 7, until 2023-11-14T22:13:20.123Z",
        "2  epoch 2  -  Block               user, kind 5, 2 tokens, visibility version 2, payload 2 bytes",
        "3  epoch 2  -  PermissionResponse  request id 3, granted true",
        "4  epoch 2  -  Appended            1 token",
        "5  epoch 2  -  Message             role 9, 0 tokens, 1 byte",
    ]
    assert list(event_lines([])) == []


def test_export_as_json_lines(session: Session, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert superfluid("session", "export", session.id, "--socket", socket) == 0
    plain = capsys.readouterr().out
    assert KEY not in plain
    assert "Paris" not in plain
    lines = [json.loads(line) for line in plain.splitlines()]
    assert [line["event_id"] for line in lines] == list(range(len(session.events())))
    assert lines[2]["event"]["text"] == {"bytes": len(f"My key is {KEY}.")}
    assert superfluid("session", "export", session.id, "--socket", socket, "--include-content") == 0
    told = capsys.readouterr().out
    assert KEY not in told
    assert "My key is [REDACTED]." in told
    assert "Paris" in told


def test_export_to_private_files(session: Session, socket: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    (tmp_path / "made").mkdir()
    for form, name in (("jsonl", ".jsonl"), ("otlp-jsonl", ".traces.otlp.jsonl")):
        assert superfluid("session", "export", session.id, "--socket", socket, "--out", out, f"--format={form}") == 0
        file = out / f"session-{session.id}{name}"
        assert file.stat().st_mode & 0o777 == 0o600
        for line in file.read_text().splitlines():
            json.loads(line)
    (out / f"session-{session.id}.jsonl").chmod(0o644)
    assert superfluid("session", "export", session.id, "--socket", socket, "--out", out) == 0
    assert (out / f"session-{session.id}.jsonl").stat().st_mode & 0o777 == 0o600


class Collector(BaseHTTPRequestHandler):
    received: list[tuple[str, str | None, Any]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, self.headers["content-type"], json.loads(body)))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, type[Collector]]]:
    handler = type("Handler", (Collector,), {"received": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_export_to_a_collector(
    session: Session, socket: Path, collector: tuple[str, type[Collector]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = collector
    push = ("session", "export", session.id, "--socket", socket, "--model", "m", "--endpoint")
    assert superfluid(*push, f"{url}//") == 0
    path, kind, trace = handler.received[0]
    assert (path, kind) == ("/v1/traces", "application/json")
    (resource,) = trace["resourceSpans"]
    assert resource["resource"]["attributes"][2] == {
        "key": "superfluid.content_included",
        "value": {"boolValue": False},
    }
    names = [span["name"] for span in resource["scopeSpans"][0]["spans"]]
    assert names == ["session", "generate", "tool_use"]
    for leave in ((), ("--allow-content-egress",)):
        assert superfluid(*push, url, "--include-content", *leave) == 0
        assert capsys.readouterr().err == (
            "superfluid: --include-content is ignored: a trace holds names and counts and never content, "
            "with --allow-content-egress or without; the texts are in --format jsonl\n"
        )
    for whole in (f"{url}/v1/traces", f"{url}/v1/traces/"):
        assert superfluid(*push, whole) == 0
    assert len(handler.received) == 5
    assert all(received == handler.received[0] for received in handler.received)
    handler.status = 503
    assert superfluid(*push, url) == 1
    assert capsys.readouterr().err == f"superfluid: {url}/v1/traces answered 503\n"
    assert superfluid(*push, "http://127.0.0.1:1") == 1
    assert capsys.readouterr().err == "superfluid: http://127.0.0.1:1/v1/traces: Connection refused\n"


def test_the_sessions_are_listed(session: Session, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert superfluid("session", "list", "--socket", socket) == 0
    first = capsys.readouterr().out.splitlines()[0].split()
    assert (first[0], first[2:]) == (str(session.id), ["tokens", "Wéather"])


def test_flags_of_export_that_do_nothing_are_told(
    session: Session, socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ("session", "export", session.id, "--socket", socket)
    assert superfluid(*export, "--allow-content-egress", "--model", "m") == 0
    assert capsys.readouterr().err.splitlines() == [
        "superfluid: --allow-content-egress is ignored: without --endpoint no content leaves",
        "superfluid: --model is ignored: only OTLP names the model",
    ]
    assert superfluid(*export, "--out", tmp_path) == 0
    assert capsys.readouterr().err == f"superfluid: wrote {tmp_path}/session-{session.id}.jsonl\n"


def test_exit_codes(socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("inspect", "export"):
        assert superfluid("session", action, 999999, "--socket", socket) == 1
        assert capsys.readouterr().err == "superfluid: unknown session 999999\n"
        assert superfluid("session", action, 1, "--socket", tmp_path / "none.sock") == 1
        assert capsys.readouterr().err.startswith(f"superfluid: no server answers at {tmp_path}/none.sock: ")
        for wrong in ("one", "-1", str(1 << 64), "1.5", "²"):
            assert superfluid("session", action, "--socket", socket, "--", wrong) == 2
            assert "a session's number" in capsys.readouterr().err
        assert superfluid("session", action) == 2
        told = capsys.readouterr().err
        assert "Missing argument" in told
        assert "superfluid session list" in told
    assert superfluid("session", "export", 1, "--format", "xml") == 2
    assert superfluid("session", "inspct", 1) == 2
    assert "(did you mean inspect?)" in capsys.readouterr().err
    for endpoint in ("nowhere", "file:///etc/hosts", "ftp://a/b", ""):
        assert superfluid("session", "export", 1, "--socket", socket, "--endpoint", endpoint) == 2


def test_the_client_needs_no_server_until_it_asks(tmp_path: Path) -> None:
    with Client(tmp_path / "none.sock") as client:
        session = client.get(1)
        assert session.id == 1
        with pytest.raises(NotReached):
            session.events()
