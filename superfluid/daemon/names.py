"""The names that models are served under."""

from collections.abc import Sequence
from pathlib import Path

import orjson

UNNAMED = "superfluid"  # the name of a model whose path has none


def served_names(paths: Sequence[Path]) -> list[str]:
    """A name for each model path: the id of a `hub.json` beside it, else its stem; should that be taken, the first
    that is free of its variant, its file name, and its folder with it."""
    names: list[str] = []
    for path in paths:
        hub = _read_hub(path)
        stem = path.name if path.is_dir() else path.stem
        name = hub.get("id") or stem or UNNAMED
        candidates = [name, path.name, f"{path.parent.name}/{path.name}"]
        if hub.get("variant"):
            candidates.insert(1, f"{name}:{hub['variant']}")
        names.append(next((candidate for candidate in candidates if candidate not in names), str(path)))
    return names


def _read_hub(path: Path) -> dict[str, str]:
    """The id and variant that a `hub.json` beside a model gives it; empty when there is none that can be read."""
    try:
        hub = orjson.loads((path if path.is_dir() else path.parent).joinpath("hub.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(hub, dict):
        return {}
    return {key: hub[key].strip() for key in ("id", "variant") if isinstance(hub.get(key), str)}
