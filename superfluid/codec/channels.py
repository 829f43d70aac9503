"""Routing a lane's tokens to channels and text."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import attrs

from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.utf8 import Utf8Stream
from superfluid.link.events import Channel

TEXT = int(Channel.TEXT)
REASONING = int(Channel.REASONING)
TOOL_CALL = int(Channel.TOOL_CALL)


@attrs.frozen
class Pair:
    """An opener and its closer token (none: the turn's end). `name` tokens right after the opener are kept out of
    the text; `literals` are special tokens inside that belong to it."""

    open: int
    close: int | None
    channel: int
    name: tuple[int, ...] = ()
    literals: tuple[tuple[int, bytes], ...] = ()


class Piece(NamedTuple):
    """Text ahead of its commit. `closes`: a tool call ends with it (its text may be empty then)."""

    channel: int
    text: str
    closes: bool = False


class Segment(NamedTuple):
    """A stretch of one channel: every token, the bytes of its text tokens, whether its closer ended it."""

    span: list[int]
    data: bytes
    channel: int
    closes: bool


@attrs.frozen
class Run:
    """A committed segment: one `Generated` record."""

    span: list[int]
    text: str
    channel: int
    closes: bool


class Plain(NamedTuple):
    """The channel that stands open: tokens add their bytes in `table` to its text, but for those in `special`."""

    channel: int
    special: frozenset[int]
    table: TokenBytes


class Splitter(Protocol):
    """Splits a token stream into segments, whatever its slices."""

    table: TokenBytes

    @property
    def channel(self) -> int:
        """The channel that the stream so far leaves open."""
        ...

    @property
    def ended(self) -> bool:
        """A turn terminator has been seen; what follows is not shown."""
        ...

    @property
    def closer(self) -> int | None:
        """The token that ends the open channel."""
        ...

    @property
    def special(self) -> frozenset[int] | None:
        """The tokens that do more now than add their bytes to the open channel; none: any may."""
        ...

    def feed(self, tokens: Sequence[int]) -> list[Segment]: ...
    def flush(self) -> bytes:
        """Bytes still held back, at the end of the stream."""
        ...

    def open_channel(self, channel: int) -> None:
        """Start in `channel` when the stream so far left none open."""
        ...


class PairSplitter:
    """Channels between opener and closer tokens: outside a pair an opener enters, inside only its closer leaves."""

    __slots__ = ("_held", "_literals", "_matched", "_pair", "_pairs", "_special", "_terminators", "ended", "table")

    def __init__(self, table: TokenBytes, pairs: Sequence[Pair], terminators: Iterable[int] = ()) -> None:
        self.table = table
        self._pairs = pairs
        self._terminators = frozenset(terminators)
        self._literals = {token: text for pair in pairs for token, text in pair.literals}
        self._special = self._terminators | self._literals.keys()
        self._special |= {p.open for p in pairs} | {p.close for p in pairs if p.close is not None}
        self._pair: Pair | None = None
        self._matched = -1  # tokens of the open pair's name seen so far; -1: not in a name
        self._held = b""
        self.ended = False

    @property
    def channel(self) -> int:
        return self._pair.channel if self._pair else TEXT

    @property
    def closer(self) -> int | None:
        return self._pair.close if self._pair else None

    @property
    def special(self) -> frozenset[int] | None:
        return None if self.ended or self._matched >= 0 else self._special

    def open_channel(self, channel: int) -> None:
        if self._pair is None:
            self._pair = next((p for p in self._pairs if p.channel == channel), None)

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        self._matched = -1
        return held

    def feed(self, tokens: Sequence[int]) -> list[Segment]:
        if not tokens:
            return []
        if self._matched < 0 and not self.ended and self._special.isdisjoint(tokens):
            return [Segment(list(tokens), self.table.join(tokens), self.channel, False)]
        segments: list[Segment] = []
        span: list[int] = []
        data: list[bytes] = []
        for token in tokens:
            if self.ended:
                span.append(token)
                continue
            if token not in self._special:
                span.append(token)
                self._text(token, data)
                continue
            pair = self._pair
            if pair is None:
                entered = next((p for p in self._pairs if p.open == token), None)
                if entered is not None:
                    if span:
                        segments.append(Segment(span, b"".join(data), TEXT, False))
                        span, data = [], []
                    self._pair = entered
                    self._matched = 0 if entered.name else -1
                span.append(token)
            else:
                if self._matched >= 0:
                    data.append(self.flush())
                span.append(token)
                if token in self._literals:
                    data.append(self._literals[token])
                elif token == pair.close:
                    segments.append(Segment(span, b"".join(data), pair.channel, True))
                    span, data = [], []
                    self._pair = None
            if token in self._terminators:
                self.ended = True
        if span:
            segments.append(Segment(span, b"".join(data), self.channel, False))
        return segments

    def _text(self, token: int, data: list[bytes]) -> None:
        """The bytes of one text token, held back while they may be the name of the open pair."""
        piece = self.table.of(token)
        if self._matched < 0 or self._pair is None:
            data.append(piece)
        elif token == self._pair.name[self._matched]:
            self._held += piece
            self._matched += 1
            if self._matched == len(self._pair.name):
                self._held = b""
                self._matched = -1
        else:
            data.append(self.flush())
            data.append(piece)


class Router:
    """One lane's tokens as committed runs, and as provisional text that runs ahead of them.

    Both sides see every token once, in order, each through a splitter and a UTF-8 stream of its own, so the
    provisional text is always a prefix of what is committed.
    """

    __slots__ = ("_ahead", "_ahead_text", "_make", "_splitter", "_text")

    def __init__(self, make: Callable[[], Splitter]) -> None:
        self._make = make
        self._splitter = make()
        self._ahead = make()
        self._text = Utf8Stream()
        self._ahead_text = Utf8Stream()

    def fresh(self) -> "Router":
        """A router of the same lane that has seen no token yet."""
        return Router(self._make)

    @property
    def channel(self) -> int:
        """The channel that the committed tokens leave open."""
        return self._splitter.channel

    @property
    def ended(self) -> bool:
        """Whether the committed tokens hold a terminator: the turn ended as by end of sequence."""
        return self._splitter.ended

    @property
    def plain(self) -> Plain | None:
        """What tokens mean ahead of the commit; none where any may do more than add to the text, or half a character
        is open."""
        ahead = self._ahead
        special = ahead.special
        return None if special is None or self._ahead_text.unfinished else Plain(ahead.channel, special, ahead.table)

    def provisional(self, tokens: Sequence[int]) -> list[Piece]:
        """The text in `tokens`, in order; what has none is left out, but for the ends of tool calls."""
        out: list[Piece] = []
        for segment in self._ahead.feed(tokens):
            text = self._ahead_text.feed(segment.data)
            closes = segment.closes and segment.channel == TOOL_CALL
            if text or closes:
                out.append(Piece(segment.channel, text, closes))
        return out

    def commit(self, tokens: Sequence[int], last: bool = False) -> list[Run]:
        """The runs of a tick's tokens; their spans concatenate to `tokens`. `last` puts what was pending into the
        last run; without tokens there is no run, and `flush` gives it."""
        feed = self._text.feed
        runs = [Run(s.span, feed(s.data), s.channel, s.closes) for s in self._splitter.feed(tokens)]
        if last and runs and (pending := self.flush()):
            runs[-1] = attrs.evolve(runs[-1], text=runs[-1].text + pending)
        return runs

    def flush(self) -> str:
        """Text still pending at the end of the lane: an unfinished character reads as U+FFFD."""
        return self._text.feed(self._splitter.flush()) + self._text.flush()
