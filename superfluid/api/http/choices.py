"""Several generations of one request, read together: each in a task of its own, their items in one channel."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from superfluid.api.http.context import Api
from superfluid.api.http.reply import Reply
from superfluid.daemon.model import Started
from superfluid.scheduler.generation import Committed, Ended, Item, Provisional

AHEAD = 64  # items a choice may be ahead of the client; behind that the generation merges them


class Merged:
    """Items of all choices as they come, in batches: every item that is there when one is."""

    def __init__(self, started: Sequence[Started], receive: "trio.MemoryReceiveChannel[tuple[int, Item]]") -> None:
        self._started = started
        self._receive = receive
        self._stopped: set[int] = set()

    def stop(self, index: int) -> None:
        """Cancel the lane of one choice (a stop string was found); its end still comes."""
        if index not in self._stopped:
            self._stopped.add(index)
            self._started[index].generation.cancel()

    def __aiter__(self) -> "Merged":
        return self

    async def __anext__(self) -> list[tuple[int, Item]]:
        try:
            batch = [await self._receive.receive()]
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        while True:
            try:
                batch.append(self._receive.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                return batch


@asynccontextmanager
async def merge(api: Api, started: Sequence[Started]) -> AsyncIterator[Merged]:
    """Read all generations; leaving the block cancels those that still run."""
    send, receive = trio.open_memory_channel[tuple[int, Item]](AHEAD)
    scope = trio.CancelScope()

    async def pump(index: int, one: Started, out: "trio.MemorySendChannel[tuple[int, Item]]") -> None:
        with scope:
            async with out, one.generation:
                async for item in one.generation:
                    await out.send((index, item))

    async with send:
        for index, one in enumerate(started):
            api.nursery.start_soon(pump, index, one, send.clone(), name=f"choice:{one.session}")
    try:
        async with receive:
            yield Merged(started, receive)
    finally:
        scope.cancel()


async def collect(api: Api, started: Sequence[Started], replies: Sequence[Reply]) -> None:
    """Run all generations to their ends into `replies`. Raises ApiError 500 when one fails."""
    async with merge(api, started) as merged:
        async for batch in merged:
            for index, item in batch:
                reply = replies[index]
                if isinstance(item, Committed):
                    reply.take(item.events, item.logprobs)
                elif isinstance(item, Ended):
                    reply.end(item)
                else:
                    assert isinstance(item, Provisional)
                if reply.stopped:
                    merged.stop(index)
