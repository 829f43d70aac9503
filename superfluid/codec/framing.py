"""Encoding framing and content: framing parses markers, content never forms one."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from superfluid.codec.literals import literal_pattern, occurrences
from superfluid.codec.segments import SegmentEncoder
from superfluid.codec.tokenizer import Tokenizer, bytes_table
from superfluid.codec.utf8 import decode_utf8
from superfluid.codec.words import Cuts, WordEncoder
from superfluid.link.ids import AT_ONCE, packed

# Markers without a bar that families use as framing.
BARE_MARKERS = frozenset(
    [
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "<bos>",
        "<eos>",
        "<sop>",
        "<eop>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[gMASK]",
        "[sMASK]",
        "[MASK]",
        "/nothink",
    ]
)


class Piece(NamedTuple):
    """A part of a prompt: framing (markers parse) or content (they stay text)."""

    text: str
    content: bool = False


def framing(text: str) -> Piece:
    return Piece(text, False)


def content(text: str) -> Piece:
    return Piece(text, True)


def joined(pieces: Iterable[Piece]) -> str:
    """The text that the pieces make."""
    return "".join([piece.text for piece in pieces])


def is_marker_shaped(text: str) -> bool:
    """Whether a special token's text looks like framing of some chat format."""
    if text in BARE_MARKERS:
        return True
    if not (text.startswith("<") and text.endswith(">") and len(text.encode()) >= 4):
        return False
    return text[1] == "|" or text[-2] == "|"


class Encoder:
    """Encodes pieces over one tokenizer and its markers; immutable, so any thread may use it. `more` are markers
    whatever the vocabulary says of them; each must be one token."""

    def __init__(self, tokenizer: Tokenizer, template_source: str = "", more: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.template_source = template_source
        self.table = bytes_table(tokenizer)
        bos = tokenizer.bos
        self.auto_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
        self.specials: dict[str, int] = {}
        markers: list[str] = []
        for token, text in tokenizer.special_tokens():
            self.specials.setdefault(text, token)
            if text.strip() and (
                not self.table.of(token) or is_marker_shaped(text) or (template_source and text in template_source)
            ):
                markers.append(text)
        for text in more:
            if text not in markers:
                self.specials.setdefault(text, self._encode_plain(text)[0])
                markers.append(text)
        self.special_texts = {token: text for text, token in self.specials.items()}
        self.markers = frozenset(markers)
        self.marker_pattern = literal_pattern(markers)
        self.longest_marker = max(map(len, markers), default=0)
        self._beginnings = frozenset(m[:n] for m in markers for n in range(1, len(m)))
        self._endings = frozenset(m[n:] for m in markers for n in range(1, len(m)))
        self._all_markers = "\0".join(markers)
        cuts = getattr(tokenizer, "cuts", None)
        if not isinstance(cuts, Cuts):
            cuts = Cuts.learn(self._encode_plain, self.table, self.specials)
        words = WordEncoder(self._encode_plain, cuts, self.table)
        self._segments = SegmentEncoder(words, self.marker_pattern, self.specials)
        self.bos_text = self.special_texts.get(bos, "") if bos is not None else ""

    def with_markers(self, markers: Iterable[str]) -> "Encoder":
        """An encoder for which these tokens' texts are markers too."""
        more = [text for text in markers if text not in self.markers]
        return Encoder(self.tokenizer, self.template_source, more) if more else self

    def guards(self, tokens: Iterable[int]) -> bool:
        """Whether each token is a marker, so that no content makes it."""
        return all(self.special_texts.get(token) in self.markers for token in tokens)

    def _encode_plain(self, text: str) -> list[int]:
        """Ids without the BOS that the vocabulary puts in front by itself."""
        ids = self.tokenizer.encode(text)
        return ids[1:] if self.auto_bos else ids

    def encode_text(self, text: str, at_start: bool) -> list[int]:
        """Ids of one framing text; `at_start` when nothing precedes it."""
        ids = self._segments.encode(text)
        if at_start and self.auto_bos and self.tokenizer.bos is not None and text:
            if self.bos_text and text.startswith(self.bos_text):
                return ids
            ids.insert(0, self.tokenizer.bos)
        return ids

    def encode_content(self, text: str) -> Sequence[int]:
        """Ids of a text without markers, without a BOS; the halves of quoted markers come again and again."""
        return self._segments.segment(text)

    def literal(self, token: int) -> str:
        """A marker's text: decode of its id, or its special-token text when that is empty."""
        return decode_utf8(self.table.of(token)) or self.special_texts.get(token, "")

    def encode(self, pieces: Sequence[Piece], at_start: bool = True) -> list[int]:
        """Ids of the pieces (very many are an array: link.ids); `at_start` when they open the stream, so that an
        automatic BOS leads them."""
        out = _Output(self, at_start)
        text = joined(pieces)
        touched = self._touched(pieces, text)
        if not touched:
            out.add_framing(text)
            return out.ids
        run: list[str] = []
        for index, piece in enumerate(pieces):
            if index not in touched:
                run.append(piece.text)
                continue
            out.add_framing("".join(run))
            run = []
            self._add_content(out, piece.text)
        out.add_framing("".join(run))
        return out.ids

    def tail_window(self, pieces: Sequence[Piece], boundary: int) -> tuple[list[Piece], int, bool]:
        """A tail of `pieces` that begins at a framing marker well before `boundary`, the boundary in it, and whether
        it is the whole. What precedes a marker does not change how the text from it on is encoded."""
        starts = [0, *accumulate(len(piece.text) for piece in pieces)]
        for index in range(len(pieces) - 1, -1, -1):
            piece = pieces[index]
            if piece.content or starts[index] >= boundary:
                continue
            upto = min(len(piece.text), boundary - starts[index])
            found = [match.start() for match in self.marker_pattern.finditer(piece.text, max(0, upto - 4096), upto)]
            if found:
                at = found[max(0, len(found) - 3)]
                window = [Piece(piece.text[at:], False), *pieces[index + 1 :]]
                start = starts[index] + at
                return window, boundary - start, start == 0
        return list(pieces), boundary, True

    def encode_framing(self, text: str, at_start: bool = False) -> list[int]:
        """Ids of framing text."""
        return self.encode([framing(text)], at_start)

    def could_form_marker(self, texts: Iterable[str]) -> bool:
        """Whether a text holds a marker, or the beginning, end or middle of one that its surroundings may complete."""
        longest = self.longest_marker
        for text in texts:
            if not text:
                continue
            if any(True for _ in self._markers_in(text)) or (len(text) < longest and text.strip() in self._all_markers):
                return True
            for form in {text, text.strip()}:
                for n in range(1, min(longest, len(form)) + 1):
                    if form[-n:] in self._beginnings or form[:n] in self._endings:
                        return True
        return False

    def _markers_in(self, text: str) -> Iterator[re.Match[str]]:
        """Every marker that occurs in a text, from left to right, not overlapping."""
        return occurrences(self.marker_pattern, self.longest_marker, text)

    def _touched(self, pieces: Sequence[Piece], text: str) -> set[int]:
        """Indexes of the content pieces that a marker occurrence overlaps, in the whole text."""
        touched: set[int] = set()
        index, end = -1, 0
        for match in self._markers_in(text):
            first, last = match.span()
            while end <= first:  # to the piece that holds the first character of the marker
                index += 1
                end += len(pieces[index].text)
            at, at_end = index, end
            while True:
                if pieces[at].content:
                    touched.add(at)
                if at_end >= last:
                    break
                at += 1
                at_end += len(pieces[at].text)
        return touched

    def _add_content(self, out: "_Output", text: str) -> None:
        """Encode content so that no marker forms: markers are split in halves until none is left."""
        stack = [text]
        while stack:
            chunk = stack.pop()
            if len(chunk) <= 1:
                out.add_content(chunk)
                continue
            parts: list[str] = []
            at = 0
            for match in self._markers_in(chunk):
                first, last = match.span()
                if first > at:
                    parts.append(chunk[at:first])
                half = first + (last - first) // 2
                parts += [chunk[first:half], chunk[half:last]]
                at = last
            if not at:
                out.add_content(chunk)
                continue
            if at < len(chunk):
                parts.append(chunk[at:])
            stack.extend(reversed(parts))


class _Output:
    """The ids of a prompt being encoded chunk by chunk, with one BOS at most."""

    def __init__(self, encoder: Encoder, at_start: bool) -> None:
        self.encoder = encoder
        self.ids: list[int] = []
        self.at_start = at_start

    def add_framing(self, text: str) -> None:
        self._add(self.encoder.encode_text(text, self._leads))

    def add_content(self, text: str) -> None:
        if text:
            bos = self.encoder.tokenizer.bos
            if self._leads and self.encoder.auto_bos and bos is not None:
                self.ids.append(bos)
            self._add(self.encoder.encode_content(text))

    def _add(self, ids: Sequence[int]) -> None:
        if len(self.ids) + len(ids) > AT_ONCE:
            out = packed(self.ids)
            out.extend(packed(ids))
            self.ids = cast("list[int]", out)
        else:
            self.ids.extend(ids)

    @property
    def _leads(self) -> bool:
        return self.at_start and not self.ids
