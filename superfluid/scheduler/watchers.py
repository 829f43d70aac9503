"""Who follows the provisional text of sessions, beside the callers of their generations."""

from collections.abc import Callable

import attrs

Sink = Callable[[int, str], None]
"""Takes a channel and a piece of its text."""


@attrs.frozen(eq=False)
class Watcher:
    """Who wants a session's provisional text, from tick `since` on."""

    sink: Sink
    since: int


class Watchers:
    """The watchers of every session of a model."""

    def __init__(self) -> None:
        self._by_session: dict[int | None, list[Watcher]] = {}

    def __contains__(self, session: object) -> bool:
        return session in self._by_session

    def add(self, session: int, sink: Sink, since: int) -> Callable[[], None]:
        """Have `sink` follow a session from tick `since` on, until the returned function is called."""
        watcher = Watcher(sink, since)
        self._by_session.setdefault(session, []).append(watcher)

        def unwatch() -> None:
            watchers = self._by_session.get(session, [])
            if watcher in watchers:
                watchers.remove(watcher)
            if not watchers:
                self._by_session.pop(session, None)

        return unwatch

    def sinks(self, session: int | None, tick: int) -> list[Sink]:
        """Who gets the text that a session makes in a tick."""
        if not self._by_session:
            return []
        return [watcher.sink for watcher in self._by_session.get(session, ()) if watcher.since <= tick]
