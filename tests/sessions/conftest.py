"""A clock that moves by itself, and stores that are closed."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from superfluid.sessions.files import Files
from superfluid.sessions.store import Store

OpenStore = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Open (or open again, closing the last) the store in `tmp_path/s`, with times from 1 000 000 ms on."""
    opened: list[Store] = []
    times = count(1_000_000)

    def open_(files: Files | None = None, directory: Path = tmp_path / "s") -> Store:
        while opened:
            opened.pop().close()
        opened.append(Store.open(directory, files, lambda: next(times)))
        return opened[0]

    yield open_
    while opened:
        opened.pop().close()
