"""Scripted models whose vocabulary has the markers of a fill-in-the-middle family."""

import importlib.util
from pathlib import Path
from typing import Any, cast

from superfluid.codec.fim import FAMILIES

END = "<|im_end|>"
MIDDLES: dict[str, list[str | bytes | None]] = {  # what follows the middle marker
    "add": ["return ", "a + b", END],
    "loop": ["tick ", "tock ", None],
    "utf8": ["caf", b"\xc3", b"\xa9", " ok", END],
    "cut": ["caf", b"\xc3", END],
}


def write_fim(shared: Path, name: str, path: Path, family: str = "qwen") -> Path:
    """A model that answers every fill-in-the-middle prompt, prefix first, with the middle `name`."""
    spec = importlib.util.spec_from_file_location("scripted_gguf", shared / "tools/scripted_gguf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tool = cast(Any, module)
    markers = FAMILIES[family]
    tool.MARKERS += markers
    tool.CONTROL |= set(markers)
    tool.SCRIPTS[f"fim-{name}"] = ("plain", [markers.middle, *MIDDLES[name]])
    tool.write(path, f"fim-{name}")
    return path
