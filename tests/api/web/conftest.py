"""Sites that many tests share."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.web.serving import Site, SiteThread


@pytest.fixture(scope="session")
def sites(scripted_gguf: Callable[[str], Path]) -> Iterator[Callable[[str], Site]]:
    """`sites(name)`: a server of the scripted model of that name on the web."""
    running: dict[str, SiteThread] = {}
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:

        def serve(name: str) -> Site:
            if name not in running:
                home = Path(folder, name)
                home.mkdir()
                running[name] = SiteThread(home, scripted_gguf(name))
                running[name].start()
            return running[name].site

        yield serve
        for thread in running.values():
            thread.stop()


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:
    """One whose model replies text and then a tool call."""
    return sites("text_tool")


@pytest.fixture
def endless(sites: Callable[[str], Site]) -> Site:
    """One whose replies only end with their max_tokens."""
    return sites("loop")
