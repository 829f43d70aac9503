"""What every route has at hand: the daemon, the listener's settings, and the answers that are being made."""

import itertools
from collections.abc import Hashable

import attrs
import trio
from quart import request

from superfluid.api.http.choices import SILENCE, Running
from superfluid.api.http.connection import CONNECTION
from superfluid.api.http.errors import SERVER, ApiError
from superfluid.api.http.options import Choices, read_class, read_switch
from superfluid.api.http.requests import on_end
from superfluid.daemon.daemon import Daemon, ModelUnavailable
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model


@attrs.define
class HttpSettings:
    """The listener's own flags."""

    default_class: int = 2
    read_qos_headers: bool = True
    allow_batch_invariant: bool = False


@attrs.define
class Api:
    """Shared by all routes of one listener."""

    daemon: Daemon
    settings: HttpSettings = attrs.Factory(HttpSettings)
    running: set[Running] = attrs.field(factory=set, init=False)
    _ids: "itertools.count[int]" = attrs.field(factory=lambda: itertools.count(1), alias="ids")

    def next_id(self) -> int:
        """Counts from 1, shared by chat, completions and rerank."""
        return next(self._ids)

    def known(self, name: str) -> Model:
        """The model of that name, loaded or not. Raises ApiError 404."""
        for model in self.daemon.models:
            if model.name == name:
                return model
        loaded = ", ".join(sorted(model.name for model in self.daemon.models if model.loaded)) or "none"
        raise ApiError(
            404, f"model {name!r} is not served here; loaded: {loaded}", code="model_not_found", param="model"
        )

    async def model(self, name: str) -> Model:
        """The model of that name, loaded. Raises ApiError 404 (unknown) or 503 (it does not load)."""
        try:
            return await self.daemon.model(self.known(name).name)
        except ModelUnavailable as error:
            raise ApiError(503, str(error), kind=SERVER, retry_after=error.retry_after) from None

    def called(self, choices: Choices) -> GenerateOptions:
        """The options of the current request with its caller: class and batch invariance from its headers, and its
        peer for fairness. Raises ApiError 400 and 403."""
        klass, invariant = self.settings.default_class, False
        if self.settings.read_qos_headers:
            klass = read_class(request.headers, klass)
            invariant = read_switch(request.headers, "x-superfluid-batch-invariant")
        if invariant and not self.settings.allow_batch_invariant:
            raise ApiError(403, "batch invariance is not allowed here; serve with --http-allow-batch-invariant")
        return attrs.evolve(choices.options, klass=klass, client=self.peer(), batch_invariant=invariant)

    def peer(self) -> str:
        """Where the current request comes from."""
        return str(request.remote_addr or "")

    def metered_client(self) -> Hashable:
        """Whose completions the current request counts as: its address, for whoever may ask shows the one key."""
        return "http", self.peer()

    def run(self) -> Running:
        """The generations of the current request, none yet: they end when it does."""
        running = Running(request.scope["state"].get(CONNECTION))
        self.running.add(running)

        def close() -> None:
            self.running.discard(running)
            running.close()

        on_end(close)
        return running

    async def beat(self) -> None:
        """Tell the answers that are being made of their silences."""
        while True:
            now = trio.current_time()
            due = [running.beat(now) for running in self.running]
            await trio.sleep_until(min(due, default=now + SILENCE))

    def cut(self, reason: str) -> None:
        """End every answer that is being made with an error."""
        for running in self.running:
            running.cut(reason)
