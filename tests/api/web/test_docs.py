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


def run(kind: str, code: str, site: Site, folder: Path) -> str:
    """What an example says; a shell's variables are there in the next one."""
    shell = f"touch kept; . ./kept; {code}\ndeclare -p token session > kept 2> /dev/null; true"
    command = ["bash", "-c", shell] if kind == "sh" else [sys.executable, "-c", code]
    said = None if kind == "sh" else "y\n"
    environment = os.environ | {"SUPERFLUID_HOME": str(site.token_file.parents[1])}
    done = subprocess.run(
        command, cwd=folder, env=environment, input=said, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(title: str, site: Site) -> list[tuple[str, str]]:
    """(language, code) of a section's examples, for this server."""
    section = DOCS.read_text().split(f"## {title}")[1].split("\n## ")[0]
    here = section.replace("http://127.0.0.1:8454", site.url).replace("http://127.0.0.1:3000", ORIGIN)
    return BLOCK.findall(here)


def test_what_the_documentation_shows_of_the_web_works(site: Site, tmp_path: Path) -> None:
    site.session()  # nothing in the examples hangs on the numbers of sessions
    said: list[str] = []
    for kind, code in blocks("Over the web", site):
        if "Sec-WebSocket-Key" in code:
            said.append(head_of(code, tmp_path))
        elif "follow" in code:  # it would follow for ever
            stop = "            if getattr(item, 'event_id', 0) == 5:\n                break\n"
            said.append(run(kind, code + stop, site, tmp_path))
        else:
            said.append(run(kind, code, site, tmp_path))
    credentials, rpc, stream, websocket, follow = said
    assert credentials == ""
    assert (tmp_path / "web.curl").stat().st_mode & 0o777 == 0o600
    assert rpc.startswith('{"Created":{"session":2}}\n{"Committed":')
    assert rpc.endswith('{"Sessions":{"ids":[1,2]}}')
    assert stream.count('data: {"provisional"') >= 1
    assert 'data: {"done":{"tokens_generated":5,"finish":1,"warm_prefix":0}}' in stream
    assert stream.endswith("data: [DONE]\n\n")
    assert websocket.startswith("HTTP/1.1 101")
    assert "superfluid.v1" in websocket
    assert "Generated(span=" in follow


def test_what_the_documentation_shows_of_the_client_works(site: Site, tmp_path: Path) -> None:
    site.session()
    (site.token_file.parents[1] / "superfluid.sock").symlink_to(site.server.path)
    conversation, sampled, web = (run(kind, code, site, tmp_path) for kind, code in blocks("From Python", site))
    assert conversation.startswith("Hello, world.\n Hello, world.\nHello, world.\n")
    assert "system You are brief." in conversation
    assert sampled.count("\n") == 2
    assert web == "Hello, world.\n"


def test_what_the_documentation_shows_of_tools_works(scripted_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sf-") as home, SiteThread(Path(home), scripted_gguf("text_tool")) as site:
        (site.token_file.parents[1] / "superfluid.sock").symlink_to(site.server.path)
        ((kind, code),) = blocks("Tools and permissions", site)
        said = run(kind, code, site, tmp_path)
        assert re.match(r"May get_weather\(\{.*Paris.*\}\) run\? \[y/n\] ", said)
        with site.server.blocking_client() as client:
            bodies = [type(event.body).__name__ for event in client.get(1).events()]
    order = ["ToolUse", "PermissionRequest", "PermissionResponse", "ToolResult", "GenerationPrompt"]
    assert [name for name in bodies[bodies.index(order[0]) :] if name in order][:5] == order
