"""The sending side of a session connection: a u32 little-endian length, then a postcard response."""

import struct
from collections.abc import Sequence

import trio

from superfluid.link import postcard
from superfluid.link.session_api import MAX_FRAME, ErrResponse, Response, is_long

LENGTH = struct.Struct("<I")


class Outlet:
    """Whole frames in order: from the connection's own tasks, or between them straight to its `descriptor`."""

    def __init__(self, stream: trio.SocketStream, nursery: trio.Nursery) -> None:
        """`nursery` runs whatever serves the connection, and is cancelled when nobody reads."""
        self.descriptor = stream.socket.fileno()
        self._stream = stream
        self._nursery = nursery
        self._writing = trio.Lock()
        self._rest = b""

    @property
    def free(self) -> bool:
        """Whether frames may be written straight to the socket now."""
        return not (self._rest or self._writing.locked())

    def finish(self, rest: bytes) -> None:
        """Send, before anything else, what the socket did not take of frames that were written straight to it."""
        self._rest = rest
        self._nursery.start_soon(self.send, name="session-rest")

    async def send(self, *responses: Response) -> None:
        try:
            async with self._writing:
                rest, self._rest = self._rest, b""
                await self._stream.send_all(rest + await frames(responses))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._nursery.cancel_scope.cancel()  # nobody reads: what runs for this client stops here
            await trio.sleep_forever()


async def frames(responses: Sequence[Response]) -> bytes:
    """The bytes of responses; of long ones they are made off the event loop."""
    if any(map(is_long, responses)):
        return await trio.to_thread.run_sync(_joined, responses)
    return _joined(responses)


def _joined(responses: Sequence[Response]) -> bytes:
    return b"".join(map(frame, responses))


def frame(response: Response) -> bytes:
    """The bytes of a response; one that no frame holds becomes an Err."""
    payload = postcard.encode(response)
    if len(payload) > MAX_FRAME:
        why = f"protocol: the answer has {len(payload)} bytes, and {MAX_FRAME} fit a frame; read from a later cursor"
        payload = postcard.encode(ErrResponse(why))
    return LENGTH.pack(len(payload)) + payload
