"""A whole server as a process: what it leaves of itself in the system, and what deaths around it do."""

import json
import os
import re
import resource
import select
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluid.cli.command import run
from superfluid.cli.main import program
from superfluid.client import NotReached, Refused
from superfluid.link import session_api as api
from superfluid.link.events import Generated, GenParams
from superfluid.sessions import rules
from superfluid.sessions.store import Store
from tests import models
from tests.cli.server import LIMIT, Server, text_of
from tests.daemon import worker_lives

CONTEXT = 1 << 16  # an endless reply lasts for some seconds
ENDLESS = "tick tock " * CONTEXT
MODEL = "scripted-loop"


@pytest.fixture(scope="session")
def endless(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_scripted(shared, "loop", tmp_path_factory.mktemp("endless") / f"{MODEL}.gguf", CONTEXT)


def arguments(model: Path) -> list[str | Path]:
    return [model, "--port", "0", "--max-context", str(CONTEXT), "--max-batch", "4"]


@pytest.fixture(scope="module")
def server(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that leave it serving; its environment holds credentials."""
    secrets = {"HF_TOKEN": "secret", "my_api_key": "secret", "PGPASSWORD": "secret", "HF_TOKEN_PATH": "/a/path"}
    with Server(tmp_path_factory.mktemp("home"), *arguments(endless), environment=secrets) as running:
        yield running.ready()
        assert running.stop() == 0


def worker_program(folder: Path, lives: list[list[str] | str], engine: str = "llamacpp") -> dict[str, str]:
    """The environment that puts a program with these lives in the place of the llama.cpp worker."""
    told = folder / "lives.json"
    told.write_text(json.dumps(lives))
    program = folder / "worker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {worker_lives.__file__} {told} {engine} "$@"\n')
    program.chmod(0o700)
    return {"SUPERFLUID_WORKER_LLAMACPP": str(program)}


def gone(pid: int) -> bool:
    """Wait for a process, of whoever's, to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT)[0])
    finally:
        os.close(descriptor)


# ---- what a worker gets


def test_a_worker_gets_nothing_of_the_daemons(server: Server) -> None:
    def targets(pid: int) -> dict[int, str]:
        return {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}

    worker, daemon = targets(server.worker), targets(server.process.pid)
    assert {0, 1, 2, 3, 4} <= worker.keys()
    assert worker[0] == "/dev/null"
    standard = {worker[0], worker[1], worker[2]}
    shared = {target for target in worker.values() if target in daemon.values()} - standard
    assert all(target.startswith("/memfd:") for target in shared), shared  # rings and control words
    environment = Path(f"/proc/{server.worker}/environ").read_bytes().split(b"\0")
    assert b"HF_TOKEN_PATH=/a/path" in environment
    assert not [variable for variable in environment if variable.endswith(b"=secret")]
    assert os.getpgid(server.worker) == server.worker  # a terminal's Ctrl-C does not reach it


def test_files_are_their_owners_alone(server: Server) -> None:
    server.chat(MODEL, max_tokens=2)
    for path in (server.home, *server.home.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600) or path.name.endswith(".lock"), (path, oct(mode))
    assert stat.S_IMODE((server.home / "superfluid.sock").stat().st_mode) == 0o600


def test_a_second_server_on_the_directory_is_refused(
    server: Server, endless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUPERFLUID_HOME", str(server.home))
    assert run(program, ["serve", *map(str, arguments(endless))]) == 1
    assert f"another server is already running on {server.home}/sessions" in capsys.readouterr().err
    assert server.client().session_ids()  # the first one's socket is as it was


def test_another_servers_socket_is_left_alone(server: Server, endless: Path, tmp_path: Path) -> None:
    taken = server.home / "superfluid.sock"
    with Server(tmp_path, *arguments(endless), "--socket", taken) as second:
        assert second.wait() == 1
        second.said("--socket .*: another server answers there")
    assert server.client().session_ids()


# ---- deaths


def test_a_killed_worker_costs_its_replies_and_nothing_else(server: Server) -> None:
    _, before = server.chat(MODEL, max_tokens=30)
    worker = server.worker
    stream = server.stream(MODEL, max_tokens=CONTEXT)
    chunks = [next(stream) for _ in range(5)]
    os.kill(worker, signal.SIGKILL)
    chunks += stream
    error = chunks.pop()["error"]
    assert "worker died" in error["message"]
    assert "SIGKILL" in error["message"]
    assert error["type"] == "server_error"
    assert len(text_of(chunks)) > 0
    assert ENDLESS.startswith(text_of(chunks))
    status, after = server.chat(MODEL, max_tokens=30)
    assert status == 200
    assert after["choices"] == before["choices"]
    assert server.worker != worker
    assert not Path(f"/proc/{worker}").exists()  # no zombie either
    assert b"superfluid_worker_respawns_total 1\n" in server.get("/metrics")


def test_a_killed_daemon_leaves_no_worker_and_its_sessions_go_on(endless: Path, tmp_path: Path) -> None:
    with Server(tmp_path, *arguments(endless)) as first:
        first.ready()
        session = first.client().session()
        session.user("hello")
        shown = ""
        worker = first.worker
        with session.stream(max_tokens=CONTEXT) as stream:
            for chunk in stream:
                shown += chunk.text
                if len(shown) > 200:
                    break
            first.process.kill()
            first.wait()
        assert gone(worker)
    with Server(tmp_path, *arguments(endless)) as second:
        second.ready()
        session = second.client().get(session.id)
        kept = "".join(event.body.text for event in session.events() if isinstance(event.body, Generated))
        assert kept
        assert ENDLESS.startswith(kept)
        reply = session.generate(max_tokens=20)
        assert reply.tokens_generated == 20
        assert ENDLESS.startswith(kept + reply.text)
        assert second.stop() == 0


def test_a_worker_that_does_not_load_ends_the_start(endless: Path, tmp_path: Path) -> None:
    environment = worker_program(tmp_path, ["reading weights\n\nout of memory"])
    with Server(tmp_path / "home", *arguments(endless), environment=environment) as server:
        assert server.wait() == 1
        server.said("superfluid: worker exited with 3: reading weights / out of memory$")
    assert not list((tmp_path / "home").glob("*.sock"))


def test_a_damaged_log_ends_the_start(endless: Path, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "sessions")
    for _ in range(2):
        store.stage(rules.create(store, None, GenParams())[1])
    store.close()
    log = tmp_path / "sessions" / "wal.log"
    damaged = bytearray(log.read_bytes())
    damaged[30] ^= 0xFF
    log.write_bytes(damaged)
    with Server(tmp_path, *arguments(endless)) as server:
        assert server.wait() == 1
        server.said(rf"superfluid: {re.escape(str(log))} is damaged at byte 8: .*Move the file aside")
    assert log.read_bytes() == damaged


def test_a_full_disk_refuses_and_then_serving_goes_on(server: Server) -> None:
    """The system's limit on file sizes, as a disk that takes no more."""
    log = server.home / "sessions" / "wal.log"
    session = server.client().session()
    session.user("before")
    known = server.client().session_ids()
    full = (log.stat().st_size + 40, resource.RLIM_INFINITY)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, full)
    try:
        with pytest.raises(Refused, match=r"^io: "):
            session.user("a turn that does not fit")
        status, body = server.chat(MODEL, max_tokens=4)
        assert status >= 500
        assert "wal.log" in body["error"]["message"]
        assert server.client().session_ids() == known
        assert len(session.events()) == 2
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    session.user("after")
    assert server.chat(MODEL, max_tokens=4)[0] == 200
    assert [event.event_id for event in session.events()] == [0, 1, 2]


def test_requests_leave_nothing_behind(server: Server) -> None:
    leave_nothing_behind(server, 40)


@pytest.mark.soak
def test_a_thousand_requests_leave_nothing_behind(server: Server) -> None:
    leave_nothing_behind(server, 1000)


def leave_nothing_behind(server: Server, requests: int) -> None:
    def ask(count: int) -> None:
        client, connection = server.client(), server.connect()
        for number in range(count // 3):
            server.chat(MODEL, max_tokens=3, over=connection)
            stream = server.stream(MODEL, max_tokens=CONTEXT)
            next(stream)
            stream.close()  # leaves while its reply is made
            session = client.session()
            session.user(f"request {number}")
            session.generate(max_tokens=3)
        client.close()
        connection.close()
        while b"superfluid_lanes_active 0\n" not in server.get("/metrics"):
            pass

    def tasks() -> int:
        return server.get("/v1/tasks", Accept="application/json").count(b'"name":')

    ask(8)
    descriptors, running, memory = server.descriptors, tasks(), server.memory
    ask(requests)
    assert server.descriptors <= descriptors + 2  # a connection may be about to close
    assert tasks() <= running + 2
    assert server.memory - memory < 20 << 20


# ---- signals


def test_a_drain_lets_what_runs_finish_and_takes_nothing_new(endless: Path, tmp_path: Path) -> None:
    with Server(tmp_path, *arguments(endless)) as server:
        server.ready()
        stream = server.stream(MODEL, max_tokens=3000)
        chunks = [next(stream)]
        client = server.client()
        session, other = client.session(), client.session()
        session.user("hello")
        other.user("hello")
        connected_before = client.connect(), server.connect()
        connected_before[1].connect()
        with session.stream(max_tokens=3000) as reply:
            pieces = iter(reply)
            next(pieces)
            server.signal(signal.SIGINT)
            server.said("draining")
            with pytest.raises(Refused, match="the server is stopping"):
                connected_before[0].ask(api.GenerateRequest(other.id, 5))
            assert server.chat(MODEL, over=connected_before[1])[0] == 503
            with pytest.raises(NotReached):
                server.client().session_ids()
            with pytest.raises(ConnectionRefusedError):
                server.get("/health")
            chunks += stream
            list(pieces)
        assert reply.reply is not None
        assert reply.reply.tokens_generated == 3000
        assert chunks[-1]["usage"]["completion_tokens"] == 3000
        assert server.wait() == 0
        assert not (tmp_path / "superfluid.sock").exists()


def test_a_second_signal_stops_at_once(endless: Path, tmp_path: Path) -> None:
    with Server(tmp_path, *arguments(endless)) as server:
        server.ready()
        stream = server.stream(MODEL, max_tokens=CONTEXT)
        chunks = [next(stream)]
        worker = server.worker
        server.signal(signal.SIGTERM)
        server.said("draining")
        server.signal(signal.SIGTERM)
        chunks += stream
        assert "error" in chunks[-1]
        assert server.wait() == 0
        assert gone(worker)


def test_the_drain_timeout_cuts_what_still_runs(endless: Path, tmp_path: Path) -> None:
    with Server(tmp_path, *arguments(endless), "--drain-timeout", "0.2") as server:
        server.ready()
        stream = server.stream(MODEL, max_tokens=CONTEXT)
        chunks = [next(stream)]
        server.signal(signal.SIGUSR1)
        chunks += stream
        assert "error" in chunks[-1]
        assert server.wait() == 0
        server.said("drain timeout of 0.2 s")


def test_a_task_dump_goes_to_stderr(server: Server) -> None:
    stream = server.stream(MODEL, max_tokens=CONTEXT)
    next(stream)
    server.signal(signal.SIGUSR2)
    for name in ("daemon", "registry", f"model:{MODEL}", f"worker:{MODEL}", f"link:{MODEL}", f"scheduler:{MODEL}"):
        assert server.said(rf"^ *{name}: ")
    assert server.said(r"^ *request:\d+ POST /v1/chat/completions: ")
    stream.close()


def test_the_tasks_command(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{server.port}"
    assert run(program, ["tasks", "--http", address]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"1 model, 1 request, ", shown)
    assert re.search(rf"^{MODEL}: \d of \d lanes, 0 waiting, \d+ sessions?, window \d+, ", shown, re.MULTILINE)
    assert re.search(rf"^ +model:{MODEL}: waiting in ", shown, re.MULTILINE)
    assert run(program, ["tasks", "--json", "--http", f"http://{address}"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree.keys() == {"name", "state", "frames", "children"}


def test_a_signal_before_the_server_is_ready_ends_the_start(endless: Path, tmp_path: Path) -> None:
    """Its worker never comes to serve."""
    worker = tmp_path / "worker"
    worker.write_text(
        f"#!/bin/sh\n[ $1 = check ] && exec {sys.executable} -m superfluid.worker.worker_main check "
        f'--engine llamacpp "$@"\nexec sleep 1000\n'.replace('"$@"', "$2 $3")
    )
    worker.chmod(0o700)
    environment = {"SUPERFLUID_WORKER_LLAMACPP": str(worker)}
    with Server(tmp_path / "home", *arguments(endless), environment=environment) as server:
        server.said("context window")
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        server.said("before the server was ready")


def test_a_service_manager_is_told(endless: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LIMIT)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        with Server(tmp_path / "home", *arguments(endless), "--no-worker-process", environment=environment) as server:
            states = [manager.recv(100)]
            while states[-1] != b"READY=1":
                states.append(manager.recv(100))
            assert b"WATCHDOG=1" in states
            server.ready()
            assert server.workers == []  # it runs on a thread
            server.said("in process")
            assert text_of(list(server.stream(MODEL, max_tokens=4))) == ENDLESS[:20]
            server.signal(signal.SIGTERM)
            while manager.recv(100) != b"STOPPING=1":
                pass
            assert server.wait() == 0
