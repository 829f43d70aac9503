"""How fast a session log opens, and what an untouched session costs: `python -m bench.replay`.

Logs of up to 100 000 small sessions are written and opened, and one of few sessions and much text. Figures go to stdout
and, with a plot over the number of sessions, to `bench/out/`; times include the replay, the epoch bumps and their sync.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
import xxhash

from superfluid.link import events as ev
from superfluid.link.postcard import encode
from superfluid.sessions import records
from superfluid.sessions.records import HEADER, MAGIC, varint
from superfluid.sessions.store import Store

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench/out"
COUNTS = (1_000, 3_000, 10_000, 30_000, 100_000)
TARGET_MB_S, TARGET_OPEN_S, TARGET_BYTES = 200, 3, 1024


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


def run(sessions: int, turns: int, span: int) -> dict[str, float]:
    """Write a log and open it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_log(Path(folder) / "wal.log", sessions, turns, span)
        os.sync()
        command = [sys.executable, "-m", "bench.replay", "--measure", folder]
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return {name: round(value, 3) for name, value in json.loads(result.stdout).items()}


def plot(small: list[dict[str, float]], path: Path) -> None:
    """Speed, time and memory over the number of small sessions, each with its target."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8))
    counts = [one["sessions"] for one in small]
    panels = (
        ("MB/s of log", ("scan_mb_s", "open_mb_s"), TARGET_MB_S),
        ("s to open", ("open_s",), TARGET_OPEN_S),
        ("bytes per untouched session", ("bytes_per_untouched_session",), TARGET_BYTES),
    )
    for place, (label, names, target) in zip(axes, panels, strict=True):
        for name in names:
            place.plot(counts, [one[name] for one in small], marker="o", label=name.removesuffix("_mb_s"))
        place.axhline(target, linestyle="--", color="gray", label="target")
        place.set_xscale("log")
        place.set_ylim(bottom=0)
        place.set_xlabel("sessions, four records each")
        place.set_title(label)
        place.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help="open one store and print its figures")
    parser.add_argument("--most", type=int, default=COUNTS[-1], help="sessions of the largest log")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    small = []
    for count in (*(count for count in COUNTS if count < options.most), options.most):
        small.append(run(count, 1, 20))
        print(json.dumps({"case": f"{count} small sessions", **small[-1]}), flush=True)
    long = run(max(1, options.most // 100), 60, 400)
    print(json.dumps({"case": "long sessions", **long}))
    OUT.mkdir(exist_ok=True)
    path = OUT / f"replay-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}"
    path.with_suffix(".json").write_text(json.dumps({"small": small, "long": long}, indent=1) + "\n")
    plot(small, path.with_suffix(".png"))
    print(path.with_suffix(".png").relative_to(ROOT))


if __name__ == "__main__":
    main()
