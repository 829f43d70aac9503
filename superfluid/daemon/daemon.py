"""The daemon: the models it serves, its metrics, and its drain; what every API and command talks to."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from superfluid.daemon.fim import FimService
from superfluid.daemon.model import Model, ModelFailed
from superfluid.observe.metrics import Metrics

UNTAKEN = 5.0  # seconds of a drain in which clients may take what is left of their answers, once nothing generates


class UnknownModel(Exception):
    """No model of that name is served."""


class ModelUnavailable(Exception):
    """A known model does not serve now; `retry_after` seconds may help."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@attrs.define
class Daemon:
    """All models of one server. Made by `superfluid serve`; `run` serves until it is cancelled or a model fails.

    `put_logs_aside` is for a run that begins with fresh logs: called, in a thread, once nothing else can fail.
    """

    home: Path
    models: list[Model]
    metrics: Metrics
    fim: FimService = attrs.Factory(lambda self: FimService(self.metrics), takes_self=True)
    put_logs_aside: Callable[[], None] | None = None
    drain_started: trio.Event = attrs.Factory(trio.Event)
    _answers: int = 0
    _answered: trio.Event = attrs.Factory(trio.Event)

    @property
    def default(self) -> Model:
        return self.models[0]

    @property
    def everything(self) -> list[Model]:
        """The models that are served by name, and the one that only fills in middles."""
        return self.models if self.fim.satellite is None else [*self.models, self.fim.satellite]

    @property
    def draining(self) -> bool:
        return self.drain_started.is_set()

    def drain(self) -> None:
        """Stop taking new requests; those in flight go on."""
        self.drain_started.set()

    async def model(self, name: str) -> Model:
        """The model of that name, loaded. Raises UnknownModel, or ModelUnavailable when it does not load."""
        for model in self.models:
            if model.name == name:
                try:
                    await model.ensure_serving()
                except ModelFailed as error:
                    raise ModelUnavailable(
                        f"model '{name}' could not be loaded: {error}", retry_after=error.retry_after
                    ) from None
                return model
        raise UnknownModel(f"model {name!r} is not served here; loaded: {_listed(self.models)}")

    def metrics_page(self) -> str:
        """The Prometheus page."""
        return self.metrics.render()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve every model; started when all are ready. Raises ModelFailed when one cannot be, DialectRefused.

        No model's log is written before all models, one after the other, have shown that they can be served.
        """
        cleared = trio.Event()
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for model in self.everything:
                    run = partial(model.run, cleared=cleared.wait)
                    starting.start_soon(partial(nursery.start, run, name=f"model:{model.name}"))
                    await model.passed.wait()
                if self.put_logs_aside is not None:
                    await trio.to_thread.run_sync(self.put_logs_aside)
                cleared.set()
            task_status.started()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Held by whoever answers a request: a drain waits until nobody does."""
        self._answers += 1
        try:
            yield
        finally:
            self._answers -= 1
            if not self._answers:
                self._answered.set()

    async def idle(self) -> None:
        """Wait until no generation is queued or runs, and every answer is taken, except by those who take none."""
        while True:
            for model in self.everything:
                await model.idle()
            with trio.move_on_after(UNTAKEN):
                await self._no_answers()
            if not any(model.generating for model in self.everything):
                return

    async def _no_answers(self) -> None:
        while self._answers:
            self._answered = trio.Event()
            await self._answered.wait()


def _listed(models: Iterable[Model]) -> str:
    return ", ".join(sorted(model.name for model in models)) or "none"
