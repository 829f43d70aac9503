"""docs/protocol.md: numbers and fields of what goes over the session socket, as declared, and its bytes."""

from pathlib import Path
from typing import Any

import pytest

from superfluid.link import events, session_api
from superfluid.link.postcard import encode
from superfluid.link.schema import (
    Blob,
    Bool,
    Float,
    Int,
    Many,
    Named,
    Option,
    Pair,
    Span,
    Struct,
    Text,
    Union,
    Wire,
    fields_of,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

UNIONS = {
    "Requests": session_api.Request,
    "Responses": session_api.Response,
    "Events": events.Body,
}
PARTS: list[type[Any]] = [
    events.Event,
    events.GenParams,
    session_api.Summary,
    session_api.LedgerEntry,
    session_api.Inspection,
]


def shown(wire: Wire) -> str:
    """A type as the document writes it."""
    match wire:
        case Int(bits=bits, signed=signed):
            return f"{'i' if signed else 'u'}{bits}"
        case Float(bits=bits):
            return f"f{bits}"
        case Bool():
            return "bool"
        case Text():
            return "string"
        case Blob(size=size):
            return "bytes" if size is None else f"[u8; {size}]"
        case Span():
            return "vec u32"
        case Many(item=item):
            return f"vec {shown(item)}"
        case Option(item=item):
            return f"opt {shown(item)}"
        case Pair(items=items):
            return f"({', '.join(map(shown, items))})"
        case Named(members=cls) | Struct(cls=cls) | Union(cls=cls):
            return str(cls.__name__)


def fields(cls: type[Any]) -> str:
    return ", ".join(f"`{field.key}` {shown(field.wire)}" for field in fields_of(cls))


def section(title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    text = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("title", UNIONS)
def test_every_variant_has_its_number_and_its_fields(title: str) -> None:
    declared = [[str(at), f"`{one.variant_name}`", fields(one)] for at, one in enumerate(UNIONS[title].variants)]
    assert [row[:3] for row in section(title)] == declared


def test_parts() -> None:
    declared = [[f"`{cls.__name__}`", fields(cls)] for cls in PARTS]
    declared += [
        [
            f"`{cls.__name__}`",
            "; ".join(f"{at} `{one.variant_name}` {fields(one)}".strip() for at, one in enumerate(cls.variants)),
        ]
        for cls in (events.Edit, session_api.Tier)
    ]
    declared += [["`Descendants`", "; ".join(f"{one.value} `{one.name}`" for one in events.Descendants)]]
    assert section("Parts") == declared


EXAMPLES = {
    "List": session_api.ListRequest(),
    'AppendMessage{session 1, role 1, text "hi"}': session_api.AppendMessageRequest(1, 1, "hi"),
    "Generate{session 1, max_tokens 300}": session_api.GenerateRequest(1, 300),
    "Append{session 1, text none, span [1, 200]}": session_api.AppendRequest(1, None, [1, 200]),
    "Create{parent none, temperature 0.5, top_p 1, min_p 0, top_k 40, seed 7}": session_api.CreateRequest(
        None, events.GenParams(0.5, 1.0, 0.0, 40, 7)
    ),
    'Err{message "no"}': session_api.ErrResponse("no"),
}


def test_examples() -> None:
    told = {what.strip("`"): bytes.fromhex(frame.strip("`")) for what, frame in section("Encoding")}
    assert told == {what: len(encode(one)).to_bytes(4, "little") + encode(one) for what, one in EXAMPLES.items()}
