"""Runtimes as the daemon knows them: by finding their workers and reading what `check` prints.

The daemon holds no list of runtimes and imports none: a worker program, in any language, says what it reads, what it
can, and which tokenizer its models have (spec: adapters, finding a worker and picking a runtime).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import orjson

from superfluid.daemon.host import clean_environment, executable, last_words, module_command

LINK_W = 8
CHECK_SECONDS = 60  # then a worker is killed and reported as not answering
ENTRY_POINTS = "superfluid.runtimes"
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

    def run(self, command: str, *arguments: str, seconds: float = CHECK_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run one of its commands. Raises RuntimeUnusable when it does not answer in time or cannot be started."""
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
            raise RuntimeUnusable(f"the worker of {self.id} ({self.path}) could not be started: {error}") from error


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
    def formats(self) -> list[Format]:
        return list(read_formats(self.report.get("formats") or []))

    @property
    def capabilities(self) -> dict[str, Any]:
        return self.report.get("capabilities") or {}

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self.report.get("tokenizer") or {}

    @property
    def devices(self) -> list[dict[str, Any]]:
        return self.report.get("devices") or []

    def reads(self, path: Path) -> bool:
        return any(form.matches(path) for form in self.formats)

    def serve_command(
        self, model: Path, *, max_context: int, max_batch: int, kv_bits: int, options: Sequence[str] = ()
    ) -> list[str]:
        """The command that serves `model`, without the descriptor flags."""
        command = [*self.worker.program, *self.worker.prefix, *options, "--model", str(model)]
        command += ["--max-context", str(max_context), "--max-batch", str(max_batch)]
        load = self.capabilities.get("load")
        if not isinstance(load, dict) or load.get("kv_bits") in (True, None):
            command += ["--kv-bits", str(kv_bits)]
        return command


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
    """The runtimes of this machine. Checks are made once per process and remembered."""

    def __init__(self, home: Path, options: dict[str, list[str]] | None = None) -> None:
        self.home = home
        self.options = options or {}
        self._checked: dict[str, Runtime] = {}

    @property
    def installs(self) -> Path:
        return self.home / "runtimes"

    def ids(self) -> list[str]:
        """Every runtime id known here, sorted."""
        found = {point.name for point in entry_points(group=ENTRY_POINTS)}
        prefix = "SUPERFLUID_WORKER_"
        for name, value in os.environ.items():
            if name.startswith(prefix) and value:
                found.add(name[len(prefix) :].lower().replace("_", "-"))
        for folder in self._beside():
            found |= {
                entry.name.removeprefix("superfluid-worker-")
                for entry in folder.glob("superfluid-worker-*")
                if executable(entry)
            }
        if self.installs.is_dir():
            found |= {entry.name for entry in self.installs.iterdir() if entry.is_dir()}
        return sorted(name for name in found if RUNTIME_ID.match(name))

    def _beside(self) -> list[Path]:
        command = Path(sys.argv[0]).resolve().parent
        return [folder for folder in dict.fromkeys((command, Path(sys.executable).parent)) if folder.is_dir()]

    def find(self, name: str) -> WorkerProgram | None:
        """The worker of an id (`id` or `id@install`), the first place that has one; none when there is none."""
        identity, _, install = name.partition("@")
        program = f"superfluid-worker-{identity}"
        if install:
            path = self.installs / identity / install / "bin" / program
            return WorkerProgram(identity, (str(path),), f"installed: {identity}/{install}", str(path))
        named = os.environ.get("SUPERFLUID_WORKER_" + identity.upper().replace("-", "_").replace(".", "_"))
        if named:
            return WorkerProgram(identity, (named,), "environment", named)
        if identity == "mock" or any(point.name == identity for point in entry_points(group=ENTRY_POINTS)):
            program_here = tuple(module_command(WORKERD_MODULE))
            return WorkerProgram(identity, program_here, "built in", " ".join(program_here), ("--engine", identity))
        for folder in self._beside():
            if executable(folder / program):
                return WorkerProgram(identity, (str(folder / program),), "beside superfluid", str(folder / program))
        current = self.installs / identity / "current" / "bin" / program
        if executable(current):
            return WorkerProgram(identity, (str(current),), "installed", str(current))
        return None

    def check(self, name: str, model: Path | None = None) -> Runtime:
        """What the worker of `name` says of itself, and of `model` when one is given.

        Raises RuntimeUnusable when there is no worker, or its answer cannot be used.
        """
        if model is None and name in self._checked:
            return self._checked[name]
        worker = self.find(name)
        if worker is None:
            raise RuntimeUnusable(f"there is no runtime {name} here (runtimes here: {', '.join(self.ids()) or 'none'})")
        arguments = list(self.options.get(worker.id, []))
        if model is not None:
            arguments += ["--model", str(model)]
        done = worker.run("check", *arguments)
        runtime = Runtime(worker, read_report(worker, done))
        if model is None:
            self._checked[name] = runtime
        return runtime

    def usable(self, name: str) -> Runtime:
        """As `check`, and it must be able to run here."""
        runtime = self.check(name)
        if not runtime.available:
            raise RuntimeUnusable(f"runtime {runtime.id} cannot run here: {runtime.reason}")
        return runtime

    def resolve(self, name: str) -> str:
        """A runtime id for an id or alias, `@install` kept. Raises RuntimeUnusable (2) for what is neither."""
        identity, at, install = name.partition("@")
        if not RUNTIME_ID.match(identity) or (at and (not INSTALL_NAME.match(install) or install.startswith("-"))):
            raise RuntimeUnusable(f"--runtime expects a runtime id, got {name!r}", 2)
        known = self.ids()
        if identity in known or identity == "mock":
            return name
        for candidate in known:
            try:
                if identity in self.check(candidate).aliases:
                    return candidate + at + install
            except RuntimeUnusable:
                continue
        raise RuntimeUnusable(f"there is no runtime {identity!r} here (runtimes here: {', '.join(known) or 'none'})")

    def pick(self, path: Path, asked: str | None = None) -> Runtime:
        """The runtime that serves `path`: the one asked for, else the first here that reads its format."""
        if asked is not None:
            runtime = self.usable(self.resolve(asked))
            if runtime.formats and not runtime.reads(path):
                raise RuntimeUnusable(self._wrong_format(runtime, path), 2)
            return runtime
        unable: RuntimeUnusable | None = None
        for name in self.ids():
            try:
                runtime = self.check(name)
            except RuntimeUnusable as error:
                unable = unable or error
                continue
            if not runtime.reads(path):
                continue
            if runtime.available:
                return runtime
            unable = RuntimeUnusable(f"runtime {runtime.id} reads {path} but cannot run here: {runtime.reason}")
            break
        if unable is not None:
            raise unable
        raise RuntimeUnusable(f"no runtime here reads {path} (runtimes here: {', '.join(self.ids()) or 'none'})", 2)

    def _wrong_format(self, runtime: Runtime, path: Path) -> str:
        reads = ", ".join(form.describe for form in runtime.formats)
        others = []
        for name in self.ids():
            try:
                other = self.check(name)
            except RuntimeUnusable:
                continue
            others += [f"{other.id} reads it ({form.describe})" for form in other.formats if form.matches(path)]
        hint = f"; {others[0]}" if others else ""
        return f"runtime {runtime.id} reads {reads}, and {path} is none{hint}"


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
        raise RuntimeUnusable(
            f"the worker of {worker.id} ({worker.path}) speaks Link W {spoken}, this daemon {LINK_W}: "
            "update the one that is older"
        )
    return dict(report)
