"""The blocking client over `--web`: the same sessions, asked over HTTP."""

import http.client
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from superfluid.client.address import default_home
from superfluid.client.client import Client, Connection, at_rest
from superfluid.client.errors import ConnectionLost, NotReached, UnexpectedReply
from superfluid.link import postcard, session_api as api
from superfluid.link.events import Event, Generated, ToolParseFailure, ToolUse

DATA = b"data: "
DONE = b"[DONE]"
DELTAS = (Generated, ToolUse, ToolParseFailure)
NO_SUBSCRIPTION = 0  # server's ids count from 1


class WebConnection(Connection):
    """One kept-alive HTTP connection. A Generate is a stream; a Subscribe before it in the same `send` asks for its
    previews. Other requests are answered one by one; subscriptions of their own need a WebSocket."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"a server on the web is named like http://127.0.0.1:8454, got {url!r}")
        self._url = url
        self._http = http.client.HTTPConnection(parts.hostname, parts.port or http.client.HTTP_PORT)
        self._headers = {
            "Authorization": f"Bearer {token}",
            "X-Superfluid-CSRF": token,
            "Content-Type": "application/json",
        }
        self._answers: deque[api.Response] = deque()
        self._stream: Iterator[api.Response] | None = None
        try:
            self._http.connect()
        except OSError as error:
            raise NotReached(f"no server answers at {url}: {error.strerror or error}") from None

    def send(self, *requests: api.Request) -> None:
        """Ask, and take the answers of all but a Generate, which must come last. Raises ConnectionLost."""
        previews = any(isinstance(request, api.SubscribeRequest) and request.provisional for request in requests)
        last = requests[-1]
        if isinstance(last, api.GenerateRequest):
            asked = {"session": last.session, "max_tokens": last.max_tokens, "provisional": previews}
            self._stream = self._generate(self._post("/web/stream", asked))
            return
        for request in requests:
            reply = self._post("/web/rpc", postcard.to_json(request))
            self._answers.append(_response(self._read(reply)))

    def receive(self) -> api.Response | None:
        """The next response, whatever it is; none when the server has closed the connection."""
        if self._answers:
            return self._answers.popleft()
        if self._stream is None:
            return None
        try:
            return next(self._stream, None)
        except (OSError, http.client.HTTPException):
            return None

    @property
    def stale(self) -> bool:
        """Whether it cannot be asked again: closed by the server, or with bytes nobody asked for."""
        return self._http.sock is None or self._stream is not None or not at_rest(self._http.sock.fileno())

    def close(self) -> None:
        """Let it go; a generation that runs over it is cancelled."""
        self._http.close()

    def _post(self, path: str, body: Any) -> http.client.HTTPResponse:
        try:
            self._http.request("POST", path, orjson.dumps(body), self._headers)
            return self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(f"{self._url} closed the connection: {error}") from error

    def _read(self, reply: http.client.HTTPResponse) -> Any:
        try:
            return orjson.loads(reply.read())
        except ValueError as error:
            raise UnexpectedReply(
                f"{self._url} answered {reply.status} without JSON; is it the --web address?"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(f"{self._url} closed the connection: {error}") from error

    def _generate(self, reply: http.client.HTTPResponse) -> Iterator[api.Response]:
        """The responses that a Generate, and a subscription to its previews, would bring over the socket."""
        if reply.status != http.HTTPStatus.OK:
            yield _response(self._read(reply))
            return
        events: list[Event] = []
        with reply:
            for line in reply:
                if not line.startswith(DATA) or (text := line[len(DATA) :].rstrip(b"\n")) == DONE:
                    continue
                match orjson.loads(text):
                    case {"provisional": {"channel": channel, "text": text}}:
                        yield api.SubProvisionalResponse(NO_SUBSCRIPTION, channel, text)
                    case {"committed": committed}:
                        event = postcard.from_json(Event, committed)
                        if isinstance(event.body, DELTAS):
                            events.append(event)
                            yield api.DeltaResponse(event)
                    case {"done": counts}:
                        yield api.GeneratedResponse(events=events, **counts)
                    case {"error": message}:
                        yield api.ErrResponse(message)
                    case other:
                        raise UnexpectedReply(f"{str(other)[:200]} is no message of a stream")
        self._stream = None


def _response(value: Any) -> api.Response:
    try:
        return postcard.from_json(api.Response, value)
    except postcard.PostcardError as error:
        raise UnexpectedReply(f"the server's answer does not decode: {error}") from error


class WebClient(Client):
    """A running server, at the `api-web` address that it says when it starts. As Client in all else.

    `token` is the token, or the file it stands in (`web-token` of the sessions directory), which is read again for
    each connection: a server that starts again has another.
    """

    def __init__(self, url: str, token: str | os.PathLike[str] | None = None) -> None:
        super().__init__(default_home())
        self.url = url
        self._token = default_home() / "sessions" / "web-token" if token is None else token

    def connect(self) -> WebConnection:
        """A connection of one's own, for what this class has no method for; the caller closes it."""
        token = self._token
        if not isinstance(token, str):
            try:
                token = Path(token).read_text().strip()
            except OSError as error:
                raise NotReached(f"the token of {self.url} cannot be read: {token}: {error.strerror}") from None
        return WebConnection(self.url, token)
