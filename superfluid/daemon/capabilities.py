"""Capability records: leaves by path, and what differs between two of them (spec: wire, capability record)."""

from collections.abc import Iterator
from typing import Any

WHOLE = "the whole record"
NOT_COMPARED = "limits"  # may differ from one start of a worker to the next


def leaves(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf; a path joins its sections by dots."""
    for key, value in record.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Sorted paths of the leaves that differ, `limits` left out; `the whole record` when one came or went."""
    if bool(before) != bool(after):
        return [WHOLE]
    old, new = (
        dict(leaves({section: value for section, value in record.items() if section != NOT_COMPARED}))
        for record in (before, after)
    )
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))


def refusal(record: dict[str, Any], section: str, leaf: str) -> str | None:
    """Why a leaf is a no, in the runtime's words; none when it is a yes or unknown."""
    part = record.get(section)
    value = part.get(leaf) if isinstance(part, dict) else None
    if value is False:
        return "not supported"
    return value if isinstance(value, str) else None
