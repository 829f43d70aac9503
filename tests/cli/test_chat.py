"""`superfluid chat` as a program of its own, on a pipe and on a terminal."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from superfluid.cli.chat import title_of
from superfluid.client import Finish
from superfluid.link import events as ev, session_api as api
from tests.api.serving import Server
from tests.client.double import Double

Served = Callable[[str], Server]
SECONDS = 60.0
CHAT = [sys.executable, "-m", "superfluid", "chat"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"SUPERFLUID_HOME": str(tmp_path), "TERM": "dumb"}


def chat(server: Server, environment: dict[str, str], typed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    sampling = () if "--session" in arguments else ("--temperature", "0")
    return subprocess.run(
        [*CHAT, "--socket", str(server.path), *sampling, *arguments],
        input=typed, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False,
    )  # fmt: skip


def test_lines_in_replies_out(served: Served, environment: dict[str, str]) -> None:
    done = chat(served("plain"), environment, "Say hello.\n\nAnd again.\n", "--system", "You are brief.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, world.\n" * 2, "")
    with served("plain").blocking_client() as client:
        summary = client.sessions()[-1]
        messages = client.get(summary.id).messages()
    assert summary.title == "Say hello."
    assert [(message.role, message.text) for message in messages] == [
        ("system", "You are brief."),
        ("user", "Say hello."),
        ("assistant", "Hello, world."),
        ("user", "And again."),
        ("assistant", "Hello, world."),
    ]


def test_sessions_are_listed_and_resumed(served: Served, environment: dict[str, str]) -> None:
    server = served("plain")
    with server.blocking_client() as client:
        first = client.session()
        first.user("Remember this.")
        first.generate()
        typed = f"/sessions\nMore.\n/new\nElse.\n/session {first.id}\n/quit\nnot read\n"
        tokens = client.sessions()[-1].tokens
        done = chat(server, environment, typed, "--session", str(first.id))
        assert (done.returncode, done.stderr) == (0, "")
        said = ["> Remember this.", "Hello, world."]
        shown = done.stdout.splitlines()  # on a pipe nothing of what was said before, unless it is asked for
        assert shown[0].split() == ["*", str(first.id), str(tokens), "tokens", "-"]
        assert shown[-6:] == ["Hello, world.", "Hello, world.", *said, "> More.", "Hello, world."]
        assert [message.text for message in first.messages()][::2] == ["Remember this.", "More."]
        assert client.sessions()[-1].title == "Else."


def test_tool_calls_and_reasoning(served: Served, environment: dict[str, str]) -> None:
    done = chat(served("text_tool"), environment, "Weather?\n")
    assert done.stdout == 'Let me look.\n[tool call get_weather {"city":"Paris"}]\n'
    done = chat(served("think"), environment, "Why?\n")
    assert done.stdout.strip() == "The answer."  # of the reasoning a pipe gets nothing


def test_a_reply_may_be_limited(served: Served, environment: dict[str, str]) -> None:
    done = chat(served("loop"), environment, "Go.\n", "--max-tokens", "3")
    assert (done.returncode, done.stdout) == (0, "tick tock tick \n")
    assert done.stderr == "cut at 3 tokens (--max-tokens)\n"


def test_what_a_resumed_session_has_no_use_for_is_told(served: Served, environment: dict[str, str]) -> None:
    server = served("plain")
    with server.blocking_client() as client:
        number = client.session().id
    done = chat(server, environment, "Hi.\n", "--session", str(number), "--system", "Be brief.", "--seed", "1")
    assert (done.returncode, done.stdout) == (0, "Hello, world.\n")
    said = f"--system, --seed are for sessions that /new starts: session {number} keeps its own"
    assert done.stderr == f"superfluid: {said}\n"


def test_what_is_refused_is_told_and_the_chat_goes_on(served: Served, environment: dict[str, str]) -> None:
    """A pipe's exit code tells it."""
    done = chat(served("plain"), environment, "/session 999999\n/session x\n/nonsense\nHi.\n")
    assert done.returncode == 1
    assert done.stdout == "Hello, world.\n"
    assert done.stderr.splitlines() == [
        "superfluid: unknown session 999999",
        "superfluid: /session wants a session's number; /sessions lists them",
        "superfluid: no command /nonsense; /help lists them",
    ]


def test_a_reply_that_fails_fails_the_command(tmp_path: Path, environment: dict[str, str]) -> None:
    event = ev.Event(2, 1, 0, ev.Generated([1], "Half a", 0, 0))
    answers: dict[type[api.Request], list[api.Response | bytes | None]] = {
        api.ListRequest: [api.SessionsResponse([])],
        api.CreateRequest: [api.CreatedResponse(1)],
        api.SetMetaRequest: [api.MetaResponse(1)],
        api.AppendMessageRequest: [api.CommittedResponse(event)],
        api.SubscribeRequest: [api.SubscribedResponse(1)],
        api.GenerateRequest: [api.DeltaResponse(event), api.ErrResponse("generation failed: the worker is gone")],
        api.CancelRequest: [api.ErrResponse("session 1 has no generation in flight")],
    }
    with Double(tmp_path / "d.sock", lambda request: answers[type(request)]) as server:
        done = subprocess.run(
            [*CHAT, "--socket", str(server.path)], input="Go.\n", capture_output=True, text=True, timeout=SECONDS,
            env=environment, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "Half a\n")
    assert done.stderr == "superfluid: generation failed: the worker is gone\n"


def test_a_server_that_is_not_there(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(CHAT, input="", capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"superfluid: no server answers at {tmp_path}/superfluid.sock: No such file or directory; "
        "start one with `superfluid serve`\n"
    )


def test_a_session_that_is_not_there(served: Served, environment: dict[str, str]) -> None:
    done = chat(served("plain"), environment, "", "--session", "999999")
    assert (done.returncode, done.stderr) == (1, "superfluid: unknown session 999999\n")
    done = chat(served("plain"), environment, "", "--session", "two")
    assert done.returncode == 2
    assert done.stderr.startswith('superfluid: --session expects a session\'s number, got "two"\n')


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        mode = termios.tcgetattr(theirs)
        mode[3] &= ~termios.ECHO  # type: ignore[operator]
        termios.tcsetattr(theirs, termios.TCSANOW, mode)
        self.process = subprocess.Popen(
            [*CHAT, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""
        self._at = 0

    def until(self, text: str) -> str:
        """Read until `text` is shown, from where the last read ended."""
        while (found := self.seen.find(text, self._at)) < 0:
            self.seen += os.read(self._ours, 65536).decode()
        before, self._at = self.seen[self._at : found], found + len(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(server: Server, *arguments: str) -> Terminal:
            made = Terminal(["--socket", str(server.path), *arguments], environment)
            stack.callback(made.close)
            return made

        yield start


def test_ctrl_c_stops_the_reply_and_then_leaves(
    served: Served, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    server = served("loop")
    shell = terminal(server)
    shell.until("> ")
    shell.type("Go on.\n")
    shell.until("tick tock tick tock ")
    shell.interrupt()
    shell.until("stopped")
    shell.until("> ")
    with server.blocking_client() as client:
        summary = client.sessions()[-1]
        session = client.get(summary.id)
        last = session.events()[-1].body
        assert isinstance(last, ev.Generated)
        assert last.finish == Finish.CANCELLED
        shell.type("Once more.\n")
        shell.until("tick tock ")
        shell.interrupt()
        shell.until("stopped")
        shell.until("> ")
        assert [message.text for message in session.messages() if message.role == "user"] == ["Go on.", "Once more."]
    shell.interrupt()
    assert shell.process.wait(SECONDS) == 0
    history = tmp_path / "chat_history"
    assert history.read_text().splitlines() == ["Go on.", "Once more."]
    assert history.stat().st_mode & 0o777 == 0o600


def test_the_terminal_is_not_the_models_to_drive(served: Served, terminal: Callable[..., Terminal]) -> None:
    server = served("plain")
    with server.blocking_client() as client:
        session = client.session()
        session.assistant("\x1b[2Jgone\x07\ttab\nline")
    shell = terminal(server, "--session", str(session.id))
    assert "\x1b" not in shell.until("[2Jgone\ttab\r\nline")
    assert "\x07" not in shell.seen
    shell.until("> ")
    shell.type("\x04")
    assert shell.process.wait(SECONDS) == 0


def test_a_terminal_is_told_once_how_to_go_on(served: Served, terminal: Callable[..., Terminal]) -> None:
    server = served("plain")
    shell = terminal(server)
    shell.until("> ")
    shell.type("Say hello.\nAnd again.\n")
    shell.until("Hello, world.")
    shell.until("Hello, world.")
    with server.blocking_client() as client:
        number = client.sessions()[-1].id
    assert shell.seen.count("to go on with it later: ") == 1
    assert f"superfluid chat --socket {server.path} --session {number}" in shell.seen


def test_titles() -> None:
    assert title_of("  What\nis  this? ") == "What is this?"
    assert title_of("x" * 200) == "x" * 59 + "…"
