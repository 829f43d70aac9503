"""Structural tags written as a Lark grammar for llguidance; markers in strings are token ids in it."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.schemas import close_schema

MARKER_PREFIX = b"\xff"  # a marker's bytes are this and its text, so that no text can form it
_ANY_TEXT = "/(?s:.*)/"
_JSON_MARGIN = r"/[\x20\x0A\x0D\x09]{1,4}/"  # around a JSON body


class StructuralWriter:
    """Writes structural tags over one vocabulary: `markers` are its special tokens by text, `stop_ids` its stop set."""

    def __init__(self, markers: Mapping[str, int], stop_ids: Iterable[int]) -> None:
        self._markers = markers
        self._stop_ids = frozenset(stop_ids)
        longest_first = sorted((text for text in markers if text), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def write(self, tag: Any) -> str:
        """The grammar of a format. Raises EngineError -127 for what is not supported, -114 for what is malformed."""
        return _Writing(self).grammar(tag)

    def pieces(self, text: str) -> list[str | int]:
        """A literal as plain texts and marker ids, longest markers first."""
        if self._split is None:
            return [text] if text else []
        found: list[str | int] = []
        at = 0
        for match in self._split.finditer(text):
            if match.start() > at:
                found.append(text[at : match.start()])
            found.append(self._markers[match[0]])
            at = match.end()
        if at < len(text):
            found.append(text[at:])
        return found

    def token(self, value: Any) -> int:
        """A token given by id or by its marker's text."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if isinstance(value, str) and value in self._markers:
            return self._markers[value]
        raise EngineError(Status.Unsupported, f"{value!r} is no token of this vocabulary")

    def any_but(self, excluded: Iterable[int]) -> str:
        """One token that is neither in the stop set nor excluded."""
        return "<[^" + ",".join(map(str, sorted(self._stop_ids.union(excluded)))) + "]>"


class _Writing:
    """One grammar being written. Each node gives an expression; the empty one matches nothing at all."""

    def __init__(self, vocabulary: StructuralWriter) -> None:
        self._vocabulary = vocabulary
        self._rules: list[str] = []
        self._nodes: dict[str, Callable[[dict[str, Any], list[str | int]], str]] = {
            "const_string": lambda node, _: self._literal(_member(node, "value", str)),
            "json_schema": lambda node, _: self._json(node),
            "regex": lambda node, _: _regex(_member(node, "pattern", str)),
            "any_text": lambda _, end: self._text_to(end),
            "any_tokens": self._any_tokens,
            "token": lambda node, _: f"<[{self._vocabulary.token(node.get('token'))}]>",
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda node, end: self._repeat(node, "?"),
            "star": lambda node, end: self._repeat(node, "*"),
            "plus": lambda node, end: self._repeat(node, "+"),
            "tag": lambda node, _: self._tag(node),
            "triggered_tags": lambda node, _: self._triggered_tags(node),
        }

    def grammar(self, tag: Any) -> str:
        start = self._write(tag, [])
        return "\n".join([f"start: {start or _EMPTY}", *self._rules])

    def _write(self, node: Any, end: list[str | int]) -> str:
        """`end` is what closes the enclosing tag, for text that runs up to it."""
        if not isinstance(node, dict):
            raise EngineError(Status.RejectBadStruct, f"a format is an object, not {node!r}")
        kind = node.get("type")
        if kind not in self._nodes:
            raise EngineError(Status.Unsupported, f"no structural format {kind!r}")
        return self._nodes[kind](node, end)

    # ---- leaves

    def _literal(self, text: str) -> str:
        return self._joined(self._vocabulary.pieces(text))

    def _joined(self, pieces: list[str | int]) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece) for piece in pieces)

    def _json(self, node: dict[str, Any]) -> str:
        if node.get("style", "json") != "json":
            raise EngineError(Status.Unsupported, f"json_schema in the style {node['style']!r}")
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise EngineError(Status.RejectBadStruct, f"a json_schema is an object, not {schema!r}")
        return f"({_JSON_MARGIN})? %json {json.dumps(close_schema(schema))} ({_JSON_MARGIN})?"

    def _any_tokens(self, node: dict[str, Any], end: list[str | int]) -> str:
        excluded = {self._vocabulary.token(value) for value in _member(node, "exclude_tokens", list, [])}
        if end and isinstance(end[0], int):
            excluded.add(end[0])
        return f"({self._vocabulary.any_but(excluded)})*"

    def _text_to(self, end: list[str | int]) -> str:
        """Text without markers, and the plain text that begins `end`, which without a marker is its first match."""
        if not end or isinstance(end[0], int):
            return _ANY_TEXT
        if len(end) == 1:
            return self._rule(f"[suffix={_quoted(end[0])}]: {_ANY_TEXT}")
        return f"/(?s:.*){_escaped(end[0])}/"

    # ---- composites

    def _sequence(self, node: dict[str, Any], end: list[str | int]) -> str:
        elements = _member(node, "elements", list)
        written = [self._write(element, []) for element in elements[:-1]]
        written += [self._write(element, end) for element in elements[-1:]]
        return _sequence(written)

    def _or(self, node: dict[str, Any], end: list[str | int]) -> str:
        elements = [self._write(element, []) for element in _member(node, "elements", list)]
        if not elements:
            raise EngineError(Status.RejectBadStruct, "an or of nothing")
        return _any_of(elements)

    def _repeat(self, node: dict[str, Any], how: str) -> str:
        content = self._write(node.get("content"), [])
        return f"({content}){how}" if content else ""

    def _tag(self, node: dict[str, Any]) -> str:
        begin = self._bound(node.get("begin"))
        ends = node.get("end")
        alternatives = [self._bound(end) for end in (ends if isinstance(ends, list) else [ends])]
        content = node.get("content")
        if not alternatives:
            raise EngineError(Status.RejectBadStruct, "a tag without an end")
        bodies = []
        for end in alternatives:
            body = self._write(content, end)
            # text up to a plain end has taken the first piece of it already
            taken = 1 if end and isinstance(end[0], str) and _ends_in_text(content) else 0
            bodies.append(_sequence([body, self._joined(end[taken:])]))
        return _sequence([self._joined(begin), _any_of(bodies)])

    def _bound(self, value: Any) -> list[str | int]:
        """The begin or end of a tag: a literal, or a token node."""
        if isinstance(value, str):
            return self._vocabulary.pieces(value)
        if isinstance(value, dict) and value.get("type") == "token":
            return [self._vocabulary.token(value.get("token"))]
        raise EngineError(Status.RejectBadStruct, f"a tag begins and ends with text or a token, not {value!r}")

    def _triggered_tags(self, node: dict[str, Any]) -> str:
        triggers: set[int] = set()
        for trigger in _member(node, "triggers", list):
            pieces = self._vocabulary.pieces(trigger) if isinstance(trigger, str) else []
            if not pieces or not isinstance(pieces[0], int):
                raise EngineError(Status.Unsupported, f"the trigger {trigger!r} does not begin with a special token")
            triggers.add(pieces[0])
        tags = _member(node, "tags", list)
        if not tags or not triggers:
            raise EngineError(Status.RejectBadStruct, "triggered_tags without triggers or tags")
        for tag in tags:
            begin = self._bound(tag.get("begin") if isinstance(tag, dict) else None)
            if not begin or begin[0] not in triggers:
                raise EngineError(Status.RejectBadStruct, f"no trigger begins the tag {tag!r:.200}")
        call = self._rule(": " + (_any_of([self._write(tag, []) for tag in tags]) or _EMPTY))
        text = self._rule(f": ({self._vocabulary.any_but(triggers)})*")
        match bool(node.get("at_least_one")), bool(node.get("stop_after_first")):
            case False, False:
                return f"{text} ({call} {text})*"
            case True, False:
                return f"{call} ({text} {call})* {text}"
            case False, True:
                return f"{text} ({call})?"
        return call

    def _rule(self, definition: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(name + definition)
        return name


_EMPTY = '""'


def _sequence(expressions: list[str]) -> str:
    return " ".join(expression for expression in expressions if expression)


def _any_of(expressions: list[str]) -> str:
    unique = list(dict.fromkeys(expressions))
    if len(unique) == 1:
        return unique[0]
    return "(" + " | ".join(expression or _EMPTY for expression in unique) + ")"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    return f"/{regex_to_lark(pattern)}/" if pattern else ""


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _ends_in_text(node: Any) -> bool:
    """Whether a format is, or ends in, any_text."""
    while isinstance(node, dict) and node.get("type") == "sequence" and node.get("elements"):
        node = node["elements"][-1]
    return isinstance(node, dict) and node.get("type") == "any_text"


def _member(node: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    found = node.get(key, default)
    if not isinstance(found, kind):
        raise EngineError(Status.RejectBadStruct, f"{node.get('type')} needs {key}, got {found!r:.200}")
    return found
