"""`superfluid serve --web`: where it may listen, what it says, and what its token file is."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.client import WebClient
from tests.api.web.serving import mode
from tests.cli.conftest import RunCommand, superfluid  # noqa: F401  (a fixture)
from tests.cli.server import Server


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:8454", "8454", ":8454", "[::]:8454", "10.0.0.1:1", "127.0.0.1", "localhost:x", "127.0.0.1:70000"],
)
def test_it_listens_on_loopback_only(superfluid: RunCommand, tiny_gguf: Path, address: str) -> None:  # noqa: F811
    done = superfluid("serve", tiny_gguf, "--port", "0", "--web", address)
    assert done.code == 2
    assert "--web listens on loopback only" in done.err


def test_a_taken_port_is_told_first(superfluid: RunCommand) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = superfluid("serve", "/not/there", "--port", "0", "--web", address)
    assert done.code == 1
    assert f"--web {address}" in done.err
    assert "another process listens there" in done.err


def test_a_server_says_where_it_is_and_makes_a_token_at_every_start(
    scripted_gguf: Callable[[str], Path], home: Path
) -> None:
    seen = set()
    for _ in range(2):
        with Server(home, scripted_gguf("plain"), "--port", "0", "--web", "127.0.0.1:0") as server:
            said = server.said(r"^superfluid: api-web on (http://127\.0\.0\.1:\d+) \(token: (.+)\)$")
            openai = next(line for line in server.lines if "openai api on" in line)
            assert server.lines.index(openai) < server.lines.index(said[0])
            token_file = Path(said[2])
            assert token_file == home / "sessions" / "web-token"
            assert mode(token_file) == 0o600
            seen.add(token_file.read_text())
            with WebClient(said[1], token_file) as client:
                session = client.session()
                session.user("Go.")
                assert session.generate().text == "Hello, world."
            token_file.chmod(0o644)
            assert server.stop() == 0
    assert len(seen) == 2
