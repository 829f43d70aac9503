"""A reply as it is made from a generation's items: text, reasoning, calls, logprobs, and why it ended."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from superfluid.api.http.calls import Calls
from superfluid.api.http.refusals import ended_with_error
from superfluid.codec.conversation import compact
from superfluid.codec.stops import StopStrings
from superfluid.codec.tokenizer import Tokenizer
from superfluid.link.events import Channel, Event, Finish, Generated, ToolParseFailure, ToolUse
from superfluid.scheduler.generation import Committed, Ended, Item, Provisional, TokenLogprob

CALL_STARTS = "{["  # how a call begins that stands without its markers
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
    commit; calls come as they are committed. `calls` none: the reply has none (raw text). `calls_as_text`:
    tool_choice none. `whole_reply`: what looks like a call without its markers is kept back, and read at the end.
    """

    tokenizer: Tokenizer
    stops: StopStrings
    max_tokens: int
    want_logprobs: bool = False
    calls: Calls | None = None
    calls_as_text: bool = False
    whole_reply: bool = False
    content: list[str] = attrs.Factory(list)
    reasoning: list[str] = attrs.Factory(list)
    unread: list[str] = attrs.Factory(list)
    logprobs: list[TokenLogprob] = attrs.Factory(list)
    tokens: int = 0
    complete: bool = False
    ended: Ended | None = None
    _kept: str = ""  # text that may be a call
    _ahead: list[int] = attrs.Factory(lambda: [0, 0, 0])  # characters shown per channel that are not committed yet
    _counted: int = 0  # of `tokens`, those that are committed
    _waiting: deque[tuple[int, TokenLogprob]] = attrs.Factory(deque)  # by where in the text each token begins
    _drawn: int = 0  # bytes of text that tokens stand for
    _shown: int = 0  # bytes of text that were shown
    _last_event: int = 0

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
        return [] if self.complete else self._end()

    def _end(self) -> list[Delta]:
        rest = self.stops.flush()
        if not self.whole_reply:
            return self._content(rest, last=True)
        text, self._kept = self._kept + rest, ""
        if self.calls is not None and not self.calls.read and not self.calls.broken and text.strip():
            entries = self.calls.whole_text(text, self._last_event)
            if entries:
                return [Delta("tool_calls", call=entry) for entry in entries]
        return self._content(text, last=True)

    def _commit(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> list[Delta]:
        deltas: list[Delta] = []
        start = 0
        for event in events:
            body = event.body
            self._last_event = event.event_id
            if isinstance(body, Generated):
                deltas += self._read_calls()
                span = logprobs[start : start + len(body.span)]
                start += len(body.span)
                self._counted += len(body.span)
                self.tokens = max(self.tokens, self._counted)
                if body.channel == Channel.TEXT:
                    self._await(span)
                deltas += self._text(body.channel, self._unshown(body))
                if body.channel == Channel.TOOL_CALL and self.calls is not None and not self._silent:
                    deltas += [Delta("tool_calls", call=entry) for entry in self.calls.write(event, body.text)]
            elif isinstance(body, ToolUse) and not self.complete:
                deltas += self._use(event, body)
            elif isinstance(body, ToolParseFailure) and not self.complete:
                deltas += self._run_over(body.raw)
        return deltas + self._read_calls()

    def _unshown(self, body: Generated) -> str:
        """A committed text without what was shown ahead of it."""
        ahead = self._ahead[body.channel]
        known = min(ahead, len(body.text))
        self._ahead[body.channel] = ahead - known
        return body.text[known:]

    def _text(self, channel: int, text: str) -> list[Delta]:
        if self.complete:
            return []
        if channel == Channel.TEXT:
            ready, hit = self.stops.feed(text)
            if self.whole_reply:
                ready = self._may_show(ready)
            deltas = self._content(ready)
            self.complete = hit
            return deltas
        if channel == Channel.REASONING and text:
            self.reasoning.append(text)
            return [Delta("reasoning_content", text)]
        return []

    def _may_show(self, text: str) -> str:
        """What of a text cannot be a call that stands without its markers."""
        self._kept += text
        if not self._kept.strip() or self._kept.lstrip()[0] in CALL_STARTS:
            return ""
        text, self._kept = self._kept, ""
        self.whole_reply = False
        return text

    def _content(self, text: str, last: bool = False) -> list[Delta]:
        logprobs = self._due(text, last) if self.want_logprobs else None
        if not text and not logprobs:
            return []
        self.content.append(text)
        return [Delta("content", text, logprobs=logprobs)]

    # ---- calls

    @property
    def _silent(self) -> bool:
        return self.complete or self.calls_as_text

    def _use(self, event: Event, use: ToolUse) -> list[Delta]:
        if self.calls is not None and not self.calls_as_text:
            self.calls.use(event)
            return []
        return self._as_content('{"name":%s,"arguments":%s}' % (compact(use.name), use.arguments))  # noqa: UP031

    def _read_calls(self) -> list[Delta]:
        """The run whose calls were read is over."""
        return self._run_over("") if self.calls is not None and self.calls.pending and not self.complete else []

    def _run_over(self, raw: str) -> list[Delta]:
        if self.calls is None or self.calls_as_text:
            return self._as_content(raw)
        entries, no_call = self.calls.over(self._last_event)
        deltas = [Delta("tool_calls", call=entry) for entry in entries]
        self.complete = self.calls.only_one and bool(self.calls.read)
        return deltas + self._as_content(raw or no_call)

    def _as_content(self, raw: str) -> list[Delta]:
        if not raw:
            return []
        self.unread.append(raw)
        return [Delta("content", raw)]

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
        if self.calls is not None and self.calls.broken:
            return "length"
        if self.stops.hit:
            return "stop"
        finish = self.ended.finish
        cut = finish not in (Finish.EOS, Finish.CANCELLED) and self.ended.tokens_generated >= self.max_tokens
        if finish == Finish.LENGTH or cut:
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.read else "stop"


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
