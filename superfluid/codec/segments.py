"""Encoding framing text piece by piece: markers cut a text into segments whose ids are remembered.

A conversation grows by a turn at a time and is encoded whole for every request, so all but its last segments are known.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from threading import Lock

from superfluid.codec.literals import occurrences
from superfluid.codec.words import WordEncoder
from superfluid.link.ids import Ids, listed, packed

REMEMBERED = 4 << 20  # bytes of text and ids that are kept
LONGEST = 1 << 16  # characters: a longer segment is a document, which rarely comes back


class SegmentCache:
    """Ids of texts, the least recently used forgotten first. Any thread may use it."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._size = 0
        self._held: OrderedDict[str, Ids] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> Ids | None:
        with self._lock:
            ids = self._held.get(text)
            if ids is not None:
                self._held.move_to_end(text)
            return ids

    def put(self, text: str, ids: Ids) -> None:
        if len(text) > LONGEST:
            return
        with self._lock:
            if text in self._held:
                return
            self._held[text] = ids
            self._size += _cost(text, ids)
            while self._size > self._capacity:
                self._size -= _cost(*self._held.popitem(last=False))


def _cost(text: str, ids: Ids) -> int:
    return len(text) + ids.itemsize * len(ids)


class SegmentEncoder:
    """Encodes framing text through the cache. `words` encodes texts without a BOS.

    A marker cuts a text only when it is found to stand alone: no other special string overlaps it, and what stands
    beside it encodes as it does by itself (some vocabularies have markers that swallow white space).
    """

    def __init__(self, words: WordEncoder, markers: re.Pattern[str], specials: Mapping[str, int]) -> None:
        self._words = words
        self._markers = markers
        self._specials = specials
        self._longest = max(map(len, specials), default=0)
        self._stands_alone: dict[str, bool] = {}
        self._cache = SegmentCache()

    def encode(self, text: str) -> list[int]:
        """Ids of a whole framing text, without a BOS; very many are an array (link.ids)."""
        segments: list[str] = []
        markers: list[int] = []  # behind each segment but the last
        at = 0
        for match in occurrences(self._markers, self._longest, text):
            marker = match[0]
            alone = self._stands_alone.get(marker)
            if alone is None:
                alone = self._stands_alone[marker] = self._is_alone(marker)
            if alone:
                segments.append(text[at : match.start()])
                markers.append(self._specials[marker])
                at = match.end()
        segments.append(text[at:])
        out = Ids("I")
        for ids, marker_id in zip_longest(self._encoded(segments), markers):
            out.extend(ids)
            if marker_id is not None:
                out.append(marker_id)
        return listed(out)

    def segment(self, text: str) -> Sequence[int]:
        """Ids of a text that no marker cuts."""
        ids = self._cache.get(text)
        if ids is None:
            ids = packed(self._words.encode(text))
            self._cache.put(text, ids)
        return ids

    def _encoded(self, texts: Sequence[str]) -> Iterator[Ids]:
        """Ids of each text."""
        found = {"": Ids("I")}
        missing: list[str] = []
        for text in dict.fromkeys(texts):
            ids = self._cache.get(text) if text else found[""]
            if ids is None:
                missing.append(text)
            else:
                found[text] = ids
        for text, made in zip(missing, self._words.encode_all(missing), strict=True):
            found[text] = ids = packed(made)
            self._cache.put(text, ids)
        return map(found.__getitem__, texts)

    def _is_alone(self, marker: str) -> bool:
        for other in self._specials:
            if other != marker and (marker in other or other in marker or _overlap(marker, other)):
                return False
        plain = self._words.encode
        return all(
            plain(before + marker + after) == [*plain(before), self._specials[marker], *plain(after)]
            for before, after in (("a \n", " \nb"), ("a", "b"), ("a\n\n", "\n\nb"), ("a ", " b"))
        )


def _overlap(one: str, other: str) -> bool:
    """Whether a text may end in one of the strings and the other begin inside it."""
    return any(one.endswith(other[:n]) or other.endswith(one[:n]) for n in range(1, min(len(one), len(other))))
