"""Side operations: work on the worker that runs between ticks, each class in its turn."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import trio

from superfluid.scheduler.classes import Class
from superfluid.scheduler.link import EngineLink, WorkerGone

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Work that no generation needs: what goes wrong in it is logged and ends there, but for a dead worker."""
    try:
        yield
    except WorkerGone:
        raise
    except Exception:
        log.exception("%s is given up", what)


class SideOperation(Generic[T]):
    """Work waiting for its turn; without a class it runs before the next tick."""

    def __init__(self, run: Callable[[EngineLink], Awaitable[T]], klass: Class | None, tick: int) -> None:
        self.run = run
        self.klass = klass
        self.tick = tick
        self.done = trio.Event()
        self.value: T
        self.error: BaseException | None = None

    async def perform(self, link: EngineLink) -> None:
        """Run it for who waits; what it raises is theirs, but a dead worker is the caller's too."""
        try:
            self.value = await self.run(link)
        except trio.Cancelled:
            self.error = WorkerGone("the worker was stopped")
            raise
        except WorkerGone as gone:
            self.error = gone
            raise
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class SideOperations:
    """The side operations of one model that wait."""

    def __init__(self) -> None:
        self._waiting: list[SideOperation[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, operation: SideOperation[Any]) -> None:
        self._waiting.append(operation)

    def drop(self, operation: SideOperation[Any]) -> None:
        """Forget an operation that nobody waits for any more."""
        if operation in self._waiting:
            self._waiting.remove(operation)

    def fail(self, error: WorkerGone) -> None:
        """Tell everyone who waits that the worker is gone."""
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.error = error
            operation.done.set()

    async def run_due(
        self, link: EngineLink, tick: int, starvation_ticks: int, better: Callable[[Class], bool]
    ) -> None:
        """Run every operation without a class, and at most one with: an aged one, or one that nothing `better` than
        its class keeps waiting. Raises WorkerGone."""
        for operation in [operation for operation in self._waiting if operation.klass is None]:
            self.drop(operation)
            await operation.perform(link)
        if not self._waiting:
            return
        aged = [operation for operation in self._waiting if tick - operation.tick >= starvation_ticks]
        chosen = aged[0] if aged else min(self._waiting, key=lambda operation: operation.klass or 0)
        if aged or not better(chosen.klass or Class.INTERACTIVE):
            self.drop(chosen)
            await chosen.perform(link)
