"""A scheduler over a MockEngine in process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from superfluid.engines.mock.config import MockConfig
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

    @property
    def starts(self) -> dict[int, int]:
        """First prompt token of every lane that was admitted, by tag."""
        return {tag: prompt[0] for tag, prompt in self.link.prompts.items()}

    @asynccontextmanager
    async def serving(self, link: MockLink | None = None) -> AsyncIterator[Scheduler]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.scheduler.run, link or self.link, name="scheduler:mock")
            yield self.scheduler
            nursery.cancel_scope.cancel()


class MakeBench:
    """Makes benches; their links are closed when the test is over."""

    def __init__(self) -> None:
        self.links: list[MockLink] = []

    def link(self, config: MockConfig | None = None) -> MockLink:
        self.links.append(MockLink(config))
        return self.links[-1]

    def __call__(
        self, config: SchedulerConfig | None = None, *, codec: WordCodec | None = None, link: MockLink | None = None
    ) -> Bench:
        store, metrics = MemoryStore(), ModelMetrics()
        scheduler = Scheduler(store, codec or WordCodec(), config or SchedulerConfig(), metrics, "mock")
        return Bench(scheduler, link or self.link(), store, metrics)


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    make = MakeBench()
    yield make
    for link in make.links:
        link.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()
