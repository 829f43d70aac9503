"""Parked sessions: states that wait to be written, and the artifacts that were."""

import logging
import math

import attrs
import trio

from superfluid.link.codes import Encoding
from superfluid.link.linkw import StateSpaceDesc
from superfluid.scheduler.exports import Writer
from superfluid.scheduler.seeds import PAGED
from superfluid.scheduler.states import Ids, SavedState, SpaceState, read_segment
from superfluid.sessions import park
from superfluid.sessions.park import Artifact, Head, Space

log = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""A session that is idle for so long has its state written."""

MOST_WAITING = 256 << 20
"""Bytes of state that may wait to be written."""


@attrs.define(eq=False)
class Waiting:
    """A parked state that is only in memory. `idle_since`: when its session's last generation ended."""

    saved: SavedState
    idle_since: float | None = None
    writing: bool = False
    removed: bool = False


class Parks:
    """The parks of one model, on the event loop. `artifacts` are their files, which `writer` writes."""

    def __init__(self, artifacts: park.Parks, writer: Writer, most_waiting: int = MOST_WAITING) -> None:
        self.artifacts = artifacts
        self._writer = writer
        self._most_waiting = most_waiting
        self._waiting: dict[int, Waiting] = {}
        self._heads: dict[int, Head] = {}
        self._changed = trio.Event()

    def open(self) -> None:
        """Sweep the directory and read what is in it. Blocks."""
        self.artifacts.sweep()
        for session in self.artifacts.sessions():
            head = self.artifacts.head(session)
            if head is not None:
                self._heads[session] = head

    # ---- coming

    def keep(self, session: int, saved: SavedState, *, at_once: bool) -> bool:
        """Park a session: its state is written at once, or when the session has been idle for a while.

        It replaces one that still waits. False when it was dropped because the writer is behind.
        """
        self._drop_waiting(session)
        entry = Waiting(saved)
        if at_once and not self._writer.has_room:
            log.warning("the park of session %d is dropped: the disk does not keep up", session)
            saved.discard()
            return False
        self._waiting[session] = entry
        if at_once:
            self._write(session, entry)
        self._limit()
        return self._waiting.get(session) is entry

    def ended(self, session: int) -> None:
        """A generation of the session ended: from now on it is idle."""
        entry = self._waiting.get(session)
        if entry is not None:
            entry.idle_since = trio.current_time()
            self._changed.set()

    def resumed(self, session: int) -> None:
        """A generation of the session began."""
        entry = self._waiting.get(session)
        if entry is not None:
            entry.idle_since = None

    def remove(self, session: int) -> None:
        """Forget a session's state and delete its artifact."""
        entry = self._waiting.get(session)
        known = entry is not None or self._heads.pop(session, None) is not None
        if entry is not None:
            entry.removed = True
        self._drop_waiting(session)
        if known:
            self._writer.add(f"removing the park of session {session}", lambda: self.artifacts.remove(session))

    # ---- going

    def find(self, session: int) -> SavedState | Head | None:
        """A session's state in memory, or what its artifact says of itself."""
        entry = self._waiting.get(session)
        return self._heads.get(session) if entry is None else entry.saved

    def read(self, session: int, head: Head, ids: Ids) -> SavedState:
        """The states in an artifact, which is of a prefix of `ids`. Blocks. Raises OSError, EOFError."""
        states: list[SpaceState] = []
        path = self.artifacts.path(session)
        try:
            for part in head.parts:
                segment = read_segment(path, part.offset, part.length)
                states.append(SpaceState(part.space_id, part.kind, part.encoding, segment, part.length))
        except BaseException:
            for state in states:
                state.close()
            raise
        return SavedState(ids[: head.covered], tuple(states))

    def useless(self, session: int, state: SavedState | Head) -> None:
        """A session's state cannot be read, or the engine does not take it: it is not tried again."""
        if isinstance(state, SavedState):
            self._drop_waiting(session)
        elif self._heads.get(session) is state:
            del self._heads[session]

    def tier(self, session: int) -> tuple[int, int] | None:
        """(covered tokens, encoding of the paged space) of a parked session."""
        found = self.find(session)
        if isinstance(found, Head):
            found = self.artifacts.head(session)
        if found is None:
            return None
        if isinstance(found, SavedState):
            return found.covered, found.encoding
        paged = (part.encoding for part in found.parts if part.kind in PAGED)
        return found.covered, next(paged, Encoding.LOSSLESS)

    # ---- writing

    async def run(self) -> None:
        """Write what has waited long enough, until cancelled."""
        while True:
            now = trio.current_time()
            first = math.inf
            for session, entry in list(self._waiting.items()):
                due = math.inf if entry.idle_since is None or entry.writing else entry.idle_since + IDLE_SECONDS
                if due > now:
                    first = min(first, due)
                elif self._writer.has_room:
                    self._write(session, entry)
                else:
                    first = now
            if first == now:
                await self._writer.wait_idle()
                continue
            self._changed = trio.Event()
            with trio.move_on_at(first):
                await self._changed.wait()

    async def flush(self) -> None:
        """Write everything that waits; returns when it is done."""
        while unwritten := self._unwritten():
            for session, entry in list(self._waiting.items()):
                if entry in unwritten and self._writer.has_room:
                    self._write(session, entry)
            await self._writer.wait_idle()

    def close(self) -> None:
        """Forget what waits."""
        for session in list(self._waiting):
            self._drop_waiting(session)

    def _unwritten(self) -> list[Waiting]:
        return [entry for entry in self._waiting.values() if not entry.writing]

    def _write(self, session: int, entry: Waiting) -> None:
        saved = entry.saved
        head: Head | None = None

        def write() -> None:
            nonlocal head
            spaces = (Space(space.space_id, space.kind, space.encoding, space.sealed) for space in saved.spaces)
            self.artifacts.write(session, Artifact(saved.covered, saved.digest, tuple(spaces)))
            head = self.artifacts.head(session)

        def done(ok: bool) -> None:
            saved.__exit__()
            if ok and head is not None and not entry.removed:
                self._heads[session] = head
            if self._waiting.get(session) is entry:
                self._drop_waiting(session)
            self._changed.set()

        entry.writing = True
        saved.__enter__()
        self._writer.add(f"the park of session {session} is not written", write, done)

    def _limit(self) -> None:
        """Bring what waits under its bound: the oldest is written, or dropped when the writer is behind."""
        waiting = sum(entry.saved.size for entry in self._unwritten())
        for session, entry in list(self._waiting.items()):
            if waiting <= self._most_waiting:
                return
            if entry.writing:
                continue
            waiting -= entry.saved.size
            if self._writer.has_room:
                self._write(session, entry)
            else:
                log.warning("the park of session %d is dropped: too much waits to be written", session)
                self._drop_waiting(session)

    def _drop_waiting(self, session: int) -> None:
        entry = self._waiting.pop(session, None)
        if entry is not None:
            entry.saved.discard()


def holds(found: SavedState | Head, spaces: list[StateSpaceDesc]) -> bool:
    """Whether an artifact has the state of every one of these spaces."""
    parts = found.spaces if isinstance(found, SavedState) else found.parts
    has = {(part.space_id, part.kind) for part in parts}
    return all((space.space_id, space.kind) in has for space in spaces)
