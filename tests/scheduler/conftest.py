"""A scheduler over a MockEngine in process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from tests.scheduler.doubles import MemoryStore, MockLink, WordCodec


@attrs.define
class Bench:
    """A scheduler and its neighbours; `serving` runs it on the link."""

    scheduler: Scheduler
    link: MockLink
    store: MemoryStore
    metrics: ModelMetrics

    @asynccontextmanager
    async def serving(self, link: MockLink | None = None) -> AsyncIterator[Scheduler]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.scheduler.run, link or self.link, name="scheduler:mock")
            yield self.scheduler
            nursery.cancel_scope.cancel()


class MakeBench:
    def __call__(
        self, config: SchedulerConfig | None = None, *, codec: WordCodec | None = None, link: MockLink | None = None
    ) -> Bench:
        store, metrics = MemoryStore(), ModelMetrics()
        scheduler = Scheduler(store, codec or WordCodec(), config or SchedulerConfig(), metrics, "mock")
        return Bench(scheduler, link or MockLink(), store, metrics)


@pytest.fixture
def make_bench() -> MakeBench:
    return MakeBench()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()
