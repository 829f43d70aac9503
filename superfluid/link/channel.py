"""Framed messages over a stream socket: blocking for a worker's loop, for trio in the daemon."""

import functools
import select
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from superfluid.link.envelope import Decoder, EnvelopeError, Frame, VersionMismatch, begin_frame, end_frame
from superfluid.link.errors import LinkError
from superfluid.link.linkw import MESSAGES
from superfluid.link.postcard import decode, encode_into
from superfluid.link.schema import once_per_class, union_of

if TYPE_CHECKING:
    import trio

    from superfluid.link.relay import Relay

SOCKET_BUFFER = 1 << 20  # so that a peer busy for a moment holds up no tick
_READ_BYTES = 1 << 16

Table = Mapping[int, type[Any]]
_union_of = once_per_class(union_of)


def decode_message(frame: Frame, table: Table = MESSAGES) -> Any:
    """The message of a frame (of Link W, unless another table is given). Raises PostcardError."""
    return decode(table[frame.msg_type], frame.payload)


class Framer:
    """Numbers and frames the messages of one direction."""

    __slots__ = ("_types", "_version", "seq")

    def __init__(self, version: int, table: Table) -> None:
        self.seq = 0  # of the last frame
        self._version = version
        self._types = {cls: msg_type for msg_type, cls in table.items()}

    def add(self, out: bytearray, message: object, correlation: int = 0) -> int:
        """Append the frame of a message; returns its seq.

        Raises PostcardError and FrameTooLarge; `out` is then as it was, and the next seq too.
        """
        msg_type = self._types.get(_union_of(type(message)))
        if msg_type is None:
            raise LinkError(f"{type(message).__name__} is no message of this link")
        start = begin_frame(out)
        try:
            encode_into(message, out)
            end_frame(out, start, self._version, msg_type, self.seq + 1, correlation)
        except LinkError:
            del out[start:]
            raise
        self.seq += 1
        return self.seq


class _Inbound:
    """Cuts what is read into frames of the chosen version; `failure` is what ended the link after them."""

    __slots__ = ("_decoder", "_version", "ended", "failure")

    def __init__(self, version: int, table: Table) -> None:
        self._decoder = Decoder(table)
        self._version = version
        self.ended = False
        self.failure: EnvelopeError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that `data` completes; no data is the end of the stream."""
        frames: list[Frame] = []
        try:
            if not data:
                self.ended = True
                self._decoder.eof()
            self._decoder.feed(data)
            for frame in self._decoder:
                if frame.version != self._version:
                    raise VersionMismatch(f"a frame of version {frame.version} on a link of version {self._version}")
                frames.append(frame)
        except EnvelopeError as error:
            self.failure = error
        return frames

    def rest(self) -> bytes:
        """Take out the bytes of a frame that is begun."""
        return self._decoder.rest()


class BlockingChannel:
    """The worker's side: one thread sends and receives. The socket stays its owner's."""

    def __init__(self, sock: socket.socket, version: int, table: Table = MESSAGES) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self._sock = sock
        self._table = table
        self._framer = Framer(version, table)
        self._inbound = _Inbound(version, table)
        self._frames: deque[Frame] = deque()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: object, correlation: int = 0) -> int:
        """Send one message and return its seq; blocks while the peer reads nothing. Raises PostcardError, OSError."""
        out = bytearray()
        seq = self._framer.add(out, message, correlation)
        self._sock.sendall(out)
        return seq

    def send_many(self, messages: Iterable[object]) -> None:
        """Send unsolicited messages with one write."""
        out = bytearray()
        for message in messages:
            self._framer.add(out, message)
        if out:
            self._sock.sendall(out)

    def recv(self) -> tuple[int, int, Any] | None:
        """The next message as (seq, correlation, message); None at a clean end of the stream.

        Raises EnvelopeError and PostcardError, which end the link, and OSError.
        """
        while not self._frames:
            if self._inbound.failure is not None:
                raise self._inbound.failure
            if self._inbound.ended:
                return None
            self._read()
        frame = self._frames.popleft()
        return frame.seq, frame.correlation_id, decode_message(frame, self._table)

    def poll(self, timeout: float | None) -> bool:
        """Whether `recv` would return or raise at once; waits for that up to `timeout` seconds (None: for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self._frames or self._inbound.ended or self._inbound.failure):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
            if not self._readable.poll(left):
                return False
            self._read()
        return True

    def _read(self) -> None:
        size = self._sock.recv_into(self._scratch)
        self._frames += self._inbound.feed(self._scratch[:size])


class AsyncChannel:
    """The daemon's side, for trio. Any task may send; one task receives. The stream stays its owner's."""

    def __init__(self, stream: "trio.SocketStream", version: int, table: Table = MESSAGES) -> None:
        import trio  # not at the top: a worker, which is synchronous, does without it

        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self._stream = stream
        self._version = version
        self._framer = Framer(version, table)
        self._inbound = _Inbound(version, table)
        self._receive: Callable[[], Awaitable[bytes | bytearray]] = functools.partial(stream.receive_some, _READ_BYTES)
        self._sending = trio.StrictFIFOLock()
        self._whole = functools.partial(trio.CancelScope, shield=True)

    @property
    def next_seq(self) -> int:
        """The seq of the next message sent, when only one task sends: known before its reply can come."""
        return self._framer.seq + 1

    async def send(self, message: object, correlation: int = 0) -> int:
        """Send one message and return its seq; a message that is begun is sent whole, cancelled or not.

        Raises PostcardError, trio.BrokenResourceError.
        """
        async with self._sending:
            out = bytearray()
            seq = self._framer.add(out, message, correlation)
            with self._whole():
                await self._stream.send_all(out)
            return seq

    async def receive_frames(self) -> list[Frame]:
        """As many frames as one read holds, at least one; an empty list at a clean end of the stream.

        Raises EnvelopeError, which ends the link, and trio.BrokenResourceError.
        """
        while self._inbound.failure is None:
            frames = self._inbound.feed(await self._receive())
            if frames or (self._inbound.ended and self._inbound.failure is None):
                return frames
        raise self._inbound.failure

    def relayed(self) -> "Relay":
        """From now on a thread reads the stream, until whoever asked for it closes it."""
        from superfluid.link.relay import Relay  # which needs trio

        relay = Relay(self._stream.socket.fileno(), self._version, self._inbound.rest())
        self._receive = relay.receive
        return relay
