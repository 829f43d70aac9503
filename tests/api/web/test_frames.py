"""WebSocket frames that break the protocol: each is answered with its close code, and the connection ends."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from superfluid.api.web import frames, websocket
from tests.api.web.serving import Site, on_web
from tests.api.web.test_stream import wait_until_free

FIN, RSV1, RSV3 = 0x80, 0x40, 0x10
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MASKED = 0x80
LIST = b'"List"'


def frame(first: int, payload: bytes = b"", masked: int = MASKED, length: int | None = None) -> bytes:
    """A client's frame: its first byte (flags and opcode), and its payload under a mask of zeros."""
    length = len(payload) if length is None else length
    if length < 126:
        head = bytes([first, masked | length])
    elif length < 1 << 16:
        head = bytes([first, masked | 126]) + struct.pack("!H", length)
    else:
        head = bytes([first, masked | 127]) + struct.pack("!Q", length)
    return head + (bytes(4) if masked else b"") + payload


class Raw:
    """A WebSocket past its handshake, byte by byte."""

    def __init__(self, site: Site) -> None:
        self.socket = site.websocket().socket
        self._held = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _take(self, size: int) -> bytes:
        while len(self._held) < size:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError(f"the server closed with {self._held!r}")
            self._held += data
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def frame(self) -> tuple[int, bytes]:
        """The next frame's opcode and payload."""
        first, length = self._take(2)
        assert first & FIN
        if length == 126:
            (length,) = struct.unpack("!H", self._take(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self._take(8))
        return first & 0xF, self._take(length)

    def closed(self) -> int:
        """The code of the close frame that comes next, behind which the connection ends."""
        opcode, payload = self.frame()
        assert opcode == CLOSE, payload
        with pytest.raises(EOFError):
            self.frame()
        self.socket.close()
        payload[2:].decode()
        return int.from_bytes(payload[:2], "big")


def close_frame(payload: bytes) -> bytes:
    return frame(FIN | CLOSE, payload)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(frame(FIN | TEXT, LIST, masked=0), 1002, id="not masked"),
        pytest.param(frame(FIN | RSV1 | TEXT, LIST), 1002, id="a bit of an extension that was not agreed on"),
        pytest.param(frame(FIN | RSV3 | PING), 1002, id="a reserved bit"),
        pytest.param(frame(FIN | 3, LIST), 1002, id="a reserved opcode"),
        pytest.param(frame(FIN | 11), 1002, id="a reserved control opcode"),
        pytest.param(frame(FIN | CONTINUATION, LIST), 1002, id="a continuation of nothing"),
        pytest.param(frame(TEXT, LIST) + frame(FIN | TEXT, LIST), 1002, id="a message inside another"),
        pytest.param(frame(PING, b"a"), 1002, id="a control frame in pieces"),
        pytest.param(frame(FIN | PING, bytes(126)), 1002, id="a long control frame"),
        pytest.param(bytes([FIN | TEXT, MASKED | 126, 0, 5]) + bytes(9), 1002, id="a length in too many bytes"),
        pytest.param(frame(FIN | TEXT, length=1 << 63), 1002, id="a negative length"),
        pytest.param(close_frame(b"\x03"), 1002, id="a close of one byte"),
        pytest.param(close_frame(struct.pack("!H", 999)), 1002, id="a close code below those there are"),
        pytest.param(close_frame(struct.pack("!H", 1006)), 1002, id="a close code that is never sent"),
        pytest.param(close_frame(struct.pack("!H", 1000) + b"\xff"), 1007, id="a close reason that is no text"),
        pytest.param(frame(FIN | TEXT, b'"\xff"'), 1007, id="text that is not UTF-8"),
        pytest.param(frame(FIN | TEXT, b'"\xed\xa0\x80"'), 1007, id="text with half a surrogate pair"),
        pytest.param(frame(FIN | TEXT, b'"\xc3'), 1007, id="text that ends inside a character"),
        pytest.param(frame(TEXT, b'"\xc3') + frame(FIN | CONTINUATION, b'"'), 1007, id="text broken between frames"),
    ],
)
def test_a_violation_has_its_close_code(site: Site, sent: bytes, code: int) -> None:
    raw = Raw(site)
    raw.send(frame(FIN | TEXT, LIST))
    assert raw.frame()[0] == TEXT
    raw.send(sent)
    assert raw.closed() == code


def test_what_is_no_violation(site: Site) -> None:
    raw = Raw(site)
    raw.send(frame(TEXT, b'"Li') + frame(FIN | PING, b"there?") + frame(CONTINUATION) + frame(FIN | 0, b'st"'))
    assert raw.frame() == (PONG, b"there?")
    assert raw.frame()[0] == TEXT
    raw.send(frame(FIN | PONG) + close_frame(struct.pack("!H", 4000) + "ü".encode()))
    assert raw.closed() == 4000
    raw = Raw(site)
    raw.send(close_frame(b""))
    with pytest.raises(EOFError):  # a close without a code is answered with one
        assert raw.frame() == (CLOSE, b"") and raw.frame()


@pytest.mark.parametrize("kind", [TEXT, BINARY])
def test_a_frame_or_a_message_that_is_too_big(site: Site, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client that sends all of it before it reads, and far more than the system buffers."""
    monkeypatch.setattr(frames, "MOST_FRAME", 1 << 20)
    piece = b" " * (1 << 20)
    raw = Raw(site)
    raw.send(frame(FIN | kind, piece + b" "))
    assert raw.closed() == 1009
    raw = Raw(site)
    raw.send(
        frame(kind, piece) + frame(CONTINUATION, piece) * 63 + frame(FIN | CONTINUATION, b" ") + frame(0, piece) * 8
    )
    assert raw.closed() == 1009


def test_bytes_are_counted_and_not_characters(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_FRAME", 1000)
    raw = Raw(site)
    raw.send(frame(FIN | TEXT, ("é" * 500).encode()))
    assert raw.frame()[0] == TEXT  # it is no request
    raw.send(frame(FIN | TEXT, ("é" * 500).encode() + b"1"))
    assert raw.closed() == 1009


async def test_a_connection_whose_requests_nobody_takes_leaves_no_task(
    home: Path, scripted_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits to hand over the next one when the client leaves."""
    monkeypatch.setattr(websocket, "LOOK", 0.001)
    async with on_web(home, scripted_gguf("loop")) as site:

        def leave() -> None:
            session = site.session()
            socket = site.websocket()
            socket.send({"Generate": {"session": session, "max_tokens": 3500}}, *["List"] * 200)
            socket.until("Delta")
            socket.socket.close()
            wait_until_free(site, session)

        before = tasks()
        await trio.to_thread.run_sync(leave)
        while tasks() > before:
            await trio.lowlevel.checkpoint()
        assert tasks() <= before


def tasks() -> int:
    """How many tasks there are."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return sum(1 for _ in below(root))


def below(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from below(child)


def test_a_violation_cancels_what_the_connection_runs(endless: Site) -> None:
    session = endless.session()
    socket = endless.websocket()
    socket.send({"Generate": {"session": session, "max_tokens": 3500}})
    socket.until("Delta")
    raw = Raw(endless)
    raw.socket = socket.socket
    raw.send(frame(FIN | 3))
    opcode, payload = raw.frame()
    while opcode == TEXT:
        opcode, payload = raw.frame()
    assert opcode == CLOSE
    assert payload[:2] == struct.pack("!H", 1002)
    assert wait_until_free(endless, session)["last_finish"] == 4
