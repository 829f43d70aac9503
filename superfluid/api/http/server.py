"""The routes of the HTTP listener, tied to their app, and the task that serves them."""

from collections.abc import Awaitable, Callable
from functools import partial

import trio
from quart import Response
from quart_trio import QuartTrio

from superfluid.api.http import completions, models, openai
from superfluid.api.http.app import make_app
from superfluid.api.http.context import Api, HttpSettings
from superfluid.api.http.listener import Listener, listen, serve
from superfluid.api.http.requests import Requests
from superfluid.api.http.security import Access
from superfluid.daemon.daemon import Daemon

FLUSH = 5.0  # seconds of a drain in which clients may take what is left of their answers, once nothing generates
MOMENT = 0.01  # seconds that tell whether a model is idle
CUT = 1.0  # seconds in which answers that are cut send their error
STOPPED = "the server stopped before the answer was complete"

Route = Callable[..., Awaitable[Response]]

ROUTES: list[tuple[str, str, Route]] = [
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/<path:name>", models.get_model),
    ("GET", "/health", models.health),
    ("GET", "/props", models.props),
    ("POST", "/slots/<slot>/save", models.retired),
    ("POST", "/slots/<slot>/restore", models.retired),
    ("GET", "/metrics", models.metrics),
    ("GET", "/v1/metrics", models.metrics),
    ("GET", "/v1/tasks", models.task_dump),
    ("POST", "/v1/tokenize", models.tokenize),
    ("POST", "/v1/detokenize", models.detokenize),
]


def build_app(api: Api, access: Access) -> QuartTrio:
    app = make_app(access, lambda: api.daemon.draining)
    for method, path, route in ROUTES:
        app.add_url_rule(path, f"{method} {path}", partial(route, api), methods=[method])
    return app


async def run_http(
    daemon: Daemon,
    host: str,
    port: int,
    access: Access,
    settings: HttpSettings,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen and serve until the daemon has drained; reports the bound port. Raises CannotListen.

    Cancelled, it ends the answers that still run with an error before it goes.
    """
    listener = Listener(listen(host, port))
    api = Api(daemon, settings)
    requests = Requests(build_app(api, access), daemon.answering)
    shutdown = trio.Event()
    serving = trio.CancelScope(shield=True)

    async def serve_shielded(task_status: trio.TaskStatus[None]) -> None:
        with serving:
            await serve(requests, listener, shutdown, task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_shielded, name="listener")
        nursery.start_soon(api.beat, name="silences")
        task_status.started(listener.port)
        try:
            await daemon.drain_started.wait()
            listener.stop()
            await _answered(daemon, requests)
            nursery.cancel_scope.cancel()
        except trio.Cancelled:
            api.cut(STOPPED)
            with trio.move_on_after(CUT, shield=True):
                await requests.none()
            raise
        finally:
            listener.drop_connections()
            shutdown.set()
            serving.shield = False


async def _answered(daemon: Daemon, requests: Requests) -> None:
    """Wait until all requests are answered, or those left over belong to clients that do not take their answers."""
    while True:
        for model in daemon.everything:
            await model.idle()
        with trio.move_on_after(FLUSH):
            await requests.none()
            return
        with trio.move_on_after(MOMENT) as moment:
            for model in daemon.everything:
                await model.idle()
        if not moment.cancelled_caught:
            return
