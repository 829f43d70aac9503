"""The bodies of gemma's calls: `{k:v,..}` with `<|"|>` as quotes, numbers and words bare."""

import re
from typing import Any

Json = Any

DEPTH = 128  # objects and arrays inside each other
QUOTE = '<|"|>'
OPENER, CLOSER = "<|tool_call>", "<tool_call|>"

_BLANKS = re.compile(r"\s*")
_KEY_NEXT = re.compile(r",\s*[^\s,:{}\[\]]+\s*:|\}|<tool_call\|>")
_MEMBER_END = re.compile(r"[,\]]|<tool_call\|>")
_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}
LONGEST_INTEGER = 4000  # digits; Python converts no more than 4300


class Body:
    """A cursor over a text, at the opening brace; a cut body gives what is there. The closing marker of a call ends
    it, but not within quotes."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def read(self) -> dict[str, Json]:
        """The object under the cursor, which goes past it."""
        return self._object(0)

    def blanks(self) -> None:
        """Past white space."""
        match = _BLANKS.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _over(self) -> bool:
        return self.at >= len(self.text) or self.text.startswith(CLOSER, self.at)

    def _value(self, depth: int, in_array: bool) -> Json:
        self.blanks()
        text = self.text
        if depth > DEPTH:
            self.at = len(text)
            return None
        if text.startswith(QUOTE, self.at):
            return self._quoted()
        if text.startswith("{", self.at):
            return self._object(depth)
        if text.startswith("[", self.at):
            return self._array(depth)
        return self._bare(in_array)

    def _quoted(self) -> str:
        start = self.at + len(QUOTE)
        end = self.text.find(QUOTE, start)
        if end >= 0:
            self.at = end + len(QUOTE)
            return self.text[start:end]
        end = self.text.find(CLOSER, start)
        self.at = end if end >= 0 else len(self.text)
        return self.text[start : self.at]

    def _object(self, depth: int) -> dict[str, Json]:
        self.at += 1
        made: dict[str, Json] = {}
        while True:
            self.blanks()
            if self._over():
                return made
            if self.text[self.at] in "},":
                self.at += 1
                if self.text[self.at - 1] == "}":
                    return made
                continue
            colon = self.text.find(":", self.at)
            if colon < 0:
                self.at = len(self.text)
                return made
            key = self.text[self.at : colon].strip().removeprefix(QUOTE).removesuffix(QUOTE)
            self.at = colon + 1
            self.blanks()
            if self._over():
                return made
            made[key] = self._value(depth + 1, False)

    def _array(self, depth: int) -> list[Json]:
        self.at += 1
        made: list[Json] = []
        while True:
            self.blanks()
            if self._over():
                return made
            if self.text[self.at] in "],":
                self.at += 1
                if self.text[self.at - 1] == "]":
                    return made
                continue
            made.append(self._value(depth + 1, True))

    def _bare(self, in_array: bool) -> Json:
        match = (_MEMBER_END if in_array else _KEY_NEXT).search(self.text, self.at)
        end = match.start() if match else len(self.text)
        literal = self.text[self.at : end].strip()
        self.at = end
        if literal in _WORDS:
            return _WORDS[literal]
        if _INTEGER.fullmatch(literal):
            return int(literal) if len(literal) < LONGEST_INTEGER else literal
        if _NUMBER.fullmatch(literal):
            number = float(literal)
            return number if abs(number) != float("inf") else literal
        return literal
