"""SIGTERM, SIGINT and SIGUSR1 while no event loop watches them: before the server runs, and while it is torn down."""

import os
import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StoppedBeforeReady(BaseException):
    """A signal ends the start (exit 1)."""


class StopSignals:
    """Installed when `serve` begins; the event loop's own handlers stand above it while they are in place."""

    def __init__(self) -> None:
        self.served = False

    def install(self) -> None:
        for number in STOPPING:
            signal.signal(number, self)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there are no tasks yet

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.served:
            os._exit(0)  # the log is durable at every moment, and workers end with their links
        raise StoppedBeforeReady(signal.Signals(number).name)


stop_signals = StopSignals()
