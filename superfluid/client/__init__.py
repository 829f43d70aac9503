"""A Python client of the session API. `Client` blocks, `WebClient` too, over `--web`; `AsyncClient` is for trio.

with Client() as client:
    session = client.session(system="You are brief.")
    session.user("Say hello.")
    for chunk in session.stream(max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from typing import TYPE_CHECKING

from superfluid.client.address import default_socket
from superfluid.client.client import Client, Connection, Session, Stream
from superfluid.client.errors import (
    ClientError,
    ConnectionLost,
    NotReached,
    Refused,
    Throttled,
    UnexpectedReply,
)
from superfluid.client.turns import ChatMessage, Chunk, Reply, ToolCall
from superfluid.client.web import WebClient
from superfluid.link.events import Descendants, Drop, Event, Finish, GenParams as Sampling, Replace

if TYPE_CHECKING:
    from superfluid.client.trio_client import AsyncClient, AsyncSession, AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientError",
    "Connection",
    "ConnectionLost",
    "Descendants",
    "Drop",
    "Event",
    "Finish",
    "NotReached",
    "Refused",
    "Replace",
    "Reply",
    "Sampling",
    "Session",
    "Stream",
    "Throttled",
    "ToolCall",
    "UnexpectedReply",
    "WebClient",
    "default_socket",
]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "AsyncSession", "AsyncStream"):  # who blocks does not pay for importing trio
        from superfluid.client import trio_client

        return getattr(trio_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
