"""The life of a model's workers: one after the other, until the model is retired, and again when it is asked for."""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import attrs
import trio

from superfluid.daemon.capabilities import differing
from superfluid.daemon.client import WorkerLink
from superfluid.daemon.host import Host, WorkerStartError
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.link import EngineLink, WorkerGone

RESPAWNS = 3  # in a row without a good tick; then the model is retired until its next request
RELOAD_PAUSE = 10.0  # seconds before a reload that failed is tried again
ENDING = 1.0  # seconds that an ended link waits for the exit status of its process

log = logging.getLogger(__name__)


class ModelFailed(Exception):
    """The model does not serve; the message says why. `retry_after`: seconds after which a request may try again."""

    def __init__(self, message: str, retry_after: float = RELOAD_PAUSE) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SchedulerLike(Protocol):
    async def run(self, link: EngineLink) -> None:
        """Serve with one worker; raises WorkerGone."""

    async def side(self, run: Callable[[EngineLink], Awaitable[None]]) -> None: ...

    def retire(self, reason: str) -> None: ...


@attrs.frozen
class Life:
    """How one worker's life ended: why, whether it came to serve, and whether it turned out to be another model."""

    why: str
    served: bool
    changed: bool = False


class Supervisor:
    """Keeps one model's worker running. `spawn` starts a worker, `respawns` is false for one that starts but once.

    `run` must be running. `record` and `window` are the last worker's; `connected`: the first worker has loaded.
    """

    def __init__(
        self, name: str, spawn: Callable[[], Awaitable[Host]], metrics: ModelMetrics, *, respawns: bool = True
    ) -> None:
        self.name = name
        self.record: dict[str, Any] = {}
        self.window: int | None = None
        self.loaded = False
        self.retired: str | None = None
        self.connected = trio.Event()
        self._spawn = spawn
        self._metrics = metrics
        self._respawns = respawns
        self._wanted = trio.Event()  # a request asks for the retired model
        self._settled = trio.Event()  # the reload under way has succeeded or failed
        self._not_before = -math.inf

    # ---- for requests

    async def ensure_serving(self) -> None:
        """Return when the model serves, or its next worker is on its way; a retired one is loaded again.

        Raises ModelFailed when it is not to be had.
        """
        if self.retired is None:
            return
        settled = self._settled
        self.want()
        await settled.wait()
        if self.retired is not None:
            raise ModelFailed(self.retired, self._pause())

    def want(self) -> None:
        """Have a retired model loaded again. Raises ModelFailed when that has just failed, or cannot be."""
        if self.retired is None:
            return
        if not self._respawns or self._pause() > 0:
            raise ModelFailed(self.retired, self._pause() or RELOAD_PAUSE)
        self._wanted.set()

    def _pause(self) -> float:
        """Seconds until a reload may be tried again."""
        return max(0.0, self._not_before - trio.current_time())

    # ---- the task

    async def run(
        self,
        scheduler: Callable[[], Awaitable[SchedulerLike]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        *,
        examined: Callable[[], Awaitable[None]],
    ) -> None:
        """Start worker after worker; started when the first serves.

        The first worker loads while the model's files and log are still read, of which `examined` returns or raises
        the end. Raises ModelFailed when the first does not come to serve.
        """
        tries = 0
        started: trio.TaskStatus[None] | None = task_status
        while True:
            ticks = self._metrics.ticks_total
            life = await self._live(scheduler, started)
            self.loaded = False
            if not life.served and started is not None:
                await examined()  # what is wrong with the model's files is told first
                raise ModelFailed(life.why)
            reload = self.retired is not None
            started = None
            if self._metrics.ticks_total > ticks:
                tries = 0
            if life.changed or reload or tries >= RESPAWNS or not self._respawns:
                await self._retire(await scheduler(), life.why, failed_reload=reload)
                tries = 0
                continue
            tries += 1
            self._metrics.worker_respawns_total += 1
            log.warning("%s: %s; starting it again (%d of %d)", self.name, life.why, tries, RESPAWNS)

    async def _live(
        self, scheduler: Callable[[], Awaitable[SchedulerLike]], task_status: trio.TaskStatus[None] | None
    ) -> Life:
        """One worker from start to end."""
        try:
            host = await self._spawn()
        except WorkerStartError as error:
            return Life(str(error), served=False)
        link: WorkerLink | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.wait, name=f"worker:{self.name}")
                try:
                    link = await WorkerLink.open(host.frames, host.descriptors)
                except WorkerGone as gone:
                    ended = await how_it_ended(host)
                    life = Life(str(gone) if host.running else ended, served=False)
                else:
                    self.connected.set()
                    life = await self._serve(link, host, await scheduler(), nursery, task_status)
                nursery.cancel_scope.cancel()
        finally:
            if link is not None:  # whoever used it has ended
                link.close()
            await host.close()
        return life

    async def _serve(
        self,
        link: WorkerLink,
        host: Host,
        scheduler: SchedulerLike,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None] | None,
    ) -> Life:
        """Serve with a connected worker until it is gone, unless its record says that it is another model now."""
        if self.record and (changed := differing(self.record, link.record)):
            why = f"the model's capabilities changed with its new worker: {', '.join(changed)}"
            return Life(why, served=False, changed=True)
        self.record = link.record
        self.window = link.window
        ended = trio.Event()
        why = "it was stopped"

        async def read_link() -> None:
            gone = await link.run(partial(how_it_ended, host))
            with contextlib.suppress(WorkerGone):  # an idle scheduler learns of it by this
                await scheduler.side(partial(_raise_gone, gone))

        async def schedule() -> None:
            nonlocal why
            try:
                await scheduler.run(link)
            except WorkerGone as gone:
                why = gone.reason
            ended.set()

        nursery.start_soon(read_link, name=f"link:{self.name}")
        nursery.start_soon(schedule, name=f"scheduler:{self.name}")
        self.loaded = True
        self.retired = None
        self._settled.set()
        if task_status is not None:
            task_status.started()
        await ended.wait()
        return Life(why, served=True)

    async def _retire(self, scheduler: SchedulerLike, why: str, *, failed_reload: bool) -> None:
        """Fail everything and wait until a request asks for the model again."""
        hope = "it loads again on its next request" if self._respawns else "it loads again when the server is restarted"
        self.retired = f"{why}; {hope}"
        if failed_reload:
            self._not_before = trio.current_time() + RELOAD_PAUSE
        self.record = {}
        self._wanted = trio.Event()
        self._settled.set()  # those who wait for the reload are told that it failed
        self._settled = trio.Event()
        scheduler.retire(f"generation failed: {self.retired}")
        log.error("%s: retired: %s", self.name, why)
        await self._wanted.wait()


async def how_it_ended(host: Host) -> str:
    """Why a link that closed did: the exit of its process, when that follows at once."""
    with trio.move_on_after(ENDING):
        await host.ended.wait()
    return host.describe_end()


async def _raise_gone(why: str, _: EngineLink) -> None:
    raise WorkerGone(why)
