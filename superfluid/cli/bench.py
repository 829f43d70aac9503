"""`superfluid bench`: the benchmarks of a source checkout (spec: bench)."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

import superfluid
from superfluid.cli.command import HELP_FLAGS, Command, CommandError, Number, Option, Program
from superfluid.cli.demo import fetch_demo
from superfluid.llama.search import home_directory

CHECKOUT = Path(superfluid.__file__).resolve().parents[1]


def harness() -> Any:
    """The harness in `bench/` beside the package. Raises CommandError 1 where there is none."""
    if not (CHECKOUT / "bench" / "throughput.py").is_file():
        raise CommandError("the benchmarks are in the source checkout, not in the installed package", 1)
    sys.path.insert(0, str(CHECKOUT))
    try:
        from bench import throughput
    except ImportError as error:
        raise CommandError(
            f"{error}; install the benchmarks' packages: pip install -e '.[bench,llamacpp]'", 1
        ) from None
    return throughput


@click.group(cls=Program, context_settings=HELP_FLAGS)
def command() -> None:
    """Measure against llama-server and a bare loop, side by side in one run.

    Runs in a source checkout with the [bench] extra: pip install -e '.[bench,llamacpp]'
    """


def run_options(reply: int) -> list[click.Parameter]:
    """The flags that both benchmarks take."""
    return [
        Option(["--lanes"], group="Run", default="1,2,4,8", metavar="N,...", help="Requests at once."),
        Option(["--reply"], group="Run", type=Number(8), default=reply, metavar="N", help="Tokens of each reply."),
        Option(
            ["--rounds"], group="Run", type=Number(1), default=5, metavar="N", help="Rounds kept; one more is dropped."
        ),
    ]


def throughput(model: str | None, lanes: str, reply: int, rounds: int) -> None:
    """Measure tokens a second at several requests at once on a real model.

    superfluid, llama-server and a bare loop over the same library take turns. Needs a source checkout with the [bench]
    extra: pip install -e '.[bench,llamacpp]'
    """
    path = Path(model) if model else fetch_demo(home_directory(), False)
    run("throughput", path, lanes, reply, rounds)


def overhead(lanes: str, reply: int, rounds: int) -> None:
    """Measure tokens a second on a tiny random model: what serving itself costs.

    A step of it takes about a millisecond. superfluid, llama-server and a bare loop over the same library take turns.
    Needs a source checkout with the [bench] extra: pip install -e '.[bench,llamacpp]'
    """
    bench = harness()
    demo = fetch_demo(home_directory(), False)
    from tests.models import write_random  # the checkout's, like the harness

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny-random.gguf"
        write_random(path, demo)
        run("overhead", path, lanes, reply, rounds, bench)


MODEL_FLAG = Option(["--model"], group="Run", metavar="PATH", help="A GGUF file (the demo model).")
for name, function, flags in (
    ("throughput", throughput, [MODEL_FLAG, *run_options(128)]),
    ("overhead", overhead, run_options(256)),
):
    command.add_command(
        Command(name, params=flags, callback=function, help=function.__doc__, context_settings=HELP_FLAGS)
    )


def run(name: str, model: Path, lanes: str, reply: int, rounds: int, bench: Any = None) -> None:
    bench = bench or harness()
    try:
        counts = tuple(int(part) for part in lanes.split(","))
    except ValueError:
        raise CommandError(f'--lanes expects numbers, got "{lanes}"', 2) from None
    settings = bench.Settings(name=name, model=model, lanes=counts, reply=reply, rounds=rounds)
    try:
        result = bench.measure(settings, click.echo)
    except RuntimeError as error:
        raise CommandError(str(error), 1) from None
    data, picture = bench.write(result)
    click.echo(f"wrote {data} and {picture}")
