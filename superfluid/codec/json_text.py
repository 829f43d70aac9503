"""JSON from clients: read with a bound on its nesting, which templates, schemas and writers recurse over."""

import json
import re
from typing import Any

MAX_NESTING = 200  # objects and arrays inside each other; tools and schemas that people write have a dozen


HALF = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of a surrogate, which may lack its other half


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


def mended(value: Any, text: str) -> Any:
    """The value of a JSON text with U+FFFD for half surrogate pairs, which JSON can escape and UTF-8 cannot hold.

    The value is not nested too deep.
    """
    if HALF.search(text) is None:
        return value
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: it is none, or it is nested too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise NestedTooDeep from None
    check_nesting(value)
    return mended(value, text)
