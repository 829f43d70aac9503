"""The session API over HTTP, without the connection: /web/rpc for a request, /web/stream for a generation."""

import re
from abc import ABC, abstractmethod
from collections import deque
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import attrs
import h11
import orjson

from superfluid.client.errors import Misuse, UnexpectedReply
from superfluid.client.wire import Wire, payload
from superfluid.link import ids, postcard, session_api as api
from superfluid.link.events import Event, Generated, ToolParseFailure, ToolUse

RPC, STREAM = "/web/rpc", "/web/stream"
DATA = b"data: "
DONE = b"[DONE]"
DELTAS = (Generated, ToolUse, ToolParseFailure)
NO_SUBSCRIPTION = 0  # server's ids count from 1
HTTP_PORT = 80
HEADER_VALUE = re.compile(r"[!-~]+")


@attrs.frozen
class WebAddress:
    """Where a server is on the web."""

    url: str
    host: str
    port: int
    authority: str  # as it stands in a Host header

    @classmethod
    def of(cls, url: str) -> "WebAddress":
        """Raises Misuse for anything but `http://host[:port]`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or HTTP_PORT
        except (ValueError, AttributeError):  # brackets, a port that is no number, no text at all
            host = None
        if host is None or parts.scheme != "http":
            raise Misuse(f"a server on the web is named like http://127.0.0.1:8454, got {url!r}")
        return cls(url, host, port, header_value("the URL", parts.netloc))


def header_value(what: str, value: str) -> str:
    """A value that stands in an HTTP header: visible ASCII. Raises Misuse, which does not tell the value."""
    if HEADER_VALUE.fullmatch(value) is None:
        raise Misuse(f"{what} holds what no HTTP header can carry: it is visible ASCII characters, on one line")
    return value


def json_of(request: api.Request) -> bytes:
    """A request in its JSON form. Raises Misuse for one that does not encode or is over 64 MiB."""
    payload(request)  # the types and ranges of its fields
    try:
        body = orjson.dumps(postcard.to_json(request), default=ids.json_of)
    except (postcard.PostcardError, TypeError, ValueError) as error:
        raise Misuse(str(error)) from error
    if len(body) > api.MAX_FRAME:
        raise Misuse(f"a request of {len(body)} bytes; {api.MAX_FRAME} is the most")
    return body


class HttpWire(Wire):
    """One kept-alive HTTP connection, one exchange at a time. A Generate is a stream, and a Subscribe with previews
    right before it asks for its previews; other subscriptions need a WebSocket."""

    def __init__(self, address: WebAddress, token: str) -> None:
        self._address = address
        header_value("the token", token)
        self._headers = [
            ("Host", address.authority),
            ("Authorization", f"Bearer {token}"),
            ("X-Superfluid-CSRF", token),
            ("Content-Type", "application/json"),
        ]
        self._http = h11.Connection(h11.CLIENT)
        self._asked: deque[tuple[str, bytes]] = deque()
        self._answers: deque[api.Response] = deque()
        self._reply: _Reply | None = None
        self._streams = False  # whether the exchange under way is a generation's
        self._ended = False

    def ask(self, *requests: api.Request) -> None:
        previews = False
        asked: list[tuple[str, bytes]] = []
        for request, following in zip(requests, (*requests[1:], None), strict=True):
            match request, following:
                case api.SubscribeRequest(session, _, True), api.GenerateRequest(same) if session == same:
                    previews = True
                case api.GenerateRequest(session, max_tokens), _:
                    json_of(request)
                    stream = {"session": session, "max_tokens": max_tokens, "provisional": previews}
                    asked.append((STREAM, orjson.dumps(stream)))
                    previews = False
                case _:
                    asked.append((RPC, json_of(request)))
        self._asked += asked

    def outgoing(self) -> bytes:
        if not self._asked or self._http.our_state is not h11.IDLE:
            return b""
        path, body = self._asked.popleft()
        self._streams = path == STREAM
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        events = (h11.Request(method="POST", target=path, headers=headers), h11.Data(body), h11.EndOfMessage())
        return b"".join(self._http.send(event) or b"" for event in events)

    def feed(self, data: bytes) -> None:
        self._ended |= not data
        self._http.receive_data(data)

    def next(self) -> api.Response | None:
        while not self._answers:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._ended:
                    return None
                raise UnexpectedReply(f"{self._address.url} does not speak HTTP: {error}") from error
            match event:
                case h11.Response():
                    kind = _Stream if self._streams and event.status_code == HTTPStatus.OK else _Single
                    self._reply = kind(self._address.url, event.status_code)
                case h11.Data() if self._reply is not None:
                    self._answers += self._reply.read(bytes(event.data))
                case h11.EndOfMessage() if self._reply is not None:
                    self._answers.append(self._reply.end())
                    self._reply = None
                    if self._http.our_state is self._http.their_state is h11.DONE:
                        self._http.start_next_cycle()
                case h11.InformationalResponse():
                    pass
                case _:  # more bytes are wanted, or it has ended
                    return None
        return self._answers.popleft()

    @property
    def idle(self) -> bool:
        states = self._http.our_state, self._http.their_state
        return not self._asked and not self._answers and states == (h11.IDLE, h11.IDLE) and not self._ended


class _Reply(ABC):
    """The body of one reply."""

    def __init__(self, url: str, status: int) -> None:
        self._url, self._status = url, status
        self._body = bytearray()

    def read(self, data: bytes) -> list[api.Response]:
        """The responses that a piece of the body completes, but for the last."""
        self._body += data
        return []

    @abstractmethod
    def end(self) -> api.Response:
        """The last response, when the body is whole. Raises UnexpectedReply."""


class _Single(_Reply):
    """One response as JSON; a refusal of the listener is an Err too."""

    def end(self) -> api.Response:
        try:
            value = orjson.loads(self._body)
        except ValueError as error:
            raise UnexpectedReply(
                f"{self._url} answered {self._status} without JSON; is it the --web address?"
            ) from error
        return response(value, self._url)


class _Stream(_Reply):
    """Server-sent events: what a Generate, and a subscription to its previews, would bring over the socket."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(url, status)
        self._events: list[Event] = []
        self._last: api.Response | None = None

    def read(self, data: bytes) -> list[api.Response]:
        *lines, rest = (bytes(self._body) + data).split(b"\n")
        self._body = bytearray(rest)
        made: list[api.Response] = []
        for line in lines:
            if line.startswith(DATA) and (text := line[len(DATA) :]) != DONE:
                made += self._message(orjson.loads(text))
        return made

    def end(self) -> api.Response:
        if self._last is None:
            raise UnexpectedReply(f"{self._url} ended a stream without telling how the generation ended")
        return self._last

    def _message(self, message: Any) -> list[api.Response]:
        match message:
            case {"provisional": {"channel": channel, "text": text}}:
                return [api.SubProvisionalResponse(NO_SUBSCRIPTION, channel, text)]
            case {"committed": committed}:
                event = postcard.from_json(Event, committed)
                if not isinstance(event.body, DELTAS):
                    return []
                self._events.append(event)
                return [api.DeltaResponse(event)]
            case {"done": counts}:
                self._last = api.GeneratedResponse(events=self._events, **counts)
            case {"error": told}:
                self._last = api.ErrResponse(told)
            case other:
                raise UnexpectedReply(f"{str(other)[:200]} is no message of a stream")
        return []


def response(value: Any, url: str) -> api.Response:
    """A response out of its JSON form, as `url` answered it. Raises UnexpectedReply."""
    try:
        return postcard.from_json(api.Response, value)
    except postcard.PostcardError as error:
        raise UnexpectedReply(
            f"{url} answered with no response of the session API ({error}); is it the --web address, `api-web` when "
            "the server starts?"
        ) from error
