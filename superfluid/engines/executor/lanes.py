"""Lanes: one stream each, and where it stands."""

import attrs
import numpy as np

from superfluid.engines.engine import PARAM_IGNORE_EOS, Sampling
from superfluid.engines.executor.grammar import Grammar, Matcher
from superfluid.engines.executor.leases import Lease
from superfluid.engines.executor.sampling import LaneDraws
from superfluid.engines.executor.sequences import NO_TOKENS, Sequence
from superfluid.engines.executor.speculate import Drafter
from superfluid.engines.primitives import Feed, TokenArray
from superfluid.link import linkw

STREAM_ROOM = 512  # ids a stream's buffer has to spare when it grows


@attrs.define(eq=False)
class GrammarSlot:
    """A grammar handle; it serves one lane at a time, and one freed in use goes with its lane."""

    grammar: Grammar
    in_use: bool = False
    freed: bool = False


@attrs.define(eq=False)
class Lane:
    """One stream being generated.

    The stream's first `length` ids are the prompt and what was produced. `prefilled` is where the prompt stands,
    replayed tokens included; of those, `ingested` are in the sequence: one less when the last is held back as the
    next step's input, fewer when a seed's state could not be had and its tokens are still to be fed.
    """

    tag: int
    admit: linkw.LaneAdmit
    prompt_len: int
    prefill_end: int
    stream: TokenArray = attrs.field(repr=False)
    lease: Lease | None = None
    matcher: Matcher | None = None
    grammar: GrammarSlot | None = None
    prefilled: int = 0
    ingested: int = 0
    finish: int = 0
    nonce: int = 0  # of the row that waits for its commit
    row: linkw.RingRef | None = None
    alive: bool = True
    drafter: Drafter | None = None
    started: bool = False  # it has its sequence
    length: int = attrs.field(init=False)
    sequence: Sequence = attrs.field(init=False)
    draws: LaneDraws = attrs.field(init=False)
    feed: Feed = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.length = self.prompt_len

    @property
    def host(self) -> bool:
        return self.admit.sampling == Sampling.HOST

    @property
    def greedy(self) -> bool:
        return self.admit.sampling == Sampling.GREEDY or self.admit.params.temperature <= 0

    @property
    def ignores_eos(self) -> bool:
        return bool(self.admit.params.flags & PARAM_IGNORE_EOS)

    @property
    def want_logprobs(self) -> int:
        """0 off, else 1 + alternatives."""
        return 1 + self.admit.top_logprobs if self.admit.want_logprobs else 0

    @property
    def ready(self) -> bool:
        """The whole prompt is behind it, replayed tail included."""
        return self.prefilled == self.prompt_len

    @property
    def position(self) -> int:
        """Length as a plan counts it: the stream's, or where the prompt stands."""
        return self.length if self.ready else self.prefilled

    @property
    def held(self) -> bool:
        """Its last token is the next step's input."""
        return self.ready and self.ingested == self.length - 1

    @property
    def owed(self) -> int:
        """Ids of a lost seed that are still to be fed."""
        return max(0, self.prefilled - self.ingested - 1) if self.ready else self.prefilled - self.ingested

    def tokens(self) -> TokenArray:
        """The committed ids."""
        return self.stream[: self.position]

    def start(self, sequence: Sequence) -> None:
        """Take the sequence that holds, or will hold, the stream."""
        sequence.lane_tag = self.tag
        sequence.tokens = None
        self.sequence = sequence
        self.started = True
        self.feed = Feed(sequence.seq, NO_TOKENS, True)

    def reserve(self, count: int) -> None:
        """Make room for `count` more ids in the stream's buffer."""
        n = self.length
        if n + count > len(self.stream):
            grown = np.empty(n + max(n, count, STREAM_ROOM), np.uint32)
            grown[:n] = self.stream[:n]
            self.stream = grown

    def append(self, token: int) -> None:
        """A token joins the stream."""
        n = self.length
        if n == len(self.stream):
            self.reserve(1)
        self.stream[n] = token
        self.length = n + 1

    def next_feed(self, row: bool) -> Feed:
        """Feed the one token at `ingested`."""
        feed = self.feed
        at = self.ingested
        feed.tokens = self.stream[at : at + 1]
        feed.wants_row = row
        return feed

    def draft_feed(self, draft: TokenArray) -> Feed:
        """Feed the last token and a draft of what follows it."""
        n, k = self.length, len(draft)
        self.reserve(k)
        self.stream[n : n + k] = draft
        feed = self.feed
        feed.tokens = self.stream[n - 1 : n + k]
        feed.wants_row = True
        return feed


@attrs.define
class Chunk:
    """A prefill of one lane as the budget left it."""

    lane: Lane
    count: int
    dropped: int = 0
