"""Server-sent events: one `data:` line of compact JSON per event, and a comment when nothing was said for a while."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import orjson
import trio

T = TypeVar("T")

SILENCE = 15.0  # seconds without an event after which a comment shows that the stream lives
COMMENT = b":\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def with_silences(items: AsyncIterator[T]) -> AsyncIterator[T | None]:
    """`items`, with a none after every `SILENCE` seconds without one (the route then sends `COMMENT`).

    The step of `items` is cancelled at each silence, so it must be one that loses nothing when cancelled: a receive
    from a channel.
    """
    while True:
        item: T | None = None
        with trio.move_on_after(SILENCE):
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
        yield item
