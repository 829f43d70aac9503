"""The model of `--fim-model`: on a worker of its own, it fills in middles for every served model, and keeps no log."""

from collections.abc import Awaitable, Callable

import trio

from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.daemon.model import Model
from superfluid.link.events import Body
from superfluid.scheduler.config import SchedulerConfig
from superfluid.scheduler.loop import Scheduler
from superfluid.scheduler.outbox import CommitLike


class NoLog:
    """The log of a model whose jobs are all raw."""

    def stage(self, batch: list[tuple[int, Body]]) -> CommitLike:
        raise RuntimeError(f"{len(batch)} records for a model that keeps no log")


class Satellite(Model):
    """Supervised as any model; it has no sessions."""

    window_flag = "--fim-max-context"
    most_by_itself = 8192  # what surrounds a cursor fits

    async def _open(self, nursery: trio.Nursery, cleared: Callable[[], Awaitable[None]]) -> None:
        await self._open_codec()
        if self.codec.fim is None:
            raise DialectRefused(f"--fim-model {self.config.path}: this model has no FIM dialect")
        config = SchedulerConfig(self.config.max_batch, settings=self._settings())
        self.scheduler = Scheduler(NoLog(), self.codec, config, self.metrics, self.name)
        self._examined.set()
        await self.supervisor.connected.wait()
        self.passed.set()
        await cleared()
        self._ready.set()

    async def idle(self) -> None:
        """Wait until no generation is queued or runs."""
        await self.scheduler.wait_idle()
