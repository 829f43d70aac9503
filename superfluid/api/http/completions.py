"""POST /v1/completions: raw text, no template (spec: http_openai, completions)."""

from collections.abc import Sequence
from typing import Any

import attrs
from quart import Response

from superfluid.api.http.access_log import AccessLine
from superfluid.api.http.app import read_body
from superfluid.api.http.context import Api
from superfluid.api.http.errors import context_length_exceeded, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.api.http.fim import fill_in
from superfluid.api.http.options import MAX_TOP_LOGPROBS, read_choices, with_seed
from superfluid.api.http.refusals import refusals
from superfluid.api.http.text_answer import TextAnswer
from superfluid.codec.tokenizer import Tokenizer
from superfluid.link.events import Appended


def check_prompt(prompt: Any) -> None:
    """Raise ApiError 400 for what is no prompt; token ids are checked against the vocabulary later."""
    if prompt is None or prompt in ("", []):
        raise invalid("prompt must be non-empty", "prompt")
    for part in several(prompt):
        if part in ("", []):
            raise invalid("prompt must be non-empty", "prompt")
        if not isinstance(part, str) and not (isinstance(part, list) and all(is_token(token) for token in part)):
            raise wrong_type("prompt", "a string, an array of strings, token ids, or an array of those", part)


def several(prompt: Any) -> list[Any]:
    """The prompts of a request."""
    if isinstance(prompt, list) and all(isinstance(part, str | list) for part in prompt):
        return prompt
    return [prompt]


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def encode_prompt(part: str | list[int], tokenizer: Tokenizer) -> Appended:
    """A text is encoded as it stands (markers parse), token ids are taken as given. Raises ApiError 400."""
    if isinstance(part, str):
        return Appended(part, tokenizer.encode(part))
    check_tokens(part, tokenizer, "prompt")
    return Appended(None, part)


def prompt_texts(prompts: Sequence[Appended], tokenizer: Tokenizer) -> list[str]:
    """The prompts as texts, those of token ids decoded."""
    return [tokenizer.decode(one.span) if one.text is None else one.text for one in prompts]


def check_tokens(tokens: list[int], tokenizer: Tokenizer, field: str) -> None:
    """Raise ApiError 400 for an id that is not in the vocabulary."""
    largest = max(tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise invalid(f"{field}: token id {largest} is not in the vocabulary of {tokenizer.vocab_size}", field)


async def completions(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    name = fields.string("model")
    if not name:
        raise invalid("missing required field: model", "model")
    if "suffix" in fields:
        return await fill_in(api, name, fields)
    prompt = fields.raw("prompt")
    check_prompt(prompt)
    if "fim_mode" in fields:
        raise invalid("fim_mode takes a suffix", "fim_mode", "unsupported_parameter")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    choices = read_choices(fields, logprobs)
    streamed = choices.stream and logprobs is None
    options = attrs.evolve(api.called(choices), provisional=streamed, deadline=api.daemon.fim.deadline())
    served = await api.model(name)
    line = AccessLine.of_request(served.name, choices.stream)
    running = api.run()
    with refusals(served.name, served.larger_window):
        prompts = [await served.in_thread(encode_prompt, part, served.tokenizer) for part in several(prompt)]
        for one in prompts:
            if len(one.span) > served.window:
                raise context_length_exceeded(served.window, len(one.span), served.larger_window)
        for one in prompts:
            seeds = range(len(running.started), len(running.started) + choices.n)
            running.add(await served.begin_all([one], [with_seed(options, i) for i in seeds], raw=True))
    echoed = await served.in_thread(prompt_texts, prompts, served.tokenizer) if echo else []
    answer = TextAnswer(
        api,
        choices,
        served,
        running,
        line,
        model=served.name,
        prompt=sum(len(one.span) for one in prompts),
        echoed=echoed,
        want_logprobs=logprobs is not None,
    )
    return await answer.respond(choices.stream)
