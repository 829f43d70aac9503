"""The tools of AppendSystem in the log: behind the body of their Message, where readers of the format look at nothing.

Who does not know them still reads the same Message; compaction, forks and purges treat them as what they are, a part
of that record.
"""

from collections.abc import Sequence

import attrs

from superfluid.link import events as ev
from superfluid.link.errors import PostcardError
from superfluid.link.postcard import decode, decode_prefix, encode, message
from superfluid.sessions import records

MARK = b"SFTOOLS1"


@message
class _Tools:
    tools: list[str]


@attrs.frozen
class Declaring(ev.Body):
    """What a rule plans for a Message that declares tools, each a JSON text as it was given. Never in an event."""

    said: ev.Message
    tools: tuple[str, ...]

    def behind(self) -> bytes:
        """What follows the body in its frame."""
        return MARK + encode(_Tools(list(self.tools)))


def tools_of(payload: bytes, version: int) -> tuple[ev.Body, tuple[str, ...]]:
    """The body in a frame's payload, and the tools behind it."""
    _, _, position = records.head(payload, version)
    body, end = decode_prefix(ev.Body, payload, position)
    if type(body) is not ev.Message or not payload.startswith(MARK, end):
        return body, ()
    try:
        return body, tuple(decode(_Tools, payload, end + len(MARK)).tools)
    except PostcardError:  # someone else's bytes
        return body, ()


def declaring(body: ev.Body, tools: Sequence[str]) -> ev.Body:
    """`body` with tools declared by it, if it can and there are any."""
    return Declaring(body, tuple(tools)) if tools and isinstance(body, ev.Message) else body
