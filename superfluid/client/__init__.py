"""A Python client of the session API. `Client` and, over `--web`, `WebClient` block; `AsyncClient` and
`AsyncWebClient` are the same for trio.

with Client() as client:
    session = client.session(system="You are brief.")
    session.user("Say hello.")
    for chunk in session.stream(max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from typing import TYPE_CHECKING

from superfluid.client.address import default_socket
from superfluid.client.client import Client, Connection, Following, Session, Stream
from superfluid.client.errors import (
    ClientError,
    ConnectionLost,
    Misuse,
    NotReached,
    Refused,
    Throttled,
    UnexpectedReply,
)
from superfluid.client.turns import ChatMessage, Chunk, Reply, ToolCall
from superfluid.link.events import Descendants, Drop, Event, Finish, GenParams as Sampling, Replace

if TYPE_CHECKING:
    from superfluid.client.trio_client import AsyncClient, AsyncFollowing, AsyncSession, AsyncStream, AsyncWebClient
    from superfluid.client.web import WebClient

__all__ = [
    "AsyncClient",
    "AsyncFollowing",
    "AsyncSession",
    "AsyncStream",
    "AsyncWebClient",
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
    "Following",
    "Misuse",
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
    if name.startswith("Async") and name in __all__:  # who blocks does not pay for importing trio
        from superfluid.client import trio_client

        return getattr(trio_client, name)
    if name == "WebClient":  # nor who uses the socket for HTTP
        from superfluid.client.web import WebClient

        return WebClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
