"""One site for the tests of this room: every script that they talk to."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.api.http.listening import Site, SiteThread

SCRIPTS = (
    "plain", "loop", "text_tool", "think", "bad_utf8", "stop", "broken_tool", "two_tools", "open_tool"
)  # fmt: skip


@attrs.frozen
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each `data:` line; the stream must end in [DONE]."""
        lines = [line for line in self.body.decode().split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


def call(site: Site, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request; `body` is JSON unless it is bytes."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(site.url + path, data, names, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return Reply(answer.status, lower(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, lower(error.headers), error.read())


def lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@pytest.fixture(scope="session")
def site(scripted_gguf: Callable[[str], Path]) -> Iterator[Site]:
    """Serves every script in `SCRIPTS`, open to all."""
    with tempfile.TemporaryDirectory(prefix="sf-") as home:
        thread = SiteThread(Path(home), [scripted_gguf(name) for name in SCRIPTS])
        yield thread.start()
        thread.stop()
