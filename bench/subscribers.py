"""What followers cost a lane: its rate with none, and with a thousand that follow its session, on sockets of their own.

    python -m bench.subscribers [MODEL] [--followers 1000] [--reply 128] [--rounds 5]

One session generates over the socket: alone, followed by committed events only, and followed with provisional text.
The three take turns; the first round is dropped, ratios are of one round. The followers are a process of its own that
reads what comes and keeps nothing.
"""

import argparse
import multiprocessing
import selectors
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.systems import start_superfluid
from superfluid.client import Client, Sampling
from superfluid.client.frames import frame
from superfluid.link import session_api as api
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory

READ_BYTES = 256 * 1024
CASES: dict[str, bool | None] = {"alone": None, "committed": False, "provisional": True}


def follow(path: str, sessions: dict[bool, int], followers: int, told: Connection) -> None:
    """Subscribe `followers` times to each session, by whether with provisional text; bytes read are told on demand."""
    selector = selectors.DefaultSelector()
    read = dict.fromkeys(sessions, 0)
    for provisional, session in sessions.items():
        for _ in range(followers):
            follower = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            follower.connect(path)
            follower.sendall(frame(api.SubscribeRequest(session, 0, provisional)))
            follower.recv(READ_BYTES)
            selector.register(follower, selectors.EVENT_READ, provisional)
    told.send(None)
    selector.register(told, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is told:
                told.recv()
                told.send(read)
            elif isinstance(key.fileobj, socket.socket):
                data = key.fileobj.recv(READ_BYTES)
                read[key.data] += len(data)
                if not data:
                    selector.unregister(key.fileobj)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--reply", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        path = Path(folder) / "s.sock"
        system = start_superfluid(model, 4, 8192, "--socket", str(path), "--sessions", str(Path(folder) / "sessions"))
        try:
            with Client(path) as client:
                sessions = {case: client.session(Sampling(temperature=0.0)) for case in CASES}
                for case, session in sessions.items():
                    session.user(f"Tell a story without an end, the {case} one.")
                followed = {wanted: sessions[case].id for case, wanted in CASES.items() if wanted is not None}
                ours, theirs = multiprocessing.Pipe()
                crowd = multiprocessing.get_context("spawn").Process(
                    target=follow, args=(str(path), followed, arguments.followers, theirs), daemon=True
                )
                crowd.start()
                ours.recv()
                rates: dict[str, list[float]] = {case: [] for case in CASES}
                for turn in range(arguments.rounds + 1):
                    for case in CASES:
                        began = time.perf_counter()
                        tokens = sessions[case].generate(arguments.reply).tokens_generated
                        if turn:
                            rates[case].append(tokens / (time.perf_counter() - began))
                ours.send(None)
                read = ours.recv()
                crowd.kill()
        finally:
            system.stop()
    for case, made in rates.items():
        ratio = statistics.median(one / other for one, other in zip(made, rates["alone"], strict=True))
        wanted = CASES[case]
        heard = "" if wanted is None else f"; {read[wanted] / 1e6:.1f} MB read by {arguments.followers}"
        print(f"{case:12} {statistics.median(made):6.1f} tokens/s ({ratio:.3f}){heard}")


if __name__ == "__main__":
    main()
