"""What every route has at hand: the daemon, the nursery of its tasks, the listener's settings."""

import itertools

import attrs
import trio
from quart.wrappers import Request

from superfluid.api.http.errors import SERVER, ApiError
from superfluid.api.http.options import read_class, read_switch
from superfluid.daemon.daemon import Daemon, ModelUnavailable, UnknownModel
from superfluid.daemon.model import Model


@attrs.define
class HttpSettings:
    """The listener's own flags."""

    default_class: int = 2
    read_qos_headers: bool = True
    allow_batch_invariant: bool = False


@attrs.define
class Api:
    """Shared by all routes of one listener. `nursery` owns the tasks that read generations."""

    daemon: Daemon
    nursery: trio.Nursery
    settings: HttpSettings = attrs.Factory(HttpSettings)
    _ids: "itertools.count[int]" = attrs.field(factory=lambda: itertools.count(1), alias="ids")

    def next_id(self) -> int:
        """Counts from 1, shared by chat, completions and rerank."""
        return next(self._ids)

    async def model(self, name: str) -> Model:
        """The model of that name, loaded. Raises ApiError 404 (unknown) or 503 (it does not load)."""
        try:
            return await self.daemon.model(name)
        except UnknownModel as error:
            raise ApiError(404, str(error), code="model_not_found", param="model") from None
        except ModelUnavailable as error:
            raise ApiError(503, str(error), kind=SERVER, retry_after=error.retry_after) from None

    def caller(self, request: Request) -> tuple[int, str, bool]:
        """Class, fairness client and batch invariance of a request, from its headers and its peer."""
        client = str(request.remote_addr or "")
        if not self.settings.read_qos_headers:
            return self.settings.default_class, client, False
        klass = read_class(request.headers, self.settings.default_class)
        invariant = read_switch(request.headers, "x-superfluid-batch-invariant")
        if invariant and not self.settings.allow_batch_invariant:
            raise ApiError(403, "batch invariance is not allowed here; serve with --http-allow-batch-invariant")
        return klass, client, invariant
