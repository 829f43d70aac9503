"""Where a worker's tokenizer library is."""

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

LLAMA = "llama"  # the library that is here: libllama's vocabulary is opened through its own binding


def find_library(name: str, worker: str | PathLike[str]) -> Path | None:
    """`lib<name>` beside a worker's program, else in `../lib` from there, where the program's link stands before where
    it leads; None when it is in neither."""
    file = f"lib{name}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    program = Path(worker)
    beside = dict.fromkeys((program.absolute().parent, program.resolve().parent))
    places = (place for folder in beside for place in (folder, folder.parent / "lib"))
    return next((path for folder in places if (path := folder / file).is_file()), None)


def missing_library(source: Mapping[str, Any], worker: str | PathLike[str]) -> str | None:
    """The name of the tokenizer library that a worker's report asks for and that is in none of its places."""
    name = source.get("name")
    if source.get("from") != "library" or name == LLAMA or find_library(str(name), worker) is not None:
        return None
    return str(name)
