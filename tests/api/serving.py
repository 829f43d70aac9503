"""A server in this process, on a scripted model and a real worker, for tests of the session socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from superfluid.api.socket import run_socket
from superfluid.client.trio_client import AsyncClient
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import RuntimeCatalog
from superfluid.observe.metrics import Metrics

WINDOW = 4096


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


@asynccontextmanager
async def serving(home: Path, model: Path, *, window: int = WINDOW, max_batch: int = 4) -> AsyncIterator[Server]:
    """Serve `model`; its sessions and its socket are in `home`."""
    catalog = RuntimeCatalog(home)
    runtime = await trio.to_thread.run_sync(lambda: catalog.check(catalog.pick(model).id, model))
    metrics = Metrics("test")
    config = ModelConfig(
        name=model.stem, path=model, runtime=runtime, store=home / "sessions", max_context=window, max_batch=max_batch
    )
    daemon = Daemon(home, [Model(config, metrics.model(model.stem))], metrics)
    path = home / "s.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        await nursery.start(run_socket, daemon, path)
        yield Server(daemon, path)
        nursery.cancel_scope.cancel()
