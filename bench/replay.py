"""How fast a session log opens, and what an untouched session costs: `python bench/replay.py`.

Two logs are written and opened: one of 100 000 small sessions, one of few sessions and much text. Figures go to stdout
as JSON; times include the replay, the epoch bumps and their sync.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash

from superfluid.link import events as ev
from superfluid.link.postcard import encode
from superfluid.sessions import records
from superfluid.sessions.records import HEADER, MAGIC, varint
from superfluid.sessions.store import Store


def write_log(path: Path, sessions: int, turns: int, span: int) -> None:
    """Sessions that take turns in the log, each a Created, then `turns` of message, opener and reply."""
    text = "the quick brown fox " * (span // 5)
    tokens = [1000 + 7 * i % 48000 for i in range(span)]
    turn = [ev.Message(1, text, tokens), ev.GenerationPrompt([1, 2, 3]), ev.Generated(tokens, text, 0, 1)]
    rounds: list[list[ev.Body]] = [[ev.Created(None, ev.GenParams(seed=1))], *[list[ev.Body](turn)] * turns]
    with path.open("wb") as file:
        file.write(MAGIC)
        event_id = 0
        for bodies in rounds:
            encoded = [encode(body) for body in bodies]
            for session in range(1, sessions + 1):
                for place, body in enumerate(encoded):
                    payload = b"".join(map(varint, (session, event_id + place, 1, 1_700_000_000_000))) + body
                    file.write(HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
            event_id += len(bodies)


def resident() -> int:
    """Anonymous memory of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(directory: Path) -> dict[str, float]:
    """Open the store in `directory`, in this process; sizes in bytes, times in seconds."""
    size = (directory / "wal.log").stat().st_size
    data = (directory / "wal.log").read_bytes()
    start = time.perf_counter()
    index, _, _ = records.scan(data, len(MAGIC), 2)
    scan = time.perf_counter() - start
    frames = len(index)
    del data, index
    before = resident()
    start = time.perf_counter()
    store = Store.open(directory)
    opened = time.perf_counter() - start
    held = resident() - before
    sessions = len(store.session_ids())
    start = time.perf_counter()
    store.session(sessions // 2 + 1).tokens()
    touch = time.perf_counter() - start
    store.close()
    return {
        "log_mb": size / 1e6,
        "frames": frames,
        "sessions": sessions,
        "scan_mb_s": size / 1e6 / scan,
        "open_s": opened,
        "open_mb_s": size / 1e6 / opened,
        "bytes_per_untouched_session": held / sessions,
        "first_touch_ms": touch * 1e3,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help="open one store and print its figures")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    cases = {"100k small sessions": (100_000, 1, 20), "1000 long sessions": (1000, 60, 400)}
    for name, (sessions, turns, span) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            write_log(Path(folder) / "wal.log", sessions, turns, span)
            os.sync()
            result = subprocess.run(
                [sys.executable, __file__, "--measure", folder], check=True, capture_output=True, text=True
            )
            figures = json.loads(result.stdout)
            print(json.dumps({"case": name, **{key: round(value, 3) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
