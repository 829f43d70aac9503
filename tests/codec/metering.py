"""What reading a text costs, in steps: lines of Python that run, native calls, characters that these search or copy,
and what a backtracking matcher does for an expression."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from re import _constants as ops, _parser as parser  # type: ignore[attr-defined]
from types import FrameType, ModuleType
from typing import Any, ClassVar, SupportsIndex

import pytest


class Steps:
    """Lines of Python that ran, native calls, and what texts and expressions add."""

    def __init__(self) -> None:
        self.count = 0

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None  # what it counts itself is told
        self.count += 1
        return self.line

    def call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename != __file__:
            self.count += 1


@contextmanager
def counted() -> Iterator[Steps]:
    steps = Steps()
    before = sys.gettrace(), sys.getprofile()
    Metered.steps = steps
    sys.settrace(steps.line)
    sys.setprofile(steps.call)
    try:
        yield steps
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        Metered.steps = Steps()


class Metered(str):
    """A text that counts the characters of it that are searched or copied; what is cut out of it does too."""

    __slots__ = ()
    steps: ClassVar[Steps] = Steps()

    def _count(self, characters: int) -> None:
        Metered.steps.count += characters

    def _copied(self, text: str) -> "Metered":
        self._count(len(text))
        return Metered(text)

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        found = str.find(self, sub, start, end)
        self._count((found + len(sub) if found >= 0 else len(self)) - (start or 0))
        return found

    def rfind(self, sub: str, start: Any = 0, end: Any = None) -> int:
        found = str.rfind(self, sub, start, end)
        self._count(len(self) - max(found, 0))
        return found

    def __contains__(self, sub: object) -> bool:
        return self.find(str(sub)) >= 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = str.__getitem__(self, key)
        return self._copied(found) if isinstance(key, slice) else found

    def __add__(self, other: str) -> "Metered":
        return self._copied(str.__add__(self, other))

    def __radd__(self, other: str) -> "Metered":
        return self._copied(str.__add__(other, self))

    def strip(self, chars: str | None = None) -> "Metered":
        return self._copied(str.strip(self, chars))

    def lstrip(self, chars: str | None = None) -> "Metered":
        return self._copied(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> "Metered":
        return self._copied(str.rstrip(self, chars))

    def removeprefix(self, prefix: str) -> "Metered":
        return self._copied(str.removeprefix(self, prefix))

    def removesuffix(self, suffix: str) -> "Metered":
        return self._copied(str.removesuffix(self, suffix))

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, found, tail = str.partition(self, sep)
        return self._copied(head), found, self._copied(tail)

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, found, tail = str.rpartition(self, sep)
        return self._copied(head), found, self._copied(tail)


class MeteredPattern:
    """An expression whose matching is done again by a plain backtracking matcher, which counts."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self._tree = parser.parse(pattern.pattern, pattern.flags)

    def _count(self, text: str, at: int, anywhere: bool) -> None:
        text = str(text)
        starts = range(at, len(text) + 1) if anywhere else [at]
        for start in starts:
            if self._match(list(self._tree), 0, text, start, lambda end: True):
                return

    def _match(self, items: list[Any], n: int, text: str, at: int, then: Callable[[int], bool]) -> bool:
        Metered.steps.count += 1
        if n == len(items):
            return then(at)
        kind, value = items[n]

        def rest(end: int) -> bool:
            return self._match(items, n + 1, text, end, then)

        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = value
            ends = [at]
            while len(ends) <= most and (end := self._one(list(inner), text, ends[-1])) is not None:
                ends.append(end)
            tried = ends[least:]
            return any(rest(end) for end in (tried if kind is ops.MIN_REPEAT else reversed(tried)))
        if kind is ops.SUBPATTERN:
            return self._match(list(value[-1]), 0, text, at, rest)
        if kind is ops.BRANCH:
            return any(self._match(list(branch), 0, text, at, rest) for branch in value[1])
        if kind is ops.AT:
            return at == len(text) and rest(at)  # \Z and $ are all there is
        end = self._one([items[n]], text, at)
        return end is not None and rest(end)

    def _one(self, items: list[Any], text: str, at: int) -> int | None:
        """The end of what does not hang on what follows: one character, or a group of which the first way counts."""
        Metered.steps.count += 1
        if len(items) != 1 or items[0][0] in (ops.SUBPATTERN, ops.BRANCH, ops.MAX_REPEAT):
            ends: list[int] = []

            def note(end: int) -> bool:
                ends.append(end)
                return True

            self._match(items, 0, text, at, note)
            return ends[0] if ends and ends[0] > at else None
        kind, value = items[0]
        if at >= len(text):
            return None
        code = ord(text[at])
        if kind is ops.IN:
            found = any(_in(member, code) for member in value if member[0] is not ops.NEGATE)
            return at + 1 if found != (value[0][0] is ops.NEGATE) else None
        return at + 1 if _in(items[0], code) else None

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        self._count(text, at, True)
        return self.pattern.search(text, at)

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        self._count(text, at, False)
        return self.pattern.match(text, at)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        self._count(text, 0, False)
        return self.pattern.fullmatch(text)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        at = 0
        while (found := self.search(text, at)) is not None:
            yield found
            at = max(found.end(), at + 1)

    def sub(self, by: str, text: str) -> str:
        list(self.finditer(text))
        return self.pattern.sub(by, text)


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "space": str.isspace,
    "digit": str.isdigit,
    "word": lambda char: char.isalnum() or char == "_",
}


def _in(member: Any, code: int) -> bool:
    kind, value = member
    match kind:
        case ops.LITERAL:
            return code == value  # type: ignore[no-any-return]
        case ops.NOT_LITERAL:
            return code != value  # type: ignore[no-any-return]
        case ops.RANGE:
            return value[0] <= code <= value[1]  # type: ignore[no-any-return]
        case ops.ANY:
            return True
        case ops.CATEGORY:
            text = str(value).lower()
            known = text.removeprefix("category_").removeprefix("not_")
            return _CATEGORIES[known](chr(code)) != text.startswith("category_not_")
    raise NotImplementedError(f"the matcher does not know {kind}")


def meter_patterns(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> int:
    """Have the expressions of modules, and of the classes in them, counted; how many there are."""
    found = 0
    for module in modules:
        owners = [
            module,
            *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__),
        ]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if isinstance(value, re.Pattern):
                    monkeypatch.setattr(owner, name, MeteredPattern(value))
                    found += 1
    return found
