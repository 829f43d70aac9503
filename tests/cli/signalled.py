"""`superfluid serve` in a process that sends itself stop signals at exact points of its start and of its end.

    python -m tests.cli.signalled PLACE[,PLACE] [MODEL [FLAG...]]

Each PLACE is a step of the server; as the server takes it, the signal is sent and handled before the step is done.
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import attrs

from superfluid.cli import main as program


def send() -> None:
    """The interpreter handles the signal before it goes on to the next line."""
    os.kill(os.getpid(), signal.SIGTERM)


class Last:
    """Dies with this module, when the interpreter has given up its signal handlers."""

    def __del__(self, send: Callable[[], None] = send) -> None:
        send()


@attrs.frozen
class Before:
    """A function that is called as ever, behind a signal."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        send()
        return self.function(*arguments, **named)


@attrs.frozen
class Swallowing(Before):
    """A step whose exceptions nobody sees, as in a destructor."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with contextlib.suppress(BaseException):
            send()
        return self.function(*arguments, **named)


def main() -> None:
    global last
    places = sys.argv[1].split(",")
    if "exit" in places:  # what was registered first is called last
        atexit.register(send)
    if "end" in places:
        last = Last()
    from superfluid.cli import serve, serving
    from superfluid.daemon.daemon import Daemon

    steps: dict[str, tuple[Any, str]] = {
        "choosing": (serve, "choose_runtimes"),
        "swallowed": (serve, "choose_runtimes"),
        "loop": (serving, "configure_logging"),
        "watched": (serving, "check_socket"),
        "loading": (serving, "announce"),
        "ready": (serving, "settle_memory"),
        "teardown": (Daemon, "run"),
    }
    for place in places:
        if place not in steps:
            continue
        where, name = steps[place]
        function = getattr(where, name)
        if place == "teardown":
            setattr(where, name, behind(function))
        else:
            setattr(where, name, (Swallowing if place == "swallowed" else Before)(function))
    program.main(["serve", *sys.argv[2:]])


def behind(run: Callable[..., Any]) -> Callable[..., Any]:
    """The daemon's task, with a signal when everything in it has ended."""

    async def teardown(*arguments: Any, **named: Any) -> None:
        try:
            await run(*arguments, **named)
        finally:
            send()

    return teardown


if __name__ == "__main__":
    main()
