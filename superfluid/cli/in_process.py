"""`--no-worker-process`: what a worker program does, on a thread of the daemon's process."""

import socket
from collections.abc import Sequence

from superfluid.daemon.in_process import ServeInProcess
from superfluid.worker import worker_main
from superfluid.worker.command_line import UsageError, parse
from superfluid.worker.server import serve


def in_process_worker(runtime_id: str) -> ServeInProcess:
    """The worker of a runtime that this package carries, to be run on a thread."""
    runtime = worker_main.find_runtime(runtime_id)

    def run(arguments: Sequence[str], frames: socket.socket, descriptors: socket.socket) -> None:
        streams = ["--frames-fd", str(frames.fileno()), "--fd-channel-fd", str(descriptors.fileno())]
        try:
            line = parse(runtime, [*arguments, *streams])
        except UsageError as error:
            raise ValueError(str(error)) from None
        runtime.prepare(line.args)
        engine, rings = worker_main.load(runtime, line.args)
        try:
            serve(engine, rings, frames, descriptors, name=f"in-process {runtime_id}", in_process=True)
        finally:
            engine.close()

    return run
