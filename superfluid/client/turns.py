"""What a generation becomes for its caller: chunks while it runs, a reply at its end, messages when it is read back;
and what a session's follower sees of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs

from superfluid.client.errors import ConnectionLost, UnexpectedReply
from superfluid.client.wire import answers
from superfluid.link import events as ev, session_api as api

Kind = Literal["text", "reasoning"]
KINDS: dict[int, Kind] = {ev.Channel.TEXT: "text", ev.Channel.REASONING: "reasoning"}
ROLES = ("system", "user", "assistant", "tool")
NO_BACKLOG = (1 << 64) - 1  # a cursor past every event
WHOLE_WINDOW = (1 << 32) - 1  # max_tokens of a caller who sets none: the window ends it


@attrs.frozen
class Chunk:
    """A piece of a reply as it is made."""

    kind: Kind
    text: str


@attrs.frozen
class ToolCall:
    """A call the model made. `id` is what its result names; `arguments` is JSON text."""

    id: int
    name: str
    arguments: str


@attrs.frozen
class Reply:
    """A finished generation. `events` are those it committed; `finish` is NONE when `max_tokens` stopped it.

    `tokens_generated` counts this call's tokens, `warm_prefix` those of the prompt that were served from a cache.
    """

    events: list[ev.Event]
    tokens_generated: int
    finish: ev.Finish
    warm_prefix: int

    @classmethod
    def of(cls, response: api.GeneratedResponse) -> "Reply":
        return cls(response.events, response.tokens_generated, ev.Finish(response.finish), response.warm_prefix)

    @property
    def text(self) -> str:
        return _channel_text(self.events, ev.Channel.TEXT)

    @property
    def reasoning(self) -> str:
        return _channel_text(self.events, ev.Channel.REASONING)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(event.event_id, event.body.name, event.body.arguments)
            for event in self.events
            if isinstance(event.body, ev.ToolUse)
        ]


@attrs.define
class ChatMessage:
    """A turn of a conversation, read back from its events. `event_id` is where it begins."""

    event_id: int
    role: str
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = attrs.Factory(list)
    tool_call_id: int | None = None


def _channel_text(events: Iterable[ev.Event], channel: int) -> str:
    return "".join(e.body.text for e in events if isinstance(e.body, ev.Generated) and e.body.channel == channel)


def conversation(events: Sequence[ev.Event]) -> list[ChatMessage]:
    """The turns that a session's events make; what the model said between two turns is one message.

    A call that a limit cut is not in it once it is read again as a whole.
    """
    messages: list[ChatMessage] = []
    reply: ChatMessage | None = None
    for event in events:
        match event.body:
            case ev.Message(role, text):
                messages.append(ChatMessage(event.event_id, ROLES[role], text))
                reply = None
            case ev.ToolResult(call_id, content):
                messages.append(ChatMessage(event.event_id, "tool", content, tool_call_id=call_id))
                reply = None
            case ev.GenerationPrompt():
                reply = None
            case ev.Generated(_, text, channel):
                if reply is None:
                    reply = ChatMessage(event.event_id, "assistant", "")
                    messages.append(reply)
                if channel == ev.Channel.TEXT:
                    reply.text += text
                elif channel == ev.Channel.REASONING:
                    reply.reasoning += text
            case ev.ToolUse(name, arguments) if reply is not None:
                reply.tool_calls.append(ToolCall(event.event_id, name, arguments))
            case ev.ToolExpired(call_id, ev.CONTINUED) if reply is not None:
                reply.tool_calls = [call for call in reply.tool_calls if call.id != call_id]
    return messages


class TurnReader:
    """A streamed generation without its connection: the requests that start it, chunks out of the replies.

    The connection first follows the session with previews, so that text comes as it is made; what is committed is
    shown where previews are missing (a server that sends none, a subscription that lagged).
    """

    def __init__(self, session: int, max_tokens: int | None) -> None:
        self.requests: list[api.Request] = [
            api.SubscribeRequest(session, NO_BACKLOG, True),
            api.GenerateRequest(session, WHOLE_WINDOW if max_tokens is None else max_tokens),
        ]
        self.reply: Reply | None = None
        self._shown: dict[int, int] = {}
        self._previewed: dict[int, int] = {}
        self._committed: dict[int, int] = {}

    def feed(self, response: api.Response | None) -> Iterator[Chunk]:
        """The chunks of a response; `reply` is set by the last one. None: the connection ended.

        Raises ClientError: the refusal of the request, or what broke it.
        """
        match response:
            case None:
                raise ConnectionLost("the server closed the connection while it generated")
            case api.SubProvisionalResponse(_, channel, text):
                yield from self._show(self._previewed, channel, text)
            case api.DeltaResponse(event):
                if isinstance(event.body, ev.Generated):
                    yield from self._show(self._committed, event.body.channel, event.body.text)
            case api.GeneratedResponse():
                self.reply = Reply.of(response)
            case api.SubscribedResponse():
                pass
            case _ if answers(response):
                raise UnexpectedReply(f"{type(response).variant_name} does not answer Generate")

    def _show(self, source: dict[int, int], channel: int, text: str) -> Iterator[Chunk]:
        """What of a source's text no source has shown yet: both bring the same text of a channel, in order."""
        kind = KINDS.get(channel)
        if kind is None:
            return
        reached = source[channel] = source.get(channel, 0) + len(text)
        ahead = reached - self._shown.get(channel, 0)
        if ahead > 0:
            self._shown[channel] = reached
            yield Chunk(kind, text[-ahead:])


class FollowReader:
    """A subscription without its connection: the request that starts it, events and chunks out of the replies."""

    def __init__(self, session: int, cursor: int, previews: bool) -> None:
        self.request = api.SubscribeRequest(session, cursor, previews)
        self.reason: str | None = None
        self._number: int | None = None

    def stop(self) -> api.Request | None:
        """The request that ends it; none when there is nothing to end."""
        return None if self._number is None or self.reason is not None else api.UnsubscribeRequest(self._number)

    def feed(self, response: api.Response | None) -> Iterator[ev.Event | Chunk]:
        """What a response brings; `reason` is set by the last one. None: the connection ended. Raises ClientError."""
        match response:
            case None:
                raise ConnectionLost("the server closed the connection of one who followed a session")
            case api.SubscribedResponse(number):
                self._number = number
            case api.SubEventResponse(_, event):
                yield event
            case api.SubProvisionalResponse(_, channel, text) if (kind := KINDS.get(channel)) is not None:
                yield Chunk(kind, text)
            case api.SubEndedResponse(_, reason):
                self.reason = reason
            case api.UnsubscribedResponse():
                pass
            case _ if answers(response):
                raise UnexpectedReply(f"{type(response).variant_name} does not answer Subscribe")
