"""The examples of docs/sessions.md, run as they stand against a server of their own."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.web.serving import LIMIT, ORIGIN, Site, SiteThread

DOCS = Path(__file__).parents[3] / "docs" / "sessions.md"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.fixture
def site(scripted_gguf: Callable[[str], Path]) -> Iterator[Site]:
    """A server with no sessions yet."""
    with tempfile.TemporaryDirectory(prefix="sf-") as home, SiteThread(Path(home), scripted_gguf("plain")) as site:
        yield site


def head_of(command: str, folder: Path) -> str:
    """What a command that does not end by itself says up to an empty line."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout is not None
        said = "".join(iter(lambda: running.stdout.readline().strip(), ""))
        running.kill()
    return said


def test_what_the_documentation_shows_works(site: Site, tmp_path: Path) -> None:
    section = DOCS.read_text().split("## Over the web")[1].split("\n## ")[0]
    said: list[str] = []
    for kind, code in BLOCK.findall(section):
        here = code.replace("http://127.0.0.1:8454", site.url).replace("http://127.0.0.1:3000", ORIGIN)
        here = here.replace("~/.superfluid", str(site.token_file.parents[1]))
        if "Sec-WebSocket-Key" in here:
            said.append(head_of(here, tmp_path))
            continue
        if kind == "python":  # it would follow for ever
            here += "    if getattr(item, 'event_id', 0) == 5:\n        break\n"
        command = ["bash", "-c", here] if kind == "sh" else [sys.executable, "-c", here]
        environment = os.environ | {"SUPERFLUID_HOME": str(site.token_file.parents[1])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
        said.append(done.stdout)
        assert kind == "sh" or done.returncode == 0, done.stderr
    credentials, rpc, stream, websocket, follow = said
    assert credentials == ""
    assert (tmp_path / "web.curl").stat().st_mode & 0o777 == 0o600
    assert rpc.startswith('{"Created":{"session":1}}{"Committed":')
    assert rpc.endswith('{"Sessions":{"ids":[1]}}')
    assert stream.count('data: {"provisional"') >= 1
    assert 'data: {"done":{"tokens_generated":5,"finish":1,"warm_prefix":0}}' in stream
    assert stream.endswith("data: [DONE]\n\n")
    assert websocket.startswith("HTTP/1.1 101")
    assert "superfluid.v1" in websocket
    assert "Generated(span=" in follow
