"""The systems under measurement, each a process of its own: superfluid, llama-server's server, the bare loop."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import attrs
import psutil

READY_SECONDS = 120.0
STOP_SECONDS = 20.0


@attrs.define
class System:
    """A running server. `name` of the model to ask for, `base` its host and port."""

    label: str
    process: "subprocess.Popen[str]"
    host: str
    port: int
    model: str
    ready_seconds: float

    def family(self) -> list[psutil.Process]:
        """The process and its children, the server itself first."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def cpu_seconds(self) -> dict[int, float]:
        """CPU time so far, by process id."""
        times = {one.pid: one.cpu_times() for one in self.family()}
        return {pid: spent.user + spent.system for pid, spent in times.items()}

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_superfluid(model: Path, lanes: int, context: int, *extra: str) -> System:
    """`superfluid serve` on a home of its own, which goes when the process does."""
    home = tempfile.mkdtemp(prefix="sf-bench-")
    command = [sys.executable, "-m", "superfluid", "serve", str(model), "--port", "0"]
    command += ["--max-batch", str(lanes), "--max-context", str(context), *extra]
    environment = os.environ | {"SUPERFLUID_HOME": home}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed server's modules are compiled
    return _start("superfluid", command, model.stem, r"openai api on http://([\d.]+):(\d+)", environment, stderr=True)


def start_peer(model: Path, lanes: int, context: int) -> System:
    command = [sys.executable, "-m", "bench.peer_server", str(model), "--lanes", str(lanes), "--context", str(context)]
    return _start("llama-server", command, model.stem, r"^listening http://([\d.]+):(\d+)", dict(os.environ))


def _start(
    label: str, command: list[str], model: str, ready: str, environment: dict[str, str], stderr: bool = False
) -> System:
    """Start a server and wait for the line that says where it listens."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if stderr else subprocess.PIPE,
        stderr=subprocess.PIPE if stderr else subprocess.DEVNULL,
        text=True,
        errors="replace",
        cwd=Path(__file__).resolve().parents[1],
    )
    lines = process.stderr if stderr else process.stdout
    assert lines is not None
    said: list[str] = []
    for line in lines:
        said.append(line)
        found = re.search(ready, line)
        if found:
            threading.Thread(target=lines.read, daemon=True).start()  # keep its pipe empty
            return System(label, process, found[1], int(found[2]), model, time.perf_counter() - started)
        if time.perf_counter() - started > READY_SECONDS:
            break
    process.kill()
    raise RuntimeError(f"{label} did not come to serve: {''.join(said[-5:])}")


def bare_loop(model: Path, lanes: int, prompt: int, reply: int, context: int) -> float:
    """Rate of the bare loop, tokens a second of all lanes over prefill and decoding."""
    command = [sys.executable, "-m", "bench.bare_loop", str(model), "--lanes", str(lanes), "--prompt", str(prompt)]
    command += ["--reply", str(reply), "--context", str(context), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parents[1])
    rate: float = json.loads(done.stdout.strip().splitlines()[-1])["whole"]
    return rate
