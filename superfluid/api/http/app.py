"""The HTTP listener: the app's frame (checks, errors, bodies) and hypercorn under it, on trio.

What the server libraries do not do by themselves is done here, on their public interfaces: the end of a response that
a disconnect would cut, a client that reads nothing, a drain (spec: http; the reasons are in docs/architecture.md).
"""

import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.config
import hypercorn.trio
import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from superfluid.api.http.errors import SERVER, ApiError, draining
from superfluid.api.http.security import Access, bearer_token

MAX_BODY = 100 * 1024 * 1024  # bytes; published as max_request_bytes
SLOW_BODY = 30.0  # seconds a body may bring nothing
IDLE = 30.0  # seconds for a request's head, and for an idle kept-alive connection
UNREAD = 60.0  # seconds a client may take no byte of its answer
BACKLOG = 1024

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
UNLIMITED_ROUTES = {"/health"}  # answer without a credential


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.envelope(), error.status, error.headers)


def make_app(access: Access, is_draining: Callable[[], bool]) -> QuartTrio:
    """An app without routes: every request is checked, and every error has its envelope."""
    app = QuartTrio("superfluid", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.config["RESPONSE_TIMEOUT"] = None  # a stream ends when it ends
    app.config["BODY_TIMEOUT"] = None  # `read_body` limits silence, not the whole
    app.url_map.strict_slashes = False

    @app.before_request
    async def check() -> Response | None:
        headers = request.headers
        shown = bearer_token(headers.get("Authorization")), headers.get("X-Api-Key")
        try:
            access.check_place(headers.get("Host"), headers.get("Origin"), shown[0] or shown[1])
            if request.path not in UNLIMITED_ROUTES:
                access.check_credential(*shown)
            if is_draining() and request.path not in UNLIMITED_ROUTES:
                raise draining()
        except ApiError as error:
            return error_response(error)
        return None

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return error_response(error)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return error_response(ApiError(413, "Request body too large", code="payload_too_large"))

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or 500
        if status == 404:
            message = f"no such route: {request.method} {request.path}"
        elif status == 405:
            message = f"{request.path} does not take {request.method}"
        else:
            message = error.description or error.name
        response = error_response(ApiError(status, message))
        for name, value in error.get_headers():
            if name.lower() == "allow":
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        app.logger.error("request failed: %s %s", request.method, request.path, exc_info=error)
        return error_response(ApiError(500, f"internal error: {type(error).__name__}", kind=SERVER))

    return app


async def read_body() -> bytes:
    """The request's body. Raises ApiError 408 when it brings nothing for a while, 413 when it is too large."""
    parts: list[bytes] = []
    size = 0
    body = request.body.__aiter__()
    while True:
        with trio.move_on_after(SLOW_BODY) as limit:
            try:
                part = await anext(body)
            except StopAsyncIteration:
                return b"".join(parts)
        if limit.cancelled_caught:
            raise ApiError(
                408, f"the request's body brought nothing for {SLOW_BODY:g} s", headers={"Connection": "close"}
            )
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(413, "Request body too large", code="payload_too_large")
        parts.append(part)


class Shielded:
    """An ASGI app around the app: the message that ends a response is sent whole.

    After it the server tells the app that the client is gone and then closes the connection; the app answers the
    disconnect by cancelling the very task that is inside that close, which would never send the FIN.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._count += 1
        task = trio.lowlevel.current_task()
        task.name = f"request:{self._count} {scope['method']} {scope['path']}"

        async def send_shielded(message: dict[str, Any]) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            with trio.CancelScope(shield=last):
                await send(message)

        await self._app(scope, receive, send_shielded)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose accepted connections drop a client that takes no byte for `UNREAD` seconds.

    Raises OSError when the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def serve(
    app: QuartTrio,
    listener: socket.socket,
    shutdown: trio.Event,
    drain_timeout: float,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests on `listener` until `shutdown`, then let those in flight finish for `drain_timeout` seconds.

    The server takes the listener over and closes it.
    """
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.keep_alive_timeout = IDLE
    config.graceful_timeout = drain_timeout
    config.h11_max_incomplete_size = 64 * 1024
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    await hypercorn.trio.serve(
        Shielded(app),
        config,
        shutdown_trigger=shutdown.wait,
        mode="asgi",
        task_status=task_status,
    )
