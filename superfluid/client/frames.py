"""The socket's framing, without the socket: a u32 little-endian length, then a postcard request or response."""

import struct

from superfluid.client.errors import Throttled, UnexpectedReply, refusal
from superfluid.link import postcard, session_api as api

LENGTH = struct.Struct("<I")


def frame(request: api.Request) -> bytes:
    """The bytes of a request. Raises ValueError for one that does not encode or is over 64 MiB."""
    payload = postcard.encode(request)
    if len(payload) > api.MAX_FRAME:
        raise ValueError(f"a request of {len(payload)} bytes; {api.MAX_FRAME} is the most")
    return LENGTH.pack(len(payload)) + payload


class Responses:
    """Responses out of the bytes of a connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether no byte waits for the rest of its response."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> api.Response | None:
        """The next whole response; none when more bytes are wanted. Raises UnexpectedReply."""
        buffer = self._buffer
        if len(buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(buffer)
        if length > api.MAX_FRAME:
            raise UnexpectedReply(f"a frame of {length} bytes; {api.MAX_FRAME} is the most")
        end = LENGTH.size + length
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[LENGTH.size : end])
        del buffer[:end]
        try:
            return postcard.decode(api.Response, payload)
        except postcard.PostcardError as error:
            raise UnexpectedReply(f"the server's answer does not decode: {error}") from error


ASIDE = (api.DeltaResponse, api.SubEventResponse, api.SubProvisionalResponse, api.SubEndedResponse)


def answers(response: api.Response) -> bool:
    """Whether a response answers a request; the others come beside it. Raises the error that an answer tells of."""
    if isinstance(response, api.ErrResponse):
        raise refusal(response.message)
    if isinstance(response, api.ThrottledResponse):
        raise Throttled(response.retry_after_ms)
    return not isinstance(response, ASIDE)
