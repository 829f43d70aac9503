"""Calls written in learned XML, `<function=f>` with `<parameter=k>` v `</parameter>` inside and kin, as a scanner of
their text: the same for a whole run and for one that is still being written.

A value ends where its closer stands and nowhere else, so what it holds is never another call, nor another argument.
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

import attrs

_NO_NAME = re.compile(r"[<\s]")
_BLANK = " \t\r\n"
_JSON = ("{", "[", "`")  # how a run begins that is JSON, fenced or not


@attrs.frozen(slots=False)
class Delimiters:
    """The texts around a call's name, its keys and its values; `val_close` may be empty, the others are not."""

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    val_close: str

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """What ends a value: a later one counts where none of those before it follows in the run. White space may
        differ, and what follows the last value of a call may begin otherwise."""
        last = self.val_close.removesuffix("<").rstrip()
        return tuple(dict.fromkeys(closer for closer in (self.val_close, last, last.strip()) if closer))

    @cached_property
    def openings(self) -> re.Pattern[str]:
        """What begins a call or an argument."""
        return any_of((self.name_open, self.key_open))

    def overlap(self, word: str) -> int:
        """Characters at the end of a delimiter that may begin the next call or argument."""
        return max(
            next((n for n in range(min(len(word), len(opening) - 1), 0, -1) if opening.startswith(word[-n:])), 0)
            for opening in (self.name_open, self.key_open)
        )


class Named(NamedTuple):
    """A call begins; `at` is how many characters of the run lead up to there."""

    name: str
    at: int


class Member(NamedTuple):
    """An argument of the call under way, as written."""

    key: str
    text: str


class _Within(Enum):
    """The part of a call that is being read."""

    START = auto()
    OUTSIDE = auto()
    NAME = auto()
    BODY = auto()
    KEY = auto()
    VALUE = auto()


class Scanner:
    """One run. `named`: it has the beginning of a call. `failed`: it is none of these calls, whatever was found."""

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._closers = list(delimiters.closers)
        self._within = _Within.START
        self._taken: list[str] = []  # text of the part under way that holds no delimiter
        self._pending = ""  # text behind it that may begin one
        self._past = 0  # characters before `_pending`
        self._key = ""
        self.named = False
        self.failed = False

    def feed(self, text: str) -> list[Named | Member]:
        """More of the run; what it completes."""
        if self.failed:
            return []
        self._pending += text
        at = 0
        found: list[Named | Member] = []
        while not self.failed and (end := self._next(at, found)) is not None:
            at = end
        if not self.failed:
            settled = len(self._pending) - self._kept()
            if settled > at:
                self._taken.append(self._pending[at:settled])
                at = settled
        self._past += at
        self._pending = self._pending[at:]
        return found

    def read(self, run: str) -> Iterator[Named | Member]:
        """The whole of a run, which nothing was fed of yet."""
        self._pending = run
        at = 0
        while not self.failed:
            found: list[Named | Member] = []
            end = self._next(at, found)
            yield from found
            if end is not None:
                at = end
            elif self._within is _Within.VALUE and len(self._closers) > 1:
                del self._closers[0]  # it does not come any more
            else:
                break
        if self._within is _Within.VALUE and not self.failed:
            yield Member(self._key, run[at:])
        self.failed |= self._within is _Within.NAME

    def _next(self, at: int, found: list[Named | Member]) -> int | None:
        """Read the part from `at` to its end, past it; None while that is not there."""
        text, delimiters = self._pending, self._delimiters
        match self._within:
            case _Within.START:
                while at < len(text) and text[at] in _BLANK:
                    at += 1
                if at == len(text):
                    return None
                self.failed = text.startswith(_JSON, at)
                self._within = _Within.OUTSIDE
                return at
            case _Within.OUTSIDE:
                start, end = self._find(delimiters.name_open, at)
                if start < 0:
                    return None
                self._within, self.named = _Within.NAME, True
            case _Within.NAME:
                start, end = self._find(delimiters.name_close, at)
                if start < 0:
                    return None
                name = self._part(at, start).strip()
                self.failed = not name or _NO_NAME.search(name) is not None
                found += [] if self.failed else [Named(name, self._past + end)]
                end -= delimiters.overlap(delimiters.name_close)
                self._within = _Within.BODY
            case _Within.BODY:
                opening = delimiters.openings.search(text, at)
                if opening is None:
                    return None
                end = opening.end()
                self._within = _Within.NAME if opening[0] == delimiters.name_open else _Within.KEY
            case _Within.KEY:
                start, end = self._find(delimiters.key_close, at)
                if start < 0:
                    return None
                self._key = self._part(at, start).strip()
                self._within = _Within.VALUE
            case _Within.VALUE:
                ended = self._value_end(at)
                if ended is None:
                    return None
                start, end = ended
                found.append(Member(self._key, self._part(at, start)))
        self._taken = []
        return end

    def _value_end(self, at: int) -> tuple[int, int] | None:
        """(where the value ends, where reading goes on)."""
        if self._closers:
            closer = self._closers[0]
            start, end = self._find(closer, at)
            if start < 0:
                return None
            self._within = _Within.BODY
            return start, end - self._delimiters.overlap(closer)
        opening = self._delimiters.openings.search(self._pending, at)  # nothing closes a value: the next key does
        if opening is None:
            return None
        self.failed = opening[0] == self._delimiters.name_open  # another call, or text of the value: nothing tells
        self._within = _Within.KEY
        return opening.start(), opening.end()

    def _find(self, word: str, at: int) -> tuple[int, int]:
        start = self._pending.find(word, at)
        return start, start + len(word)

    def _part(self, at: int, end: int) -> str:
        return "".join([*self._taken, self._pending[at:end]])

    def _kept(self) -> int:
        """How much of the text's end may begin what ends the part under way."""
        delimiters = self._delimiters
        match self._within:
            case _Within.START:
                return 0
            case _Within.OUTSIDE:
                words: Iterable[str] = (delimiters.name_open,)
            case _Within.NAME:
                words = (delimiters.name_close,)
            case _Within.KEY:
                words = (delimiters.key_close,)
            case _Within.VALUE if self._closers:
                words = self._closers[:1]
            case _:
                words = (delimiters.name_open, delimiters.key_open)
        return max(map(len, words)) - 1


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Any of several texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
