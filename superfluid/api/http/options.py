"""What a request says about its generations: sampling, limits, stops, class; the same for chat and completions."""

import math
import secrets

import attrs
from werkzeug.datastructures import Headers

from superfluid.api.http.errors import ApiError, invalid
from superfluid.api.http.fields import U32, U64, Fields, logit_bias, stop_strings
from superfluid.codec.stops import StopStrings
from superfluid.daemon.generation import GenerateOptions, SamplingRequest
from superfluid.scheduler.classes import parse_class

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
SWITCH_ON = {"1", "true", "yes", "on"}
SWITCH_OFF = {"0", "false", "no", "off"}


@attrs.frozen
class Choices:
    """`n`, streaming, and the options that every choice shares."""

    options: GenerateOptions
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stops: list[str]

    def stop_filter(self) -> StopStrings:
        """A filter for one choice's text."""
        return StopStrings(self.stops)


def read_sampling(fields: Fields) -> SamplingRequest:
    """Sampling fields; those not given stay none and are filled from the rungs below (operator, model, constants)."""
    repeat = fields.first("repeat_penalty", "repetition_penalty")
    return SamplingRequest(
        temperature=fields.number("temperature", 0, math.inf),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", 0, U32),
        min_p=fields.number("min_p", 0, 1),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0, "presence_penalty must be in [-2, 2]"),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0, "frequency_penalty must be in [-2, 2]"),
        repeat_penalty=fields.number(repeat, 0, math.inf),
        seed=fields.integer("seed", 0, U64),
    )


def read_choices(fields: Fields, logprobs: int | None) -> Choices:
    """Everything but the prompt, the constraints and the caller. Raises ApiError 400 naming the field that is wrong."""
    count = fields.integer("n", -math.inf, math.inf, 1)
    if not 0 <= count <= MAX_CHOICES:
        raise invalid("n must be between 1 and 128", "n")
    stream_options = Fields(fields.mapping("stream_options"))
    limit = fields.first("max_completion_tokens", "max_tokens")
    options = GenerateOptions(
        sampling=read_sampling(fields),
        max_tokens=fields.integer(limit, 0, U32),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        logit_bias=logit_bias(fields),
    )
    return Choices(
        options=options,
        n=max(1, count),
        stream=fields.boolean("stream"),
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        stops=stop_strings(fields),
    )


def with_seed(options: GenerateOptions, choice: int) -> GenerateOptions:
    """The options of one choice: without a seed each draws its own; a given seed counts up per choice."""
    seed = options.sampling.seed
    drawn = secrets.randbits(63) if seed is None else (seed + choice) & U64
    return attrs.evolve(options, sampling=attrs.evolve(options.sampling, seed=drawn), seed_chosen=seed is not None)


def read_class(headers: Headers, default: int) -> int:
    """The request's class, from `x-superfluid-qos`."""
    value = headers.get("x-superfluid-qos")
    if value is None:
        return default
    try:
        return parse_class(value)
    except ValueError:
        raise ApiError(
            400, f"x-superfluid-qos must be one of interactive, completion, agent, background, got {value!r}"
        ) from None


def read_switch(headers: Headers, name: str) -> bool:
    """An on/off header; absent is off."""
    value = headers.get(name)
    if value is None or value.lower() in SWITCH_OFF:
        return False
    if value.lower() in SWITCH_ON:
        return True
    raise ApiError(400, f"{name}: expected true or false, got {value!r}")
