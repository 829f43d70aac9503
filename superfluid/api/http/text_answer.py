"""Answers of text alone, streamed and not: what raw completions and fill-in-the-middle reply with."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quart import Response

from superfluid.api.http import sse
from superfluid.api.http.access_log import LEFT, AccessLine
from superfluid.api.http.app import json_response
from superfluid.api.http.choices import Running
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError
from superfluid.api.http.options import Choices
from superfluid.api.http.reply import Reply, Usage, number
from superfluid.daemon.model import Model
from superfluid.scheduler.generation import TokenLogprob


class TextAnswer:
    """The answer to one request; `model` is the name it shows, `prompt` the tokens of all prompts.

    `echoed` are the prompts' texts when they are shown.
    """

    def __init__(
        self,
        api: Api,
        choices: Choices,
        served: Model,
        running: Running,
        line: AccessLine,
        *,
        model: str,
        prompt: int,
        echoed: Sequence[str] = (),
        want_logprobs: bool = False,
    ) -> None:
        self._choices = choices
        self._tokenizer = served.tokenizer
        self._running = running
        self._prompt = prompt
        self._want_logprobs = want_logprobs
        self._line = line
        self._replies = [
            Reply(served.tokenizer, choices.stop_filter(), one.generation.job.router, one.max_tokens, want_logprobs)
            for one in running.started
        ]
        self._echoed = [echoed[index // choices.n] if echoed else "" for index in range(len(self._replies))]
        self._offsets = [len(text.encode()) for text in self._echoed]  # of the next token in each choice's text
        self._head = {
            "id": f"cmpl-superfluid-{api.next_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def _usage(self) -> Usage:
        """Every prompt once, and its warm prefix once."""
        n = self._choices.n
        cached = [reply.ended.warm_prefix if reply.ended is not None else 0 for reply in self._replies]
        return Usage(
            prompt=self._prompt,
            completion=sum(reply.tokens for reply in self._replies),
            cached=sum(max(cached[at : at + n]) for at in range(0, len(cached), n)),
        )

    def _members(self) -> dict[str, Any]:
        """What a whole answer has besides its choices."""
        return {"usage": self._usage().to_json()}

    def _last_members(self) -> dict[str, Any]:
        """The same of the last chunk: usage only when it was asked for."""
        return self._members() if self._choices.include_usage else {}

    def _text(self, index: int) -> str:
        return self._echoed[index] + self._replies[index].text

    def _write_line(self, status: int, finish: str) -> None:
        ends = [reply.ended for reply in self._replies if reply.ended is not None]
        self._line.write(status, self._usage(), self._running.started, ends, finish)

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
            self._write_line(error.status, self._running.why_failed)
            raise
        finally:
            self._write_line(LEFT if any(reply.ended is None for reply in self._replies) else 200, self._finish())
        entries = [
            {
                "index": index,
                "text": self._text(index),
                "logprobs": self._logprobs(index, reply.logprobs),
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(self._replies)
        ]
        return json_response({**self._head, "choices": entries, **self._members()})

    async def stream(self) -> AsyncIterator[bytes]:
        """With echo the prompt is the first chunk."""
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
                    self._write_line(200, self._running.why_failed)  # which the client has read already
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
        members = self._last_members()
        out: list[bytes] = []
        for index, reply in enumerate(self._replies):
            choice = {"index": index, "finish_reason": reply.finish_reason, "text": "", "logprobs": None}
            out.append(chunks.chunk(choice, **(members if index == len(self._replies) - 1 else {})))
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
