"""Several generations of one request, read together."""

from collections.abc import Sequence

import trio

from superfluid.daemon.model import Started
from superfluid.link.events import Finish
from superfluid.scheduler.generation import Ended, Failure, Generation, Item

SILENCE = 15.0  # seconds without an item after which a stream shows that it lives
PACE = 0.004  # seconds: a reader is woken at most this often; no token of a model that a person reads comes faster


class Running:
    """The generations of one request. One task reads them; `close` ends what still runs.

    Waking a reader and writing a message costs more than making a token does on a fast lane, so items that come
    closer together than `PACE` are handed on together.
    """

    def __init__(self) -> None:
        self.started: list[Started] = []
        self._generations: list[Generation] = []
        self._open: set[int] = set()  # whose end was not handed on
        self._cut: str | None = None
        self._news = trio.Event()
        self._woken = trio.current_time()

    def add(self, started: Sequence[Started]) -> None:
        """Own more generations; their indexes go on from those that are there."""
        for one in started:
            self._open.add(len(self.started))
            self.started.append(one)
            self._generations.append(one.generation)
            one.generation.notify = self._wake
            if one.generation.ended:
                self._wake()

    def _wake(self) -> None:
        self._news.set()

    def stop(self, index: int) -> None:
        """Cancel the lane of one choice (its answer is complete); its end still comes."""
        self._generations[index].cancel()

    def close(self) -> None:
        """Cancel every lane that still runs; nobody reads on."""
        for generation in self._generations:
            generation.notify = None
            generation.cancel()

    @property
    def why_failed(self) -> str:
        """The finish that the access log shows of an answer with an error: what the server's stop cut is no failure."""
        return "error" if self._cut is None else "cancelled"

    def cut(self, reason: str) -> None:
        """End every choice now with an error: the server stops."""
        self._cut = reason
        self._wake()

    def __aiter__(self) -> "Running":
        return self

    async def __anext__(self) -> list[tuple[int, Item]] | None:
        """(index, item), as many as are there at once, until every choice has ended; none after a silence.

        The silences are told by `beat`: a time limit on each step would cost as much as the step.
        """
        if not self._open:
            raise StopAsyncIteration
        await self._wait()
        return self._take() or None

    def beat(self, now: float) -> float:
        """Wake a reader who has heard nothing for `SILENCE`; when to look again."""
        if now >= self._woken + SILENCE:
            self._woken = now
            self._wake()
        return self._woken + SILENCE

    async def _wait(self) -> None:
        if self._news.is_set():
            await trio.lowlevel.checkpoint()
        else:
            await self._news.wait()
        pause = self._woken + PACE - trio.current_time()
        if pause > 0 and not all(generation.ended for generation in self._generations):
            await trio.sleep(pause)
        self._woken = trio.current_time()

    def _take(self) -> list[tuple[int, Item]]:
        self._news = trio.Event()
        batch: list[tuple[int, Item]] = []
        for index in sorted(self._open):
            for item in self._generations[index].take():
                batch.append((index, item))
                if isinstance(item, Ended):
                    self._open.discard(index)
        if self._cut is not None:
            failed = Ended(Finish.ERROR, reason=self._cut, error_code=Failure.STOPPED)
            batch += [(index, failed) for index in sorted(self._open)]
            self._open.clear()
        return batch
