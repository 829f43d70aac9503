"""POST /web/rpc: one request and its reply. POST /web/stream: one generation as server-sent events."""

import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs
import orjson
import trio
from quart import Response, request

from superfluid.api.http import sse
from superfluid.api.http.access_log import log_refusal
from superfluid.api.http.app import json_response, read_body
from superfluid.api.http.requests import on_end
from superfluid.api.session_api import Connection, ended, refusal
from superfluid.api.web.checks import WebRefusal
from superfluid.daemon.daemon import Daemon
from superfluid.link import postcard, session_api as api
from superfluid.link.events import Generated, ToolParseFailure, ToolResult, ToolUse
from superfluid.scheduler.generation import Committed, Ended, Generation, Item, Provisional

SILENCE = 15.0  # seconds without an event after which a comment shows that the stream lives
OVER_WEBSOCKET = (api.GenerateRequest, api.SubscribeRequest, api.UnsubscribeRequest)
SHOWN = (Generated, ToolUse, ToolResult, ToolParseFailure)
STOPPED = "generation failed: the server stopped before the reply was complete"
RPC = "/web/rpc"  # all of it is one client
LEAST_RETRY = 1  # second of Retry-After
INTEGERS = {"session": 64, "max_tokens": 32}  # bits


@attrs.define
class Web:
    """What every route of one listener has at hand."""

    daemon: Daemon
    streams: "set[Stream]" = attrs.Factory(set)

    def cut(self) -> None:
        """End every stream with an error now: the server stops."""
        for running in self.streams:
            running.cut()


def refusal_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    log_refusal(status, None)
    return json_response({"Err": {"message": message}}, status, headers)


async def read_json() -> Any:
    """The JSON of the current request's body. Raises WebRefusal 415 and 400, and what `read_body` raises."""
    kind = request.headers.get("Content-Type", "").split(";", 1)[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise WebRefusal(415, f"the body must be sent as application/json, not {kind or 'without a Content-Type'}")
    try:
        return orjson.loads(await read_body(api.MAX_FRAME))
    except ValueError as error:
        raise WebRefusal(400, f"the body is not JSON: {error}") from None


async def rpc(web: Web) -> Response:
    """Answer one request."""
    value = await read_json()
    try:
        asked = postcard.from_json(api.Request, value)
    except postcard.PostcardError as error:
        raise WebRefusal(422, f"the body is no request: {error}") from None
    if isinstance(asked, OVER_WEBSOCKET):
        name = type(asked).variant_name
        route = "/web/stream or /web/ws" if isinstance(asked, api.GenerateRequest) else "/web/ws"
        return json_response(postcard.to_json(api.ErrResponse(f"protocol: {name} needs a connection: use {route}")))
    replies: list[api.Response] = []

    async def keep(*responses: api.Response) -> None:
        replies.extend(responses)

    async with trio.open_nursery() as nursery:
        await Connection(web.daemon, nursery, keep, client=RPC).handle(asked)
    (reply,) = replies
    if api.is_long(reply):
        text = await trio.to_thread.run_sync(api.json_text, reply)
        return Response(text, content_type="application/json")
    body = postcard.to_json(reply)
    if isinstance(reply, api.ThrottledResponse):
        wait = max(LEAST_RETRY, math.ceil(reply.retry_after_ms / 1000))
        return json_response(body, 429, {"Retry-After": str(wait)})
    return json_response(body)


def read_stream_request(value: Any) -> tuple[int, int, bool]:
    """Session, max_tokens, provisional. Raises WebRefusal 422."""
    if not isinstance(value, dict):
        raise WebRefusal(422, "the body must be an object with session and max_tokens")
    numbers = []
    for name, bits in INTEGERS.items():
        number = value.get(name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << bits:
            raise WebRefusal(422, f"{name} must be a number from 0 to 2^{bits} - 1, got {json.dumps(number)[:80]}")
        numbers.append(number)
    provisional = value.get("provisional", False)
    if not isinstance(provisional, bool):
        raise WebRefusal(422, f"provisional must be true or false, got {json.dumps(provisional)[:80]}")
    return numbers[0], numbers[1], provisional


async def stream(web: Web) -> Response:
    """Generate, and send what is committed as it is."""
    session, max_tokens, provisional = read_stream_request(await read_json())
    reply = Stream(web, session, max_tokens, provisional)
    on_end(reply.close)
    return Response(reply.events(), headers=sse.HEADERS)


class Stream:
    """One generation as server-sent events; `close` stops it when the request is over."""

    def __init__(self, web: Web, session: int, max_tokens: int, provisional: bool) -> None:
        self._web = web
        self._asked = session, max_tokens, provisional
        self._generation: Generation | None = None
        self._news = trio.Event()
        self._cut = False
        web.streams.add(self)

    def close(self) -> None:
        self._web.streams.discard(self)
        if self._generation is not None:
            self._generation.notify = None
            self._generation.cancel()

    def cut(self) -> None:
        self._cut = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """The body, piece by piece."""
        try:
            generation = await self._start()
            over = False
            while not over:
                items = await self._items(generation)
                over = any(isinstance(item, Ended) for item in items)
                if not items:
                    yield sse.COMMENT
                elif messages := [sse.event(message) for item in items for message in _messages(item)]:
                    yield b"".join(messages)
        except StreamFailed as failure:
            yield sse.event({"error": str(failure)})
        yield sse.DONE

    async def _start(self) -> Generation:
        if self._web.daemon.draining:
            raise StreamFailed("generation failed: the server is stopping")
        try:
            self._generation = await self._web.daemon.default.sessions.generate(*self._asked)
        except Exception as error:
            raise StreamFailed(refusal(api.GenerateRequest.variant_name, error)) from error
        self._generation.notify = self._wake
        return self._generation

    async def _items(self, generation: Generation) -> list[Item]:
        """What is there, once something is; nothing after a silence. Raises StreamFailed when the server stops."""
        items = generation.take()
        if not items:
            self._news = trio.Event()
            with trio.move_on_after(SILENCE):
                await self._news.wait()
            items = generation.take()
        if self._cut:
            raise StreamFailed(STOPPED)
        return items


class StreamFailed(Exception):
    """A stream that ends with this error."""


def _messages(item: Item) -> Iterator[dict[str, Any]]:
    match item:
        case Provisional():
            yield {"provisional": {"channel": item.channel, "text": item.text}}
        case Committed():
            for event in item.events:
                if isinstance(event.body, SHOWN):
                    yield {"committed": postcard.to_json(event)}
        case Ended():
            reply = ended(item, [])
            if isinstance(reply, api.ErrResponse):
                yield {"error": reply.message}
            else:
                counts = postcard.to_json(reply)[type(reply).variant_name]
                del counts["events"]
                yield {"done": counts}
