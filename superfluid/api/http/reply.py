"""A reply as it is assembled from a generation's events: text, reasoning, calls, logprobs, and why it ended."""

from collections.abc import Sequence
from typing import Any

import attrs

from superfluid.api.http.errors import SERVER, ApiError
from superfluid.codec.stops import StopStrings
from superfluid.codec.tokenizer import Tokenizer
from superfluid.link.events import Channel, Event, Finish, Generated, ToolParseFailure, ToolUse
from superfluid.scheduler.generation import Ended, TokenLogprob


@attrs.frozen
class Usage:
    prompt: int
    completion: int
    cached: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, self.prompt)},
        }


@attrs.define
class Reply:
    """One choice. Feed it committed events; `stopped` turns true at a stop string, and the caller cancels the lane."""

    tokenizer: Tokenizer
    stops: StopStrings
    max_tokens: int
    content: list[str] = attrs.Factory(list)
    reasoning: list[str] = attrs.Factory(list)
    calls: list[dict[str, Any]] = attrs.Factory(list)
    logprobs: list[dict[str, Any]] = attrs.Factory(list)
    broken_call: bool = False
    stopped: bool = False
    ended: Ended | None = None

    def text(self, text: str) -> str:
        """Take text of the text channel; what of it may be shown now (a tail that may begin a stop waits)."""
        if self.stopped:
            return ""
        ready, hit = self.stops.feed(text)
        self.stopped = hit
        self.content.append(ready)
        return ready

    def take(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob] | None = None) -> None:
        """Take committed events, whole (the non-streamed path)."""
        start = 0
        for event in events:
            body = event.body
            if isinstance(body, Generated):
                span = logprobs[start : start + len(body.span)] if logprobs is not None else []
                start += len(body.span)
                if body.channel == Channel.TEXT:
                    if not self.stopped:
                        self.logprobs += content_logprobs(self.tokenizer, span)
                    self.text(body.text)
                elif body.channel == Channel.REASONING and not self.stopped:
                    self.reasoning.append(body.text)
            else:
                self.take_call(event)

    def take_call(self, event: Event) -> dict[str, Any] | None:
        """Take a ToolUse (the entry it becomes) or a ToolParseFailure (its raw text goes to content)."""
        body = event.body
        if isinstance(body, ToolUse) and not self.stopped:
            call = {
                "index": len(self.calls),
                "id": f"call_{event.event_id}",
                "type": "function",
                "function": {"name": body.name, "arguments": body.arguments},
            }
            self.calls.append(call)
            return call
        if isinstance(body, ToolParseFailure) and not self.stopped:
            self.content.append(body.raw)
        return None

    def end(self, ended: Ended) -> str:
        """The generation is over; the text that was held back for a stop string. Raises ApiError 500 on an error."""
        self.ended = ended
        if ended.reason is not None:
            raise generation_error(ended)
        if self.stopped:
            return ""
        rest = self.stops.flush()
        self.content.append(rest)
        return rest

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls (spec: codec_tools, answers)."""
        assert self.ended is not None
        if self.broken_call:
            return "length"
        if self.stopped:
            return "stop"
        finish = self.ended.finish
        cut = finish not in (Finish.EOS, Finish.CANCELLED) and self.ended.tokens_generated >= self.max_tokens
        if finish == Finish.LENGTH or cut:
            return "length"
        return "tool_calls" if self.calls else "stop"


def generation_error(ended: Ended) -> ApiError:
    """What a generation that failed after it was admitted becomes."""
    return ApiError(500, str(ended.reason), kind=SERVER)


def content_logprobs(tokenizer: Tokenizer, span: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's logprobs entries of text tokens; markers (tokens without bytes) have none."""
    return [
        {
            **token_logprob(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [token_logprob(tokenizer, token, value) for token, value in entry.top],
        }
        for entry in span
        if tokenizer.token_bytes(entry.token)
    ]


def token_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
