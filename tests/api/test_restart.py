"""Sessions outlive their server: `superfluid serve` is killed in mid-reply and started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from superfluid.client import Client, ClientError
from superfluid.link import events as ev, session_api as api

SECONDS = 60.0


@contextmanager
def serve(home: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """A server without HTTP, ready; killed at the end if it still runs."""
    command = [sys.executable, "-m", "superfluid", "serve", "--model", str(model), "--max-context", "4096"]
    command += ["--no-http", "--socket", str(home / "s.sock"), "--sessions", str(home / "sessions")]
    environment = os.environ | {"SUPERFLUID_HOME": str(home)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        said = ""
        while f"serving on {home}/s.sock" not in said:
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_killed_server_loses_nothing_it_has_shown(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    model = scripted_gguf("loop")
    client = Client(home / "s.sock")
    with serve(home, model) as process:
        session = client.session(system="You are brief.")
        session.user("Go.")
        connection = client.connect()
        connection.send(api.GenerateRequest(session.id, 4000))
        seen = [connection.receive(), connection.receive()]  # two ticks of it
        process.send_signal(signal.SIGKILL)
        while (response := connection.receive()) is not None:
            seen.append(response)
        connection.close()
        process.wait(SECONDS)
        with pytest.raises(ClientError):
            session.events()
    shown = [response.event for response in seen if isinstance(response, api.DeltaResponse)]
    assert shown
    with serve(home, model) as process:
        events = session.events()
        assert events[shown[0].event_id : shown[-1].event_id + 1] == shown
        assert isinstance(events[-1].body, ev.EpochBump)
        text = "".join(e.body.text for e in events if isinstance(e.body, ev.Generated))
        assert text == ("tick tock " * 2048)[: len(text)]
        more = session.generate(4)  # the open turn goes on
        assert (text + more.text) == ("tick tock " * 2048)[: len(text + more.text)]
        assert more.tokens_generated == 4
        assert [one.role for one in session.messages()] == ["system", "user", "assistant"]
        assert session.inspect().epoch == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert not (home / "s.sock").exists()
    client.close()
