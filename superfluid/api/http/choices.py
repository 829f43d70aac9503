"""Several generations of one request, read together."""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from superfluid.codec.channels import Plain
from superfluid.daemon.model import Started
from superfluid.link.events import Finish
from superfluid.link.relay import TextOut
from superfluid.scheduler.generation import Ended, Failure, Generation, Item

SILENCE = 15.0  # seconds without an item after which a stream shows that it lives
PACE = 0.004  # seconds: a reader is woken at most this often; no token of a model that a person reads comes faster


Batch = list[tuple[int, Item]]
"""Items, each with the index of its choice."""


class Writable(Protocol):
    """Where a response in progress can be written without waiting (`superfluid.api.http.connection`)."""

    @property
    def writable(self) -> bool: ...

    def write(self, body: bytes) -> bool: ...

    def text_out(self, plain: Plain, lead: bytes, tail: bytes, pace: float) -> TextOut | None: ...

    def lend(self, text: TextOut) -> bool: ...

    async def flush(self) -> None: ...


class Running:
    """The generations of one request. One task reads them; `close` ends what still runs.

    Waking a reader and writing a message costs more than making a token does on a fast lane, so items that come
    closer together than `PACE` are handed on together. And what comes while the reader waits is written without it,
    where there is an outlet (`write_ahead`): only ends, failures and what the outlet does not take are for the reader.
    """

    def __init__(self, outlet: Writable | None = None) -> None:
        self.started: list[Started] = []
        self._generations: list[Generation] = []
        self._open: set[int] = set()  # whose end was not handed on
        self._cut: str | None = None
        self._news = trio.Event()
        self._woken = trio.current_time()
        self._waits = False  # the reader does
        self._outlet = outlet
        self._encode: Callable[[Batch], bytes] | None = None
        self._unsent = False  # the outlet has more than it could write
        self._failure: Exception | None = None  # of a write, for the reader
        self._texts: dict[tuple[bytes, bytes], TextOut | None] = {}  # by what frames them

    def write_ahead(self, encode: Callable[[Batch], bytes]) -> None:
        """From now on, write what `encode` makes of items as they come, and not of their ends."""
        self._encode = encode

    def write_straight(self, frame: Callable[[Plain], tuple[bytes, bytes] | None]) -> None:
        """From now on, let plain text be written as its tokens come, where one choice is all that is streamed.

        `frame` gives what stands before and behind each text of a channel; none where it cannot be shown as it is.
        """
        if len(self._generations) == 1:
            self._generations[0].text_out = functools.partial(self._text_out, self._generations[0], frame)

    def _text_out(self, generation: Generation, frame: Callable[[Plain], tuple[bytes, bytes] | None]) -> TextOut | None:
        outlet, plain = self._outlet, generation.job.router.plain
        if outlet is None or plain is None or not self._waits or self._news.is_set() or generation.waiting:
            return None
        ends = frame(plain)
        if ends is None:
            return None
        if ends not in self._texts:
            self._texts[ends] = outlet.text_out(plain, *ends, PACE)
        text = self._texts[ends]
        return text if text is not None and outlet.lend(text) else None

    def add(self, started: Sequence[Started]) -> None:
        """Own more generations; their indexes go on from those that are there."""
        for one in started:
            self._open.add(len(self.started))
            self.started.append(one)
            self._generations.append(one.generation)
            one.generation.notify = self._new_item
            if one.generation.ended:
                self._news.set()

    def _new_item(self) -> None:
        if not self._written():
            self._news.set()

    def _written(self) -> bool:
        """Write what is there; false when it is for the reader."""
        outlet, encode = self._outlet, self._encode
        if outlet is None or encode is None or not self._waits or self._news.is_set() or not outlet.writable:
            return False
        now = trio.current_time()
        if now < self._woken + PACE or any(generation.ended for generation in self._generations):
            return False
        self._woken = now
        try:
            body = encode(self._take())
            self._unsent = bool(body) and not outlet.write(body)
        except Exception as error:  # it is the request's, not of whoever made the item
            self._failure = error
        return not self._unsent and self._failure is None

    def stop(self, index: int) -> None:
        """Cancel the lane of one choice (its answer is complete); its end still comes."""
        self._generations[index].cancel()

    def close(self) -> None:
        """Cancel every lane that still runs; nobody reads on."""
        for generation in self._generations:
            generation.notify = generation.text_out = None
            generation.cancel()

    @property
    def why_failed(self) -> str:
        """The finish that the access log shows of an answer with an error: what the server's stop cut is no failure."""
        return "error" if self._cut is None else "cancelled"

    def cut(self, reason: str) -> None:
        """End every choice now with an error: the server stops."""
        self._cut = reason
        self._news.set()

    def __aiter__(self) -> "Running":
        return self

    async def __anext__(self) -> Batch | None:
        """Items, as many as are there at once, until every choice has ended; none after a silence.

        The silences are told by `beat`: a time limit on each step would cost as much as the step.
        """
        while self._open:
            await self._wait()
            if self._failure is not None:
                raise self._failure
            flushed = self._unsent
            if flushed and self._outlet is not None:
                await self._outlet.flush()
                self._unsent = False
            self._news = trio.Event()
            batch = self._take()
            if batch or not flushed:
                return batch or None
        raise StopAsyncIteration

    def beat(self, now: float) -> float:
        """Wake a reader who has heard nothing for `SILENCE`; when to look again."""
        if now >= self._woken + SILENCE:
            self._woken = now
            self._news.set()
        return self._woken + SILENCE

    async def _wait(self) -> None:
        if self._news.is_set():
            await trio.lowlevel.checkpoint()
        else:
            self._waits = True
            try:
                await self._news.wait()
            finally:
                self._waits = False
        pause = self._woken + PACE - trio.current_time()
        if pause > 0 and not all(generation.ended for generation in self._generations):
            await trio.sleep(pause)
        self._woken = trio.current_time()

    def _take(self) -> Batch:
        batch: Batch = []
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
