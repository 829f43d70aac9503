"""Server-sent events: one `data:` line of compact JSON per event, and a comment when nothing was said for a while."""

from typing import Any

import orjson

COMMENT = b":\n\n"
MARK = "\0"  # in place of a text; names, which may hold the like of it, stand before that
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def around(chunk: bytes) -> tuple[bytes, bytes]:
    """What stands before and behind the text of a chunk whose text is `MARK`."""
    before, _, behind = chunk.rpartition(orjson.dumps(MARK)[1:-1])
    return before, behind


class Chunks:
    """The chunks of one streamed answer: what they have in common is encoded once.

    `head` are the members before `choices`; each chunk has one choice.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._lead = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._pieces: dict[tuple[int, str], bytes] = {}

    def chunk(self, choice: dict[str, Any], **members: Any) -> bytes:
        """Any chunk; `members` follow the choices."""
        tail = b"]," + orjson.dumps(members)[1:] if members else b"]}"
        return self._lead + orjson.dumps(choice) + tail + b"\n\n"

    def delta(self, index: int, name: str, text: str) -> bytes:
        """A chunk whose delta is one text: what a stream mostly is."""
        lead = self._pieces.get((index, name))
        if lead is None:
            lead = self._pieces[index, name] = self._lead + (
                b'{"index":%d,"finish_reason":null,"delta":{"%b":' % (index, name.encode())
            )
        return lead + orjson.dumps(text) + b"}}]}\n\n"
