"""Encoding long texts word by word: bounded native calls, and words that come again are remembered.

A text may be cut between two characters that no token of the vocabulary holds side by side: no merge can join what
stands on the two sides, so the parts' ids are the whole's, whatever the tokenizer splits by. The cuts are places where
pre-tokenizers look no further than the text beside them: before white space and, behind a letter, before punctuation.
"""

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from random import getrandbits
from string import ascii_letters, digits, punctuation
from threading import Lock
from typing import Any, TypeVar, cast

from superfluid._native import ffi, lib
from superfluid.codec.literals import WINDOW, literal_pattern
from superfluid.codec.tokenizer import TokenBytes
from superfluid.link.ids import Ids, listed

BLOCK = 8192  # characters of one native call. libllama's pre-tokenizers may recurse per character (a run of 25 000
# overflows a thread's stack), and its byte fallback is quadratic in the text of a call
GROUP = 4096  # bytes of unknown words that go into one call
PARALLEL = 16  # texts from which threads share the work: on two threads of one core it costs a quarter more of both
THREADS = min(4, os.cpu_count() or 1)
REMEMBERED = 16384  # words in each of two generations, and what one call adds
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
        self.table = ffi.from_buffer(pairs)  # the same, for native calls
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
        return cast("list[int]", encode(self.lead + text)[len(self.lead_ids) :]) if text else []

    def offsets(self, text: bytes) -> tuple[Any, int]:
        """A native array with the offsets of the cuts in a UTF-8 text, and how many there are."""
        if not self.pairs or not text:
            return ffi.NULL, 0
        room = len(text) // 4 + 8
        while True:
            cuts = ffi.new("uint32_t[]", room)
            count = lib.sf_word_cuts(self.table, text, len(text), cuts, room)
            if count <= room:
                return cuts, count
            room = count

    def positions(self, text: bytes) -> list[int]:
        """Offsets of the cuts in a UTF-8 text."""
        cuts, count = self.offsets(text)
        return list(ffi.unpack(cuts, count)) if count else []

    def split(self, text: bytes) -> list[bytes]:
        """The words of a UTF-8 text."""
        edges = [0, *self.positions(text), len(text)]
        return [text[start:end] for start, end in pairwise(edges)]

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
        while at := _end_of_run(text, start):
            around = max(start, at - self._longest_special), at + self._longest_special
            for special in self._specials.finditer(text, *around):
                if start < special.start() < at < special.end():
                    at = special.start()
                    break
            parts.append(text[start:at])
            start = at
        parts.append(text[start:])
        return [part for part in parts if part]


def _end_of_run(text: str, start: int) -> int:
    """Where the first run that is to be cut ends; 0 when there is none."""
    for at in range(start, len(text) - BLOCK, WINDOW):
        if run := _RUN.search(text, at, at + WINDOW + BLOCK):
            return run.end()
    return 0


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
        self._memory = _new_memory()
        self._whole = not cuts.lead  # a text's beginning encodes like its middle
        self._lock = Lock()  # of the memory

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as one call would give them; very many are an `Ids`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; what is not known of all of them is encoded together."""
        cut = [self._cut(text) for text in texts]
        long = self._encode_missing([words for words in cut if words is not None])
        return [
            cast("list[int]", self._encode(text)) if words is None else self._filled(words, long)
            for text, words in zip(texts, cut, strict=True)
        ]

    def _cut(self, text: str) -> "_CutText | None":
        """A text with its cuts; None for one that is encoded as it is."""
        if len(text) < SHORTEST_TEXT:
            return None
        made = _CutText(text.encode("utf-8", "replace"), self._cuts)
        return made if made.count else None

    def _known(self, words: "_CutText") -> tuple[Any, list[tuple[int, int, int]]]:
        """The ids of a text's known words, and the gaps between them: ids before it, beginning, end in bytes; the last
        is an empty one at the text's end."""
        room = size = len(words.text)
        ids = ffi.new("uint32_t[]", room)
        gaps = ffi.new("uint32_t[]", 3 * (words.count + 1))
        n_gaps = ffi.new("size_t *")
        with self._lock:
            n_ids = lib.sf_words_known(
                self._memory, words.text, size, words.offsets, words.count, self._whole, ids, room, gaps, n_gaps
            )
        numbers = iter(ffi.unpack(gaps, 3 * n_gaps[0]) if n_gaps[0] else ())
        return ids, [*zip(numbers, numbers, numbers, strict=True), (n_ids, size, size)]

    def _filled(self, words: "_CutText", long: Mapping[bytes, Sequence[int]]) -> list[int]:
        """Ids of a text whose words are known by now, but for those that are not remembered."""
        ids, gaps = self._known(words)
        out = Ids("I")
        done = 0
        for at, start, end in gaps:
            if at > done:
                out.frombytes(ffi.buffer(ids + done, 4 * (at - done)))
                done = at
            word = words.text[start:end]
            if start == 0:
                out += self._encode(word.decode())
            elif word:
                out += long.get(word) or self._following(word)
        return listed(out)

    def _encode_missing(self, texts: Sequence["_CutText"]) -> dict[bytes, Sequence[int]]:
        """Have unknown words remembered; the ids of those that are too long for that. A word may follow another
        wherever there is a cut, so they are encoded as texts of many."""
        asked, beyond = _new_memory(), _new_memory()
        for words in texts:
            with self._lock:
                lib.sf_words_unknown(
                    self._memory,
                    asked,
                    beyond,
                    LONGEST_WORD,
                    words.text,
                    len(words.text),
                    words.offsets,
                    words.count,
                    self._whole,
                )
        text, ends, n = _words_of(asked)
        if n:
            with self._lock:
                lib.sf_word_memory_turn(self._memory, REMEMBERED)
            groups = list(self._groups(text, ends, n))
            encoded = spread(self._following, [group for group, _ in groups])
            for (group, group_ends), ids in zip(groups, encoded, strict=True):
                self._learn(group, group_ends, ids)
        text, ends, n = _words_of(beyond)
        long = (
            [bytes(ffi.buffer(text + start, end - start)) for start, end in pairwise([0, *ffi.unpack(ends, n)])]
            if n
            else []
        )
        return dict(zip(long, spread(self._following, long), strict=True))

    def _groups(self, text: Any, ends: Any, n: int) -> "Iterator[tuple[bytes, array[int]]]":
        """Texts of `n` words that stand one behind the other, and where each word of them ends."""
        out = ffi.new("uint8_t[]", ends[n - 1] + n * len(GLUE))
        out_ends, counts = ffi.new("uint32_t[]", 2 * n), ffi.new("uint32_t[]", n)
        found = lib.sf_words_pack(
            self._cuts.table,
            text,
            ends,
            n,
            GLUE,
            len(GLUE),
            GROUP,
            out,
            out_ends,
            counts,
        )
        at = first = 0
        for count in ffi.unpack(counts, found):
            word_ends = array("I", ffi.unpack(out_ends + first, count))
            yield ffi.buffer(out + at, word_ends[-1])[:], word_ends
            at += word_ends[-1]
            first += count

    def _following(self, text: bytes) -> list[int]:
        return self._cuts.following(self._encode, text.decode())

    def _learn(self, text: bytes, ends: "array[int]", ids: Sequence[int]) -> None:
        """Remember each word of a group by its part of the group's ids. Where their bytes do not tell the parts
        (markers have none, some tokenizers rewrite text) the group is encoded in halves."""
        packed = array("I", ids)
        with self._lock:
            told = lib.sf_words_learn(
                self._memory, text, ffi.from_buffer("uint32_t[]", ends), len(ends),
                ffi.from_buffer("uint32_t[]", packed), len(packed), self._table.data,
                ffi.from_buffer("unsigned long[]", self._table.offsets), self._table.size,
            )  # fmt: skip
        if not told:
            half = len(ends) // 2
            at = ends[half - 1]
            for part, part_ends in ((text[:at], ends[:half]), (text[at:], array("I", [e - at for e in ends[half:]]))):
                self._learn(part, part_ends, self._following(part))


def _new_memory() -> Any:
    return ffi.gc(lib.sf_word_memory_new(getrandbits(64)), lib.sf_word_memory_free)


def _words_of(memory: Any) -> tuple[Any, Any, int]:
    """What sf_words_unknown has put into a memory, which must outlive it: words, their ends, how many."""
    text, ends = ffi.new("const uint8_t **"), ffi.new("const uint32_t **")
    n = lib.sf_word_memory_words(memory, text, ends)
    return text[0], ends[0], n


class _CutText:
    """A UTF-8 text and the offsets of its cuts."""

    __slots__ = ("count", "offsets", "text")

    def __init__(self, text: bytes, cuts: Cuts) -> None:
        self.text = text
        self.offsets, self.count = cuts.offsets(text)
