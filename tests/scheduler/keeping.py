"""A scheduler with kept states over a MockEngine of one paged space, restarted on the same directory at will."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from superfluid.engines.mock.config import MockConfig, default_spaces
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Ended, Generation, Job
from superfluid.scheduler.keeping import Keeper, KeepSettings
from superfluid.scheduler.link import WorkerGone
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.sessions.files import Files
from tests.scheduler.doubles import MemoryStore, MockLink, WordCodec, WordRouter

PAGE = 16
SLOW = 0.01
"""Seconds of prefill per token: 50 tokens and more are worth keeping."""


def paged(**more: Any) -> MockConfig:
    return MockConfig(spaces=[default_spaces()[0]], **more)


@attrs.define
class Daemon:
    """One run of a scheduler and its neighbours."""

    scheduler: Scheduler
    keeper: Keeper
    link: MockLink
    store: MemoryStore
    metrics: ModelMetrics

    async def run(self, job: Job) -> Ended:
        return (await self.scheduler.submit(job).collect())[2]


@asynccontextmanager
async def daemon(
    folder: Path,
    settings: KeepSettings | None = None,
    *,
    config: SchedulerConfig | None = None,
    engine: MockConfig | None = None,
    files: Files | None = None,
    prefill_s: float | None = SLOW,
    spare: MockLink | None = None,
) -> AsyncIterator[Daemon]:
    """Serve with a worker; with `spare`, with that one after the first is gone."""
    metrics, store, link = ModelMetrics(), MemoryStore(), MockLink(engine or paged())
    keeper = await trio.to_thread.run_sync(Keeper.open, folder, settings or KeepSettings(), metrics, files)
    scheduler = Scheduler(store, WordCodec(), config or SchedulerConfig(), metrics, "mock", keeper)
    scheduler.rates.prefill_s = prefill_s
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(keeper.run)
            await keeper.disk_scanned.wait()
            nursery.start_soon(_serve, scheduler, link, spare)
            yield Daemon(scheduler, keeper, link, store, metrics)
            nursery.cancel_scope.cancel()
    finally:
        link.close()


async def _serve(scheduler: Scheduler, link: MockLink, spare: MockLink | None) -> None:
    try:
        await scheduler.run(link)
    except WorkerGone:
        if spare is None:
            raise
        await scheduler.run(spare)


def turn(session: int | None, stream: list[int], max_tokens: int = 8, *, native: bool = True, **more: Any) -> Job:
    return Job(session, stream, max_tokens, WordRouter(), native=native, **more)


async def end_of(generation: Generation) -> Ended:
    return (await generation.collect())[2]


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))
