"""The answer to one request that generates: its choices are read to their ends, whole or streamed as they come."""

import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from quart import Response

from superfluid.api.http import sse
from superfluid.api.http.access_log import LEFT, AccessLine
from superfluid.api.http.app import json_response
from superfluid.api.http.choices import Batch, Running
from superfluid.api.http.errors import ApiError
from superfluid.api.http.reply import Delta, Reply, Usage
from superfluid.codec.channels import Plain
from superfluid.link.events import Channel
from superfluid.scheduler.generation import Provisional

TEXTS = {int(Channel.TEXT): "content", int(Channel.REASONING): "reasoning_content"}


class Answer(ABC):
    """A reply per choice, and the shape that a route gives them. `head` are the members before the choices."""

    def __init__(self, running: Running, replies: Sequence[Reply], line: AccessLine, head: dict[str, Any]) -> None:
        self._running = running
        self._replies = replies
        self._line = line
        self._head = head
        self._frames: dict[str, tuple[bytes, bytes]] = {}  # of the chunks of a text, by its name

    async def respond(self, stream: bool) -> Response:
        """Raises ApiError when a generation fails before the answer began."""
        return Response(self._stream(), headers=sse.HEADERS) if stream else await self._whole()

    # ---- of each shape

    @abstractmethod
    def _usage(self) -> Usage: ...

    @abstractmethod
    def _members(self) -> dict[str, Any]:
        """Of a whole answer, all but its head."""

    def _headers(self) -> dict[str, str] | None:
        """Of a whole answer."""
        return None

    @abstractmethod
    def _opening(self, chunks: sse.Chunks) -> list[bytes]:
        """The chunks a stream begins with."""

    @property
    def _uniform(self) -> bool:
        """Whether the chunks of one channel differ in nothing but their text."""
        return True

    @abstractmethod
    def _chunk(self, chunks: sse.Chunks, index: int, delta: Delta) -> bytes:
        """The chunk of what one choice has more."""

    @abstractmethod
    def _last(self, chunks: sse.Chunks) -> list[bytes]:
        """The chunks a stream ends with."""

    # ---- the same for all

    def _write_line(self, status: int, finish: str) -> None:
        ends = [reply.ended for reply in self._replies if reply.ended is not None]
        self._line.write(status, self._usage(), self._running.started, ends, finish)

    def _finish(self) -> str:
        first = self._replies[0]
        return "cancelled" if first.ended is None else first.finish_reason

    def _read(self, batch: Batch) -> Iterator[tuple[int, Delta]]:
        """What items add, each with its choice. Raises ApiError when a generation failed."""
        for index, item in batch:
            reply = self._replies[index]
            deltas = reply.take(item)
            if not (isinstance(item, Provisional) and item.written):
                for delta in deltas:
                    yield index, delta
            if reply.complete:
                self._running.stop(index)

    def _frame(self, chunks: sse.Chunks, plain: Plain) -> tuple[bytes, bytes] | None:
        """What stands before and behind each text of a channel in the only choice's chunks, if they are all alike."""
        name = TEXTS.get(plain.channel)
        if name is None or not self._uniform or not self._replies[0].straight:
            return None
        frame = self._frames.get(name)
        if frame is None:
            frame = self._frames[name] = sse.around(self._chunk(chunks, 0, Delta(name, sse.MARK)))
        return frame

    async def _whole(self) -> Response:
        try:
            async for batch in self._running:
                for _ in self._read(batch or []):
                    pass
        except ApiError as error:
            self._write_line(error.status, self._running.why_failed)
            raise
        finally:
            self._write_line(LEFT if any(reply.ended is None for reply in self._replies) else 200, self._finish())
        return json_response({**self._head, **self._members()}, headers=self._headers())

    async def _stream(self) -> AsyncIterator[bytes]:
        chunks = sse.Chunks(self._head)

        def encode(batch: Batch) -> bytes:
            return b"".join([self._chunk(chunks, index, delta) for index, delta in self._read(batch)])

        try:
            if opening := self._opening(chunks):
                yield b"".join(opening)
            self._running.write_ahead(encode)
            self._running.write_straight(functools.partial(self._frame, chunks))
            async for batch in self._running:
                out = [sse.COMMENT] if batch is None else []
                try:
                    for index, delta in self._read(batch or []):
                        out.append(self._chunk(chunks, index, delta))
                except ApiError as error:
                    self._write_line(200, self._running.why_failed)  # which the client has read already
                    yield b"".join([*out, sse.event(error.frame()), sse.DONE])
                    return
                if out:
                    yield b"".join(out)
            self._write_line(200, self._finish())
            yield b"".join([*self._last(chunks), sse.DONE])
        finally:
            self._write_line(200, "cancelled")
