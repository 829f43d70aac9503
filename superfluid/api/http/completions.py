"""POST /v1/completions: raw text, no template (spec: http_openai, completions)."""

import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from quart import Response

from superfluid.api.http import sse
from superfluid.api.http.access_log import LEFT, AccessLine
from superfluid.api.http.app import json_response, read_body
from superfluid.api.http.choices import Running
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError, context_length_exceeded, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.api.http.options import MAX_TOP_LOGPROBS, Choices, read_choices, with_seed
from superfluid.api.http.refusals import refusals
from superfluid.api.http.reply import Reply, Usage, number
from superfluid.codec.tokenizer import Tokenizer
from superfluid.daemon.model import Model
from superfluid.link.events import Appended
from superfluid.scheduler.generation import TokenLogprob


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
    prompt = fields.raw("prompt")
    suffix = fields.string("suffix")
    if suffix is None:
        check_prompt(prompt)
        if "fim_mode" in fields:
            raise invalid("fim_mode takes a suffix", "fim_mode", "unsupported_parameter")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    choices = read_choices(fields, logprobs)
    options = attrs.evolve(api.called(choices), provisional=choices.stream and logprobs is None)
    served = await api.model(name)
    if suffix is not None:
        raise invalid(
            f"model '{served.name}' has no fill-in-the-middle dialect and no --fim-model serves for it",
            "suffix",
            "fim_unsupported",
        )
    line = AccessLine.of_request(served.name, choices.stream)
    running = api.run()
    with refusals(served.name):
        prompts = [await served.in_thread(encode_prompt, part, served.tokenizer) for part in several(prompt)]
        for one in prompts:
            if len(one.span) > served.window:
                raise context_length_exceeded(served.window, len(one.span))
        for one in prompts:
            seeds = range(len(running.started), len(running.started) + choices.n)
            running.add(await served.begin_all([one], [with_seed(options, i) for i in seeds], raw=True))
    texts = [served.tokenizer.decode(one.span) if one.text is None else one.text for one in prompts]
    answer = TextAnswer(api, choices, served, running, prompts, texts if echo else [], logprobs is not None, line)
    return Response(answer.stream(), headers=sse.HEADERS) if choices.stream else await answer.whole()


class TextAnswer:
    """The answer to one request for raw completions; `echoed` are the prompts' texts when they are shown."""

    def __init__(
        self,
        api: Api,
        choices: Choices,
        served: Model,
        running: Running,
        prompts: list[Appended],
        echoed: list[str],
        want_logprobs: bool,
        line: AccessLine,
    ) -> None:
        self._choices = choices
        self._tokenizer = served.tokenizer
        self._running = running
        self._prompts = prompts
        self._want_logprobs = want_logprobs
        self._line = line
        self._replies = [
            Reply(served.tokenizer, choices.stop_filter(), one.max_tokens, want_logprobs) for one in running.started
        ]
        self._echoed = [echoed[index // choices.n] if echoed else "" for index in range(len(self._replies))]
        self._offsets = [len(text.encode()) for text in self._echoed]  # of the next token in each choice's text
        self._head = {
            "id": f"cmpl-superfluid-{api.next_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def _usage(self) -> Usage:
        """Every prompt once, and its warm prefix once."""
        n = self._choices.n
        cached = [reply.ended.warm_prefix if reply.ended is not None else 0 for reply in self._replies]
        return Usage(
            prompt=sum(len(prompt.span) for prompt in self._prompts),
            completion=sum(reply.tokens for reply in self._replies),
            cached=sum(max(cached[at : at + n]) for at in range(0, len(cached), n)),
        )

    def _write_line(self, status: int, finish: str) -> None:
        ends = [reply.ended for reply in self._replies if reply.ended is not None]
        self._line.write(status, self._usage(), ends, finish)

    def _finish(self) -> str:
        first = self._replies[0]
        return "cancelled" if first.ended is None else first.finish_reason

    async def whole(self) -> Response:
        try:
            async for batch in self._running:
                for index, item in batch or ():
                    reply = self._replies[index]
                    reply.take(item)
                    if reply.complete:
                        self._running.stop(index)
        except ApiError as error:
            self._write_line(error.status, "error")
            raise
        finally:
            self._write_line(LEFT if any(reply.ended is None for reply in self._replies) else 200, self._finish())
        entries = [
            {
                "index": index,
                "text": self._echoed[index] + reply.text,
                "logprobs": self._logprobs(index, reply.logprobs),
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(self._replies)
        ]
        return json_response({**self._head, "choices": entries, "usage": self._usage().to_json()})

    async def stream(self) -> AsyncIterator[bytes]:
        """With echo the prompt is the first chunk; usage is on the last one, when asked for."""
        chunks = sse.Chunks(self._head)
        try:
            opening = [self._chunk(chunks, index, text) for index, text in enumerate(self._echoed) if text]
            if opening:
                yield b"".join(opening)
            async for batch in self._running:
                out = [sse.COMMENT] if batch is None else []
                try:
                    for index, item in batch or ():
                        reply = self._replies[index]
                        out += [self._chunk(chunks, index, d.text, d.logprobs) for d in reply.take(item)]
                        if reply.complete:
                            self._running.stop(index)
                except ApiError as error:
                    self._write_line(error.status, "error")
                    yield b"".join([*out, sse.event(error.frame()), sse.DONE])
                    return
                if out:
                    yield b"".join(out)
            self._write_line(200, self._finish())
            yield self._last(chunks)
        finally:
            self._write_line(200, "cancelled")

    def _chunk(self, chunks: sse.Chunks, index: int, text: str, logprobs: list[TokenLogprob] | None = None) -> bytes:
        shown = self._logprobs(index, logprobs) if logprobs else None
        return chunks.chunk({"index": index, "finish_reason": None, "text": text, "logprobs": shown})

    def _last(self, chunks: sse.Chunks) -> bytes:
        usage = {"usage": self._usage().to_json()} if self._choices.include_usage else {}
        out: list[bytes] = []
        for index, reply in enumerate(self._replies):
            choice = {"index": index, "finish_reason": reply.finish_reason, "text": "", "logprobs": None}
            out.append(chunks.chunk(choice, **(usage if index == len(self._replies) - 1 else {})))
        return b"".join([*out, sse.DONE])

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        """The logprobs of a choice's next tokens; offsets count UTF-8 bytes of its text."""
        if not self._want_logprobs:
            return None
        decode = self._tokenizer.token_bytes
        pieces = [decode(entry.token) for entry in entries]
        offsets: list[int] = []
        for piece in pieces:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(piece)
        return {
            "tokens": [piece.decode(errors="replace") for piece in pieces],
            "token_logprobs": [number(entry.logprob) for entry in entries],
            "top_logprobs": [
                {decode(token).decode(errors="replace"): number(value) for token, value in entry.top} or None
                for entry in entries
            ],
            "text_offset": offsets,
        }
