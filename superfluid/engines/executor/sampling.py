"""The host sampler: a token per row of logits, the arithmetic in csrc/sampler.

A lane's state (position of its next draw, penalty window, mask) lives in one native struct, so that a decode round is
one native call whatever its lanes ask for.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from superfluid._native import ffi, lib
from superfluid.engines.engine import MAX_ALTERNATIVES, Sampling
from superfluid.link import linkw

Rows = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PENALTY_WINDOW = 64
_U64 = 0xFFFFFFFFFFFFFFFF


def _to_words(ids: Sequence[int] | Words) -> Words:
    return np.ascontiguousarray(ids, np.uint32)


def _to_values(values: Sequence[float] | Rows) -> Rows:
    return np.ascontiguousarray(values, np.float32)


@attrs.frozen(eq=False)
class Bias:
    """Values added to the logits of some ids; ids outside the vocabulary are passed over."""

    tokens: Words = attrs.field(converter=_to_words)
    values: Rows = attrs.field(converter=_to_values)

    def __attrs_post_init__(self) -> None:
        if len(self.tokens) != len(self.values):
            raise ValueError(f"a bias has {len(self.tokens)} ids and {len(self.values)} values; it needs one for each")


@attrs.frozen
class Record:
    """Logprobs of a pick, in nats, of the row as it was picked from; alternatives likeliest first."""

    logprob: float
    ids: list[int]
    logprobs: list[float]


def _words(pointer: Words) -> Any:
    return ffi.cast("const uint32_t *", ffi.from_buffer(pointer))


class LaneDraws:
    """What one lane asks of each pick, and where its draws stand. Made by `Sampler.lane`."""

    __slots__ = ("_keep", "_mask", "draws_base", "native", "plain", "want_logprobs")

    def __init__(
        self,
        params: linkw.SamplingParams,
        sampling: int,
        position: int,
        window: Sequence[int] | Words,
        want_logprobs: int,
        bias: Bias | None,
    ) -> None:
        native: Any = ffi.new("sf_lane *")
        native.temperature, native.top_p, native.min_p = params.temperature, params.top_p, params.min_p
        native.top_k = params.top_k
        native.repeat, native.presence = params.repeat_penalty, params.presence_penalty
        native.frequency = params.freq_penalty
        native.greedy = sampling == Sampling.GREEDY
        native.position = self.draws_base = position & _U64
        native.want_logprobs = self.want_logprobs = min(want_logprobs, 1 + MAX_ALTERNATIVES)
        if bias is not None and len(bias.tokens):
            native.n_bias = len(bias.tokens)
            native.bias_ids = _words(bias.tokens)
            native.bias_values = ffi.cast("const float *", ffi.from_buffer(bias.values))
        recent = np.asarray(window[-PENALTY_WINDOW:], np.uint32)
        ffi.memmove(native.window, recent.tobytes(), recent.nbytes)
        native.window_fill = len(recent)
        native.window_next = len(recent) % PENALTY_WINDOW
        self.native = native
        self._keep = bias
        self._mask: Words | None = None
        penalized = params.repeat_penalty not in (0, 1) or params.presence_penalty != 0 or params.freq_penalty != 0
        self.plain = bias is None and not penalized and not want_logprobs

    @property
    def position(self) -> int:
        """Of the next draw: the base plus the tokens drawn, wrapping."""
        return int(self.native.position)

    @property
    def draws(self) -> int:
        """Tokens drawn so far."""
        return (self.position - self.draws_base) & _U64

    @property
    def mask(self) -> Words | None:
        """Bit i: id i may be picked; none: no grammar holds the lane. Ids past the mask are refused."""
        return self._mask

    @mask.setter
    def mask(self, mask: Words | None) -> None:
        self._mask = mask
        if mask is None:
            self.native.mask = ffi.NULL
        else:
            self.native.mask = _words(mask)
            self.native.mask_words = len(mask)

    def push(self, token: int) -> None:
        """A token joined the stream without a draw."""
        lib.sf_lane_push(self.native, token)

    def commit(self, token: int) -> None:
        """A token drawn elsewhere (by the daemon, or on the device) joined the stream: it counts as a draw."""
        lib.sf_lane_push(self.native, token)
        self.native.position = (self.native.position + 1) & _U64

    def record(self) -> Record | None:
        """Logprobs of the last pick; none unless the lane asked."""
        if not self.want_logprobs:
            return None
        native = self.native
        n = native.n_top
        return Record(native.logprob, ffi.unpack(native.top_ids, n), ffi.unpack(native.top_logprobs, n))


class Sampler:
    """Picks tokens from rows of one vocabulary; `exempt` ids (specials and the stop set) are spared by penalties."""

    def __init__(self, vocab_size: int, exempt: Iterable[int] = ()) -> None:
        bits = np.zeros(vocab_size // 32 + 1, np.uint32)
        for token in exempt:
            if 0 <= token < vocab_size:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        native = lib.sf_sampler_new(vocab_size, _words(bits))
        if native == ffi.NULL:
            raise MemoryError(f"no memory for a sampler over {vocab_size} ids")
        self.vocab_size = vocab_size
        self._native = ffi.gc(native, lib.sf_sampler_free)
        self._grow(8)

    def _grow(self, rows: int) -> None:
        self._room = rows
        self._lanes = ffi.new("sf_lane *[]", rows)
        self._tokens = np.zeros(rows, np.uint32)
        self._tokens_out = ffi.cast("uint32_t *", ffi.from_buffer(self._tokens))

    def lane(
        self,
        params: linkw.SamplingParams,
        sampling: int,
        position: int,
        window: Sequence[int] | Words = (),
        want_logprobs: int = 0,
        bias: Bias | None = None,
    ) -> LaneDraws:
        """A lane whose next draw is at `position`, after a stream that ends with `window` (its last 64 ids count).

        `want_logprobs`: 0 off, else 1 + alternatives (at most 20 of them).
        """
        return LaneDraws(params, sampling, position, window, want_logprobs, bias)

    def pick_rows(self, rows: Rows, lanes: Sequence[LaneDraws]) -> Words:
        """A token for each row of `rows` (lanes x vocabulary), each by its lane, which moves on by one draw.

        Rows are masked, biased and penalized in place. The result is valid until the next pick.
        """
        n = len(lanes)
        if rows.shape != (n, self.vocab_size) or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise ValueError(
                f"rows of {n} x {self.vocab_size} contiguous f32 expected, got {rows.shape} of {rows.dtype}"
            )
        if n > self._room:
            self._grow(max(n, 2 * self._room))
        for i, lane in enumerate(lanes):
            self._lanes[i] = lane.native
        address = ffi.cast("float *", ffi.from_buffer(rows, require_writable=True))
        lib.sf_pick_rows(self._native, address, self.vocab_size, self._lanes, n, self._tokens_out)
        return self._tokens[:n]

    def pick(self, row: Rows, lane: LaneDraws) -> int:
        """A token from one row, as `pick_rows` picks it."""
        return int(self.pick_rows(row.reshape(1, -1), [lane])[0])

    def probabilities(self, row: Rows, temperature: float) -> Rows | None:
        """The full softmax a draw at `temperature` is made from; none for a row without mass."""
        if row.shape != (self.vocab_size,):
            raise ValueError(f"a row of {self.vocab_size} f32 expected, got {row.shape}")
        address = ffi.cast("const float *", ffi.from_buffer(np.ascontiguousarray(row, np.float32)))
        if not lib.sf_softmax(self._native, address, temperature):
            return None
        found = ffi.buffer(lib.sf_probabilities(self._native), 4 * self.vocab_size)
        return np.frombuffer(found, np.float32).copy()


def argmax(row: Rows) -> int:
    """The highest logit, the lowest id on ties; NaN never wins; 0 for an empty row or one whose first value is NaN."""
    if not len(row):
        return 0
    return int(
        lib.sf_argmax(ffi.cast("const float *", ffi.from_buffer(np.ascontiguousarray(row, np.float32))), len(row))
    )


def uniform(position: int) -> float:
    """The draw of a position, in [0, 1)."""
    return float(lib.sf_uniform(position & _U64))
