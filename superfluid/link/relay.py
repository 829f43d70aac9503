"""A link read on a thread of its own, so that streamed tokens reach a client without the event loop.

Waking a task for a token costs more than the token's text is worth, beside a decode that wants every core. The thread
(csrc/relay.c) gives the tokens of a lane to the text out that the lane was lent, and wakes the event loop only for the
rest: what the tick brought in the end, and the tokens of all other lanes.
"""

import math
import os
from array import array
from collections.abc import Iterable
from errno import errorcode

import trio

from superfluid._native import ffi, lib
from superfluid.link.linkw import MESSAGES, TickEmit
from superfluid.link.schema import union_of

EMIT_TYPE = next(msg_type for msg_type, cls in MESSAGES.items() if cls is union_of(TickEmit))


class TextOut:
    """The text of one streamed answer, on its way to a socket: chunks of an HTTP/1.1 body, written as tokens come.

    A chunk is `lead`, the text as the inside of a JSON string, and `tail`. Token t has the bytes
    pieces[ends[t]:ends[t + 1]] (`ends` of C unsigned longs); tokens in `special` are left to whoever reads the link.
    Texts closer together than `pace` seconds are written together. It writes between `open` and `close`.
    """

    def __init__(
        self,
        descriptor: int,
        pieces: bytes,
        ends: "array[int]",
        special: Iterable[int],
        lead: bytes,
        tail: bytes,
        pace: float = 0.0,
    ) -> None:
        ids = sorted(token for token in special if 0 <= token < 1 << 32)
        self._kept = ffi.from_buffer(pieces), ffi.from_buffer("unsigned long[]", ends)  # for as long as it is used
        made = lib.sf_text_out_new(
            descriptor, *self._kept, len(ends) - 1, ids, len(ids), lead, len(lead), tail, len(tail), pace
        )
        if not made:
            raise MemoryError("no memory for the text of an answer")
        self.native = ffi.gc(made, lib.sf_text_out_free)
        self._at = ffi.new("void *[1]")

    def open(self) -> None:
        """Let it write, beginning with a whole character."""
        lib.sf_text_out_open(self.native)

    def close(self) -> bytes:
        """Nothing more is written; the bytes of chunks that the socket did not take."""
        at = ffi.cast("const uint8_t **", self._at)
        left = lib.sf_text_out_close(self.native, at)
        return bytes(ffi.buffer(at[0], left)) if left else b""

    def take(self) -> list[int]:
        """The tokens that it took since the last call."""
        at = ffi.cast("const uint32_t **", self._at)
        count = lib.sf_text_out_taken(self.native, at)
        return ffi.unpack(at[0], count) if count else []

    def put(self, tokens: list[int], now: float = math.inf) -> bool:
        """Take tokens, as the thread of a relay does; false when they, and all behind them, are not for it."""
        return bool(lib.sf_text_out_put(self.native, tokens, len(tokens), now))


class Relay:
    """Reads the frames of a Link W of `version` from a socket: `receive` what is for the event loop.

    Nobody else may read the socket. `before`: what was read of its next frame already.
    """

    def __init__(self, descriptor: int, version: int, before: bytes = b"") -> None:
        self._descriptor = os.dup(descriptor)  # whoever owns the socket may close it at any time
        made = lib.sf_relay_open(self._descriptor, version, EMIT_TYPE, before, len(before))
        if not made:
            os.close(self._descriptor)
            raise OSError(ffi.errno, f"no thread to read a link: {os.strerror(ffi.errno)}")
        self._native = made
        self._news = lib.sf_relay_news(made)
        self._at = ffi.new("const uint8_t **")
        self._ended = ffi.new("int *")
        self._lent: list[TextOut] = []  # the thread uses them

    async def receive(self) -> bytes:
        """Bytes for the event loop, nothing at the end of the stream. Raises trio.BrokenResourceError."""
        while True:
            await trio.lowlevel.wait_readable(self._news)
            length = lib.sf_relay_take(self._native, self._at, self._ended)
            if length:
                return bytes(ffi.buffer(self._at[0], length))
            ended = self._ended[0]
            if ended < 0:
                why = f"{errorcode.get(-ended, -ended)}: {os.strerror(-ended)}"
                raise trio.BrokenResourceError(f"the link cannot be read: {why}") from OSError(-ended, why)
            if ended:
                return b""

    def lend(self, tag: int, text: TextOut) -> None:
        """Give the tokens of lane `tag` to `text`, until `take_back`."""
        if self._native is not None:
            self._lent.append(text)
            lib.sf_relay_lend(self._native, tag, text.native)  # without memory they come the other way

    def take_back(self) -> None:
        """No lane has a text any more."""
        if self._native is not None:
            lib.sf_relay_return(self._native)
            self._lent.clear()

    def close(self) -> None:
        """End the thread; nothing is read any more."""
        if self._native is not None:
            native, self._native = self._native, None
            lib.sf_relay_close(native)
            os.close(self._descriptor)
            self._lent.clear()
