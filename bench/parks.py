"""What parking gives and costs: the first token after a restart, and the lanes beside a session that parks.

    python -m bench.parks [MODEL] [--tokens 1500] [--seconds 12] [--rounds 6] [--pace 2] [--only-beside]

First: what the steps of one park cost. Then: seconds to the first token of a session of so many tokens after the server
was restarted, without a park, with one (the default: written at the drain), and of the same conversation over HTTP from
the disk tier. Last: the rate of four HTTP streams while a fifth session of that length ends a short turn every so many
seconds: with the default and with --park, each between two runs with nothing kept, to whose mean it is compared. A
ratio is of one such triple; the median of them is told, and the least and the most. So is the CPU time of all the
server's processes per token, which says more than the rate where other programs take turns on the processors.
"""

import argparse
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np

from bench.load import Answer, ask
from bench.systems import System, start_superfluid
from superfluid.client import Client, Session
from superfluid.engines.executor.envelope import BYTES, Space, body, seal_in_place
from superfluid.engines.llamacpp.model import open_model
from superfluid.engines.llamacpp.options import Settings
from superfluid.engines.primitives import Feed
from superfluid.link.events import GenParams
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory, open_library
from superfluid.sessions.files import Files
from superfluid.shm.segment import Segment

SENTENCE = "The old lighthouse keeper wrote down the weather, the passing ships and the colour of the sea. "
SENTENCE_TOKENS = 19
NEIGHBOURS = 4
NEIGHBOUR_REPLY = 64
COST_CALLS = 15
WARM_SECONDS = 1.0
"""Before a run is measured: its streams have been prefilled."""

SETTLE_SECONDS = 6.5
"""After a run: a session is written when it has been idle for 5 s."""

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

    def mark(self) -> tuple[float, int, float, int]:
        """The time, and up to now: tokens made, seconds of CPU of all processes, parks."""
        page = self.client.metrics()
        made, parks = (
            sum(map(int, re.findall(rf"^superfluid_{name}\S* (\d+)", page, re.MULTILINE)))
            for name in ("decode_tokens_total", "parks_total")
        )
        return time.perf_counter(), made, sum(self.system.cpu_seconds().values()), parks


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


def cost(model: Path, tokens: int) -> None:
    """CPU time of the steps of one park, each alone and on one thread. What is on the tick path: copy and checksum."""
    primitives = open_model(open_library(), model, Settings.of({"threads": 1}), window=4096, lanes=2)
    sequence = primitives.seq_create()
    for at in range(0, tokens, 250):
        primitives.step([Feed(sequence, np.arange(at, min(at + 250, tokens), dtype=np.uint32), at + 250 >= tokens)])
    size = primitives.seq_export_size(sequence, tokens, 0)
    assert size is not None
    space, files = Space(1, bytes(32)), Files()
    with tempfile.TemporaryDirectory(prefix="sf-") as name, Segment.create("state", BYTES + size) as segment:
        path = Path(name) / "state"
        segment.populate()

        def pages() -> None:
            with Segment.create("state", BYTES + size) as new:
                new.populate()

        def write() -> None:
            files.create(path, segment.buf, synced=True, behind=True)
            files.remove(path)

        steps: dict[str, Callable[[], object]] = {
            "copy": lambda: primitives.seq_export_into(sequence, tokens, 0, body(segment.buf, size)),
            "checksum": lambda: seal_in_place(segment.buf, size, space, end=tokens),
            "new memory": pages,
            "file": write,
        }
        told = [f"{step} {cpu_of(run):.1f}" for step, run in steps.items()]
    primitives.close()
    print(f"  {size / 1e6:.1f} MB; milliseconds of CPU: {', '.join(told)}", flush=True)


def cpu_of(run: Callable[[], object]) -> float:
    """The least milliseconds of CPU of some calls: what others do only adds to it."""
    spent = []
    for _ in range(COST_CALLS):
        begun = time.process_time()
        run()
        spent.append(time.process_time() - begun)
    return 1e3 * min(spent)


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


@attrs.frozen
class Pace:
    """What a server did in a while: tokens a second, milliseconds of CPU a token, parks."""

    rate: float
    cpu: float
    parks: int


@attrs.define
class Compared:
    """Runs of one server, each with the two of the server with nothing kept around it."""

    runs: list[tuple[Pace, Pace, Pace]] = attrs.Factory(list)

    def row(self, label: str) -> str:
        rates = [run.rate / statistics.mean((before.rate, after.rate)) for before, run, after in self.runs]
        costs = [run.cpu / statistics.mean((before.cpu, after.cpu)) for before, run, after in self.runs]
        rate = statistics.median(run.rate for _, run, _ in self.runs)
        parks = statistics.median(run.parks for _, run, _ in self.runs)
        told = f"{rate:6.1f} tokens/s, {spread(rates)}; CPU a token {spread(costs)}; {parks:g} parks a run"
        return f"  {label:12} {told}"


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def beside(model: Path, tokens: int, seconds: float, rounds: int, pace: float) -> None:
    """The neighbours' rates with each set of flags."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        sessions: dict[str, Session] = {}
        for label, flags in KEEPING.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sf-")))
            servers[label] = stack.enter_context(serving(folder, model, *flags))
            sessions[label] = servers[label].client.session(GenParams(temperature=0.0))
            sessions[label].user(text_of(tokens, "turns"))
            sessions[label].generate(1)
        base, *others = servers

        def run(label: str) -> Pace:
            made = neighbours(servers[label], sessions[label], seconds, pace)
            time.sleep(SETTLE_SECONDS)  # what waits for its session to be idle is written now, in nobody's run
            return made

        compared = {label: Compared() for label in others}
        bases: list[float] = []
        run(base)
        before = run(base)
        for turn in range(rounds):
            for label in others[turn % len(others) :] + others[: turn % len(others)]:
                made = run(label)
                after = run(base)
                compared[label].runs.append((before, made, after))
                before = after
                bases.append(after.rate)
        swing = [two / one for one, two in pairwise(bases)]
        print(f"  {base:12} {statistics.median(bases):6.1f} tokens/s; from one run to the next {spread(swing)}")
        for label, runs in compared.items():
            print(f"{runs.row(label)}; {servers[label].counters()}", flush=True)


def neighbours(server: Server, session: Session, seconds: float, pace: float) -> Pace:
    """What the server does while four streams run and a session makes a short turn every `pace` seconds."""
    over = threading.Event()

    def stream(lane: int) -> None:
        while not over.is_set():
            ask(server.system, [{"role": "user", "content": f"Write {lane}"}], NEIGHBOUR_REPLY)

    threads = [threading.Thread(target=stream, args=(lane,)) for lane in range(NEIGHBOURS)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_SECONDS)
    begun, tokens, cpu, parks = server.mark()
    turn = begun
    while (turn := turn + pace) < begun + seconds:
        time.sleep(max(turn - time.perf_counter(), 0.0))
        session.generate(8)
    time.sleep(max(begun + seconds - time.perf_counter(), 0.0))
    ended, tokens_now, cpu_now, parks_now = server.mark()
    over.set()
    for thread in threads:
        thread.join()
    made = tokens_now - tokens
    return Pace(made / (ended - begun), 1e3 * (cpu_now - cpu) / made, parks_now - parks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=12.0, help="of a round")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds between the turns of the session beside them")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only-beside", action="store_true", help="leave the restarts out")
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    print(f"{model.stem}: a park of {arguments.tokens} tokens")
    cost(model, arguments.tokens)
    if not arguments.only_beside:
        print(f"{model.stem}: first token after a restart, {arguments.tokens} tokens")
        for label in ("nothing kept", "default"):
            print(label)
            after_restart(model, arguments.tokens, *KEEPING[label])
    session = f"a session of {arguments.tokens} tokens that ends a turn every {arguments.pace:g} s"
    print(f"{NEIGHBOURS} streams beside {session}")
    beside(model, arguments.tokens, arguments.seconds, arguments.rounds, arguments.pace)


if __name__ == "__main__":
    main()
