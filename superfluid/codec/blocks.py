"""What the model sees of a session's blocks (visibility version 2)."""

import json
from collections.abc import Mapping

from superfluid.codec.json_text import read_json

VISIBILITY_VERSION = 2
MAX_SHOWN = 16 << 10  # bytes of a diff or an artifact that enter the prompt
TRUNCATED = "\n…[truncated]"

FILE_DIFF, ARTIFACT, CITATION, PROGRESS, DIAGNOSTIC, WORKSPACE_REFERENCE, IMAGE = range(1, 8)


class UnknownBlockKind(ValueError):
    def __init__(self, kind: int) -> None:
        super().__init__(f"unknown block kind {kind}")


def block_text(kind: int, payload: str) -> str:
    """A block as a message's text; empty for kinds that the model does not see. Raises UnknownBlockKind."""
    try:
        value = read_json(payload)
    except ValueError:
        value = None
    fields = value if isinstance(value, Mapping) else {}

    def text(key: str) -> str:
        member = fields.get(key)
        return member if isinstance(member, str) else "" if member is None else json.dumps(member, ensure_ascii=False)

    if kind == FILE_DIFF:
        return _cut(f"```diff\n# {text('path')}\n{text('diff')}\n```")
    if kind == ARTIFACT:
        return _cut(f"[artifact: {text('title')}]\n{text('content')}")
    if kind == CITATION:
        quote = f"\n> {text('quote')}" if text("quote") else ""
        return f"[citation] {text('title')} — {text('url')}{quote}"
    if kind == DIAGNOSTIC:
        path = text("path")
        place = f" {path}:{text('line') or 0}:" if path else ""
        return f"[diagnostic {text('severity')}]{place} {text('message')}"
    if kind == WORKSPACE_REFERENCE:
        return f"@{text('path')}"
    if kind in (PROGRESS, IMAGE):
        return ""
    raise UnknownBlockKind(kind)


def image_texts(payload: str) -> tuple[str, str]:
    """The texts before and after an image block's image."""
    value = read_json(payload)
    return str(value.get("pre_text", "")), str(value.get("post_text", ""))


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_SHOWN:
        return text
    return data[:MAX_SHOWN].decode("utf-8", "ignore") + TRUNCATED
