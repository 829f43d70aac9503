"""A reply as it is made from a generation's items: text, reasoning, calls, logprobs, and why it ended."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from superfluid.api.http.refusals import ended_with_error
from superfluid.codec.conversation import compact
from superfluid.codec.stops import StopStrings
from superfluid.codec.tokenizer import Tokenizer
from superfluid.link.events import Channel, Event, Finish, Generated, ToolParseFailure, ToolUse
from superfluid.scheduler.generation import Committed, Ended, Item, Provisional, TokenLogprob

IMPOSSIBLE = -9999.0  # what stands in JSON for a log probability of minus infinity


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


@attrs.frozen
class Delta:
    """What an item adds to a reply: a text of `content` or `reasoning_content`, or one of `tool_calls`."""

    name: str
    text: str = ""
    call: dict[str, Any] | None = None
    logprobs: list[TokenLogprob] | None = None


@attrs.define
class Reply:
    """One choice. Give it every item of its generation; `complete` turns true when its lane need not go on.

    Text comes ahead of its commit (then the commits only add what was not shown yet), or with its logprobs at the
    commit. `calls_as_text`: tool_choice none. `one_call`: parallel_tool_calls false.
    """

    tokenizer: Tokenizer
    stops: StopStrings
    max_tokens: int
    want_logprobs: bool = False
    calls_as_text: bool = False
    one_call: bool = False
    content: list[str] = attrs.Factory(list)
    reasoning: list[str] = attrs.Factory(list)
    unread: list[str] = attrs.Factory(list)
    calls: list[dict[str, Any]] = attrs.Factory(list)
    logprobs: list[TokenLogprob] = attrs.Factory(list)
    tokens: int = 0
    complete: bool = False
    ended: Ended | None = None
    _ahead: list[int] = attrs.Factory(lambda: [0, 0, 0])  # characters shown per channel that are not committed yet
    _counted: int = 0  # of `tokens`, those that are committed
    _waiting: deque[tuple[int, TokenLogprob]] = attrs.Factory(deque)  # by where in the text each token begins
    _drawn: int = 0  # bytes of text that tokens stand for
    _shown: int = 0  # bytes of text that were shown

    def take(self, item: Item) -> list[Delta]:
        """What `item` adds. Raises ApiError when the generation failed."""
        if isinstance(item, Provisional):
            self.tokens += item.n_tokens
            self._ahead[item.channel] += len(item.text)
            return self._text(item.channel, item.text)
        if isinstance(item, Committed):
            return self._commit(item.events, item.logprobs)
        self.ended = item
        if item.reason is not None and not self.complete:
            raise ended_with_error(item)
        self.tokens = item.tokens_generated
        return [] if self.complete else self._content(self.stops.flush(), last=True)

    def _commit(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> list[Delta]:
        deltas: list[Delta] = []
        start = 0
        for event in events:
            body = event.body
            if isinstance(body, Generated):
                span = logprobs[start : start + len(body.span)]
                start += len(body.span)
                self._counted += len(body.span)
                self.tokens = max(self.tokens, self._counted)
                if self._in_text(body.channel):
                    self._await(span)
                deltas += self._text(body.channel, self._unshown(body))
            elif isinstance(body, ToolUse | ToolParseFailure) and not self.complete:
                deltas += self._call(event)
        return deltas

    def _in_text(self, channel: int) -> bool:
        return channel == Channel.TEXT

    def _unshown(self, body: Generated) -> str:
        """A committed text without what was shown ahead of it."""
        ahead = self._ahead[body.channel]
        known = min(ahead, len(body.text))
        self._ahead[body.channel] = ahead - known
        return body.text[known:]

    def _text(self, channel: int, text: str) -> list[Delta]:
        if self.complete:
            return []
        if self._in_text(channel):
            ready, hit = self.stops.feed(text)
            deltas = self._content(ready)
            self.complete = hit
            return deltas
        if channel == Channel.REASONING and text:
            self.reasoning.append(text)
            return [Delta("reasoning_content", text)]
        return []

    def _content(self, text: str, last: bool = False) -> list[Delta]:
        logprobs = self._due(text, last) if self.want_logprobs else None
        if not text and not logprobs:
            return []
        self.content.append(text)
        return [Delta("content", text, logprobs=logprobs)]

    def _call(self, event: Event) -> list[Delta]:
        body = event.body
        if isinstance(body, ToolParseFailure):
            self.unread.append(body.raw)
            return [Delta("content", body.raw)]
        assert isinstance(body, ToolUse)
        if self.calls_as_text:
            text = '{"name":%s,"arguments":%s}' % (compact(body.name), body.arguments)  # noqa: UP031
            self.unread.append(text)
            return [Delta("content", text)]
        call = {
            "index": len(self.calls),
            "id": f"call_{event.event_id}",
            "type": "function",
            "function": {"name": body.name, "arguments": body.arguments},
        }
        self.calls.append(call)
        self.complete = self.one_call
        return [Delta("tool_calls", call=call)]

    # ---- logprobs: each with the text that its token stands for

    def _await(self, span: Sequence[TokenLogprob]) -> None:
        if self.complete:
            return
        for entry in span:
            self._waiting.append((self._drawn, entry))
            self._drawn += len(self.tokenizer.token_bytes(entry.token))

    def _due(self, text: str, last: bool) -> list[TokenLogprob]:
        """The tokens whose text begins in what is shown by now; all of them at the end."""
        self._shown += len(text.encode())
        due: list[TokenLogprob] = []
        while self._waiting and (last or self._waiting[0][0] < self._shown):
            due.append(self._waiting.popleft()[1])
        self.logprobs += due
        return due

    # ---- the whole

    @property
    def text(self) -> str:
        """All content: the text, then calls that were not read."""
        return "".join(self.content) + "".join(self.unread)

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls (spec: codec_tools, answers)."""
        assert self.ended is not None
        if self.stops.hit:
            return "stop"
        finish = self.ended.finish
        cut = finish not in (Finish.EOS, Finish.CANCELLED) and self.ended.tokens_generated >= self.max_tokens
        if finish == Finish.LENGTH or cut:
            return "length"
        return "tool_calls" if self.calls else "stop"


def number(logprob: float) -> float:
    """A log probability as JSON can carry it."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The logprobs of chat content; `bytes` are a token's own, though it be a part of a character."""
    return [
        {
            **_chat_logprob(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_chat_logprob(tokenizer, token, value) for token, value in entry.top],
        }
        for entry in entries
    ]


def _chat_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": number(logprob), "bytes": list(raw)}
