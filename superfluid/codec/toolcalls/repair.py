"""Reading JSON that a model wrote: fenced, with text around it, with trailing commas, or cut short."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from superfluid.codec.json_text import mended

Json = Any


class NotJson(ValueError):
    """The text is no JSON, and no repair makes it so."""


class Reading(NamedTuple):
    """A value that a text may stand for; `closed`: what the text left open was closed."""

    value: Json
    closed: bool


def strict_loads(text: str) -> Json:
    """A JSON value; NaN and Infinity are none. Raises NotJson."""
    try:
        return mended(json.loads(text, parse_constant=_refuse, parse_float=_finite), text)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if abs(number) != float("inf") else _refuse(digits)


def readings(text: str) -> Iterator[Reading]:
    """The values that a text may stand for, the most literal first."""
    text = without_fence(text).lstrip()  # blanks at the end may be of a string that was cut
    candidates = [text]
    if (inner := first_object(text)) is not None and inner != text.rstrip():
        candidates.append(inner)
    for candidate in candidates:
        closed = close(candidate)
        tried: set[str] = set()
        for form, repaired in (
            (candidate, False),
            (without_trailing_commas(candidate), False),
            (closed, True),
            (without_trailing_commas(closed) if closed is not None else None, True),
        ):
            if form is None or form in tried:
                continue
            tried.add(form)
            try:
                value = strict_loads(form)
            except NotJson:
                continue
            yield Reading(value, repaired)


def without_fence(text: str) -> str:
    """The inside of a code fence, when the text begins with one."""
    stripped = text.strip()
    if not stripped.startswith("```"):
        return text
    _, found, inside = stripped.partition("\n")
    if not found:
        return text
    return inside.rpartition("```")[0] if "```" in inside else inside


def _structure(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """(index, character) of what stands outside strings; a quote is given where its string ends, or at the end of the
    text when it does not."""
    at = start
    while at < len(text):
        char = text[at]
        if char != '"':
            yield at, char
            at += 1
            continue
        end = at + 1
        while (end := text.find('"', end)) >= 0:
            escapes = 0
            while text[end - 1 - escapes] == "\\":
                escapes += 1
            if escapes % 2 == 0:
                break
            end += 1
        if end < 0:
            yield len(text), '"'
            return
        yield end, '"'
        at = end + 1


def first_object(text: str) -> str | None:
    """The first balanced `{..}`."""
    start = text.find("{")
    end = object_end(text, start) if start >= 0 else None
    return None if end is None else text[start:end]


def object_end(text: str, start: int) -> int | None:
    """Where the object that begins at `start` ends; None when it does not."""
    depth = 0
    for at, char in _structure(text, start):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return at + 1
    return None


def later_objects(text: str) -> Iterator[str]:
    """The objects behind the first balanced one, within an array or side by side; the last may be cut."""
    start = text.find("{")
    depth = 0
    first = True
    for at, char in _structure(text, max(start, 0)):
        if char == "{" and depth == 0:
            start = at
        if char == "{" or (char == "[" and depth):
            depth += 1
        elif char in "}]" and depth:
            depth -= 1
            if depth == 0:
                if not first:
                    yield text[start : at + 1]
                first = False
    if depth and not first:
        yield text[start:]


def without_trailing_commas(text: str) -> str:
    """The text with every comma that only a closing bracket follows taken out."""
    out: list[str] = []
    kept = 0
    comma = -1
    for at, char in _structure(text):
        if char == ",":
            comma = at
        elif char in "}]":
            if comma >= 0:
                out.append(text[kept:comma])
                kept = comma + 1
            comma = -1
        elif not char.isspace():
            comma = -1
    return "".join(out) + text[kept:]


def close(text: str) -> str | None:
    """The text with its open string and brackets closed; None when a bracket closes nothing."""
    ending = closing(text)
    return None if ending is None else text[: len(text) - _lone_escape(text, ending)] + ending


def closing(text: str) -> str | None:
    """What closes the open string and brackets of a text; None when a bracket closes nothing."""
    stack: list[str] = []
    open_string = False
    for at, char in _structure(text):
        if char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]":
            if not stack or stack.pop() != char:
                return None
        elif char == '"' and at == len(text):
            open_string = True
    return ('"' if open_string else "") + "".join(reversed(stack))


def _lone_escape(text: str, ending: str) -> int:
    """1 when an open string ends in a backslash that would escape its closing quote."""
    if not ending.startswith('"'):
        return 0
    return (len(text) - len(text.rstrip("\\"))) % 2
