"""POST /v1/completions with a suffix: fill-in-the-middle (spec: http_openai, fill-in-the-middle)."""

from typing import Any

import attrs
from quart import Response

from superfluid.api.http.access_log import AccessLine
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError, invalid
from superfluid.api.http.fields import Fields
from superfluid.api.http.options import read_choices, with_seed
from superfluid.api.http.refusals import refusals
from superfluid.api.http.reply import Usage
from superfluid.api.http.text_answer import TextAnswer
from superfluid.codec.fim import FimMode
from superfluid.daemon.fim import Fill, FimRequest, Throttled
from superfluid.sessions.errors import NoFimDialect

MODES = {"psm": FimMode.PSM, "spm": FimMode.SPM}


def read_mode(fields: Fields) -> FimMode:
    """`fim_mode`, in any case. Raises ApiError 400."""
    written = fields.string("fim_mode", "psm")
    mode = MODES.get(written.lower())
    if mode is None:
        raise invalid(f"fim_mode must be psm or spm, got {written!r}", "fim_mode", "invalid_value")
    return mode


def check_unserved(fields: Fields) -> None:
    """Refuse (400) what goes with raw completions only."""
    if fields.boolean("echo"):
        raise invalid("echo does not go with suffix", "echo", "unsupported_parameter")
    if "logprobs" in fields:
        raise invalid("logprobs do not go with suffix", "logprobs", "unsupported_parameter")


def admit(api: Api) -> None:
    """Raise ApiError 429 when the current request's client asks too often."""
    try:
        api.daemon.fim.admit(api.metered_client())
    except Throttled as throttled:
        raise ApiError(
            429,
            str(throttled),
            kind="rate_limit_error",
            code="completion_rate_limited",
            retry_after=throttled.retry_after_ms / 1000,
        ) from None


async def fill_in(api: Api, name: str, fields: Fields) -> Response:
    """Answer a request that has a suffix. Its class is completion, whatever its headers say."""
    prefix, suffix, mode = fields.string("prompt", ""), fields.string("suffix", ""), read_mode(fields)
    check_unserved(fields)
    choices = read_choices(fields, None)
    limit = choices.options.max_tokens
    options = attrs.evolve(
        choices.options,
        max_tokens=None if limit is None else max(1, limit),
        client=api.peer(),
        provisional=choices.stream,
    )
    admit(api)
    fim = api.daemon.fim
    model = api.known(name) if fim.satellite else await api.model(name)
    line = AccessLine.of_request(model.name, choices.stream, " (fim)")
    running = api.run()
    fills: list[Fill] = []
    try:
        with refusals(model.name, (fim.satellite or model).larger_window):
            for i in range(choices.n):
                fills.append(await fim.begin(model, FimRequest(prefix, suffix, mode, with_seed(options, i))))
                running.add([fills[-1].started])
    except NoFimDialect:
        raise invalid(
            f"model '{model.name}' has no fill-in-the-middle dialect, and no --fim-model serves for it",
            "suffix",
            "fim_unsupported",
        ) from None
    prompt = fills[0].started.prompt_tokens
    answer = FimAnswer(api, choices, fim.serves(model), running, line, model=model.name, prompt=prompt, fills=fills)
    return await answer.respond(choices.stream)


class FimAnswer(TextAnswer):
    """Says who answered, and how; an answer that expired is empty."""

    def __init__(self, *arguments: Any, fills: list[Fill], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._fills = fills

    def _account(self) -> dict[str, Any]:
        return {"usage": self._shown_usage(), **self._served()}

    def _last_account(self) -> dict[str, Any]:
        return self._account() if self._choices.include_usage else self._served()

    def _served(self) -> dict[str, Any]:
        return {
            "superfluid": {
                "cached": all(fill.cached for fill in self._fills),
                "expired": any(self._expired(index) for index in range(len(self._fills))),
                "served_by": self._fills[0].served_by,
            }
        }

    def _expired(self, index: int) -> bool:
        ended = self._replies[index].ended
        return ended is not None and ended.expired

    def _text(self, index: int) -> str:
        return "" if self._expired(index) else super()._text(index)

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._choices.stream:
            return usage  # what was shown is not taken back
        unseen = sum(reply.tokens for index, reply in enumerate(self._replies) if self._expired(index))
        return attrs.evolve(usage, completion=usage.completion - unseen)

    def _shown_usage(self) -> dict[str, Any]:
        usage = self._usage().to_json()
        del usage["prompt_tokens_details"]
        return usage
