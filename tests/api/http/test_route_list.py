"""The list of routes that operators read."""

import re
from pathlib import Path

from superfluid.api.http.server import ROUTES

OPERATING = Path(__file__).resolve().parents[3] / "docs" / "operating.md"


def test_every_route_is_in_the_list() -> None:
    page = OPERATING.read_text().split("## HTTP routes")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    listed = {tuple(found.split()) for row in rows for found in re.findall(r"`((?:GET|POST) \S+)`", row)}
    served = {(method, re.sub(r"<(?:path:)?name>", "{id}", path)) for method, path, _ in ROUTES if "slot" not in path}
    assert listed == served
