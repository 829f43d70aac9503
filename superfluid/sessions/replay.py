"""From a log's index to its sessions, without decoding what no one has asked for."""

from typing import TYPE_CHECKING, Any

import numpy as np

from superfluid.link import events as ev
from superfluid.sessions.records import Index
from superfluid.sessions.session import Session
from superfluid.sessions.state import State, new_state

if TYPE_CHECKING:
    from superfluid.sessions.store import Store

CREATED, FORKED, META_UPDATED, REBASED, PURGED, REROOTED, QOS_SET, PINNED, TOOL_USE, EPOCH_BUMP = (
    ev.Body.variants.index(kind)
    for kind in (
        ev.Created,
        ev.Forked,
        ev.MetaUpdated,
        ev.Rebased,
        ev.Purged,
        ev.Rerooted,
        ev.QosSet,
        ev.Pinned,
        ev.ToolUse,
        ev.EpochBump,
    )
)


def replay(store: "Store", index: Index) -> None:
    """Make every session of the log: first those records that change more than a count, one by one in log order,
    then the counts, for all sessions at once."""
    lives: dict[int, _Life] = {}
    for at, row in zip(index.at.tolist(), index.steps.tolist(), strict=True):
        _step(store, lives, at, row)
    _count(store, lives, index)


class _Life:
    """Where in the log a session's records begin to count and where they cease to, by position."""

    __slots__ = ("begin", "end", "reroot", "session")

    def __init__(self, session: Session, begin: int) -> None:
        self.session = session
        self.begin = begin
        self.end: int | None = None  # of the Purged record
        self.reroot: int | None = None  # offset of the Rerooted record


def _step(store: "Store", lives: dict[int, _Life], at: int, row: tuple[int, ...]) -> None:
    offset, session_id, _, _, _, a, b, _, _, variant, flags = row
    life = lives.get(session_id)
    if life is None:
        if variant not in (CREATED, FORKED, REBASED):
            return
        state = new_state()
        if variant == CREATED:
            session = Session(store, session_id, a if flags else None, 0, state)
        else:
            session = Session(store, session_id, a, b, state)
            if a in lives:
                parent = lives[a].session.durable
                state.qos_class, state.batch_invariant = parent.qos_class, parent.batch_invariant
        lives[session_id] = _Life(session, at)
        store.adopt(session)
        return
    if life.end is not None:
        return
    state = life.session.durable  # still this replay's own: changed in place
    if variant == META_UPDATED:
        body: Any = next(store.read_frames([offset])).body
        state.meta_version = body.version
        state.title = state.title if body.title is None else body.title
        state.archived = state.archived if body.archived is None else body.archived
    elif variant == QOS_SET:
        state.qos_class, state.batch_invariant = a, bool(b)
    elif variant == PINNED:
        state.pin_deadline = a
    elif variant == REROOTED:
        life.reroot = offset
    elif variant == PURGED:
        life.end = at
        _purge(store, life.session, state, a, ev.Descendants(b))


def _purge(store: "Store", session: Session, state: State, generation: int, mode: ev.Descendants) -> None:
    state.generation = generation
    state.purged = mode
    state.title = None
    if mode == ev.Descendants.Reroot:
        for child in store.linked_children(session.id):
            if child.durable.purged is None:
                child.rerooted = True


def _count(store: "Store", lives: dict[int, _Life], index: Index) -> None:
    if not len(index):
        return
    order = np.argsort(index.session, kind="stable")
    ids = index.session[order]
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    ends = np.r_[starts[1:], len(ids)]
    offsets = index.offset[order]
    variant = index.variant[order]
    tokens = np.r_[0, np.cumsum(index.tokens[order], dtype=np.uint64)]
    epochs = np.maximum.reduceat(index.epoch[order], starts)
    touched = np.maximum.reduceat(np.where(variant == EPOCH_BUMP, 0, index.ts_unix_ms[order]), starts)
    calls = np.maximum.reduceat(variant == TOOL_USE, starts)
    raw = offsets.tobytes()
    columns = (ids[starts], starts, ends, order[starts], tokens[ends] - tokens[starts], epochs, touched, calls)
    for session_id, start, end, first, own, epoch, touch, has_calls in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        life = lives.get(session_id)
        if life is None:
            continue
        if first != life.begin or life.end is not None:  # records before its first or after its last do not count
            places = order[start:end]
            start += int(np.searchsorted(places, life.begin))
            end = end if life.end is None else start + int(np.searchsorted(order[start:end], life.end, "right"))
            own = int(tokens[end] - tokens[start])
            epoch = int(index.epoch[order[start:end]].max())
        session = life.session
        state = session.durable
        state.n_events = session.fork_at + end - start
        state.epoch = max(state.epoch, epoch)
        state.touched_ms = touch
        state.n_tokens = 0 if state.purged is not None else own
        session.restore(raw[start * 8 : end * 8], life.reroot, listed=not session.fork_at and not has_calls)
