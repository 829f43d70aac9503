"""What a caller may ask of a generation, and how its sampling is settled from request, operator and model."""

from collections.abc import Mapping
from typing import Any

import attrs

DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_K = 40  # when sampling and nobody truncated


@attrs.frozen
class SamplingRequest:
    """Sampling fields of a request; none is not given. Penalties of 0 are off, a repeat penalty of 0 or 1 too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float | None = None
    seed: int | None = None


@attrs.frozen
class SamplingRung:
    """One rung of defaults: the operator's flags, or what the model's artifact publishes; none is not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None

    @classmethod
    def published(cls, record: Mapping[str, Any]) -> "SamplingRung":
        """The rung of a capability record's `sampling_defaults`."""
        said = record.get("sampling_defaults")
        if not isinstance(said, dict):
            return cls()
        greedy = said.get("do_sample") is False
        return cls(
            temperature=0.0 if greedy else said.get("temperature"),
            top_p=said.get("top_p"),
            top_k=said.get("top_k"),
            min_p=said.get("min_p"),
            repeat_penalty=said.get("repetition_penalty"),
        )


@attrs.frozen
class Sampling:
    """Settled sampling: every field has a value."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 0


def settle(request: SamplingRequest, *rungs: SamplingRung) -> Sampling:
    """Fill what `request` leaves open from `rungs`, best first, then from constants.

    top_p, top_k and min_p are one set: whoever gives any of them gives all three, the others off.
    """
    temperature = request.temperature
    repeat = request.repeat_penalty
    truncation: SamplingRequest | SamplingRung | None = request if _truncates(request) else None
    for rung in rungs:
        temperature = rung.temperature if temperature is None else temperature
        repeat = rung.repeat_penalty if repeat is None else repeat
        if truncation is None and _truncates(rung):
            truncation = rung
    temperature = DEFAULT_TEMPERATURE if temperature is None else temperature
    if truncation is None:
        top_p, top_k, min_p = 1.0, DEFAULT_TOP_K if temperature > 0 else 0, 0.0
    else:
        top_p = 1.0 if truncation.top_p is None else truncation.top_p
        top_k = truncation.top_k or 0
        min_p = truncation.min_p or 0.0
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repeat_penalty=1.0 if repeat is None else repeat,
        seed=request.seed or 0,
    )


def _truncates(rung: SamplingRequest | SamplingRung) -> bool:
    return not (rung.top_p is None and rung.top_k is None and rung.min_p is None)


@attrs.frozen
class GenerateOptions:
    """One generation as a route asks for it. `max_tokens` none fills the window; `logprobs` counts alternatives;
    `thinking_budget` is the tokens a thought may take."""

    sampling: SamplingRequest = attrs.Factory(SamplingRequest)
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = attrs.Factory(dict)
    klass: int = 2
    client: str = ""
    batch_invariant: bool = False
    provisional: bool = False
    provisional_calls: bool = False
    seed_chosen: bool = False
    deadline: float | None = None
    grammar: tuple[str, str] | None = None
    tools: list[dict[str, Any]] = attrs.Factory(list)
    start_channel: int | None = None
    thinking_budget: int | None = None
