"""`superfluid runtimes`: the runtimes of this machine, or what serves a model (spec: commands, installs JSON)."""

import os
from pathlib import Path
from typing import Any

import click
import orjson

from superfluid.cli.command import HELP_FLAGS, Command, CommandError, Option
from superfluid.daemon.runtimes import Runtime, RuntimeCatalog, RuntimeUnusable
from superfluid.llama.search import home_directory

GIB = 1 << 30
COLUMNS = ("RUNTIME", "STATE", "INSTALL", "VERSION", "INSTALLABLE", "READS", "DEVICE (MEMORY BUDGET)", "WORKER")
MODEL_COLUMNS = ("RUNTIME", "READS IT", "DEVICE (MEMORY BUDGET)", "MODEL")
ASKED = (
    ("images", "modalities", "image_encode"),
    ("audio", "modalities", "gemma_audio_encode"),
    ("speech to text", "workload", "speech_to_text"),
    ("embeddings", "workload", "embedding"),
    ("grammar", "sampling", "grammar"),
    ("--park-lossy", "serving", "park_lossy"),
    ("--kv-bits", "load", "kv_bits"),
)


@click.command(cls=Command, context_settings=HELP_FLAGS)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, cls=Option, group="Output", help="JSON instead of a table.")
def command(model: Path | None, as_json: bool) -> int:
    """List the runtimes of this machine; with MODEL, which of them reads and serves it."""
    home = home_directory()
    catalog = RuntimeCatalog(home)
    if model is not None:
        if not model.exists():
            raise CommandError(f"{model}: no such file or directory", 2)
        return show_model(catalog, model.resolve(), as_json)
    rows = [entry(catalog, name) for name in catalog.ids()]
    if as_json:
        click.echo(orjson.dumps([public(row) for row in rows], option=orjson.OPT_INDENT_2))
        return 0
    if not rows:
        click.echo("no runtime is installed here")
        return 0
    click.echo(table([COLUMNS, *(text_row(row) for row in rows)]))
    for row in rows:
        if row["ready"] is not True:
            click.echo(f"{row['id']}: {row['ready']}")
    click.echo(f"installed runtimes: {shorten(str(catalog.installs))}")
    return 0


def entry(catalog: RuntimeCatalog, name: str, model: Path | None = None) -> dict[str, Any]:
    """The JSON entry of a runtime; what is unknown is absent. `checked` is its runtime, for the text form."""
    worker = catalog.find(name)
    found: dict[str, Any] = {"id": name}
    if worker is not None:
        found["worker"] = {"path": worker.path, "source": worker.source}
    try:
        runtime = catalog.check(name, model)
    except RuntimeUnusable as error:
        installed = worker is not None and worker.source not in ("built in",)
        return found | {
            "state": "broken" if installed else "missing",
            "ready": str(error),
            "aliases": [],
            "formats": [],
            "devices": [],
        }
    lack = runtime.tokenizer_lack
    found |= {
        "state": "not installed" if not runtime.available else "ready" if lack is None else "broken",
        "ready": runtime.reason or lack or True,
        "aliases": runtime.aliases,
        "formats": runtime.report.get("formats") or [],
        "reads": ", ".join(form.describe for form in runtime.formats),
        "tokenizer_source": runtime.tokenizer.get("from"),
        "tokenizer": runtime.tokenizer_library,
        "version": runtime.version,
        "abi": runtime.report["runtime"].get("abi"),
        "devices": runtime.devices,
        "capabilities": runtime.report.get("capabilities"),
        "options": runtime.report.get("options"),
        "installable": [],
        "checked": runtime,
    }
    return {key: value for key, value in found.items() if value is not None}


def public(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "checked"}


def text_row(row: dict[str, Any]) -> tuple[str, ...]:
    worker = row.get("worker")
    version = (row.get("version") or "-").split(" (", 1)[0]
    shown = "-"
    if worker is not None:
        shown = worker["source"] if worker["source"] == "built in" else f"{worker['source']}: {shorten(worker['path'])}"
    reads = ", ".join(form["id"] for form in row["formats"]) or "-"
    return (row["id"], row["state"], "-", version, "-", reads, device(row["devices"]), shown)


def device(devices: list[dict[str, Any]]) -> str:
    """The first device and the memory that models are planned against."""
    if not devices:
        return "-"
    first = devices[0]
    budget = first.get("budget") or 0
    return f"{first['name']} ({budget / GIB:.1f} GiB)" if budget else str(first["name"])


def shorten(path: str) -> str:
    """`~` for the home directory, in text only."""
    user = os.path.expanduser("~")
    return "~" + path.removeprefix(user) if path.startswith(user + os.sep) else path


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns two spaces apart, padded to the widest cell, no trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def show_model(catalog: RuntimeCatalog, model: Path, as_json: bool) -> int:
    rows = [entry(catalog, name, model) for name in catalog.ids()]
    for row in rows:
        said = row["checked"].report.get("model") if "checked" in row else None
        said = said or {}
        row["reads_model"] = said.get("reads", "not read by this runtime")
        row["model_facts"] = said.get("facts", "not known")
    serving: Runtime | None = None
    why = ""
    try:
        serving = catalog.pick(model)
    except RuntimeUnusable as error:
        why = str(error)
    known = [form for row in rows if "checked" in row for form in row["checked"].formats if form.matches(model)]
    kind = known[0].describe if known else "an unknown format"
    if as_json:
        value = {
            "model": str(model),
            "format": known[0].id if known else None,
            "runtimes": [public(row) for row in rows],
            "serves": serving.id if serving else {"none": why},
        }
        click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2))
        return 0 if serving else 1
    click.echo(f"{model}: {kind}")
    lines: list[tuple[str, ...]] = [MODEL_COLUMNS]
    for row in rows:
        reads = row["reads_model"] is True
        facts = row["model_facts"] if reads else row["reads_model"]
        described = facts if isinstance(facts, str) else describe_facts(facts)
        lines.append((row["id"], "yes" if reads else "no", device(row["devices"]), described))
    click.echo(table(lines))
    if serving is None:
        click.echo(f"nothing here serves it: {why}")
        return 1
    click.echo(f"{serving.id} serves it")
    for words, section, leaf in ASKED:
        click.echo(f"  {words}: {said_before_loading(serving.capabilities, section, leaf)}")
    return 0


def describe_facts(facts: dict[str, Any]) -> str:
    defaults = facts.get("sampling_defaults") or {}
    shown = " ".join(f"{key}={value}" for key, value in defaults.items())
    return f"{facts.get('architecture', '-')} {shown}".strip()


def said_before_loading(record: dict[str, Any], section: str, leaf: str) -> str:
    part = record.get(section)
    value = part.get(leaf) if isinstance(part, dict) else None
    if value is None:
        return "said once the model is loaded"
    return "yes" if value is True else f"no: {value or 'not supported'}"
