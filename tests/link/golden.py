"""Readers of the golden data of the wire."""

import json
from pathlib import Path
from typing import Any


def lines(shared: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared / "data" / "golden" / name).read_text().splitlines()]
