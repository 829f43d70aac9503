"""The frame envelope of Link W and Link F: pure data in, frames out."""

import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from superfluid.link.errors import LinkError

MAX_LENGTH = 16_777_216  # of what follows the length field
DROPPABLE = 0x8000  # the bit of msg_type that says class 1
_HEAD = struct.Struct("<IHHQQB")
_LENGTH = struct.Struct("<I")
_LENGTH_BYTES = _LENGTH.size
_HEAD_BYTES = _HEAD.size
_LEAST = _HEAD_BYTES - _LENGTH_BYTES
MAX_PAYLOAD = MAX_LENGTH - _LEAST


class EnvelopeError(LinkError):
    """A frame that ends the link."""


class BadLength(EnvelopeError):
    """A length too small to hold the envelope."""


class FrameTooLarge(EnvelopeError):
    """A length over 16 MiB."""


class ClassMismatch(EnvelopeError):
    """A class byte that is not what bit 15 of the message type says."""


class UnknownRequiredType(EnvelopeError):
    """A required message of a type this link does not know."""


class VersionMismatch(EnvelopeError):
    """A frame of another version than the one the handshake chose."""


class Truncated(EnvelopeError):
    """The stream ended inside a frame."""


class Frame(NamedTuple):
    """One frame; `correlation_id` is the `seq` of the request it answers, 0 when it answers none."""

    version: int
    msg_type: int
    seq: int
    correlation_id: int
    payload: bytes


def encode_frame(
    version: int, msg_type: int, seq: int, correlation_id: int, payload: bytes, droppable: bool | None = None
) -> bytes:
    """The bytes of a frame; its class follows from `msg_type`.

    Raises FrameTooLarge; ClassMismatch when `droppable` is given and is not what the type says.
    """
    if len(payload) > MAX_PAYLOAD:
        raise FrameTooLarge(f"a payload of {len(payload)} bytes; a frame holds {MAX_PAYLOAD}")
    klass = msg_type >> 15
    if droppable is not None and droppable != bool(klass):
        raise ClassMismatch(f"message type {msg_type:#06x} has class {klass}")
    return _HEAD.pack(_LEAST + len(payload), version, msg_type, seq, correlation_id, klass) + payload


def begin_frame(out: bytearray) -> int:
    """Leave room for an envelope at the end of `out`; returns where it stands."""
    start = len(out)
    out += bytes(_HEAD_BYTES)
    return start


def end_frame(out: bytearray, start: int, version: int, msg_type: int, seq: int, correlation_id: int) -> None:
    """Fill in the envelope at `start`, whose payload is the rest of `out`. Raises FrameTooLarge."""
    length = len(out) - start - _LENGTH_BYTES
    if length > MAX_LENGTH:
        raise FrameTooLarge(f"a payload of {length - _LEAST} bytes; a frame holds {MAX_PAYLOAD}")
    _HEAD.pack_into(out, start, length, version, msg_type, seq, correlation_id, msg_type >> 15)


class Decoder:
    """Cuts a byte stream into frames: `feed` any bytes, then take frames with `next` or by iterating.

    `known_types` are the message types of the link: an unknown droppable one is skipped. After an error the stream is
    lost, and the same error is raised again.
    """

    def __init__(self, known_types: Container[int]) -> None:
        self._known = known_types
        self._buffer = bytearray()
        self._start = 0  # of the next frame in the buffer
        self._failure: EnvelopeError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take in bytes of the stream, however they are cut."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        if self._failure is None:
            self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame; None when more bytes are needed. Raises an EnvelopeError that ends the link."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._next()
        except EnvelopeError as error:
            self._failure = error
            self._buffer.clear()
            self._start = 0
            raise

    def _next(self) -> Frame | None:
        buffer = self._buffer
        while True:
            start = self._start
            held = len(buffer) - start
            if held < _LENGTH_BYTES:
                return None
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length < _LEAST:
                raise BadLength(f"a frame of length {length}; the envelope alone is {_LEAST}")
            if length > MAX_LENGTH:
                raise FrameTooLarge(f"a frame of length {length}; the limit is {MAX_LENGTH}")
            if held < _LENGTH_BYTES + length:
                return None
            _, version, msg_type, seq, correlation_id, klass = _HEAD.unpack_from(buffer, start)
            if klass != msg_type >> 15:
                raise ClassMismatch(f"message type {msg_type:#06x} came with class {klass}")
            self._start = end = start + _LENGTH_BYTES + length
            if msg_type in self._known:
                return Frame(version, msg_type, seq, correlation_id, bytes(buffer[start + _HEAD_BYTES : end]))
            if not klass:
                raise UnknownRequiredType(f"message type {msg_type:#06x} is unknown and required")

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self.next()) is not None:
            yield frame

    def rest(self) -> bytes:
        """Take out the bytes that are fed and not taken as frames."""
        rest = bytes(self._buffer[self._start :])
        self._buffer.clear()
        self._start = 0
        return rest

    def eof(self) -> None:
        """The stream has ended. Raises Truncated when it did inside a frame."""
        left = len(self._buffer) - self._start
        if left and self._failure is None:
            raise Truncated(f"the stream ended {left} bytes into a frame")
