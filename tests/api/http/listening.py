"""Servers in this process with their HTTP listener, on scripted models and real workers."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from superfluid.api.http.context import HttpSettings
from superfluid.api.http.security import Access
from superfluid.api.http.server import run_http
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import RuntimeCatalog
from superfluid.observe.metrics import Metrics

HOST = "127.0.0.1"
WINDOW = 4096
START_SECONDS = 180.0
END_SECONDS = 60.0

T = TypeVar("T")


@attrs.frozen
class Site:
    """A daemon and where its listener is."""

    daemon: Daemon
    port: int

    @property
    def model(self) -> Model:
        return self.daemon.default

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def make_daemon(home: Path, paths: Sequence[Path], *, max_batch: int = 4, window: int = WINDOW) -> Daemon:
    """A daemon of the model files, each with its own store. Blocks: it asks the runtime about each."""
    catalog = RuntimeCatalog(home)
    metrics = Metrics("test")
    models = [
        Model(
            ModelConfig(
                name=path.stem,
                path=path,
                runtime=catalog.check(catalog.pick(path).id, path),
                store=home / "sessions" / path.stem,
                max_context=window,
                max_batch=max_batch,
            ),
            metrics.model(path.stem),
        )
        for path in paths
    ]
    return Daemon(home, models, metrics)


@asynccontextmanager
async def listening(
    home: Path,
    *paths: Path,
    max_batch: int = 4,
    api_key: str | None = None,
    settings: HttpSettings | None = None,
) -> AsyncIterator[Site]:
    """Serve models over HTTP on a free port."""
    daemon = await trio.to_thread.run_sync(lambda: make_daemon(home, paths, max_batch=max_batch))
    access = Access(HOST, api_key)
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        port = await nursery.start(run_http, daemon, HOST, 0, access, settings or HttpSettings())
        yield Site(daemon, port)
        nursery.cancel_scope.cancel()


class SiteThread:
    """A site on a trio loop of its own, so that blocking clients can talk to it and many tests share it."""

    def __init__(self, home: Path, paths: Sequence[Path], api_key: str | None = None) -> None:
        self._home, self._paths, self._api_key = home, paths, api_key
        self._ready = threading.Event()
        self._stop = trio.Event()
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken
        self.site: Site

    def start(self) -> Site:
        self._thread.start()
        assert self._ready.wait(START_SECONDS), "the site did not come up"
        if self._error is not None:
            raise self._error
        return self.site

    def stop(self) -> None:
        """Raises what the site failed with: nothing a test does may bring it down."""
        if self._error is None:
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(END_SECONDS)
        if self._error is not None:
            raise self._error

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run something on the site's loop."""
        return trio.from_thread.run(function, trio_token=self._token)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._error = error
        self._ready.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with listening(self._home, *self._paths, api_key=self._api_key) as site:
            self.site = site
            self._ready.set()
            await self._stop.wait()
