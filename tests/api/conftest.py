"""Servers with a store of their own."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.api.serving import Server, serving


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: a socket's has 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        yield Path(folder)


@pytest.fixture
async def fresh_tool_server(home: Path, scripted_gguf: Callable[[str], Path]) -> AsyncIterator[Server]:
    """A server without sessions, of whose model every reply is text, then a tool call."""
    async with serving(home, scripted_gguf("text_tool")) as server:
        yield server
