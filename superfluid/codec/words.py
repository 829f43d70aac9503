"""Encoding long texts word by word: bounded native calls, and words that come again are remembered.

A text may be cut between two characters that no token of the vocabulary holds side by side: no merge can join what
stands on the two sides, so the parts' ids are the whole's, whatever the tokenizer splits by. The cuts are places where
pre-tokenizers look no further than the text beside them: before white space and, behind a letter, before punctuation.
"""

import os
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from string import ascii_letters, digits, punctuation
from typing import TypeVar

from superfluid._native import ffi, lib
from superfluid.codec.literals import literal_pattern
from superfluid.codec.tokenizer import TokenBytes

BLOCK = 8192  # characters of one native call. libllama's pre-tokenizers may recurse per character (a run of 25 000
# overflows a thread's stack), and its byte fallback is quadratic in the text of a call
GROUP = 4096  # bytes of unknown words that go into one call
PARALLEL = 4  # texts from which threads share the work
THREADS = min(4, os.cpu_count() or 1)
REMEMBERED = 16384  # words of each of two generations
LONGEST_WORD = 64  # bytes: longer ones rarely come back
SHORTEST_TEXT = 64  # characters: below this one plain call is quicker
GLUE = b" a"  # a word that may follow and precede nearly any

T = TypeVar("T")
R = TypeVar("R")
EncodePlain = Callable[[str], Sequence[int]]

# Cuts that a vocabulary must bear out in fact before it is cut at all.
_PROBES = (
    ("a", " b"), ("Hello", " world, and"), ("x1", " 2y 3"), ("The end.", " Next one"), ("word", " \u65e5\u672c"),
    ("it's", " 'quoted'"), ("f(a,", " b) -> c"), ("end", "\nbegin"), ("end", "\n\n    begin"), ("end", "\n"),
    ("a", "\n\n\n2"), ("\u00e9t\u00e9", " \u00e9t\u00e9"), ("A", " <b> c"), ("x", " \U0001f600 y"),
    ("end", "\n \n\t x"), ("a b", " c d e"), ("foo", "(bar, x)"), ("self", "._store"), ("end", ").\n    next"),
    ("x", "_y"), ("key", '": 1'), ("a", "-b"), ("x", "==y"), ("word", "...\n\n\n  z"), ("a", "/b.c:d"), ("x", "; y"),
)  # fmt: skip
_RUN = re.compile(rf"[^\n]{{{BLOCK}}}|\s{{{BLOCK}}}")


class Cuts:
    """Where a vocabulary's texts may be cut. Immutable.

    `lead` is text that goes in front of what follows a cut, for families that treat a text's beginning differently, and
    `lead_ids` its ids. `pairs` is the table of sf_word_cuts; without one the vocabulary has no cuts.
    """

    def __init__(self, pairs: bytes, lead: str, lead_ids: Sequence[int], specials: Sequence[str]) -> None:
        self.pairs = pairs
        self.lead = lead
        self.lead_ids = list(lead_ids)
        self._table = ffi.from_buffer(pairs)
        self._specials = literal_pattern(specials)
        self._longest_special = max(map(len, specials), default=0)

    @classmethod
    def learn(cls, encode: EncodePlain, table: TokenBytes, special_texts: Iterable[str]) -> "Cuts":
        """The cuts of a vocabulary. `encode` gives a text's ids without a BOS; special texts parse in it."""
        specials = [text for text in special_texts if text]
        lead = _lead(encode)
        if lead is None:
            return cls(b"", "", [], specials)
        made = cls(_pairs(table, specials), lead, encode(lead) if lead else [], specials)
        for left, right in _PROBES:
            cut = len(left.encode()) in made.positions((left + right).encode())
            if cut and [*encode(left), *made.following(encode, right)] != list(encode(left + right)):
                return cls(b"", lead, made.lead_ids, specials)
        return made

    def following(self, encode: EncodePlain, text: str) -> list[int]:
        """Ids of a text that continues another."""
        return list(encode(self.lead + text)[len(self.lead_ids) :]) if text else []

    def positions(self, text: bytes) -> list[int]:
        """Offsets of the cuts in a UTF-8 text."""
        if not self.pairs or not text:
            return []
        room = len(text) // 4 + 8
        while True:
            cuts = ffi.new("uint32_t[]", room)
            count = lib.sf_word_cuts(self._table, text, len(text), cuts, room)
            if count <= room:
                return list(ffi.unpack(cuts, count)) if count else []
            room = count

    def split(self, text: bytes) -> list[bytes]:
        """The words of a UTF-8 text."""
        edges = [0, *self.positions(text), len(text)]
        return [text[start:end] for start, end in pairwise(edges)]

    def may_follow(self, word: bytes, other: bytes) -> bool:
        """Whether there is a cut between two words of a split."""
        return bool(self.pairs[word[-1] << 8 | other[0]])

    def blocks(self, text: str) -> list[str]:
        """`text` in parts of at most BLOCK characters where the vocabulary allows it. A part stays longer where it has
        no cut; a run of BLOCK characters without a newline, or of white space, is cut all the same."""
        parts: list[str] = []
        gathered: list[bytes] = []
        size = 0
        for word in self.split(text.encode("utf-8", "replace")):
            if size + len(word) > BLOCK:
                parts += self._bounded(b"".join(gathered).decode())
                gathered, size = [], 0
            gathered.append(word)
            size += len(word)
        return parts + self._bounded(b"".join(gathered).decode())

    def _bounded(self, text: str) -> list[str]:
        parts: list[str] = []
        start = 0
        while len(text) - start > BLOCK and (run := _RUN.search(text, start)):
            at = run.end()
            around = max(start, at - self._longest_special), at + self._longest_special
            for special in self._specials.finditer(text, *around):
                if start < special.start() < at < special.end():
                    at = special.start()
                    break
            parts.append(text[start:at])
            start = at
        parts.append(text[start:])
        return [part for part in parts if part]


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


def _pairs(table: TokenBytes, specials: Sequence[str]) -> bytes:
    """1 for every pair of bytes (left << 8 | right) that texts may be cut between, as no token holds it."""
    pieces = [table.of(token) for token in range(table.size)]
    tokens = [*pieces, *(text.encode() for text in specials)]
    held = set(re.findall(rb"(?=([^\0\s][\n -/:-@\[-`{-~]))", b"\0".join(tokens)))
    newlines_merge = any(b"\n" in token and token.strip(b"\n") for token in tokens)
    visible = (ascii_letters + digits + punctuation).encode()
    wide = bytes(range(0x80, 0x100))
    spaced = visible + wide
    lefts = {b" ": spaced, b"\n": ascii_letters.encode() if newlines_merge else spaced}  # punctuation takes newlines
    for mark in punctuation.replace("'", ""):  # what an apostrophe splits off depends on what follows it
        lefts[mark.encode()] = ascii_letters.encode()
    swallows = {text.encode()[-1] for text in specials}  # a marker may swallow the white space behind it
    made = bytearray(1 << 16)
    for right, allowed in lefts.items():
        if any(byte[0] >= 0x80 and byte[1:] == right for byte in held):
            allowed = allowed.replace(wide, b"")
        for left in allowed:
            if bytes([left]) + right not in held and not (left in swallows and right.isspace()):
                made[left << 8 | right[0]] = 1
    return bytes(made)


@cache
def _threads() -> ThreadPoolExecutor:
    """The process's threads for native encodes, which run without the interpreter's lock. A caller waits for its own
    work in them, so nothing outlives a call."""
    return ThreadPoolExecutor(THREADS, "tokenize")


def spread(encode: Callable[[T], R], texts: Sequence[T]) -> Iterable[R]:
    """`encode` of each text, in order; several threads share the work when there is much of it."""
    return _threads().map(encode, texts) if len(texts) >= PARALLEL else map(encode, texts)


class WordEncoder:
    """Ids of texts through a memory of words. `encode` as for Cuts. Any thread may use it."""

    def __init__(self, encode: EncodePlain, cuts: Cuts, table: TokenBytes) -> None:
        self._encode = encode
        self._cuts = cuts
        self._table = table
        self._words: dict[bytes, array[int]] = {}
        self._older: dict[bytes, array[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as one call would give them."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; what is not known of all of them is encoded together."""
        split = [self._split(text) for text in texts]
        known: dict[bytes, Sequence[int]] = {}
        missing: list[bytes] = []
        recent, older = self._words, self._older
        for word in dict.fromkeys(word for words in split for word in words[1:-1]):
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
        return [
            self._joined(words, known) if len(words) > 1 else list(self._encode(text))
            for text, words in zip(texts, split, strict=True)
        ]

    def _split(self, text: str) -> list[bytes]:
        return self._cuts.split(text.encode("utf-8", "replace")) if len(text) >= SHORTEST_TEXT else []

    def _joined(self, words: Sequence[bytes], known: Mapping[bytes, Sequence[int]]) -> list[int]:
        """The first word begins a text and the last ends one, so neither is another's in a text."""
        out = list(self._encode(words[0].decode()))
        for word in words[1:-1]:
            out += known[word]
        return out + self._following(words[-1])

    def _encode_missing(self, missing: Sequence[bytes], known: dict[bytes, Sequence[int]]) -> None:
        """A word may follow another wherever there is a cut, so the missing ones are encoded as texts of many."""
        groups: list[list[bytes]] = []
        room = 0
        for word in missing:
            group = groups[-1] if groups and len(word) <= room else []
            joint = self._joint(group, word)
            if joint is None:
                group, joint = [], []
            if not group:
                groups.append(group)
                room = GROUP
            group += [*joint, word]
            room -= len(word)
        for group, ids in zip(groups, spread(self._following, list(map(b"".join, groups))), strict=True):
            self._settle(group, ids, known)

    def _joint(self, group: Sequence[bytes], word: bytes) -> list[bytes] | None:
        """What stands between a group and one word more; None when nothing joins them."""
        may_follow = self._cuts.may_follow
        if not group or may_follow(group[-1], word):
            return []
        return [GLUE] if may_follow(group[-1], GLUE) and may_follow(GLUE, word) else None

    def _following(self, text: bytes) -> list[int]:
        return self._cuts.following(self._encode, text.decode())

    def _settle(self, group: Sequence[bytes], ids: Sequence[int], known: dict[bytes, Sequence[int]]) -> None:
        """Give each word of a group its part of the group's ids."""
        spans = self._spans(group, ids) if len(group) > 1 else [ids]
        if spans is None:
            half = len(group) // 2
            for part in (group[:half], group[half:]):
                self._settle(part, self._following(b"".join(part)), known)
            return
        for word, span in zip(group, spans, strict=True):
            known[word] = span
            self._remember(word, span)

    def _spans(self, group: Sequence[bytes], ids: Sequence[int]) -> list[Sequence[int]] | None:
        """Each word's part of the ids; None where their bytes do not tell (markers have none, some tokenizers rewrite
        text)."""
        data, offsets = self._table.data, self._table.offsets
        pieces = [data[offsets[token] : offsets[token + 1]] for token in ids]
        if b"" in pieces or b"".join(pieces) != b"".join(group):
            return None
        index_at = dict(zip(accumulate(map(len, pieces)), range(1, len(ids) + 1), strict=True))
        spans: list[Sequence[int]] = []
        start = 0
        for size in accumulate(map(len, group)):
            end = index_at.get(size)
            if end is None:
                return None
            spans.append(ids[start:end])
            start = end
        return spans

    def _remember(self, word: bytes, ids: Sequence[int]) -> None:
        if len(word) > LONGEST_WORD:
            return
        if len(self._words) >= REMEMBERED:
            self._older, self._words = self._words, {}
        self._words[word] = array("I", ids)
