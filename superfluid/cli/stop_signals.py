"""What SIGTERM, SIGINT and SIGUSR1 do to `superfluid serve`, from its first line to the end of its process."""

import atexit
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from superfluid.cli.command import PROGRAM, first_stderr

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

OK, FAILED = 0, 1  # exit codes: of a server that was ready, of a start that a signal ended


class StoppedBeforeReady(BaseException):
    """A signal ends the start (exit 1)."""


class StopSignals:
    """Their handler, the same one all along.

    The first one before the server is ready ends the start: it is raised, or given to the event loop while that runs,
    in whose work an exception from nowhere would do damage. A second one ends the process at once. When the server
    is ready they are the loop's, as long as it takes them; after that any of them ends the process at once: the log is
    durable at every moment, and workers end with their links.
    """

    def __init__(self) -> None:
        self.served = False
        self.stopping = False  # one came before the server was ready
        self._code: int | None = None  # what the process is about to exit with
        self._in_loop = False
        self._deliver: Callable[[int], None] | None = None

    def install(self) -> None:
        for number in STOPPING:
            signal.signal(number, self)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there are no tasks yet
        atexit.register(ignore)  # registered first, it comes last

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._code is not None:
            os._exit(self._code)
        if self.served:
            if self._deliver is None:
                os._exit(OK)
            self._deliver(number)
            return
        if self.stopping:
            os._exit(FAILED)
        self.stopping = True
        tell(f"{PROGRAM}: {signal.Signals(number).name} before the server was ready")
        if not self._in_loop:
            raise StoppedBeforeReady
        if self._deliver is not None:
            self._deliver(number)

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """While the event loop runs, nothing is raised. Raises StoppedBeforeReady if one came that nobody saw, as
        what is raised in a destructor."""
        self._in_loop = True
        try:
            if self.stopping:
                raise StoppedBeforeReady
            yield
        finally:
            self._in_loop = False

    @contextlib.contextmanager
    def delivered(self, deliver: Callable[[int], None]) -> Iterator[None]:
        """Give them to `deliver` as they come."""
        self._deliver = deliver
        try:
            yield
        finally:
            self._deliver = None

    def leave(self, code: int) -> int:
        """The process is about to exit with `code`; a signal only makes it sooner."""
        self._code = code
        return code


def tell(line: str) -> None:
    """A line on stderr, which may be in the middle of another one: its buffer cannot be used."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
    first_stderr.write(line)


def ignore() -> None:
    """The interpreter gives back handlers before it ends, and a signal would decide the exit code then. One that is
    ignored stays so."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


stop_signals = StopSignals()
