"""Kill a server in the middle of a reply, start it again, and let it finish the sentence.

    python examples/pull_the_plug.py [MODEL.gguf]

It starts servers of its own, with sessions of their own. What a session's log holds is all there is to a session: the
reply goes on where the log ends. The program shows that the continued reply is, token for token, the one of a run that
was never cut: greedy, and sampled with a seed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from superfluid.client import Client, Sampling, Session
from superfluid.link.events import Generated

PROMPT = "Tell a long story about a lighthouse and the sea."
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=7)


class Server:
    """A server of our own, whose sessions outlive it."""

    def __init__(self, home: Path, model: str) -> None:
        self._command = [sys.executable, "-m", "superfluid", "serve", model, "--no-http", "--max-batch", "2"]
        self._environment = os.environ | {"SUPERFLUID_HOME": str(home)}
        self.client = Client(home / "superfluid.sock")
        self._process: subprocess.Popen[str]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if line.startswith("superfluid: serving on "):
                return
        raise SystemExit("the server did not start:\n" + "".join(said))

    def pull_the_plug(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.client.close()
        self._process.send_signal(how)
        self._process.communicate()


def tokens_of(session: Session) -> list[int]:
    """The tokens of the session's reply, those that are in the log."""
    return [token for event in session.events() if isinstance(event.body, Generated) for token in event.body.span]


def reply_cut(server: Server, session: Session, max_tokens: int) -> list[int]:
    """Begin a reply and kill the server when the log has the first of it; what the log has after a restart."""
    for _ in session.stream(max_tokens):
        if tokens_of(session):
            server.pull_the_plug()
            break
    else:
        print("  (the reply was over before the plug was pulled: ask for more tokens)")
        server.pull_the_plug()
    server.start()
    return tokens_of(session)


def show(server: Server, name: str, sampling: Sampling, max_tokens: int) -> bool:
    """Cut a reply, continue it, and compare it with a whole one."""
    session = server.client.session(sampling)
    session.user(PROMPT)
    twin = session.fork()
    kept = reply_cut(server, session, max_tokens)
    print(f"{name}: killed with {len(kept)} of {max_tokens} tokens in the log")
    if len(kept) < max_tokens:
        session.generate(max_tokens - len(kept))
    twin.generate(max_tokens)
    continued, whole = tokens_of(session), tokens_of(twin)
    same = continued == whole
    print(
        f"{name}: continued to {len(continued)} tokens, "
        + ("the very ones" if same else "NOT those")
        + " of a whole run"
    )
    return same and continued[: len(kept)] == kept


def demo_model() -> str:
    """Where the demo model is; fetched on first use."""
    pull = [sys.executable, "-m", "superfluid", "pull", "demo"]
    return subprocess.run(pull, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main(model: str, max_tokens: int) -> int:
    with tempfile.TemporaryDirectory(prefix="plug-") as home:
        server = Server(Path(home), model)
        server.start()
        try:
            results = [show(server, *case, max_tokens) for case in (("greedy", GREEDY), ("seeded", SEEDED))]
        finally:
            server.end()
    return 0 if all(results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model file; the demo model without one")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    sys.exit(main(arguments.model or demo_model(), arguments.max_tokens))
