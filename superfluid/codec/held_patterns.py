"""Patterns of JSON schemas in the words of the grammar compiler.

A schema's patterns are those of ECMA-262 with its flag u, and of its Annex B where that has no meaning: a `]` alone, a
`{` that counts nothing. The compiler reads another dialect, in which much of this means something else (`[[:alpha:]]`,
`[a&&b]`, `[]a]`, `\\s`, `.`), and much that is no pattern here means something (`(?i)`, `a++`, `\\A`, `\\x{61}`). So
each pattern is read, and written in words that have one meaning, or refused by name.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from superfluid.codec.properties import known_property
from superfluid.codec.schema_tree import SchemaRefused

MAX_WEIGHT = 10_000
"""States of a pattern whose counts are written out. A few times as many end a lane, or cost it 50 ms a token."""
MAX_PLAIN = 8  # counts of single characters, not within another count, that are never written out
LONGEST_COUNT = 9  # digits
LAST = 0x10FFFF
Range = tuple[int, int]

_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_HEX = {2: re.compile("[0-9a-fA-F]{2}"), 4: re.compile("[0-9a-fA-F]{4}")}
_CODE_POINT = re.compile(r"\{([0-9a-fA-F]+)\}")
_GROUP_NAME = re.compile(r"[^\W\d][\w$]*>|\$[\w$]*>")
_PROPERTY = re.compile(r"\{([A-Za-z0-9_=]+)\}")
_WITH_CONTROLS = frozenset(
    {"C", "Other", "Cc", "Control", "cntrl", "Any", "ASCII", "Assigned", "Common", "Zyyy", "Inherited", "Zinh", "Qaai"}
)  # properties and scripts
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_DIGITS: list[Range] = [(0x30, 0x39)]
_WORDS: list[Range] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: list[Range] = [
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_LINE_ENDS: list[Range] = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_SYNTAX = frozenset("\\.+*?()|[]{}^$")
_CLASS_SYNTAX = frozenset("\\[]^-&~")


class Pattern(NamedTuple):
    """A pattern as the compiler reads it, and about how many states it has."""

    text: str
    weight: int


def restated(pattern: str) -> Pattern:
    """A pattern that matches what `pattern` does. Raises SchemaRefused for what cannot be said, or held."""
    reader = _Reader(pattern)
    part = reader.alternatives()
    if reader.at < len(pattern):
        raise reader.refused("has a ) that closes nothing")
    weight = part.plain if reader.counts <= MAX_PLAIN else part.weight
    if weight > MAX_WEIGHT:
        raise reader.refused(f"has over {MAX_WEIGHT} states with its counts written out, too many to hold a reply to")
    classes = [one for one in reader.classes if one.escapes_pass(range(32))]
    if not classes:
        return Pattern(part.write(False), weight)
    if reader.nul:
        raise reader.refused("has U+0000 beside a class without a quote or backslash")
    return Pattern(part.write(True), weight)


class _Class:
    """A set of characters."""

    def __init__(self, ranges: Iterable[Range], properties: Iterable[str] = (), negated: bool = False) -> None:
        self.ranges = list(ranges)
        self.properties = list(properties)
        self.negated = negated

    def escapes_pass(self, codes: Iterable[int]) -> bool:
        """Whether the set has all of some control characters but not the quote or the backslash: then the compiler lets
        the escapes of those pass in a JSON text too. Where properties come in, whether it may be so."""
        if self.negated and self.properties:
            return True
        if any(name.startswith("\\P") or name[3:-1].rpartition("=")[2] in _WITH_CONTROLS for name in self.properties):
            return True
        return all(map(self._has, codes)) and not (self._has(0x22) and self._has(0x5C))

    def _has(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges) != self.negated

    def write(self, without_nul: bool) -> str:
        inside = "".join(map(_range, self.ranges)) + "".join(self.properties)
        text = f"[{'^' if self.negated else ''}{inside}]"
        return f"[{text}&&[^\\x{{0}}]]" if without_nul and self.escapes_pass([0]) else text


class _Part(NamedTuple):
    """A part of a pattern: how it is written, its states with counts written out (`plain`: but those of single
    characters that are not within another), whether it is a single character."""

    write: Callable[[bool], str]
    weight: int
    plain: int
    single: bool = False


class _Reader:
    """A pattern, read from `at` on."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.classes: list[_Class] = []
        self.counts = 0
        self.nul = False  # U+0000 outside of classes

    def refused(self, words: str) -> SchemaRefused:
        return SchemaRefused(f"the pattern {self.text[:80]!r} {words}")

    def _no_such(self, what: str) -> SchemaRefused:
        return self.refused(f"has {what}, which ECMA-262 does not know")

    def _next(self, word: str) -> bool:
        """Past a word, if it comes next."""
        found = self.text.startswith(word, self.at)
        self.at += len(word) if found else 0
        return found

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found is not None else self.at
        return found

    # ---- what holds parts

    def alternatives(self) -> _Part:
        """Up to a closing parenthesis or the end."""
        found = [self._sequence()]
        while self._next("|"):
            found.append(self._sequence())
        if len(found) == 1:
            return found[0]
        return _Part(lambda cut: "|".join(part.write(cut) for part in found), _sum(found).weight, _sum(found).plain)

    def _sequence(self) -> _Part:
        found: list[_Part] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            found.append(self._counted())
        return _sum(found)

    def _counted(self) -> _Part:
        char = self.text[self.at]
        if char in "^$":
            self.at += 1
            self._check_no_count("nothing before a count")
            return _Part(lambda cut: char, 0, 0)
        part = self._atom()
        least, most, written = self._count()
        if not written:
            return part
        times = max(least, most or 0, 1)
        self.counts += times > 1
        weight = part.weight * times
        return _Part(lambda cut: part.write(cut) + written, weight, part.plain if times == 1 or part.single else weight)

    def _count(self) -> tuple[int, int | None, str]:
        """(least, most, as it is written: empty without a count)."""
        char = self.text[self.at : self.at + 1]
        if char and char in "*+?":
            self.at += 1
            least, most, written = int(char == "+"), 1 if char == "?" else None, char
        elif (found := self._take(_COUNT)) is not None:
            if max(len(found[1]), len(found[3] or "")) > LONGEST_COUNT:
                raise self.refused(f"has the count {found[0][:80]}, too large to be held")
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if most is not None and most < least:
                raise self.refused(f"has the count {found[0]}, out of order")
            written = f"{{{least}{',' if found[2] else ''}{'' if most is None or found[2] is None else most}}}"
        else:
            return 1, 1, ""
        self._next("?")  # as few as can be: the same texts match
        self._check_no_count("a count behind a count")
        return least, most, written

    def _check_no_count(self, what: str) -> None:
        if self.text[self.at : self.at + 1] in ("*", "+", "?") or _COUNT.match(self.text, self.at):
            raise self._no_such(f"{what} ({self.text[self.at : self.at + 20]!r})")

    # ---- parts

    def _atom(self) -> _Part:
        if self._next("("):
            return self._group()
        if self._next("["):
            return self._set(self._class())
        if self._next("."):
            return self._set(_Class(_LINE_ENDS, negated=True))
        if self._next("\\"):
            return self._escape()
        char = self.text[self.at]
        if char in "*+?" or _COUNT.match(self.text, self.at):
            raise self._no_such(f"nothing before a count ({self.text[self.at : self.at + 20]!r})")
        if self.text.startswith("{,", self.at):
            raise self._no_such("a count without its least number")
        self.at += 1
        return self._literal(ord(char))

    def _literal(self, code: int) -> _Part:
        self.nul |= code == 0
        return _Part(lambda cut: _char(code, _SYNTAX), 1, 1, True)

    def _set(self, found: _Class) -> _Part:
        self.classes.append(found)
        return _Part(found.write, 1, 1, True)

    def _group(self) -> _Part:
        opening = "(?:"
        if self._next("?"):
            if self._next("i:"):
                opening = "(?i:"
            elif self._next("-i:"):
                opening = "(?-i:"
            elif any(map(self._next, ("=", "!", "<=", "<!"))):
                raise self.refused("has a look-around, which no grammar holds")
            elif not self._next(":") and not (self._next("<") and self._take(_GROUP_NAME)):
                raise self._no_such(f"the group (?{self.text[self.at : self.at + 10]}")
        part = self.alternatives()
        if not self._next(")"):
            raise self.refused("has a ( that nothing closes")
        return part._replace(write=lambda cut: f"{opening}{part.write(cut)})", single=False)

    def _escape(self) -> _Part:
        char = self.text[self.at : self.at + 1]
        if char in ("b", "B"):
            raise self.refused(f"has \\{char}, a boundary of words, which no grammar holds")
        if char == "k" or (char in "123456789" and char):
            raise self.refused(f"has \\{char}, a back reference, which no grammar holds")
        found = self._escaped()
        return self._literal(found) if isinstance(found, int) else self._set(found)

    def _escaped(self) -> int | _Class:
        """What is escaped: a character, or a set of them."""
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if not char:
            raise self.refused("ends in a \\")
        if char.lower() in _SETS:
            return _Class(_SETS[char.lower()], negated=char.isupper())
        if char in "pP":
            found = self._take(_PROPERTY)
            if found is None or not known_property(found[1]):
                raise self._no_such(f"\\{char}{self.text[self.at - len(found[0]) if found else self.at :][:20]}")
            return _Class([], [f"\\{char}{found[0]}"])
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not self.text[self.at : self.at + 1].isdecimal():
            return 0
        if char == "c" and (letter := self.text[self.at : self.at + 1]).isascii() and letter.isalpha():
            self.at += 1
            return ord(letter) % 32
        if char in "xu":
            return self._number(char)
        if char.isascii() and char.isalnum():
            raise self._no_such(f"\\{char}")
        return ord(char)

    def _number(self, char: str) -> int:
        if char == "x":
            if (found := self._take(_HEX[2])) is None:
                raise self._no_such("\\x without two hexadecimal digits")
            return int(found[0], 16)
        if (found := self._take(_CODE_POINT)) is not None:
            code = int(found[1], 16) if len(found[1]) < 99 else LAST + 1
        elif (found := self._take(_HEX[4])) is not None:
            code = int(found[0], 16)
            if 0xD800 <= code < 0xDC00 and self._next("\\u") and (low := self._take(_HEX[4])) is not None:
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[0], 16) - 0xDC00
        else:
            raise self._no_such("\\u without four hexadecimal digits")
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self.refused("has a number that is no character's")
        return code

    # ---- classes

    def _class(self) -> _Class:
        negated = self._next("^")
        ranges: list[Range] = []
        properties: list[str] = []
        while not self._next("]"):
            first = self._member()
            if self._ranges_on():
                self.at += 1
                last = self._member()
                if isinstance(first, _Class) or isinstance(last, _Class):
                    raise self._no_such("a range between sets of characters")
                if last < first:
                    raise self.refused(f"has the range {chr(first)}-{chr(last)}, out of order")
                ranges.append((first, last))
            elif isinstance(first, _Class):
                ranges += _complement(first.ranges) if first.negated else first.ranges
                properties += first.properties
            else:
                ranges.append((first, first))
        if not ranges and not properties:
            if not negated:
                raise self.refused("has an empty class, which nothing matches")
            return _Class([(0, LAST)])
        return _Class(ranges, properties, negated)

    def _ranges_on(self) -> bool:
        """Whether a - comes that does not end the class."""
        return self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at)

    def _member(self) -> int | _Class:
        if self.at >= len(self.text):
            raise self.refused("has a [ that nothing closes")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ord(char)
        if self._next("b"):
            return 8
        return self._escaped()


def _sum(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    weight, plain = sum(part.weight for part in parts), sum(part.plain for part in parts)
    return _Part(lambda cut: "".join(part.write(cut) for part in parts), weight, plain)


def _complement(ranges: list[Range]) -> list[Range]:
    found: list[Range] = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)] if start <= LAST else found


def _range(codes: Range) -> str:
    low, high = (_char(code, _CLASS_SYNTAX) for code in codes)
    return low if low == high else f"{low}-{high}"


def _char(code: int, syntax: frozenset[str]) -> str:
    char = chr(code)
    if not 0x20 <= code < 0x7F:
        return f"\\x{{{code:x}}}"
    return f"\\{char}" if char in syntax else char
