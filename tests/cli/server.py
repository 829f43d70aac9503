"""`superfluid serve` as a process of its own, and what a test asks of it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from superfluid.client import Client

LIMIT = 60.0  # seconds after which what a test waits for will not come


class Server:
    """A server on a home of its own; `with` ends it. Its stderr is read line by line into `lines`."""

    def __init__(self, home: Path, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
        self.home = home
        self.lines: list[str] = []
        self._said = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "superfluid", "serve", *map(str, arguments)],
            env=os.environ | {"SUPERFLUID_HOME": str(home)} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self.lines.append("")
            self._said.notify_all()

    def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line of stderr; its match."""
        seen = 0
        with self._said:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                if self.lines and self.lines[-1] == "" and self.process.poll() is not None:
                    raise AssertionError(f"{pattern!r} was never said:\n" + "\n".join(self.lines))
                seen = len(self.lines)
                assert self._said.wait(LIMIT), f"{pattern!r} is not said:\n" + "\n".join(self.lines)

    def ended(self) -> None:
        """Wait for the end of its stderr."""
        with self._said:
            while not self.lines or self.lines[-1] != "":
                assert self._said.wait(LIMIT), "\n".join(self.lines)

    def ready(self) -> "Server":
        self.port = int(self.said(r"openai api on http://\S+:(\d+)")[1])
        return self

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    # ---- the process

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    @property
    def workers(self) -> list[int]:
        """Processes that serve models for it."""
        pid = self.process.pid
        children: list[int] = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
        return [child for child in children if "--frames-fd" in command_line(child)]

    @property
    def worker(self) -> int:
        (only,) = self.workers
        return only

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    # ---- HTTP

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def get(self, path: str, **headers: str) -> bytes:
        connection = self.connect()
        connection.request("GET", path, headers=headers)
        body = connection.getresponse().read()
        connection.close()
        return body

    def chat(
        self, model: str, prompt: str = "hello", *, over: http.client.HTTPConnection | None = None, **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        """One chat completion: its status and its body."""
        connection = over or self.connect()
        post_chat(connection, model, prompt, **fields)
        response = connection.getresponse()
        body = json.loads(response.read())
        if over is None:
            connection.close()
        return response.status, body

    def stream(self, model: str, prompt: str = "hello", **fields: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion, as they come; a broken stream ends."""
        connection = self.connect()
        post_chat(connection, model, prompt, stream=True, **fields)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]" and not data.startswith(":"):
                    yield json.loads(data)
        except (http.client.HTTPException, ConnectionError):
            return
        finally:
            connection.close()

    # ---- the session socket

    def client(self) -> Client:
        return Client(self.home / "superfluid.sock")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def post_chat(connection: http.client.HTTPConnection, model: str, prompt: str, **fields: Any) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text of streamed chunks."""
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", []))
