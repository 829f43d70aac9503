"""What parking gives and costs: the first token after a restart, and the lanes beside a session that parks.

    python -m bench.parks [MODEL] [--tokens 1500] [--seconds 12] [--rounds 5] [--pace 2]

First: seconds to the first token of a session of so many tokens after the server was restarted, without a park, with
one (the default: written at the drain), and of the same conversation over HTTP from the disk tier. Then: the rate of
four HTTP streams while a fifth session of that length ends a short turn every so many seconds, with nothing kept, with
the default, and with --park, side by side.
"""

import argparse
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from bench.load import Answer, ask
from bench.systems import System, start_superfluid
from superfluid.client import Client, Session
from superfluid.link.events import GenParams
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory

SENTENCE = "The old lighthouse keeper wrote down the weather, the passing ships and the colour of the sea. "
SENTENCE_TOKENS = 19
NEIGHBOURS = 4
NEIGHBOUR_REPLY = 64
KEEPING: dict[str, tuple[str, ...]] = {
    "nothing kept": ("--no-park", "--cache-disk-gb", "0"),
    "default": (),
    "--park": ("--park",),
}
COUNTERS = ("parks_total", "exports_skipped_total", "resumes_total", "disk_seeds_total")


@attrs.define
class Server:
    system: System
    client: Client

    def counters(self) -> str:
        page = self.client.metrics()
        found = (re.findall(rf"^superfluid_{name}\S* (\d+)", page, re.MULTILINE) for name in COUNTERS)
        return ", ".join(f"{name} {sum(map(int, values))}" for name, values in zip(COUNTERS, found, strict=True))


@contextmanager
def serving(folder: Path, model: Path, *flags: str) -> Iterator[Server]:
    """One life of a server whose sessions are in `folder`; it drains at its end."""
    socket = folder / "s.sock"
    system = start_superfluid(model, 8, 4096, "--sessions", str(folder / "sessions"), "--socket", str(socket), *flags)
    try:
        with Client(socket) as client:
            yield Server(system, client)
    finally:
        system.stop()


def text_of(tokens: int, salt: str) -> str:
    return f"Log {salt}. " + SENTENCE * (tokens // SENTENCE_TOKENS)


def after_restart(model: Path, tokens: int, *flags: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sf-") as name:
        folder = Path(name)
        with serving(folder, model, *flags) as server:
            session = server.client.session(GenParams(temperature=0.0))
            session.user(text_of(tokens, "native"))
            session.generate(16)
            turns = [{"role": "user", "content": text_of(tokens, "web")}]
            answer = ask(server.system, turns, 16)
            kept = server.counters()
        turns += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        with serving(folder, model, *flags) as server:
            begun = time.perf_counter()
            warm = server.client.get(session.id).generate(1).warm_prefix
            native = time.perf_counter() - begun
            again = ask(server.system, turns, 1)
            print(f"  session API  {native:6.3f} s ({warm} tokens warm)")
            print(f"  HTTP         {first(again):6.3f} s ({again.cached} tokens warm)")
            print(f"  before: {kept}; after: {server.counters()}", flush=True)


def first(answer: Answer) -> float:
    if answer.failure:
        raise RuntimeError(answer.failure)
    return (answer.first or answer.ended) - answer.sent


def beside(model: Path, tokens: int, seconds: float, rounds: int, pace: float) -> None:
    """The neighbours' rates with each set of flags, the servers taking turns; ratios to the first are of one round."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        sessions: dict[str, Session] = {}
        for label, flags in KEEPING.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sf-")))
            servers[label] = stack.enter_context(serving(folder, model, *flags))
            sessions[label] = servers[label].client.session(GenParams(temperature=0.0))
            sessions[label].user(text_of(tokens, "turns"))
            sessions[label].generate(1)
        rates: dict[str, list[float]] = {label: [] for label in servers}
        labels = list(servers)
        for turn in range(rounds + 1):
            for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
                rate = neighbours(servers[label], sessions[label], seconds, pace)
                if turn:
                    rates[label].append(rate)
        base = rates[labels[0]]
        for label, made in rates.items():
            ratio = statistics.median(one / other for one, other in zip(made, base, strict=True))
            print(f"  {label:12} {statistics.median(made):6.1f} tokens/s ({ratio:.3f}); {servers[label].counters()}")


def neighbours(server: Server, session: Session, seconds: float, pace: float) -> float:
    """Tokens a second of the streams beside a session that makes a short turn every `pace` seconds."""
    made = [0] * NEIGHBOURS
    end = time.perf_counter() + seconds

    def stream(lane: int) -> None:
        while time.perf_counter() < end:
            made[lane] += ask(server.system, [{"role": "user", "content": f"Write {lane}"}], NEIGHBOUR_REPLY).tokens

    threads = [threading.Thread(target=stream, args=(lane,)) for lane in range(NEIGHBOURS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    turn = begun
    while (turn := turn + pace) < end:
        time.sleep(max(turn - time.perf_counter(), 0.0))
        session.generate(8)
    for thread in threads:
        thread.join()
    return sum(made) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=12.0, help="of a round")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds between the turns of the session beside them")
    parser.add_argument("--rounds", type=int, default=5, help="kept, after one that is dropped")
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    print(f"{model.stem}: first token after a restart, {arguments.tokens} tokens")
    for label in ("nothing kept", "default"):
        print(label)
        after_restart(model, arguments.tokens, *KEEPING[label])
    session = f"a session of {arguments.tokens} tokens that ends a turn every {arguments.pace:g} s"
    print(f"{NEIGHBOURS} streams beside {session}")
    beside(model, arguments.tokens, arguments.seconds, arguments.rounds, arguments.pace)


if __name__ == "__main__":
    main()
