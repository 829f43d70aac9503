"""JSON from clients: read with a bound on its nesting, which templates, schemas and writers recurse over."""

import json
from typing import Any

MAX_NESTING = 200  # objects and arrays inside each other; tools and schemas that people write have a dozen


class NestedTooDeep(ValueError):
    """A value whose objects and arrays lie too deep inside each other."""

    def __init__(self) -> None:
        super().__init__(f"objects and arrays are nested more than {MAX_NESTING} deep")


def check_nesting(value: Any) -> None:
    """Raises NestedTooDeep. Does not recurse itself."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        if not level:
            return
        level = [
            member
            for container in level
            for member in (container.values() if isinstance(container, dict) else container)
            if isinstance(member, dict | list)
        ]
    if level:
        raise NestedTooDeep


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: it is none, or it is nested too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise NestedTooDeep from None
    check_nesting(value)
    return value
