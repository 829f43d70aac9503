"""A sketch of an editor plug-in, on the bare session socket: plain Python, nothing installed.

    superfluid serve            # in another terminal, until it says "serving on"
    python examples/editor.py "Make this friendlier." < letter.txt

A frame is a u32 length and a message: the number of its kind, then its fields. Numbers are varints (7 bits a byte, the
lowest first); a text is its length and its bytes; what may be missing is a 0, or a 1 and its value.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CREATE, APPEND_MESSAGE, GENERATE = 0, 2, 3  # requests
CREATED, DELTA, COMMITTED, GENERATED, ERROR = 0, 1, 3, 4, 13  # responses
GENERATED_TEXT, USER = 4, 1  # the kind of event that holds a piece of a reply; a role
SAMPLING = struct.pack("<fff", 0.0, 1.0, 0.0) + b"\0\0"  # temperature, top_p, min_p, top_k, seed
REPLY_TOKENS = 400


def varint(number: int) -> bytes:
    low = [number & 0x7F]
    while number := number >> 7:
        low[-1] |= 0x80
        low.append(number & 0x7F)
    return bytes(low)


def text(value: str) -> bytes:
    data = value.encode()
    return varint(len(data)) + data


class Reader:
    """Takes fields off a message."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def text(self) -> str:
        length = self.varint()
        self.at += length
        return self.data[self.at - length : self.at].decode()


class Editor:
    """One conversation about what is in the buffer."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.stream = self.socket.makefile("rb")
        self.send(varint(CREATE) + b"\0" + SAMPLING)  # no parent
        self.session = varint(self.receive(CREATED).varint())

    def send(self, message: bytes) -> None:
        self.socket.sendall(struct.pack("<I", len(message)) + message)

    def receive(self, *expected: int) -> Reader:
        reader = Reader(self.stream.read(*struct.unpack("<I", self.stream.read(4))))
        self.kind = reader.varint()
        if self.kind not in expected:
            sys.exit(reader.text() if self.kind == ERROR else f"unexpected answer {self.kind}")
        return reader

    def rewrite(self, buffer: str, wish: str) -> Iterator[str]:
        """The new text of the buffer, piece by piece as it becomes durable."""
        self.send(varint(APPEND_MESSAGE) + self.session + varint(USER) + text(f"{wish}\n\n{buffer}"))
        self.receive(COMMITTED)
        self.send(varint(GENERATE) + self.session + varint(REPLY_TOKENS))
        while (event := self.receive(DELTA, GENERATED)) and self.kind == DELTA:
            _id, _epoch, _time, kind = (event.varint() for _ in range(4))
            if kind == GENERATED_TEXT:
                _tokens = [event.varint() for _ in range(event.varint())]
                yield event.text()


if __name__ == "__main__":
    home = Path(os.environ.get("SUPERFLUID_HOME") or Path.home() / ".superfluid")
    try:
        editor = Editor(home / "superfluid.sock")
    except OSError as error:
        sys.exit(f"no server answers in {home} ({error.strerror}): start one with `superfluid serve`")
    for piece in editor.rewrite(sys.stdin.read(), " ".join(sys.argv[1:]) or "Correct the spelling."):
        print(piece, end="", flush=True)
    print()
