"""A reply as it is made from a generation's items: text, reasoning, calls, logprobs, and why it ended."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from superfluid.api.http.calls import Calls, Entry
from superfluid.api.http.refusals import ended_with_error
from superfluid.codec.stops import StopStrings
from superfluid.codec.tokenizer import Tokenizer
from superfluid.link.events import Channel, Event, Finish, Generated, GenerationPrompt, ToolParseFailure, ToolUse
from superfluid.scheduler.generation import Committed, Ended, Item, Provisional, RouterLike, TokenLogprob

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
    commit. `tokens` counts to the token that ended the reply, wherever the lane stopped behind it: `router` routes the
    lane's tokens once more to find it. `calls` none: the reply has none (raw text). `whole_reply`: what looks like a
    call without its markers is kept back, and read at the end; a demanded call keeps all text back.
    """

    tokenizer: Tokenizer
    stops: StopStrings
    router: RouterLike
    max_tokens: int
    want_logprobs: bool = False
    calls: Calls | None = None
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
    _hidden: list[int] = attrs.Factory(lambda: [0, 0, 0])  # and those that wait for their commit
    _previewed: int = 0  # tokens ahead of their commit
    _counted: int = 0  # committed tokens
    _last_token: int | None = None  # the number of the token that ended the reply before its lane did
    _read: int = 0  # characters of committed text
    _again: RouterLike = attrs.Factory(lambda self: self.router.fresh(), takes_self=True)
    _waiting: deque[tuple[int, TokenLogprob]] = attrs.Factory(deque)  # by where in the text each token begins
    _drawn: int = 0  # bytes of text that tokens stand for
    _shown: int = 0  # bytes of text that were shown
    _last_event: int = 0

    @property
    def straight(self) -> bool:
        """Whether plain text ahead of its commit is shown as it is, and stays so until an item is taken."""
        only_one = self.calls is not None and self.calls.only_one
        waits = self.complete or self.want_logprobs or self.whole_reply or only_one
        return not (waits or self.stops.wanted or any(self._hidden))

    def take(self, item: Item) -> list[Delta]:
        """What `item` adds. Raises ApiError when the generation failed."""
        if isinstance(item, Provisional):
            return self._preview(item)
        if isinstance(item, Committed):
            return self._commit(item.events, item.logprobs)
        self.ended = item
        if item.reason is not None and not self.complete:
            raise ended_with_error(item)
        self.tokens = item.tokens_generated if self._last_token is None else self._last_token
        unread = "".join(self.unread)
        return self._end() + ([Delta("content", unread)] if unread else [])

    def _preview(self, item: Provisional) -> list[Delta]:
        """Text that runs ahead of its commit. Tokens count as of here, but for those that may be behind the end."""
        channel = item.channel
        if channel != Channel.TOOL_CALL:
            if self._hidden[channel] or (self.calls is not None and self.calls.only_one and self.calls.due):
                self._hidden[channel] += len(item.text)  # it may stand behind the last call that is wanted
                return []
            self._ahead[channel] += len(item.text)
            deltas = self._text(channel, item.text)
        elif self.calls is not None and not self.complete:
            deltas = _deltas(self.calls.ahead(item.text, item.closes))
        else:
            deltas = []
        behind = channel == Channel.TOOL_CALL and self.calls is not None and self.calls.only_one
        if not self.complete and not behind:
            self._previewed += item.n_tokens
            self.tokens = max(self.tokens, self._previewed)
        return deltas

    def _end(self) -> list[Delta]:
        if not self.complete and self.calls is not None:
            self.calls.cut()
        rest = "" if self.complete else self.stops.flush()
        if not self.whole_reply:
            return [] if self.complete else self._content(rest, last=True)
        text, self._kept = self._kept + rest, ""
        calls = self.calls
        nothing_read = calls is not None and not calls.read and not calls.broken
        if calls is not None and nothing_read:
            cut = self.ended is not None and self.ended.finish not in (Finish.EOS, Finish.GRAMMAR)
            if entries := calls.whole_text(text, self._last_event, cut):
                return _deltas(entries)
        return self._content(text, last=True)

    def _commit(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> list[Delta]:
        deltas: list[Delta] = []
        start = 0
        for event in events:
            body = event.body
            self._last_event = event.event_id
            if isinstance(body, Generated):
                deltas += self._run_over()
                span = logprobs[start : start + len(body.span)]
                start += len(body.span)
                if body.channel == Channel.TEXT:
                    self._await(span)
                if body.channel != Channel.TOOL_CALL:
                    deltas += self._text(body.channel, self._unshown(body))
                elif self.calls is not None and not self._silent:
                    deltas += _deltas(self.calls.write(event, body.text))
                self._count(body)
            elif isinstance(body, ToolUse | ToolParseFailure):
                self._judge(event, body)
            elif isinstance(body, GenerationPrompt):  # it ends a thought
                self._again.commit(body.span)
        return deltas + self._run_over()

    def _count(self, body: Generated) -> None:
        """Count a record's tokens; of the one in which a stop string ends, those up to its end."""
        if self._last_token is None and self.stops.wanted:
            used = self._tokens_to_stop(body)
            if used is not None:
                self._last_token = self._counted + used
        self._counted += len(body.span)
        if not self.complete:
            self.tokens = max(self.tokens, self._counted)
        elif self._last_token is not None:
            self.tokens = self._last_token

    def _tokens_to_stop(self, body: Generated) -> int | None:
        """How many tokens of a record lead up to the end of the stop string; none when it does not end there."""
        start = self._read
        self._read += len(body.text) if body.channel == Channel.TEXT else 0
        if self.stops.end is None or self._read < self.stops.end:
            self._again.commit(body.span)
            return None
        for n, token in enumerate(body.span, 1):
            start += sum(len(run.text) for run in self._again.commit([token]) if run.channel == Channel.TEXT)
            if start >= self.stops.end:
                return n
        return len(body.span)

    def _unshown(self, body: Generated) -> str:
        """A committed text without what was shown ahead of it."""
        ahead = self._ahead[body.channel]
        known = min(ahead, len(body.text))
        self._ahead[body.channel] = ahead - known
        self._hidden[body.channel] = max(self._hidden[body.channel] - (len(body.text) - known), 0)
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
        if self.calls is not None and self.calls.forced:
            return ""
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
        """No call is of interest any more: the reply is complete, but for one that began before its last text."""
        return self.complete and not (self.calls is not None and self.calls.due)

    def _judge(self, event: Event, body: ToolUse | ToolParseFailure) -> None:
        """What the call text before it reads as."""
        if self.calls is None or self._silent:
            return
        if isinstance(body, ToolUse):
            self.calls.use(event)
        else:
            self.calls.fail()

    def _run_over(self) -> list[Delta]:
        """The end of a run of the call channel, when there is one."""
        if self.calls is None or self._silent:
            return []
        entries, raw = self.calls.over()
        if raw:
            self.unread.append(raw)
        if self.calls.only_one and self.calls.read and not self.complete:
            self.complete = True
            self.tokens = self._last_token = self._counted
        return _deltas(entries)

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


def _deltas(entries: list[Entry]) -> list[Delta]:
    return [Delta("tool_calls", call=entry) for entry in entries]


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
