"""POST /v1/completions: raw text, no template (spec: http_openai, completions)."""

import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from quart import Response, request

from superfluid.api.http import sse
from superfluid.api.http.app import json_response, read_body
from superfluid.api.http.choices import collect, merge
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.api.http.openai import usage_of
from superfluid.api.http.options import MAX_TOP_LOGPROBS, Choices, read_choices, with_seed
from superfluid.api.http.reply import Reply, Usage
from superfluid.codec.tokenizer import Tokenizer
from superfluid.daemon.model import Model, Started
from superfluid.link.events import Appended, Event, Generated
from superfluid.scheduler.generation import Committed, Provisional, TokenLogprob


@attrs.define
class TextReply(Reply):
    """A raw completion: everything generated is text, whatever channel it was drawn in."""

    offset: int = 0  # of the next token, in UTF-8 bytes of the text
    tokens: list[TokenLogprob] = attrs.Factory(list)

    def take(self, events: list[Event], logprobs: list[TokenLogprob] | None = None) -> None:  # type: ignore[override]
        for event in events:
            if isinstance(event.body, Generated) and not self.stopped:
                self.text(event.body.text)
        self.tokens += logprobs or []

    @property
    def finish_reason(self) -> str:
        reason = super().finish_reason
        return "stop" if reason == "tool_calls" else reason


def read_prompts(prompt: Any, tokenizer: Tokenizer) -> list[Appended]:
    """The prompts of a request: texts are encoded as they stand (markers parse), token ids are taken as given."""
    if prompt is None or prompt in ("", []):
        raise invalid("prompt must be non-empty", "prompt")
    several = isinstance(prompt, list) and all(isinstance(part, str | list) for part in prompt)
    return [_prompt(part, tokenizer) for part in (prompt if several else [prompt])]


def _prompt(part: Any, tokenizer: Tokenizer) -> Appended:
    if isinstance(part, str) and part:
        return Appended(part, tokenizer.encode(part))
    if isinstance(part, list) and part and all(isinstance(token, int) and token >= 0 for token in part):
        bad = next((token for token in part if token >= tokenizer.vocab_size), None)
        if bad is not None:
            raise invalid(f"prompt: token id {bad} is not in the vocabulary of {tokenizer.vocab_size}", "prompt")
        return Appended(None, part)
    if part in ("", []):
        raise invalid("prompt must be non-empty", "prompt")
    raise wrong_type("prompt", "a string, an array of strings, token ids, or an array of those", part)


async def completions(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    name = fields.string("model")
    if not name:
        raise invalid("missing required field: model", "model")
    if "suffix" in fields:
        raise ApiError(400, "this model has no fill-in-the-middle dialect", code="fim_unsupported", param="suffix")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    choices = read_choices(fields, logprobs, *api.caller(request))
    if fields.raw("prompt") in (None, "", []):
        raise invalid("prompt must be non-empty", "prompt")
    served = await api.model(name)
    prompts = await served.in_thread(read_prompts, fields.raw("prompt"), served.tokenizer)
    options = attrs.evolve(choices.options, provisional=choices.stream and logprobs is None)
    started: list[Started] = []
    for prompt in prompts:
        each = [with_seed(options, len(started) + i) for i in range(choices.n)]
        started += await served.begin_all([prompt], each, raw=True)
    texts = [served.tokenizer.decode(prompt.span) if prompt.text is None else prompt.text for prompt in prompts]
    echoed = [texts[index // choices.n] if echo else "" for index in range(len(started))]
    replies = [TextReply(served.tokenizer, choices.stop_filter(), one.max_tokens) for one in started]
    head = {
        "id": f"cmpl-superfluid-{api.next_id()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if choices.stream:
        body = _stream(api, served, head, choices, started, replies, echoed, logprobs is not None)
        return Response(body, headers=sse.HEADERS)
    await collect(api, started, replies)
    entries = [
        {
            "index": index,
            "text": echoed[index] + "".join(reply.content),
            "logprobs": None if logprobs is None else token_logprobs(reply, len(echoed[index].encode())),
            "finish_reason": reply.finish_reason,
        }
        for index, reply in enumerate(replies)
    ]
    return json_response({**head, "choices": entries, "usage": _usage(prompts, started, replies).to_json()})


def token_logprobs(reply: TextReply, offset: int) -> dict[str, Any]:
    """The logprobs of the tokens not yet shown; offsets count UTF-8 bytes of the text from `offset`."""
    decode = reply.tokenizer.token_bytes
    tokens = [decode(entry.token).decode(errors="replace") for entry in reply.tokens]
    offsets = []
    for entry in reply.tokens:
        offsets.append(offset + reply.offset)
        reply.offset += len(decode(entry.token))
    shown = {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in reply.tokens],
        "top_logprobs": [
            {decode(token).decode(errors="replace"): value for token, value in entry.top} or None
            for entry in reply.tokens
        ],
        "text_offset": offsets,
    }
    reply.tokens = []
    return shown


def _usage(prompts: list[Appended], started: list[Started], replies: list[TextReply]) -> Usage:
    usage = usage_of(started, list(replies))
    return Usage(sum(len(prompt.span) for prompt in prompts), usage.completion, usage.cached)


async def _stream(
    api: Api,
    served: Model,
    head: dict[str, Any],
    choices: Choices,
    started: list[Started],
    replies: list[TextReply],
    echoed: list[str],
    want_logprobs: bool,
) -> AsyncIterator[bytes]:
    def chunk(index: int, text: str, finish: str | None = None, **more: Any) -> bytes:
        logprobs = None
        if want_logprobs and replies[index].tokens:
            logprobs = token_logprobs(replies[index], len(echoed[index].encode()))
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return sse.event({**head, "choices": [entry], **more})

    opening = [chunk(index, text) for index, text in enumerate(echoed) if text]
    if opening:
        yield b"".join(opening)
    async with merge(api, started) as merged:
        async for batch in sse.with_silences(merged):
            if batch is None:
                yield sse.COMMENT
                continue
            out: list[bytes] = []
            for index, item in batch:
                reply = replies[index]
                if isinstance(item, Provisional):
                    ready = reply.text(item.text)
                    if ready:
                        out.append(chunk(index, ready))
                elif isinstance(item, Committed):
                    if want_logprobs:
                        known = len(reply.content)
                        reply.take(item.events, item.logprobs)
                        out.append(chunk(index, "".join(reply.content[known:])))
                else:
                    try:
                        rest = reply.end(item)
                    except ApiError as error:
                        yield b"".join([*out, sse.event(error.frame()), sse.DONE])
                        return
                    if rest:
                        out.append(chunk(index, rest))
                if reply.stopped:
                    merged.stop(index)
            if all(reply.ended is not None for reply in replies):
                last = len(replies) - 1
                usage = {"usage": usage_of(started, list(replies)).to_json()} if choices.include_usage else {}
                out += [
                    chunk(index, "", reply.finish_reason, **(usage if index == last else {}))
                    for index, reply in enumerate(replies)
                ]
            if out:
                yield b"".join(out)
    yield sse.DONE
