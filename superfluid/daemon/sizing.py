"""The context window of a model that names none: what its device's memory affords (spec: executor, window sizing)."""

from typing import Any

import attrs

GIB = 1 << 30
LEAST_WINDOW = 512  # a smaller --max-context counts as this
FLOOR = 4096  # no automatic window is under this, if the model was trained for it
STEP = 1024  # an automatic window is a multiple of this
UNSIZED = 8192  # where the device cannot be sized
NOT_KNOWN = "the memory of its device is not known"
KV_SHARE = 0.60  # of what weights and reserve leave; the rest is for compute buffers and others


@attrs.frozen
class Window:
    """Tokens per lane, the words that say where the number comes from, and whether its memory could be sized."""

    tokens: int
    why: str
    sized: bool = True


def choose_window(
    asked: int | None, sizing: dict[str, Any] | str | None, lanes: int, most: int | None = None
) -> Window:
    """The window of `lanes` lanes: the one asked for, or what `sizing` (a check report's) affords, up to `most`.

    A string instead of sizing is the reason that there is none.
    """
    trained = sizing.get("trained_context", 0) if isinstance(sizing, dict) else 0
    if asked is not None:
        tokens = max(asked, LEAST_WINDOW)
        if trained and tokens > trained:
            return Window(trained, f"{asked} asked for, the model was trained for {trained}")
        return Window(tokens, "as asked for")
    afforded = _afforded(sizing, lanes, trained)
    if most is not None and afforded.tokens > most:
        return Window(most, "the most where none is asked for")
    return afforded


def _afforded(sizing: dict[str, Any] | str | None, lanes: int, trained: int) -> Window:
    if not isinstance(sizing, dict):
        return Window(UNSIZED, sizing or NOT_KNOWN, sized=False)
    budget, weights, per_token = (sizing.get(key, 0) for key in ("budget_bytes", "weight_bytes", "kv_bytes_per_token"))
    if not (budget and trained and per_token):
        return Window(UNSIZED, NOT_KNOWN, sized=False)
    reserve = max(GIB, budget // 8)
    share = int(KV_SHARE * max(0, budget - weights - reserve) / (per_token * lanes))
    tokens = max(min(share // STEP * STEP, trained), min(FLOOR, trained))
    if tokens == trained:
        return Window(tokens, "as the model was trained")
    return Window(tokens, f"{lanes} lanes in {budget / GIB:.1f} GiB")
