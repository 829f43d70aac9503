"""The jobs of a model that are not over: whose they are, which sessions they keep busy, when they expire."""

from collections.abc import Iterable

import trio

from superfluid.scheduler.generation import Generation
from superfluid.scheduler.lanes import Ticket

NEVER = float("inf")


class Tickets:
    """Every ticket from its submission until its end is told."""

    def __init__(self) -> None:
        self._of_generation: dict[Generation, Ticket] = {}
        self._of_session: dict[int, Ticket] = {}
        self._quiet: dict[int, trio.Event] = {}  # of sessions whose generation's end is waited for
        self._idle = trio.Event()
        self._idle.set()
        self._next_deadline = NEVER  # of a job that waits, or may wait again

    def __contains__(self, session: object) -> bool:
        """Whether a session has a ticket whose caller waits for the end."""
        ticket = self._of_session.get(session)  # type: ignore[call-overload]
        return ticket is not None and not ticket.told

    def of(self, generation: Generation) -> Ticket | None:
        return self._of_generation.get(generation)

    def of_session(self, session: int) -> Ticket | None:
        return self._of_session.get(session)

    def check(self, session: int | None) -> None:
        """Raises ValueError when a session has a ticket already whose caller waits for the end."""
        if session in self:
            raise ValueError(f"session {session} is generating")

    def add(self, ticket: Ticket) -> None:
        session, deadline = ticket.job.session, ticket.job.deadline
        if session is not None:
            self._of_session[session] = ticket
        self._of_generation[ticket.generation] = ticket
        if deadline is not None:
            self._next_deadline = min(self._next_deadline, deadline)
        self._idle = trio.Event() if self._idle.is_set() else self._idle

    def forget(self, ticket: Ticket) -> None:
        """A ticket's end is about to be told: its session is free."""
        self._of_generation.pop(ticket.generation, None)
        session = ticket.job.session
        if session is not None and self._of_session.get(session) is ticket:
            del self._of_session[session]
            if session in self._quiet:
                self._quiet.pop(session).set()
        if not self._of_generation:
            self._idle.set()

    def expired(self, waiting: Iterable[Ticket], now: float) -> list[Ticket]:
        """Those of the waiting whose time is up, each told once."""
        if now < self._next_deadline:
            return []
        deadlines = (ticket.job.deadline for ticket in self._of_generation.values())
        self._next_deadline = min((at for at in deadlines if at is not None and at > now), default=NEVER)
        return [ticket for ticket in waiting if ticket.past_deadline(now)]

    async def wait_idle(self) -> None:
        """Return once there is no ticket."""
        await self._idle.wait()

    async def wait_quiet(self, session: int) -> None:
        """Return once a session has no ticket."""
        while session in self._of_session:
            await self._quiet.setdefault(session, trio.Event()).wait()
