"""Which models `serve` is to serve, with which runtime each, and whether that takes what was asked of it."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from superfluid.cli.command import CommandError, did_you_mean
from superfluid.cli.demo import fetch_demo
from superfluid.cli.serve_options import ServeOptions
from superfluid.daemon.capabilities import refusal
from superfluid.daemon.names import served_names
from superfluid.daemon.runtimes import Runtime, RuntimeCatalog, RuntimeUnusable, runtime_picks
from superfluid.engines.kit.options import Option as RuntimeOption, OptionError

MODEL_ID = re.compile(r"(?![./~])[^:]*/.*", re.DOTALL)  # of a model that is not on disk (spec: installs, models by id)
MODEL_FILE = (".gguf", ".base")


@attrs.frozen
class Chosen:
    """A model to serve and the runtime that serves it, with what that says of the model."""

    path: Path
    name: str
    runtime: Runtime


def choose_runtimes(options: ServeOptions, named: Sequence[str], home: Path, catalog: RuntimeCatalog) -> list[Chosen]:
    """Each model's file and runtime, in order, a path given twice once. Raises CommandError and RuntimeUnusable."""
    for model in named:
        if is_model_id(model):
            raise CommandError(f"{model}: no runtime here fetches models by id yet; give the path of a file", 1)
    picks = runtime_picks(options.runtime)
    paths: list[Path] = []
    written: dict[Path, str] = {}
    for model in named:
        check_pick(model, picks, catalog)
        path = model_path(model, home, options.offline)
        if path not in written:
            written[path] = model
            paths.append(path)
    chosen: list[Chosen] = []
    for path, name in zip(paths, served_names(paths), strict=True):
        runtime = catalog.pick(path, asked_for(path, written[path], name, picks))
        reads = runtime.model.get("reads")
        if reads is not True:
            raise CommandError(f"{reads or f'runtime {runtime.id} does not read {path}'}", 2)
        chosen.append(Chosen(path, name, runtime))
    return chosen


def is_model_id(model: str) -> bool:
    if os.path.exists(model) or model.lower().endswith(MODEL_FILE):
        return False
    return MODEL_ID.fullmatch(model) is not None


def check_pick(model: str, picks: Mapping[str | None, str | None], catalog: RuntimeCatalog) -> None:
    """Refuse (2) a pick for `model` that names no runtime, before its file is looked at."""
    asked = asked_for(Path(model), model, "", picks)
    if asked is not None:
        catalog.resolve(asked)


def asked_for(path: Path, written: str, name: str, picks: Mapping[str | None, str | None]) -> str | None:
    """The runtime that `--runtime` picks for a model: by its path, then its stem or served name, else for all."""
    for key in (written, str(path), path.stem, name, None):
        if key in picks:
            return picks[key]
    return None


def model_path(model: str, home: Path, offline: bool) -> Path:
    """The file of a model argument; the demo model is fetched. Raises CommandError (1 fetch failed, 2 not there)."""
    if model == "demo":
        return fetch_demo(home, offline)
    path = Path(model).expanduser()
    if not path.exists():
        raise CommandError(f"{model}: no such file or directory", 2)
    return path.resolve()


def check_capabilities(options: ServeOptions, chosen: Sequence[Chosen]) -> None:
    """Refuse (2) what a runtime's static record declines, in the runtime's own words."""
    for one in chosen:
        check_kv_bits(options, one.runtime)
        if (
            options.park_lossy
            and generates(one.runtime)
            and (why := refusal(one.runtime.capabilities, "serving", "park_lossy"))
        ):
            raise CommandError(f"--park-lossy: {why}", 2)


def check_kv_bits(options: ServeOptions, runtime: Runtime) -> None:
    if options.kv_bits != "0" and (why := refusal(runtime.capabilities, "load", "kv_bits")):
        raise CommandError(f"--kv-bits {options.kv_bits}: {why}", 2)


def choose_satellite(options: ServeOptions, home: Path, catalog: RuntimeCatalog) -> Chosen | None:
    """The model of `--fim-model` and its runtime. Raises CommandError and RuntimeUnusable."""
    if options.fim_model is None:
        return None
    (chosen,) = choose_runtimes(options, [options.fim_model], home, catalog)
    check_kv_bits(options, chosen.runtime)
    return chosen


def generates(runtime: Runtime) -> bool:
    """Whether a runtime's models generate text, as far as it says."""
    return refusal(runtime.capabilities, "workload", "causal_generation") is None


def owner_of(flag: str, runtimes: Sequence[str]) -> str:
    """The runtime whose option a flag is: the longest id that fits."""
    return max((name for name in runtimes if flag.startswith(f"--{name}-")), key=len)


def worker_options(given: Mapping[str, str], runtimes: Sequence[str]) -> dict[str, list[str]]:
    """The runtimes' own options, by runtime id, as their workers take them."""
    found: dict[str, list[str]] = {}
    for flag, value in given.items():
        owner = owner_of(flag, runtimes)
        found.setdefault(owner, []).extend([f"--{flag.removeprefix(f'--{owner}-')}", value])
    return found


def check_runtime_options(given: Mapping[str, str], catalog: RuntimeCatalog, chosen: Sequence[Chosen]) -> None:
    """Check options of runtimes against what their workers declare. Raises CommandError 2, RuntimeUnusable."""
    runtimes = {one.runtime.id: one.runtime for one in chosen}
    for flag, value in given.items():
        owner = owner_of(flag, catalog.ids())
        try:
            runtime = runtimes.get(owner) or catalog.check(owner)
        except RuntimeUnusable as error:
            raise CommandError(f"{flag} cannot be checked: {error}", 2) from None
        if not runtime.available:
            raise CommandError(f"{flag} cannot be checked: runtime {owner} cannot run here: {runtime.reason}", 2)
        declared = {f"--{owner}-{entry['name']}": RuntimeOption.from_report(entry) for entry in runtime.options}
        if flag not in declared:
            takes = ", ".join(declared) or "none"
            raise CommandError(
                f"runtime {owner} has no option {flag}{did_you_mean(flag, declared)}; it takes {takes}", 2
            )
        try:
            declared[flag].parse(value)
        except OptionError as error:
            raise CommandError(f"{flag}: {error}", 2) from None
    for one in chosen:
        if one.runtime.id in catalog.refused_options:  # none by itself is wrong
            raise catalog.refused_options[one.runtime.id]
