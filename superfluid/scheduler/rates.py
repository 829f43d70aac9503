"""What the scheduler has learned of an engine's speed, from what ran (pure)."""

import attrs

from superfluid.link.linkw import TickTimings

SMOOTHING = 0.3
"""Weight of a new measurement in an exponential average."""

PREFILL_SAMPLE = 256
"""Prompt tokens a tick must hold to say something about prefill speed."""

BULK_SAMPLE = 512
"""Prompt tokens of a tick that measures bulk speed."""


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new


@attrs.define
class Rates:
    """Seconds per decode round (by lane count) and per prompt token."""

    round_s: dict[int, float] = attrs.Factory(dict)
    prefill_s: float | None = None
    bulk_s: float | None = None
    bulk_last: float | None = None
    bulk_ticks: int = 0

    def round_seconds(self, lanes: int) -> float | None:
        """Seconds per round at a lane count; where it was never measured, the nearest count's."""
        known = self.round_s.get(lanes)
        if known is not None or not self.round_s:
            return known
        return self.round_s[min(self.round_s, key=lambda count: (abs(count - lanes), count))]

    def prefill_seconds(self, tokens: int) -> float | None:
        return None if self.prefill_s is None else self.prefill_s * tokens

    def slow_prefill(self) -> float | None:
        """Seconds per prompt token to plan with: the slower of the average and the last bulk rate."""
        return max(filter(None, (self.prefill_s, self.bulk_last)), default=None)

    def measure(self, prefill_tokens: int, rounds: int, lanes: int, timings: TickTimings) -> float:
        """Learn from a tick that ran `prefill_tokens` and `rounds` decode rounds of `lanes`; its prefill seconds.

        An engine that reports no split gets the estimate of the other half subtracted.
        """
        prefill_s, decode_s = timings.prefill_ns / 1e9, timings.decode_ns / 1e9
        if timings.prefill_ns == 0 and timings.decode_ns == 0:
            wall = timings.wall_ns / 1e9
            if prefill_tokens and rounds:
                prefill_s = min(self.prefill_seconds(prefill_tokens) or 0.0, wall)
                decode_s = wall - prefill_s
            else:
                prefill_s, decode_s = (wall, 0.0) if prefill_tokens else (0.0, wall)
        if rounds > 0 and decode_s > 0:
            self.round_s[lanes] = _average(self.round_s.get(lanes), decode_s / rounds)
        if prefill_tokens >= PREFILL_SAMPLE and prefill_s > 0:
            self.prefill_s = _average(self.prefill_s, prefill_s / prefill_tokens)
        if prefill_tokens >= BULK_SAMPLE and prefill_s > 0:
            self.bulk_last = prefill_s / prefill_tokens
            self.bulk_s = _average(self.bulk_s, self.bulk_last)
            self.bulk_ticks += 1
        return prefill_s


ADAPTIVE_START = 1024
ADAPTIVE_MIN, ADAPTIVE_MAX = 256, 4096


def adapt_budget(budget: int, target_s: float, prefilling: int, decoding: int, prefill_s: float) -> int:
    """The next adaptive prefill budget, from the last tick's prefill seconds and who shared it."""
    if prefill_s <= 0 or prefilling + decoding == 0:
        return budget
    factor = target_s * prefilling / (prefilling + decoding) / prefill_s
    return int(min(max(budget * min(max(factor, 0.5), 2.0), ADAPTIVE_MIN), ADAPTIVE_MAX))
