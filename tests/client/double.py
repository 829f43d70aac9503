"""A server that answers as it is told, for what a real one never does."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from superfluid.client.frames import LENGTH
from superfluid.link import postcard, session_api as api

Answer = Callable[[api.Request], list[api.Response | bytes | None]]


class Double:
    """Listens on `path` and gives each request to `answer`: responses (or raw bytes) to send; a none closes."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = path
        self.connections = 0
        self.requests: list[api.Request] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Double":
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self.path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            while head := stream.read(LENGTH.size):
                payload = stream.read(LENGTH.unpack(head)[0])
                request = postcard.decode(api.Request, payload)
                self.requests.append(request)
                for answer in self._answer(request):
                    if answer is None:
                        return
                    data = answer if isinstance(answer, bytes) else packed(answer)
                    connection.sendall(data)


def packed(response: api.Response) -> bytes:
    payload = postcard.encode(response)
    return LENGTH.pack(len(payload)) + payload
