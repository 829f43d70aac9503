"""Encoding long texts word by word: bounded native calls, and words that come again are remembered.

A text may be cut before a white space character where no token of the vocabulary reaches across: no merge can join what
stands on the two sides, whatever the tokenizer splits by, so the parts' ids are the whole's.
"""

import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from string import ascii_letters, digits, punctuation

from superfluid.codec.literals import literal_pattern
from superfluid.codec.tokenizer import TokenBytes

BLOCK = 8192  # characters of one native call. libllama's pre-tokenizers may recurse per character (a run of 25 000
# overflows a thread's stack), and its byte fallback is quadratic in the text of a call
GROUP = 4096  # characters of unknown words that go into one call
PARALLEL = 4  # groups from which threads share the work
THREADS = min(4, os.cpu_count() or 1)
REMEMBERED = 16384  # words of each of two generations
LONGEST_WORD = 64  # characters: longer ones rarely come back
SHORTEST_TEXT = 64  # characters: below this one plain call is quicker

NEWLINE_LEFTS = ascii_letters + digits  # what a newline may be cut behind: punctuation takes newlines along
GLUE = " a"  # a word that ends so

EncodePlain = Callable[[str], Sequence[int]]

# Cuts that a vocabulary must bear out in fact before it is cut at all.
_PROBES = (
    ("a", " b"), ("Hello", " world, and"), ("x1", " 2y 3"), ("The end.", " Next one"), ("word", " \u65e5\u672c"),
    ("it's", " 'quoted'"), ("f(a,", " b) -> c"), ("end", "\nbegin"), ("end", "\n\n    begin"), ("end", "\n"),
    ("1", "\n\n\n2"), ("\u00e9t\u00e9", " \u00e9t\u00e9"), ("A", " <b> c"), ("x", " \U0001f600 y"),
    ("end", "\n \n\t x"), ("a b", " c d e"),
)  # fmt: skip


class Cuts:
    """Where a vocabulary's texts may be cut. `lead` is text that goes in front of what follows a cut, for families
    that treat a text's beginning differently, and `lead_ids` its ids. Immutable."""

    def __init__(
        self, pattern: re.Pattern[str] | None, lead: str, lead_ids: Sequence[int], specials: list[str]
    ) -> None:
        self.pattern = pattern
        self.lead = lead
        self.lead_ids = list(lead_ids)
        self._specials = literal_pattern(specials)
        self._longest_special = max(map(len, specials), default=0)

    @classmethod
    def learn(cls, encode: EncodePlain, table: TokenBytes, special_texts: Iterable[str]) -> "Cuts":
        """The cuts of a vocabulary. `encode` gives a text's ids without a BOS; special texts parse in it."""
        specials = [text for text in special_texts if text]
        lead = _lead(encode)
        if lead is None:
            return cls(None, "", [], specials)
        made = cls(_pattern(table, specials), lead, encode(lead) if lead else [], specials)
        for left, right in _PROBES:
            if [*encode(left), *made.following(encode, right)] != list(encode(left + right)):
                return cls(None, lead, made.lead_ids, specials)
        return made

    def following(self, encode: EncodePlain, text: str) -> list[int]:
        """Ids of a text that continues another."""
        return list(encode(self.lead + text)[len(self.lead_ids) :]) if text else []

    def blocks(self, text: str) -> list[str]:
        """`text` in parts of at most BLOCK characters where the vocabulary allows it. A part stays longer where it has
        no cut; a run of BLOCK characters without a newline, or of white space, is cut all the same."""
        parts: list[str] = []
        start, last = 0, 0  # of the part being made; the last cut in it
        marks = [m.start() for m in self.pattern.finditer(text)] if self.pattern is not None else []
        for at in (*marks, len(text)):
            if at - start > BLOCK and last > start:
                parts.append(text[start:last])
                start = last
            if at - start > BLOCK:
                parts += self._forced(text[start:at])
                start = at
            last = at
        if start < len(text):
            parts.append(text[start:])
        return parts

    def _forced(self, text: str) -> list[str]:
        parts: list[str] = []
        start = 0
        while len(text) - start > BLOCK and (run := _RUN.search(text, start)):
            at = run.end()
            for special in self._specials.finditer(
                text, max(start, at - self._longest_special), at + self._longest_special
            ):
                if special.start() < at < special.end() and special.start() > start:
                    at = special.start()
                    break
            parts.append(text[start:at])
            start = at
        parts.append(text[start:])
        return [part for part in parts if part]


_RUN = re.compile(rf"[^\n]{{{BLOCK}}}|\s{{{BLOCK}}}")


def _lead(encode: EncodePlain) -> str | None:
    """What makes the text after it encode as in mid-text: nothing, or a newline; None when neither does."""
    whole = list(encode("a b"))
    first = len(encode("a"))
    for lead in ("", "\n"):
        ids = list(encode(lead)) if lead else []
        continued = list(encode(f"{lead} b"))
        if continued[: len(ids)] == ids and continued[len(ids) :] == whole[first:]:
            return lead
    return None


def _pattern(table: TokenBytes, specials: Sequence[str]) -> re.Pattern[str] | None:
    """Cuts before a space, and after a letter or digit before a newline (punctuation takes newlines along), where no
    token holds that pair. A word that ends at either kind of cut may stand before a space."""
    tokens = [*(table.of(token) for token in range(table.size)), *(text.encode() for text in specials)]
    blob = b"\0".join(tokens)
    before_space, before_newline = (set(re.findall(rb"([^\0\s])" + s, blob)) for s in (b" ", b"\n"))
    ends = {text[-1].encode() for text in specials}  # a marker may swallow the white space behind it

    def side(lefts: str, reached: set[bytes], ahead: str) -> list[str]:
        allowed = "".join(re.escape(c) for c in lefts if c.encode() not in reached)
        behind = [f"(?<=[{allowed}])"] if allowed else []
        if not any(byte[0] > 127 for byte in reached):
            behind.append(r"(?<=[^\x00-\x7f\W])")
        return [f"(?:{'|'.join(behind)})(?={ahead})"] if behind else []

    sides = side(NEWLINE_LEFTS + punctuation, before_space | ends, r" \S")
    if not any(b"\n" in token and token.strip(b"\n") for token in tokens):  # newlines merge with nothing
        sides.append(rf"(?<=[^\s{re.escape(b''.join(ends).decode(errors='ignore'))}])(?=\n)")
    elif sides and GLUE[-1:].encode() not in before_newline | before_space | ends:
        sides += side(NEWLINE_LEFTS, before_newline | before_space | ends, r"\n")
    return re.compile("|".join(sides)) if sides else None


@cache
def _threads() -> ThreadPoolExecutor:
    """The process's threads for native encodes, which run without the interpreter's lock. A caller waits for its own
    work in them, so nothing outlives a call."""
    return ThreadPoolExecutor(THREADS, "tokenize")


class WordEncoder:
    """Ids of texts through a memory of words. `encode` as for Cuts. Any thread may use it."""

    def __init__(self, encode: EncodePlain, cuts: Cuts, table: TokenBytes) -> None:
        self._encode = encode
        self._cuts = cuts
        self._table = table
        self._words: dict[str, array[int]] = {}
        self._older: dict[str, array[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as one call would give them."""
        pattern = self._cuts.pattern
        if pattern is None or len(text) < SHORTEST_TEXT:
            return list(self._encode(text))
        first, *words = pattern.split(text)
        last = words.pop() if words else ""  # its end is no cut
        known: dict[str, Sequence[int]] = {}
        missing: list[str] = []
        recent, older = self._words, self._older
        for word in dict.fromkeys(words):
            ids = recent.get(word)
            if ids is None:
                ids = older.get(word)
                if ids is None:
                    missing.append(word)
                    continue
                self._remember(word, ids)
            known[word] = ids
        if missing:
            self._encode_missing(missing, known)
        out = list(self._encode(first))
        for word in words:
            out += known[word]
        return out + self._cuts.following(self._encode, last)

    def _encode_missing(self, missing: Sequence[str], known: dict[str, Sequence[int]]) -> None:
        """A word may follow another at any cut of its kind, so the missing ones are encoded as texts of many."""
        groups: list[list[str]] = []
        room = 0
        for word in missing:
            if len(word) > room:
                groups.append([])
                room = GROUP
            group = groups[-1]
            if group and word[0] == "\n" and group[-1][-1] not in NEWLINE_LEFTS:
                group.append(GLUE)
            group.append(word)
            room -= len(word)
        spread = _threads().map if len(groups) >= PARALLEL else map
        for group, ids in zip(groups, spread(self._following, map("".join, groups)), strict=True):
            self._settle(group, ids, known)

    def _following(self, text: str) -> list[int]:
        return self._cuts.following(self._encode, text)

    def _settle(self, group: Sequence[str], ids: Sequence[int], known: dict[str, Sequence[int]]) -> None:
        """Give each word of a group its part of the group's ids."""
        spans = self._spans(group, ids) if len(group) > 1 else [ids]
        if spans is None:
            half = len(group) // 2
            for part in (group[:half], group[half:]):
                self._settle(part, self._following("".join(part)), known)
            return
        for word, span in zip(group, spans, strict=True):
            known[word] = span
            self._remember(word, span)

    def _spans(self, group: Sequence[str], ids: Sequence[int]) -> list[Sequence[int]] | None:
        """Each word's part of the ids; None where their bytes do not tell (markers have none, some tokenizers rewrite
        text)."""
        data, offsets = self._table.data, self._table.offsets
        spans: list[Sequence[int]] = []
        at = 0
        for word in group:
            spelled = word.encode("utf-8", "replace")
            pieces: list[bytes] = []
            end, size, limit = at, 0, len(spelled)
            while size < limit and end < len(ids):
                token = ids[end]
                piece = data[offsets[token] : offsets[token + 1]]
                size += len(piece)
                pieces.append(piece)
                end += 1
            if b"".join(pieces) != spelled:
                return None
            spans.append(ids[at:end])
            at = end
        return spans if at == len(ids) else None

    def _remember(self, word: str, ids: Sequence[int]) -> None:
        if len(word) > LONGEST_WORD:
            return
        if len(self._words) >= REMEMBERED:
            self._older, self._words = self._words, {}
        self._words[word] = array("I", ids)
