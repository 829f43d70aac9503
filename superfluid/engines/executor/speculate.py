"""Prompt lookup: draft what followed the stream's end the last time it occurred, verify the draft in one pass.

Whether that pays depends on the text and on the machine: each lane watches what its drafts yield, and a gate per count
of decoding lanes compares the rates with and without.
"""

from math import ceil

import attrs

from superfluid._native import ffi, lib
from superfluid.engines.engine import EngineError, Status
from superfluid.engines.primitives import Description, TokenArray
from superfluid.link import linkw

STRATEGY_ID = "prompt-lookup"
SLOT = CERT_ID = 1
DISTRIBUTION_EXACT = 1
GREEDY_MODE, SAMPLED_MODE = 1, 2
ANY_PARAMETERS = 3
LINEAR = 1  # the capability kind of a drafter that proposes one continuation
MAX_DRAFT = 7  # with the token before them, eight rows in one pass
NGRAM_MOST, NGRAM_LEAST = 3, 2
DEPTH_KEPT, RATE_KEPT = 0.8, 0.7
PROBE_TICKS = 2  # drafting; the first of them warms up and is not measured


@attrs.frozen
class Settings:
    """How far drafts reach and when they are given up."""

    max_draft: int = 4
    adaptive: bool = True
    min_yield: float = 0.75  # accepted per drafting round
    yield_rounds: int = 24
    throughput_gate: bool = True
    min_speedup: float = 1.08
    gate_reprobe: int = 32
    gate_reprobe_max: int = 1024

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """`key=value` pairs with commas; unknown keys are passed over. Raises EngineError -128."""
        pairs = dict(pair.partition("=")[::2] for pair in text.split(",") if pair)
        try:
            given = {field.name: float(pairs[field.name]) for field in attrs.fields(cls) if field.name in pairs}
        except ValueError as error:
            raise EngineError(Status.RegistrationRefused, f"strategy settings {text!r}: {error}") from error
        reprobe = max(1, int(given.get("gate_reprobe", 32)))
        return cls(
            max_draft=min(max(1, int(given.get("max_draft", 4))), MAX_DRAFT),
            adaptive=bool(given.get("adaptive", 1)),
            min_yield=given.get("min_yield", 0.75),
            yield_rounds=max(1, int(given.get("yield_rounds", 24))),
            throughput_gate=bool(given.get("throughput_gate", 1)),
            min_speedup=given.get("min_speedup", 1.08),
            gate_reprobe=reprobe,
            gate_reprobe_max=max(reprobe, int(given.get("gate_reprobe_max", 1024))),
        )


def propose(stream: TokenArray, length: int, k: int) -> TokenArray:
    """Up to `k` ids that followed the last earlier occurrence of the first `length` ids' end; empty for none."""
    if k <= 0:
        return stream[:0]
    at = lib.sf_prompt_lookup(ffi.cast("const uint32_t *", ffi.from_buffer(stream)), length, NGRAM_MOST, NGRAM_LEAST)
    return stream[at : min(at + k, length)] if at else stream[:0]


class Drafter:
    """How one lane's drafts fare: how deep to draft, and when to rest."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._average = float(settings.max_draft)
        self._rounds = self._accepted = 0
        self._resting = 0
        self._next_rest = settings.gate_reprobe

    @property
    def depth(self) -> int:
        most = self._settings.max_draft
        return min(max(1, ceil(self._average) + 1), most) if self._settings.adaptive else most

    def rests(self) -> bool:
        """Whether the lane decodes this round plainly."""
        if not self._resting:
            return False
        self._resting -= 1
        return True

    def drafted(self, accepted: int) -> None:
        """A drafting round has run."""
        settings = self._settings
        self._average = DEPTH_KEPT * self._average + (1 - DEPTH_KEPT) * accepted
        self._rounds += 1
        self._accepted += accepted
        if self._rounds < settings.yield_rounds:
            return
        if self._accepted < settings.min_yield * self._rounds:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, settings.gate_reprobe_max)
        else:
            self._next_rest = settings.gate_reprobe
        self._rounds = self._accepted = 0


class Gate:
    """Which mode is faster with one count of decoding lanes: measured, held, measured again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rates: dict[bool, float] = {}  # decode tokens per second, drafting or not
        self._winner: bool | None = None
        self._hold = settings.gate_reprobe
        self.drafting = True
        self._probing = True
        self._left = PROBE_TICKS

    def measured(self, tokens: int, seconds: float, proposed: int) -> None:
        """A tick with at least a token per lane has run in the mode that `drafting` said."""
        if not self._settings.throughput_gate or seconds <= 0:
            return
        drafted = self.drafting and proposed > 0
        warming = drafted and self._probing and self._left == PROBE_TICKS
        if not warming:
            rate = tokens / seconds
            before = self._rates.get(drafted, rate)
            self._rates[drafted] = RATE_KEPT * before + (1 - RATE_KEPT) * rate
        if self.drafting and not drafted:
            return  # nothing to judge drafting by
        self._left -= 1
        if self._probing:
            if not self._left:
                self._probed()
        elif self._collapsed():
            self._decide()
        elif not self._left:
            self._probe(not self.drafting)

    def _probed(self) -> None:
        if self._winner is None and self.drafting:
            self._probe(False)
        else:
            self._decide()

    def _probe(self, drafting: bool) -> None:
        self.drafting, self._probing = drafting, True
        self._left = PROBE_TICKS if drafting else 1

    def _decide(self) -> None:
        faster = self._rates[True] >= self._settings.min_speedup * self._rates[False]
        same = faster is self._winner
        self._hold = min(2 * self._hold, self._settings.gate_reprobe_max) if same else self._settings.gate_reprobe
        self._winner = self.drafting = faster
        self._probing = False
        self._left = self._hold

    def _collapsed(self) -> bool:
        """Drafting turned out well under plain."""
        return self.drafting and self._rates[True] < self._rates[False] / self._settings.min_speedup


class Speculation:
    """The granted strategy: its settings and gates."""

    def __init__(self, settings: Settings, verify_batches: bool) -> None:
        self._settings = settings
        self._verify_batches = verify_batches
        self._gates: dict[int, Gate] = {}

    def drafter(self) -> Drafter:
        return Drafter(self._settings)

    def gate(self, lanes: int) -> Gate:
        """The gate of a tick in which so many lanes decode on the engine."""
        if lanes not in self._gates:
            self._gates[lanes] = Gate(self._settings)
        return self._gates[lanes]

    def serves(self, decoding: int) -> bool:
        """Whether drafts of so many decoding lanes can be verified."""
        return self._verify_batches or decoding == 1


def register(of: Description, registration: linkw.StrategyRegister) -> tuple[Speculation, linkw.StrategyGrantOk]:
    """Raises EngineError -128."""

    def refuse(reason: str) -> EngineError:
        return EngineError(Status.RegistrationRefused, f"strategy {registration.strategy_id}: {reason}")

    if registration.strategy_id != STRATEGY_ID:
        raise refuse(f"only {STRATEGY_ID} is served here")
    if not of.verify_rows or not of.truncate_partial:
        raise refuse("this model cannot " + ("be cut back" if of.verify_rows else "verify rows"))
    if registration.kernel_caps_required or registration.target_archs or registration.taps:
        raise refuse("kernel capabilities, target architectures and taps are not served here")
    for capability in registration.capabilities:
        if capability.kind_id != LINEAR:
            raise refuse(f"capability kind {capability.kind_id}")
    text = b",".join(capability.params for capability in registration.capabilities).decode("utf-8", "replace")
    certificate = linkw.ExactnessCert(
        CERT_ID,
        DISTRIBUTION_EXACT,
        GREEDY_MODE | SAMPLED_MODE,
        ANY_PARAMETERS,
        grammar_allowed=False,
        logit_bias_allowed=False,
        verification_shape_class=1,
    )
    speculation = Speculation(Settings.parse(text), of.verify_batches)
    return speculation, linkw.StrategyGrantOk(SLOT, [certificate], [], 0)
