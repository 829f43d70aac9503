"""No orphans: a worker whose daemon is gone ends, also inside a tick or a model load."""

import os
import select
import socket
import threading
import time

GRACE = 0.1  # seconds the serving loop has to end by itself once the daemon hung up
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP  # POLLRDHUP is Linux's
_GONE = _HANGUP | select.POLLERR | select.POLLNVAL


class HangupWatch:
    """Ends this process once the peer of `frames` has hung up and the grace is past. Starts at once; reads nothing.

    `exit_code` is what it ends with: 1, until the loop that ended by itself has set its own. Native calls run without
    the interpreter lock, so the watching thread gets its turn while they last.
    """

    def __init__(self, frames: socket.socket, grace: float = GRACE) -> None:
        self.exit_code = 1
        self._fd = frames.fileno()
        self._grace = grace
        threading.Thread(target=self._wait, name="hangup", daemon=True).start()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._fd, _HANGUP)
        while not any(event & _GONE for _, event in poll.poll()):
            pass
        time.sleep(self._grace)
        os._exit(self.exit_code)
