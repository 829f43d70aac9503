"""`superfluid chat`: a chat with a running server in the terminal."""

import contextlib
import random
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click
from click.core import ParameterSource

from superfluid.cli.command import HELP_FLAGS, Command, Number, Option, aside, say
from superfluid.cli.screen import CONTROLS
from superfluid.cli.session_list import session_line
from superfluid.cli.session_socket import SessionId, reached, socket_option
from superfluid.client import ChatMessage, Client, Finish, Refused, Sampling, Session, Stream
from superfluid.llama.search import home_directory

HELP = """\
/new             start a new session
/sessions        list the sessions, newest first
/session <n>     go on with a session
/help            show this
/quit            leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C while a reply comes stops it."""

HISTORY_LINES = 1000
LISTED = 20  # sessions shown by /sessions
TITLE_CHARACTERS = 60
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@click.command(cls=Command, context_settings=HELP_FLAGS)
@click.option("--session", type=SessionId(), cls=Option, group="Chat", metavar="N", help="Go on with that session.")
@click.option("--system", cls=Option, group="Chat", metavar="TEXT", help="What a new session begins with.")
@click.option(
    "--max-tokens",
    type=Number(1, (1 << 32) - 1),
    cls=Option,
    group="Chat",
    metavar="N",
    show_default="fill the context",
    help="Longest reply.",
)
@click.option(
    "--temperature", type=Number(0, 2, whole=False), default=0.7, cls=Option, group="Sampling", metavar="T",
    help="0 takes the likeliest token.",
)  # fmt: skip
@click.option(
    "--top-p", type=Number(0, 1, whole=False), default=0.95, cls=Option, group="Sampling", metavar="P",
    help="Keep this much of the probability.",
)  # fmt: skip
@click.option(
    "--seed",
    type=Number(0, (1 << 64) - 1),
    cls=Option,
    group="Sampling",
    metavar="N",
    show_default="random",
    help="Replies to the same words are the same with the same seed.",
)
@socket_option
def command(
    session: int | None, system: str | None, max_tokens: int | None, temperature: float, top_p: float,
    seed: int | None, socket: Path | None,
) -> None:  # fmt: skip
    """Chat with a running server in the terminal. It starts no server."""
    sampling = Sampling(temperature, top_p, seed=random.getrandbits(32) if seed is None else seed)
    with reached(socket) as client:
        client.session_ids()  # a server that is not there is told before anything is typed
        chat = Chat(client, sampling, system, max_tokens)
        chat.resume_with = "superfluid chat" + (f" --socket {shlex.quote(str(socket))}" if socket else "")
        chat.run(session)
    if chat.failed:
        raise click.exceptions.Exit(1)


class Chat:
    """One conversation after another, each a session of the server, made with its first message."""

    def __init__(self, client: Client, sampling: Sampling, system: str | None, max_tokens: int | None) -> None:
        self._client = client
        self._sampling = sampling
        self._system = system
        self._max_tokens = max_tokens
        self._session: Session | None = None
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.resume_with = "superfluid chat"
        self.failed = False
        """Whether something was refused that nobody sat by to see: a pipe's reader learns it from the exit code."""

    def run(self, resume: int | None) -> None:
        """Read lines until the end of input. Raises ClientError when the server is gone."""
        if resume is not None:
            self._resume(resume, show=self._terminal)
            tell_ignored(resume)
        elif self._terminal:
            click.echo("Type a message; /help tells more.")
        with line_editing() if self._terminal else contextlib.nullcontext():
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._obey(line):
                        return
                elif line:
                    self._say(line)

    def _read(self) -> str | None:
        """The next line; none at the end, and for Ctrl-C at the prompt."""
        try:
            return input("> " if self._terminal else "").strip()
        except EOFError:
            if self._terminal:
                click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            return None

    # ---- commands

    def _obey(self, line: str) -> bool:
        """Do what a line that begins with a slash asks; false to leave."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/new":
            self._session = None
        elif name == "/sessions":
            self._list()
        elif name in ("/session", "/resume"):
            if argument.isascii() and argument.isdigit():
                self._attempt(lambda: self._resume(int(argument)))
            else:
                self._complain(f"{name} wants a session's number; /sessions lists them")
        elif name == "/help":
            click.echo(HELP)
        else:
            self._complain(f"no command {name}; /help lists them")
        return True

    def _list(self) -> None:
        sessions = self._client.sessions()[::-1]
        for summary in sessions[:LISTED]:
            current = self._session is not None and summary.id == self._session.id
            click.echo(f"{'*' if current else ' '} {session_line(summary)}")
        if len(sessions) > LISTED:
            click.echo(f"and {len(sessions) - LISTED} older ones")
        if not sessions:
            click.echo("no sessions yet")

    def _resume(self, number: int, show: bool = True) -> None:
        """Go on with a session, after showing what was said in it."""
        session = self._client.get(number)
        messages = session.messages()
        self._session = session
        for message in messages if show else ():
            self._show(message)

    def _show(self, message: ChatMessage) -> None:
        marks = {"user": "> ", "system": "[system] ", "tool": "[tool result] "}
        if message.reasoning and self._terminal:
            self._write(message.reasoning.strip(), dim=True)
            click.echo()
        if message.text or not message.tool_calls:
            self._write(marks.get(message.role, "") + message.text)
            click.echo()
        for call in message.tool_calls:
            self._write(f"[tool call {call.name} {call.arguments}]")
            click.echo()

    # ---- talking

    def _say(self, text: str) -> None:
        """Send a message and show its reply as it comes."""
        self._attempt(lambda: self._exchange(text))

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do something that the server may refuse: the chat goes on."""
        try:
            action()
        except Refused as refusal:
            self._complain(str(refusal))

    def _complain(self, why: str) -> None:
        say(why)
        self.failed = not self._terminal

    def _exchange(self, text: str) -> None:
        session = self._session
        if session is None:
            session = self._session = self._client.session(self._sampling, system=self._system)
            session.set_meta(title=title_of(text))
            if self._terminal:
                aside(f"session {session.id}; to go on with it later: {self.resume_with} --session {session.id}")
        session.user(text)
        kind = ""
        try:
            with session.stream(self._max_tokens) as stream, stopping(stream):
                for chunk in stream:
                    if chunk.kind == "reasoning" and not self._terminal:
                        continue
                    if kind == "reasoning" and chunk.kind == "text":
                        click.echo()
                    kind = chunk.kind
                    self._write(chunk.text, dim=kind == "reasoning")
        finally:
            if kind:
                click.echo()
        reply = stream.reply
        assert reply is not None
        for call in reply.tool_calls:
            self._write(f"[tool call {call.name} {call.arguments}]")
            click.echo()
        notes = {Finish.CANCELLED: "stopped", Finish.LENGTH: "the context is full; /new starts a new session"}
        if reply.finish in notes:
            say(notes[reply.finish])
        elif reply.finish == Finish.NONE and self._max_tokens is not None:
            aside(f"cut at {self._max_tokens} tokens (--max-tokens)")

    def _write(self, text: str, dim: bool = False) -> None:
        if self._terminal:
            text = CONTROLS.sub("", text)
            text = f"{DIM}{text}{PLAIN}" if dim else text
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def stopping(stream: Stream) -> Iterator[None]:
    """Ctrl-C cancels the stream instead of interrupting; a second one interrupts."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Line editing, and a history of what was typed that outlives the chat, where there is a readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = home_directory() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(0o600)
            readline.write_history_file(file)


def title_of(text: str) -> str:
    """A session's title: the beginning of what it was asked first."""
    words = " ".join(text.split())
    return words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 1] + "…"


def tell_ignored(session: int) -> None:
    """Say which flags a session that goes on has no use for: it keeps what it was made with."""
    context = click.get_current_context()
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("system", "temperature", "top_p", "seed")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        are = "is" if len(given) == 1 else "are"
        say(f"{', '.join(given)} {are} for sessions that /new starts: session {session} keeps its own")
