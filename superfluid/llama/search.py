"""Where libllama is looked for, and the one that this process uses."""

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from superfluid.llama.declaration import LAYOUTS, Layout
from superfluid.llama.library import Library, LibraryError, load

LIBRARY_VARIABLE = "SUPERFLUID_LLAMA_LIB"
HOME_VARIABLE = "SUPERFLUID_HOME"
NAMES = ("libllama.dylib", "libllama.0.dylib") if sys.platform == "darwin" else ("libllama.so", "libllama.so.0")

HOW_TO_GET_ONE = (
    "install one with `superfluid runtime install llamacpp` or `pip install xllamacpp`,"
    f" or name one with --llamacpp-lib or {LIBRARY_VARIABLE}"
)

_opened: dict[str, Library] = {}
_lock = threading.Lock()


def home_directory() -> Path:
    """SUPERFLUID_HOME, else `~/.superfluid`; `/.superfluid` when the user's home is not an absolute path."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named)
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else "/") / ".superfluid"


def named_library(option: str | None) -> str | None:
    """What the operator named: the option, else the variable; None when neither is set."""
    return option or os.environ.get(LIBRARY_VARIABLE) or None


def _in_directory(directory: Path) -> Path | None:
    return next((directory / name for name in NAMES if (directory / name).is_file()), None)


def _resolve_named(named: str) -> str:
    path = Path(named)
    if path.is_dir():
        found = _in_directory(path)
        if found is None:
            raise LibraryError(f"{named} holds no {NAMES[0]}")
        return str(found)
    if not path.exists():
        raise LibraryError(f"{named}: no such file or directory")
    return str(path)


def _installed(own_directory: Path, home: Path) -> Iterator[str]:
    """Libraries of an install: refused by name when they fail."""
    for directory in (
        own_directory,
        own_directory.parent / "lib",
        home / "runtimes" / "llamacpp" / "current" / "lib",
    ):
        found = _in_directory(directory)
        if found is not None:
            yield str(found)


def _package_directories(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _of_this_environment() -> Iterator[str]:
    """Libraries that happen to be here: a failure tries the next."""
    for directory in _package_directories("xllamacpp"):
        yield from (str(path) for path in sorted(directory.glob("xllamacpp*.so")))
    for directory in _package_directories("llama_cpp"):
        found = _in_directory(directory / "lib") or _in_directory(directory)
        if found is not None:
            yield str(found)
    yield from NAMES


def search(
    option: str | None = None,
    *,
    own_directory: Path | None = None,
    home: Path | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
) -> Library:
    """Find, load and prove libllama; `option` is what a `--lib` option named.

    Raises LibraryError: at once for a library that was named or installed, with every reason when none is left.
    """
    named = named_library(option)
    if named is not None:
        return _open(_resolve_named(named), layouts)
    own = own_directory if own_directory is not None else Path(sys.argv[0] or ".").resolve().parent
    for path in _installed(own, home if home is not None else home_directory()):
        return _open(path, layouts)
    reasons = []
    for path in _of_this_environment():
        try:
            return _open(path, layouts)
        except LibraryError as error:
            reasons.append(str(error))
    raise LibraryError(f"no libllama here: {'; '.join(reasons)}. To get one: {HOW_TO_GET_ONE}")


def open_library(option: str | None = None) -> Library:
    """The libllama of this process for `option`; loaded once per file and kept. Raises LibraryError."""
    return search(option)


def _open(path: str, layouts: Sequence[Layout]) -> Library:
    if layouts is not LAYOUTS:
        return load(path, layouts)
    with _lock:
        if path not in _opened:
            _opened[path] = load(path)
        return _opened[path]
