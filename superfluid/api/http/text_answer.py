"""Answers of text alone, streamed and not: what raw completions and fill-in-the-middle reply with."""

import time
from collections.abc import Sequence
from typing import Any

from superfluid.api.http import sse
from superfluid.api.http.access_log import AccessLine
from superfluid.api.http.answer import Answer
from superfluid.api.http.choices import Running
from superfluid.api.http.context import Api
from superfluid.api.http.options import Choices
from superfluid.api.http.reply import Delta, Reply, Usage, number
from superfluid.daemon.model import Model
from superfluid.scheduler.generation import TokenLogprob


class TextAnswer(Answer):
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
        replies = [
            Reply(served.tokenizer, choices.stop_filter(), one.generation.job.router, one.max_tokens, want_logprobs)
            for one in running.started
        ]
        head = {
            "id": f"cmpl-superfluid-{api.next_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        super().__init__(running, replies, line, head)
        self._choices = choices
        self._tokenizer = served.tokenizer
        self._prompt = prompt
        self._want_logprobs = want_logprobs
        self._echoed = [echoed[index // choices.n] if echoed else "" for index in range(len(replies))]
        self._offsets = [len(text.encode()) for text in self._echoed]  # of the next token in each choice's text

    def _usage(self) -> Usage:
        """Every prompt once, and its warm prefix once."""
        n = self._choices.n
        cached = [reply.ended.warm_prefix if reply.ended is not None else 0 for reply in self._replies]
        return Usage(
            prompt=self._prompt,
            completion=sum(reply.tokens for reply in self._replies),
            cached=sum(max(cached[at : at + n]) for at in range(0, len(cached), n)),
        )

    def _account(self) -> dict[str, Any]:
        """What a whole answer has besides its choices."""
        return {"usage": self._usage().to_json()}

    def _last_account(self) -> dict[str, Any]:
        """The same of the last chunk: usage only when it was asked for."""
        return self._account() if self._choices.include_usage else {}

    def _text(self, index: int) -> str:
        return self._echoed[index] + self._replies[index].text

    def _members(self) -> dict[str, Any]:
        entries = [
            {
                "index": index,
                "text": self._text(index),
                "logprobs": self._logprobs(index, reply.logprobs),
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(self._replies)
        ]
        return {"choices": entries, **self._account()}

    def _opening(self, chunks: sse.Chunks) -> list[bytes]:
        """With echo the prompts are the first chunks."""
        return [self._chunk(chunks, index, Delta("text", text)) for index, text in enumerate(self._echoed) if text]

    def _chunk(self, chunks: sse.Chunks, index: int, delta: Delta) -> bytes:
        shown = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        return chunks.chunk({"index": index, "finish_reason": None, "text": delta.text, "logprobs": shown})

    def _last(self, chunks: sse.Chunks) -> list[bytes]:
        members = self._last_account()
        out: list[bytes] = []
        for index, reply in enumerate(self._replies):
            choice = {"index": index, "finish_reason": reply.finish_reason, "text": "", "logprobs": None}
            out.append(chunks.chunk(choice, **(members if index == len(self._replies) - 1 else {})))
        return out

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
