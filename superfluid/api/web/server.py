"""The web listener: its routes, and the task that serves them."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from superfluid.api.fanout import Wakes
from superfluid.api.http.app import json_response
from superfluid.api.http.errors import ApiError
from superfluid.api.http.listener import Listener, listen, serve, server_config
from superfluid.api.http.requests import Receive, Requests, Scope, Send
from superfluid.api.web import rpc
from superfluid.api.web.checks import Checks, WebRefusal, mint_token
from superfluid.api.web.frames import answer_violations
from superfluid.api.web.rpc import Web, refusal_response
from superfluid.api.web.websocket import Events, refuse, serve_websocket
from superfluid.daemon.daemon import Daemon
from superfluid.link.session_api import MAX_FRAME

CUT = 1.0  # seconds in which replies that are cut send their error, and WebSockets what is left for their clients
HEALTH = "/web/health"
WEBSOCKET = "/web/ws"
AHEAD = 1  # messages the server reads ahead of a request's task: `Queue` bounds what waits

Route = Callable[[Web], Awaitable[Response]]


def build_app(web: Web, checks: Checks) -> QuartTrio:
    """The routes that are no WebSocket."""
    app = QuartTrio("superfluid", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_FRAME
    app.config["RESPONSE_TIMEOUT"] = None  # a stream ends when it ends
    app.config["BODY_TIMEOUT"] = None  # `read_body` limits silence, not the whole
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # no preflight answers
    routes: dict[str, Route] = {"/web/rpc": rpc.rpc, "/web/stream": rpc.stream}
    for path, route in routes.items():
        app.add_url_rule(path, path, partial(route, web), methods=["POST"])

    async def health() -> Response:
        return json_response({"status": "ok"})

    async def no_handshake() -> Response:
        return refusal_response(426, f"{WEBSOCKET} is a WebSocket", {"Upgrade": "websocket"})

    app.add_url_rule(HEALTH, HEALTH, health, methods=["GET"])
    app.add_url_rule(WEBSOCKET, WEBSOCKET, no_handshake, methods=["GET"])

    @app.before_request
    async def check() -> Response | None:
        headers = request.scope["headers"]
        try:
            if request.path == WEBSOCKET:
                checks.handshake(headers)
            elif request.path != HEALTH:
                checks.request(headers)
        except WebRefusal as error:
            return refusal_response(error.status, error.message)
        return None

    @app.errorhandler(WebRefusal)
    async def refused(error: WebRefusal) -> Response:
        return refusal_response(error.status, error.message)

    @app.errorhandler(ApiError)
    async def not_read(error: ApiError) -> Response:
        return refusal_response(error.status, error.message, error.headers)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return refusal_response(413, f"the body is too large; {MAX_FRAME} bytes are the most")

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        allow = {name: value for name, value in error.get_headers() if name.lower() == "allow"}
        what = f"{request.method} {request.path}"
        message = {404: f"no such route: {what}", 405: f"{what} is not taken"}.get(error.code or 500)
        return refusal_response(error.code or 500, message or error.description or error.name, allow)

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        app.logger.error("request failed: %s %s", request.method, request.path, exc_info=error)
        return refusal_response(500, f"internal error: {type(error).__name__}")

    return app


class WebRequests(Requests):
    """Requests of the web listener, WebSockets among them."""

    def __init__(self, web: Web, checks: Checks, listener: Listener) -> None:
        super().__init__(build_app(web, checks), web.daemon.answering)
        self._web = web
        self._checks = checks
        self._listener = listener
        self._events = Events()
        self.wakes = Wakes()
        self._connections = 0
        self.stopping = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        if scope["path"] != WEBSOCKET:
            await receive()
            await refuse(send, WebRefusal(404, f"no such route: {scope['path']}"))
            return
        self._connections += 1
        trio.lowlevel.current_task().name = f"web-connection:{self._connections}"

        def gone() -> bool:
            return self._listener.gone(tuple(scope["client"]))

        daemon, carry = self._web.daemon, self.wakes.carry
        with self.running():
            await serve_websocket(daemon, self._checks, self._events, carry, self.stopping, gone, scope, receive, send)


async def run_web(
    daemon: Daemon,
    host: str,
    port: int,
    token_file: Path,
    origins: Sequence[str] = (),
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Mint a token, listen, and answer until cancelled; reports the bound port. Raises OSError.

    When the daemon drains, it takes no new connections. Cancelled, it ends the replies that still run with an error,
    and tells those who follow a session that the server stops.
    """
    answer_violations()
    listener = Listener(listen(host, port))
    web = Web(daemon)
    requests = WebRequests(web, Checks(mint_token(token_file), origins), listener)
    config = server_config()
    config.max_app_queue_size = AHEAD
    config.websocket_max_message_size = MAX_FRAME
    shutdown = trio.Event()
    serving = trio.CancelScope(shield=True)

    async def serve_shielded(task_status: trio.TaskStatus[None]) -> None:
        with serving:
            await serve(requests, listener, shutdown, task_status, config)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.wakes.run, name="web-deliveries")
        await nursery.start(serve_shielded, name="web-listener")
        task_status.started(listener.port)
        try:
            await daemon.drain_started.wait()
            listener.stop()
            await trio.sleep_forever()  # those who are connected stay
        finally:
            web.cut()
            requests.stopping.set()
            with trio.move_on_after(CUT, shield=True):
                await requests.none()
            listener.drop_connections()
            shutdown.set()
            serving.shield = False
