"""Throughput and overhead: tokens a second at 1, 2, 4 and 8 requests, against llama-server and the bare loop.

Systems take turns round by round in one run, on the same library and model; the first round is dropped, medians are
reported.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import matplotlib
import psutil

from bench.load import Burst, burst
from bench.systems import System, bare_loop, start_peer, start_superfluid

OUT = Path(__file__).resolve().parent / "out"
TOPICS = ("rivers", "clocks", "honey", "glaciers", "bridges", "violins", "maps", "comets")
PROMPT_TOKENS = 48  # of the prompts below, as a chat template makes them
APART = 0.1  # seconds before each burst: what a system does behind its last answer is not the next one's
Say = Callable[[str], None]


@attrs.define
class Settings:
    """A run. `reply` tokens per request, `rounds` kept after the dropped one."""

    name: str
    model: Path
    lanes: Sequence[int] = (1, 2, 4, 8)
    reply: int = 128
    rounds: int = 5
    context: int = 2048


def prompts(count: int, salt: int) -> list[str]:
    """Distinct prompts, new ones for every round, so that nothing is answered from a cache."""
    return [
        f"Round {salt}: tell me a long story about {TOPICS[index]} and a number {salt * 31 + index}."
        for index in range(count)
    ]


def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run everything; the result as it is written to the JSON file."""
    most = max(settings.lanes)
    systems = [
        start_superfluid(settings.model, most, settings.context),
        start_peer(settings.model, most, settings.context),
    ]
    ours = systems[0]
    try:
        say(f"ready in seconds: {', '.join(f'{one.label} {one.ready_seconds:.1f}' for one in systems)}")
        result: dict[str, Any] = {
            "benchmark": settings.name,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "model": settings.model.name,
            "library": library_version(),
            "reply_tokens": settings.reply,
            "rounds": settings.rounds,
            "ready_seconds": {one.label: one.ready_seconds for one in systems},
            "memory_bytes": {},
            "lanes": {},
        }
        salt = 0
        for lanes in settings.lanes:
            rates: dict[str, list[float]] = {label: [] for label in (*(one.label for one in systems), "bare loop")}
            firsts: dict[str, list[float]] = {one.label: [] for one in systems}
            cpu: list[dict[str, float]] = []
            for turn in range(settings.rounds + 1):
                order = systems if turn % 2 == 0 else systems[::-1]
                for one in order:
                    salt += 1
                    time.sleep(APART)
                    before = one.cpu_seconds()
                    burst_made = burst(one, prompts(lanes, salt), settings.reply)
                    after = one.cpu_seconds()
                    if turn == 0:
                        continue
                    rates[one.label].append(burst_made.rate)
                    firsts[one.label] += first_tokens(burst_made)
                    if one is ours:
                        cpu.append(cpu_per_token(one, before, after, burst_made.tokens))
                time.sleep(APART)
                bare = bare_loop(settings.model, lanes, PROMPT_TOKENS, settings.reply, settings.context)
                if turn:
                    rates["bare loop"].append(bare)
            row = summary(rates, firsts, cpu)
            result["lanes"][str(lanes)] = row
            say(describe(lanes, row))
        result["memory_bytes"] = memory(ours)
        say(f"memory: {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in result['memory_bytes'].items())}")
        return result
    finally:
        for one in systems:
            one.stop()


def first_tokens(made: Burst) -> list[float]:
    return [answer.first - answer.sent for answer in made.answers if answer.first is not None]


def cpu_per_token(system: System, before: dict[int, float], after: dict[int, float], tokens: int) -> dict[str, float]:
    """Microseconds of CPU per generated token, of the daemon and of its worker."""
    daemon = system.process.pid
    spent = {pid: after[pid] - before.get(pid, 0.0) for pid in after}
    return {
        "daemon_us": spent[daemon] / tokens * 1e6,
        "worker_us": sum(value for pid, value in spent.items() if pid != daemon) / tokens * 1e6,
    }


def summary(
    rates: dict[str, list[float]], firsts: dict[str, list[float]], cpu: list[dict[str, float]]
) -> dict[str, Any]:
    medians = {label: statistics.median(values) for label, values in rates.items()}
    peer = [ours / theirs for ours, theirs in zip(rates["superfluid"], rates["llama-server"], strict=True)]
    bare = [ours / theirs for ours, theirs in zip(rates["superfluid"], rates["bare loop"], strict=True)]
    return {
        "tokens_per_second": medians,
        "ratio_to_llama_server": statistics.median(peer),
        "ratio_to_bare_loop": statistics.median(bare),
        "first_token_seconds": {label: statistics.median(values) for label, values in firsts.items() if values},
        "daemon_cpu_us_per_token": statistics.median(one["daemon_us"] for one in cpu),
        "worker_cpu_us_per_token": statistics.median(one["worker_us"] for one in cpu),
        "raw": rates,
    }


def describe(lanes: int, row: dict[str, Any]) -> str:
    rates = ", ".join(f"{label} {rate:.0f}" for label, rate in row["tokens_per_second"].items())
    return (
        f"{lanes} at once: tokens/s {rates}; {row['ratio_to_llama_server']:.2f}x llama-server, "
        f"{row['ratio_to_bare_loop']:.2f}x bare loop; daemon {row['daemon_cpu_us_per_token']:.0f} us a token"
    )


def memory(system: System) -> dict[str, int]:
    """Resident set of daemon and worker, bytes."""
    daemon, *workers = system.family()
    return {
        "daemon": daemon.memory_info().rss,
        "worker": max((worker.memory_info().rss for worker in workers), default=0),
    }


def machine() -> dict[str, Any]:
    return {
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def library_version() -> str:
    import importlib.metadata

    return f"xllamacpp {importlib.metadata.version('xllamacpp')}"


def write(result: dict[str, Any]) -> tuple[Path, Path]:
    """The JSON and the plot, in bench/out."""
    OUT.mkdir(exist_ok=True)
    stem = OUT / f"{result['benchmark']}-{result['when'].replace(':', '')}"
    data = stem.with_suffix(".json")
    data.write_text(json.dumps(result, indent=2))
    return data, plot(result, stem.with_suffix(".png"))


def plot(result: dict[str, Any], path: Path) -> Path:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = list(result["lanes"])
    labels = list(next(iter(result["lanes"].values()))["tokens_per_second"])
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    width = 0.8 / len(labels)
    for offset, label in enumerate(labels):
        heights = [result["lanes"][lane]["tokens_per_second"][label] for lane in lanes]
        places = [index + (offset - (len(labels) - 1) / 2) * width for index in range(len(lanes))]
        bars = axes.bar(places, heights, width, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(lanes)), [f"{lane} at once" for lane in lanes])
    axes.set_ylabel("tokens/s, all requests")
    axes.set_title(f"{result['benchmark']}: {result['model']}, {result['machine']['cores']} cores, {result['library']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
