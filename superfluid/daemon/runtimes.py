"""Runtimes as the daemon knows them: by finding their workers and reading what `check` prints.

The daemon holds no list of runtimes and imports none: a worker program, in any language, says what it reads, what it
can, and which tokenizer its models have (spec: adapters, finding a worker and picking a runtime).
"""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import orjson

from superfluid.codec.tokenizers.search import find_library, missing_library
from superfluid.daemon.host import BUSY_PAUSE, BUSY_TRIES, clean_environment, executable, last_words, module_command

LINK_W = 8
BUILT_IN = "built in"
CHECK_SECONDS = 60  # then a worker is killed and reported as not answering
ENTRY_POINTS = "superfluid.runtimes"
PACKAGE = "superfluid"  # the distribution whose runtimes' own tokenizers are known here
WORKERD_MODULE = "superfluid.worker.worker_main"
RUNTIME_ID = re.compile(r"[a-z0-9_-][a-z0-9._-]*\Z")
INSTALL_NAME = re.compile(r"[A-Za-z0-9._+-]+\Z")


class RuntimeUnusable(Exception):
    """No runtime can serve; `exit_code` is what `serve` ends with (2 refused, 4 not here or cannot run here)."""

    def __init__(self, message: str, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@attrs.frozen
class WorkerProgram:
    """A worker that was found: the program that runs it and where it came from.

    `prefix` names the runtime to a program that carries several; it follows the command's name.
    """

    id: str
    program: tuple[str, ...]
    source: str
    path: str
    prefix: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The program's file, beside which its libraries are."""
        return Path(self.program[0])

    @property
    def repair(self) -> str:
        """What to do about an install that is not whole, to follow what is wrong with it; empty for what is none."""
        _, _, install = self.source.partition("installed: ")
        return f": `superfluid runtime repair {install}` makes it anew" if install else ""

    def run(self, command: str, *arguments: str, seconds: float = CHECK_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run one of its commands. Raises RuntimeUnusable when it does not answer in time or cannot be started."""
        for attempt in range(BUSY_TRIES):
            try:
                return subprocess.run(
                    [*self.program, command, *self.prefix, *arguments],
                    env=clean_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise RuntimeUnusable(
                    f"the worker of {self.id} ({self.path}) did not answer within {seconds:g} s"
                ) from None
            except OSError as error:
                if error.errno != errno.ETXTBSY or attempt == BUSY_TRIES - 1:
                    raise RuntimeUnusable(
                        f"the worker of {self.id} ({self.path}) could not be started: {error.strerror}"
                    ) from error
            time.sleep(BUSY_PAUSE)
        raise AssertionError("unreachable")


@attrs.frozen
class Format:
    """One model format of a runtime; a rule matches a file by extension or magic, or a directory by its files."""

    id: str
    describe: str
    extensions: tuple[str, ...] = ()
    magic: bytes = b""
    files: tuple[str, ...] = ()
    directory: bool = False

    def matches(self, path: Path) -> bool:
        if self.directory:
            return (
                path.is_dir()
                and all((path / name).is_file() for name in self.files)
                and any(entry.suffix.lstrip(".") in self.extensions for entry in path.iterdir() if entry.is_file())
            )
        if path.suffix.lstrip(".").lower() in self.extensions:
            return True
        if not self.magic or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(self.magic)) == self.magic


@attrs.frozen
class Runtime:
    """A runtime as its worker describes it."""

    worker: WorkerProgram
    report: dict[str, Any]

    @property
    def id(self) -> str:
        return self.worker.id

    @property
    def version(self) -> str | None:
        version: str | None = self.report["runtime"].get("version")
        return version

    @property
    def aliases(self) -> list[str]:
        return list(self.report["runtime"].get("aliases") or [])

    @property
    def available(self) -> bool:
        return self.report.get("available") is True

    @property
    def reason(self) -> str | None:
        """Why it cannot run here; none when it can."""
        said = self.report.get("available")
        return None if said is True else str(said or "it says nothing of being available")

    @property
    def built_in(self) -> bool:
        """Whether its adapter is in this environment, so that it can also run in this process."""
        return self.worker.source == BUILT_IN

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options that its worker declares."""
        return self.report.get("options") or []

    @property
    def model(self) -> dict[str, Any]:
        """What it says of the model that it was asked about."""
        return self.report.get("model") or {}

    @property
    def formats(self) -> list[Format]:
        return list(read_formats(self.report.get("formats") or []))

    @property
    def capabilities(self) -> dict[str, Any]:
        return self.report.get("capabilities") or {}

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self.report.get("tokenizer") or {}

    @property
    def tokenizer_library(self) -> str | None:
        """Where the tokenizer library that it names is; none when it names none, or none that is here."""
        if self.tokenizer.get("from") != "library":
            return None
        found = find_library(str(self.tokenizer.get("name")), self.worker.file)
        return None if found is None else str(found)

    @property
    def tokenizer_lack(self) -> str | None:
        """Why its models' tokenizer is not to be had here; none when it is."""
        source, worker = self.tokenizer.get("from"), self.worker
        if (name := missing_library(self.tokenizer, worker.file)) is not None:
            return f"its tokenizer library {name!r} is not found beside {worker.file} or in ../lib{worker.repair}"
        if source == "engine" and not carried(self.id):
            return "its tokenizer is the engine's own, which this daemon does not know"
        if source not in ("library", "huggingface", "engine"):
            return f"its tokenizer comes from {source!r}, which this daemon does not know"
        return None

    @property
    def devices(self) -> list[dict[str, Any]]:
        return self.report.get("devices") or []

    def reads(self, path: Path) -> bool:
        return any(form.matches(path) for form in self.formats)

    def serve_arguments(
        self, model: Path, *, max_context: int, max_batch: int, kv_bits: int, options: Sequence[str] = ()
    ) -> list[str]:
        """What its worker is started with to serve `model`, without the descriptor flags."""
        arguments = [*options, "--model", str(model)]
        arguments += ["--max-context", str(max_context), "--max-batch", str(max_batch)]
        load = self.capabilities.get("load")
        if not isinstance(load, dict) or load.get("kv_bits") in (True, None):
            arguments += ["--kv-bits", str(kv_bits)]
        return arguments


def read_formats(entries: Iterable[Any]) -> Iterable[Format]:
    """The formats of a check report; an entry with neither rule is skipped."""
    for entry in entries:
        file, directory = entry.get("file"), entry.get("directory")
        if file is not None:
            magic = file.get("magic") or ""
            yield Format(
                entry["id"], entry.get("describe") or entry["id"],
                tuple(ext.lower() for ext in file.get("extensions") or ()), magic.encode("latin-1"),
            )  # fmt: skip
        elif directory is not None:
            yield Format(
                entry["id"], entry.get("describe") or entry["id"], tuple(directory.get("extensions") or ()),
                files=tuple(directory.get("files") or ()), directory=True,
            )  # fmt: skip


class RuntimeCatalog:
    """The runtimes of this machine. Checks are made once per process and remembered.

    `options` are the runtimes' own, by id, as their workers take them. One whose worker does not answer because of
    them is shown as it is without, and its error kept in `refused_options`.
    """

    def __init__(self, home: Path, options: dict[str, list[str]] | None = None) -> None:
        self.home = home
        self.options = options or {}
        self.refused_options: dict[str, RuntimeUnusable] = {}
        self._checked: dict[tuple[str, Path | None], Runtime] = {}

    @property
    def installs(self) -> Path:
        return self.home / "runtimes"

    def ids(self) -> list[str]:
        """Every runtime id known here, sorted."""
        found = {point.name for point in entry_points(group=ENTRY_POINTS)}
        for folder in (*self._beside(), *self._shipped()):
            found |= {
                entry.name.removeprefix("superfluid-worker-")
                for entry in folder.glob("superfluid-worker-*")
                if executable(entry)
            }
        if self.installs.is_dir():
            found |= {entry.name for entry in self.installs.iterdir() if entry.is_dir()}
        known = {_variable(name) for name in found}
        prefix = _variable("")
        for variable, value in os.environ.items():
            if variable.startswith(prefix) and value and variable not in known:
                found.add(variable.removeprefix(prefix).lower().replace("_", "-"))
        return sorted(name for name in found if RUNTIME_ID.match(name))

    def _beside(self) -> list[Path]:
        command = Path(sys.argv[0]).resolve().parent
        return [folder for folder in dict.fromkeys((command, Path(sys.executable).parent)) if folder.is_dir()]

    def _shipped(self) -> list[Path]:
        places = [place for folder in self._beside() for place in (folder.parent / "libexec", folder / "libexec")]
        return [place / "superfluid" for place in places if (place / "superfluid").is_dir()]

    def find(self, name: str) -> WorkerProgram | None:
        """The worker of an id (`id` or `id@install`), the first place that has one; none when there is none."""
        identity, _, install = name.partition("@")
        program = f"superfluid-worker-{identity}"
        if install:
            path = str(self.installs / identity / install / "bin" / program)
            return WorkerProgram(identity, (path,), f"installed: {identity}/{install}", path)
        named = os.environ.get(_variable(identity))
        if named:
            return WorkerProgram(identity, (named,), "environment", named)
        if any(point.name == identity for point in entry_points(group=ENTRY_POINTS)):
            program_here = tuple(module_command(WORKERD_MODULE))
            return WorkerProgram(identity, program_here, BUILT_IN, " ".join(program_here), ("--engine", identity))
        places = [
            *((folder, "beside superfluid") for folder in self._beside()),
            (self.installs / identity / "current" / "bin", "installed"),
            *((folder, "shipped with superfluid") for folder in self._shipped()),
        ]
        for folder, source in places:
            if executable(folder / program):
                path = str(folder / program)
                return WorkerProgram(identity, (path,), source, path)
        return None

    def check(self, name: str, model: Path | None = None) -> Runtime:
        """What the worker of `name` says of itself, and of `model` when one is given.

        Raises RuntimeUnusable when there is no worker, or its answer cannot be used.
        """
        if (name, model) in self._checked:
            return self._checked[name, model]
        worker = self.find(name)
        if worker is None:
            raise RuntimeUnusable(f"there is no runtime {name} here (runtimes here: {', '.join(self.ids()) or 'none'})")
        options = self.options.get(worker.id, [])
        try:
            runtime = self._ask(worker, options, model)
            if not runtime.available and options:
                raise RuntimeUnusable(f"runtime {runtime.id} cannot run here: {runtime.reason}")
        except RuntimeUnusable as error:
            if not options:
                raise
            runtime = self._ask(worker, [], model)
            if runtime.available:
                self.refused_options[worker.id] = error
        self._checked[name, model] = runtime
        return runtime

    @staticmethod
    def _ask(worker: WorkerProgram, options: Sequence[str], model: Path | None) -> Runtime:
        arguments = [*options, *([] if model is None else ["--model", str(model)])]
        return Runtime(worker, read_report(worker, worker.run("check", *arguments)))

    def resolve(self, name: str) -> str:
        """A runtime id for an id or alias, `@install` kept. Raises RuntimeUnusable (2) for what is neither."""
        identity, at, install = name.partition("@")
        if not RUNTIME_ID.match(identity) or (at and (not INSTALL_NAME.match(install) or install.startswith("-"))):
            raise RuntimeUnusable(f"{name!r} is no runtime id", 2)
        known = self.ids()
        if identity in known:
            return name
        for candidate in known:
            try:
                if identity in self.check(candidate).aliases:
                    return candidate + at + install
            except RuntimeUnusable:
                continue
        raise RuntimeUnusable(f"{name}: there is no such runtime here (runtimes here: {', '.join(known) or 'none'})", 2)

    def pick(self, path: Path, asked: str | None = None) -> Runtime:
        """The runtime that serves `path`, and what it says of it: the one asked for, else the first that reads it.

        Raises RuntimeUnusable: 2 for a format it does not read, 4 when it cannot run here.
        """
        if asked is not None:
            runtime = self.check(self.resolve(asked), path)
            if runtime.available and not runtime.reads(path):
                raise RuntimeUnusable(self._wrong_format(runtime, path), 2)
            return usable(runtime)
        unable: RuntimeUnusable | None = None
        for name in self._known_first():
            try:
                runtime = self.check(name, path)
                if runtime.reads(path):
                    return usable(runtime)
            except RuntimeUnusable as error:
                unable = unable or error
        if unable is not None:
            raise unable
        raise RuntimeUnusable(f"no runtime here reads {path} (runtimes here: {', '.join(self.ids()) or 'none'})", 2)

    def _known_first(self) -> list[str]:
        """Ids in order, those that are known to run here before the others."""
        known = {name for (name, _), runtime in self._checked.items() if runtime.available}
        return sorted(self.ids(), key=lambda name: name not in known)

    def _wrong_format(self, runtime: Runtime, path: Path) -> str:
        if not runtime.formats:
            return (
                f"runtime {runtime.id} does not say what it reads (its worker, {runtime.worker.path}, is an older one)"
            )
        found = "no format that is known here"
        for name in self.ids():
            try:
                other = self.check(name)
            except RuntimeUnusable:
                continue
            matching = next((form for form in other.formats if form.matches(path)), None)
            if matching is not None:
                found = f"{matching.describe}, which {other.id} reads"
                break
        reads = ", ".join(form.describe for form in runtime.formats)
        return f"runtime {runtime.id} reads {reads}; {path} is {found}"


def runtime_picks(values: Sequence[str]) -> dict[str | None, str | None]:
    """`--runtime`: none is the pick for all models; the last of the same key wins, auto takes it back."""
    picks: dict[str | None, str | None] = {}
    for value in values:
        model, equals, name = value.rpartition("=")
        picks[model if equals else None] = None if name == "auto" else name
    return picks


def usable(runtime: Runtime) -> Runtime:
    """The runtime, which must be able to run here and have a tokenizer that is here. Raises RuntimeUnusable."""
    if not runtime.available:
        raise RuntimeUnusable(f"runtime {runtime.id} cannot run here: {runtime.reason}")
    if (lack := runtime.tokenizer_lack) is not None:
        raise RuntimeUnusable(f"runtime {runtime.id} cannot be used here: {lack}")
    return runtime


def carried(identity: str) -> bool:
    """Whether this package carries the adapter of a runtime."""
    points = entry_points(group=ENTRY_POINTS)
    return any(point.name == identity and point.dist is not None and point.dist.name == PACKAGE for point in points)


def _variable(identity: str) -> str:
    """The environment variable that names the worker of a runtime."""
    return "SUPERFLUID_WORKER_" + identity.upper().replace("-", "_").replace(".", "_")


def read_report(worker: WorkerProgram, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The check report on a worker's stdout. Raises RuntimeUnusable when it is no report this daemon can use."""
    try:
        report = orjson.loads(done.stdout)
        identity = report["runtime"]["id"]
    except (ValueError, KeyError, TypeError):
        words = last_words(done.stderr) or f"exit {done.returncode}"
        raise RuntimeUnusable(f"the worker of {worker.id} ({worker.path}) did not answer its check: {words}") from None
    if identity != worker.id:
        raise RuntimeUnusable(f"the worker of {worker.id} ({worker.path}) answers for runtime {identity!r}")
    if LINK_W not in (report.get("link_w") or []):
        spoken = report.get("link_w") or []
        hint = worker.repair or ": update the one that is older"
        raise RuntimeUnusable(
            f"the worker of {worker.id} ({worker.path}) speaks Link W {spoken}, this daemon {LINK_W}{hint}"
        )
    return dict(report)
