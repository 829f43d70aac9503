"""The socket's framing, without the socket: a u32 little-endian length, then a postcard request or response."""

import struct

from superfluid.client.errors import Misuse, UnexpectedReply
from superfluid.client.wire import Wire, payload
from superfluid.link import postcard, session_api as api

LENGTH = struct.Struct("<I")


def frame(request: api.Request) -> bytes:
    """The bytes of a request. Raises Misuse for one that does not encode or is over 64 MiB."""
    data = payload(request)
    if len(data) > api.MAX_FRAME:
        raise Misuse(f"a request of {len(data)} bytes; {api.MAX_FRAME} is the most")
    return LENGTH.pack(len(data)) + data


class SocketWire(Wire):
    """Frames of a session socket."""

    def __init__(self) -> None:
        self._asked = bytearray()
        self._buffer = bytearray()

    def ask(self, *requests: api.Request) -> None:
        self._asked += b"".join(map(frame, requests))

    def outgoing(self) -> bytes:
        data = bytes(self._asked)
        self._asked.clear()
        return data

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> api.Response | None:
        buffer = self._buffer
        if len(buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(buffer)
        if length > api.MAX_FRAME:
            raise UnexpectedReply(f"a frame of {length} bytes; {api.MAX_FRAME} is the most")
        end = LENGTH.size + length
        if len(buffer) < end:
            return None
        data = bytes(memoryview(buffer)[LENGTH.size : end])
        del buffer[:end]
        try:
            return postcard.decode(api.Response, data)
        except postcard.PostcardError as error:
            raise UnexpectedReply(f"the server's answer does not decode: {error}") from error

    @property
    def idle(self) -> bool:
        return not self._asked and not self._buffer
