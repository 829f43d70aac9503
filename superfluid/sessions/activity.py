"""Which sessions are generating and which are being purged: the fences that rules look at."""

from collections.abc import Container

from superfluid.sessions.errors import PurgedSession, SessionBusy


class Activity:
    """Kept by whoever runs generations and purges."""

    def __init__(self) -> None:
        self.busy: Container[int] = frozenset()  # a generation is queued or runs; set by who runs them
        self.purging: set[int] = set()

    def check_quiet(self, session: int) -> None:
        """Raises SessionBusy and PurgedSession: the session's stream must not move now."""
        if session in self.busy:
            raise SessionBusy(session)
        self.check_not_purging(session)

    def check_not_purging(self, session: int) -> None:
        """Raises PurgedSession."""
        if session in self.purging:
            raise PurgedSession(session)
