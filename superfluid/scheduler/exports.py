"""What copies of engine state may cost: the time that exporting them may take, and the one writer of their files."""

import logging
from collections import deque
from collections.abc import Callable

import attrs
import trio

from superfluid.scheduler.rates import Rates

log = logging.getLogger(__name__)

EXPORT_SHARE = 0.02
"""Part of the scheduler's time that exports may take."""

EXPORT_BURST = 0.5
"""Seconds of exporting that may be saved up."""

WORTH_SECONDS = 0.5
"""A state is kept when prefilling it again would take longer."""

WRITER_DEPTH = 4
"""Files that may wait for the writer; what comes then is dropped."""

SMOOTHING = 0.3
"""Weight of a new measurement."""


@attrs.define
class ExportBudget:
    """A bucket of seconds that fills with a share of the time that passes. Clock times are trio's."""

    worth_seconds: float = WORTH_SECONDS
    _level: float = EXPORT_BURST
    _at: float | None = None
    _seconds_per_byte: float | None = None
    _bytes_per_token: float = 0.0

    def worth(self, tokens: int, rates: Rates) -> bool | None:
        """Whether prefilling `tokens` costs more than a copy is worth; none while prefill speed is unknown."""
        seconds = rates.prefill_seconds(tokens)
        return None if seconds is None else seconds > self.worth_seconds

    def affords(self, tokens: int, now: float) -> bool:
        """Whether an export of `tokens` fits; the first one, of unknown cost, does."""
        self._fill(now)
        return self._level > 0 and (self._seconds_per_byte or 0.0) * self._bytes_per_token * tokens <= self._level

    def measure(self, tokens: int, size: int, seconds: float) -> None:
        """Learn from an export of `size` bytes."""
        per_byte = seconds / size
        old = self._seconds_per_byte
        self._seconds_per_byte = per_byte if old is None else (1 - SMOOTHING) * old + SMOOTHING * per_byte
        self._bytes_per_token = size / tokens

    def charge(self, seconds: float, now: float) -> None:
        self._fill(now)
        self._level -= seconds

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._level = min(self._level + EXPORT_SHARE * (now - self._at), EXPORT_BURST)
        self._at = now


@attrs.frozen
class Task:
    what: str
    run: Callable[[], None]
    done: Callable[[bool], None]


class Writer:
    """The one background writer of state files: a thread's worth of work, in order."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._idle.set()
        self._limiter = trio.CapacityLimiter(1)
        self._over = False

    @property
    def has_room(self) -> bool:
        return len(self._tasks) < WRITER_DEPTH

    async def wait_idle(self) -> None:
        """Return once everything that was added is done."""
        await self._idle.wait()

    def add(self, what: str, run: Callable[[], None], done: Callable[[bool], None] = lambda ok: None) -> None:
        """Have `run` called in the writer's thread, then `done(whether it raised nothing)` here.

        Who can wait or do without asks `has_room` first. Once the writer has stopped, nothing is run.
        """
        if self._over:
            done(False)
            return
        self._tasks.append(Task(what, run, done))
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._wake.set()

    async def caught_up(self) -> None:
        """Return once what was added before this call is done; what comes behind it is not waited for."""
        here = trio.Event()
        self.add("waiting for the writer", lambda: None, lambda ok: here.set())
        await here.wait()

    async def run(self) -> None:
        """Work until cancelled; what is under way then is finished, the rest is not done."""
        try:
            await self._work()
        finally:
            self._over = True
            while self._tasks:
                self._tasks.popleft().done(False)

    async def _work(self) -> None:
        while True:
            while self._tasks:
                task = self._tasks.popleft()
                try:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(task.run, limiter=self._limiter)
                except OSError as error:
                    log.warning("%s: %s", task.what, str(error))  # not the error: its frames hold views of the state
                    ok = False
                except Exception:  # never the server's end: these files are only ever copies
                    log.exception("%s", task.what)
                    ok = False
                else:
                    ok = True
                task.done(ok)
            self._idle.set()
            self._wake = trio.Event()
            await self._wake.wait()
