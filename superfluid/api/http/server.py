"""The routes of the HTTP listener, tied to their app, and the task that serves them."""

from collections.abc import Awaitable, Callable

import trio
from quart import Response
from quart_trio import QuartTrio

from superfluid.api.http import completions, models, openai
from superfluid.api.http.app import listen, make_app, serve
from superfluid.api.http.context import Api, HttpSettings
from superfluid.api.http.security import Access
from superfluid.daemon.daemon import Daemon

Route = Callable[[Api], Awaitable[Response]]

ROUTES: list[tuple[str, str, Route]] = [
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/health", models.health),
    ("GET", "/metrics", models.metrics),
    ("GET", "/v1/metrics", models.metrics),
    ("GET", "/v1/tasks", models.task_dump),
    ("POST", "/v1/tokenize", models.tokenize),
    ("POST", "/v1/detokenize", models.detokenize),
]


def build_app(api: Api, access: Access) -> QuartTrio:
    app = make_app(access, lambda: api.daemon.draining)
    for method, path, route in ROUTES:
        app.add_url_rule(path, f"{method} {path}", _bind(api, route), methods=[method])

    @app.get("/v1/models/<path:name>")
    async def get_model(name: str) -> Response:
        return await models.get_model(api, name)

    return app


def _bind(api: Api, route: Route) -> Callable[[], Awaitable[Response]]:
    async def view() -> Response:
        return await route(api)

    return view


async def run_http(
    daemon: Daemon,
    host: str,
    port: int,
    access: Access,
    settings: HttpSettings,
    drain_timeout: float,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen and serve until the daemon drains; reports the bound port. Raises OSError when it cannot bind."""
    listener = listen(host, port)
    bound = listener.getsockname()[1]
    async with trio.open_nursery() as nursery:
        api = Api(daemon, nursery, settings)
        app = build_app(api, access)
        await nursery.start(serve, app, listener, daemon.drain_started, drain_timeout, name="listener")
        task_status.started(bound)
