"""A lane of the mock: its stream, how far it is fed, and the tokens it draws."""

import struct
from array import array

import attrs
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from superfluid.engines.engine import TokenArray
from superfluid.engines.mock.config import ROW_WIDTH, MockConfig
from superfluid.engines.mock.state import Sequence
from superfluid.link import linkw
from superfluid.link.codes import PARAM_IGNORE_EOS, Sampling

MAX_DRAFT = 4  # tokens a strategy drafts at a time
LONGEST_NGRAM = 3
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_WRAP = (1 << 64) - 1


@attrs.define(eq=False)
class Lane:
    """`fed` prompt tokens are in the sequence; those past `prefill_end` are replayed one a step."""

    admit: linkw.LaneAdmit
    prompt: TokenArray
    sequence: Sequence
    prefill_end: int
    fed: int
    config: MockConfig
    cert: linkw.ExactnessCert | None = None
    script: "array[int] | None" = None
    drawn: int = 0
    finish: int = 0
    nonce: int = 0  # of the row that waits for its commit
    media: dict[int, linkw.MediaInfo] = attrs.Factory(dict)  # by prompt offset
    hasher: xxh3_64 = attrs.field(init=False)
    draft: list[int] = attrs.Factory(list)
    drafting: bool = False  # a draft is being verified; its pass also gives the first token after it

    def __attrs_post_init__(self) -> None:
        self.hasher = xxh3_64(self.prompt.tobytes())

    @property
    def tag(self) -> int:
        return self.admit.lane_tag

    @property
    def host(self) -> bool:
        return self.admit.sampling == Sampling.HOST

    @property
    def ready(self) -> bool:
        """Prefilled: what is left of the prompt is replayed by decode steps."""
        return self.fed >= self.prefill_end

    @property
    def replaying(self) -> bool:
        return self.fed < len(self.prompt)

    @property
    def counter(self) -> int:
        return (self.admit.rng_counter_base + self.drawn) & _WRAP

    def replay(self) -> None:
        """Feed the next token of the tail."""
        self.sequence.tokens.append(int(self.prompt[self.fed]))
        self.fed += 1

    def row(self) -> npt.NDArray[np.float32]:
        row = np.empty(ROW_WIDTH, np.float32)
        counter = _U64.pack(self.counter)
        for i in range(ROW_WIDTH):
            digest = self.hasher.copy()
            digest.update(counter + _U64.pack(i))
            row[i] = (digest.intdigest() % 1000) / 1000
        return row

    def take(self, token: int) -> None:
        """A drawn or committed token joins the stream."""
        self.sequence.tokens.append(token)
        self.hasher.update(_U32.pack(token))
        self.drawn += 1

    def draw(self, forced_finish: int) -> int:
        """The next token; sets `finish` when it ends the sequence."""
        if self.script is not None and self.drawn < len(self.script):
            token = self.script[self.drawn]
        elif self.script is not None and not self.admit.params.flags & PARAM_IGNORE_EOS:
            token = self.config.eos_token
            self.finish = 1
        else:
            digest = self.hasher.copy()
            digest.update(_U64.pack(self.counter))
            if self.admit.grammar_handle:
                digest.update(_U64.pack(self.admit.grammar_replay + self.drawn))
            token = digest.intdigest() % self.config.vocab_size
        if forced_finish:
            self.finish = forced_finish
        self.take(token)
        return token

    # ---- drafts, which change statistics only

    def propose(self, left: int) -> int:
        """Start a pass: the tokens drafted, none while one is being verified."""
        if self.drafting or not self.admit.strategy_slot:
            return 0
        self.draft = ngram_draft(self.sequence.tokens, min(MAX_DRAFT, left - 1))
        self.drafting = True
        return len(self.draft)

    def verify(self, token: int) -> int:
        """1 when the token is the draft's next; any other ends the pass."""
        if self.draft and self.draft[0] == token:
            self.draft.pop(0)
            return 1
        self.end_pass()
        return 0

    def end_pass(self) -> None:
        self.draft = []
        self.drafting = False


def ngram_draft(stream: "array[int]", count: int) -> list[int]:
    """What followed the last earlier occurrence of the stream's last 3, 2 or 1 tokens; at most `count` of it."""
    if count <= 0:
        return []
    raw = stream.tobytes()
    for n in range(LONGEST_NGRAM, 0, -1):
        if len(stream) <= n:
            continue
        tail = raw[-4 * n :]
        at = raw.rfind(tail, 0, len(raw) - 4)
        while at > 0 and at % 4:
            at = raw.rfind(tail, 0, at + 4 * n - 1)
        if at >= 0 and at % 4 == 0:
            return list(stream[at // 4 + n : at // 4 + n + count])
    return []
