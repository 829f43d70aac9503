"""The daemon: the models it serves, its metrics, and its drain; what every API and command talks to."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import orjson
import trio

from superfluid.daemon.model import Model, ModelFailed
from superfluid.observe.metrics import Metrics

UNNAMED = "superfluid"  # the name of a model whose path has none


class UnknownModel(Exception):
    """No model of that name is served."""


class ModelUnavailable(Exception):
    """A known model does not serve now; `retry_after` seconds may help."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@attrs.define
class Daemon:
    """All models of one server. Made by `superfluid serve`; `run` serves until it is cancelled or a model fails."""

    home: Path
    models: list[Model]
    metrics: Metrics
    drain_started: trio.Event = attrs.Factory(trio.Event)
    _answers: int = 0
    _answered: trio.Event = attrs.Factory(trio.Event)

    @property
    def default(self) -> Model:
        return self.models[0]

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
        """Serve every model; started when all are ready. Raises ModelFailed when one cannot be."""
        async with trio.open_nursery() as nursery:
            for model in self.models:
                await nursery.start(model.run, name=f"model:{model.name}")
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
        """Wait until no generation is queued or runs, and every answer is on its way."""
        for model in self.models:
            await model.idle()
        while self._answers:
            self._answered = trio.Event()
            await self._answered.wait()


def _listed(models: Iterable[Model]) -> str:
    return ", ".join(sorted(model.name for model in models)) or "none"


def served_names(paths: Sequence[Path]) -> list[str]:
    """A name for each model path: the id of a `hub.json` beside it, else its stem; should that be taken, the first
    that is free of its variant, its file name, and its folder with it."""
    names: list[str] = []
    for path in paths:
        hub = _read_hub(path)
        stem = path.name if path.is_dir() else path.stem
        name = hub.get("id") or stem or UNNAMED
        candidates = [name, path.name, f"{path.parent.name}/{path.name}"]
        if hub.get("variant"):
            candidates.insert(1, f"{name}:{hub['variant']}")
        names.append(next((candidate for candidate in candidates if candidate not in names), str(path)))
    return names


def _read_hub(path: Path) -> dict[str, str]:
    """The id and variant that a `hub.json` beside a model gives it; empty when there is none that can be read."""
    try:
        hub = orjson.loads((path if path.is_dir() else path.parent).joinpath("hub.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(hub, dict):
        return {}
    return {key: hub[key].strip() for key in ("id", "variant") if isinstance(hub.get(key), str)}
