"""No orphans: a worker whose daemon is gone ends, also inside a tick or a model load."""

import os
import select
import socket
import threading
import time

GRACE = 0.2  # seconds the serving loop has to end by itself once the daemon hung up
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP  # POLLRDHUP is Linux's


def watch_hangup(frames: socket.socket, grace: float = GRACE) -> threading.Thread:
    """End this process with exit 1 once the peer of `frames` has hung up and `grace` seconds are past.

    Reads nothing. Native calls run without the interpreter lock, so the thread gets its turn while they last.
    """
    thread = threading.Thread(target=_wait, args=(frames.fileno(), grace), name="hangup", daemon=True)
    thread.start()
    return thread


def _wait(fd: int, grace: float) -> None:
    poll = select.poll()
    poll.register(fd, _HANGUP)
    while not any(event & (_HANGUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    time.sleep(grace)
    os._exit(1)
