"""Servers in this process, on scripted models and real workers, for tests of the session socket and its users."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from superfluid.api.socket import run_socket
from superfluid.client import Client
from superfluid.client.trio_client import AsyncClient, AsyncConnection
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import RuntimeCatalog
from superfluid.observe.metrics import Metrics

WINDOW = 4096
START_SECONDS = 120.0

T = TypeVar("T")


@attrs.frozen
class Server:
    """What a test sees of the server it talks to."""

    daemon: Daemon
    path: Path

    @property
    def model(self) -> Model:
        return self.daemon.default

    def client(self) -> AsyncClient:
        return AsyncClient(self.path)

    def blocking_client(self) -> Client:
        return Client(self.path)

    async def connect(self) -> AsyncConnection:
        return await AsyncConnection.open(self.path)


@asynccontextmanager
async def serving(home: Path, model: Path, *, window: int = WINDOW, max_batch: int = 4) -> AsyncIterator[Server]:
    """Serve `model`; its sessions and its socket are in `home`."""
    catalog = RuntimeCatalog(home)
    runtime = await trio.to_thread.run_sync(lambda: catalog.check(catalog.pick(model).id, model))
    metrics = Metrics("test")
    config = ModelConfig(
        name=model.stem,
        path=model,
        runtime=runtime,
        store=home / "sessions",
        max_context=window,
        max_batch=max_batch,
    )
    daemon = Daemon(home, [Model(config, metrics.model(model.stem))], metrics)
    path = home / "s.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        await nursery.start(run_socket, daemon, path)
        yield Server(daemon, path)
        nursery.cancel_scope.cancel()


class ServerThread:
    """A server on a trio loop of its own, so that many tests, blocking ones too, can share it."""

    def __init__(self, home: Path, model: Path) -> None:
        self._home, self._model = home, model
        self._ready = threading.Event()
        self._stop = trio.Event()
        self._thread = threading.Thread(target=self._run, name=f"server:{model.stem}", daemon=True)
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken
        self.server: Server

    def start(self) -> Server:
        self._thread.start()
        assert self._ready.wait(START_SECONDS), f"the server of {self._model} did not come up"
        if self._error is not None:
            raise self._error
        return self.server

    def stop(self) -> None:
        """Raises what the server failed with: nothing a test does may bring it down."""
        if self._error is None:
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(START_SECONDS)
        if self._error is not None:
            raise self._error

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run something on the server's loop."""
        return trio.from_thread.run(function, trio_token=self._token)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._error = error
        self._ready.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with serving(self._home, self._model) as server:
            self.server = server
            self._ready.set()
            await self._stop.wait()
