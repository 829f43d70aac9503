"""What the scheduler needs of a worker: the Link W requests, and the errors they can end in (no I/O here)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link import linkw
from superfluid.link.codes import Status as Status, status_name as status_name
from superfluid.link.relay import TextOut
from superfluid.shm.segment import Segment

OnEmit = Callable[[int, list[int], bool], None]
"""Takes a lane's tag and the tokens it has just made, while its tick still runs, and whether the lane's text out has
written them. Must not block."""


class EngineRefused(Exception):
    """The engine refused a plan or an operation; nothing changed and the worker goes on. `status` says why."""

    def __init__(self, status: int, what: str = "the engine refused") -> None:
        super().__init__(f"{what} ({status_name(status)})")
        self.status = int(status)


class LinkFault(Exception):
    """A reply could not be used (it does not decode, or is of another type): that request failed, the worker stays."""


class WorkerGone(Exception):
    """The worker of a link is gone: its process ended, or the link broke. `reason` is shown to callers.

    `unread`: it was gone before it read the request that this ends, so nothing of that was done.
    """

    def __init__(self, reason: str, *, unread: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unread = unread


@attrs.frozen
class Record:
    """The leaves of a capability record that the scheduler acts on; an absent leaf refuses nothing."""

    max_seqs: int = 0
    round_granular: bool = False
    tick_yield: bool = False
    rollback: bool = True
    shared_prefix_seed: bool = True
    park_lossless: bool = True
    park_lossy: bool = True

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Record":
        def leaf(section: str, name: str) -> Any:
            part = record.get(section)
            return part.get(name) if isinstance(part, dict) else None

        max_seqs = leaf("limits", "max_seqs")
        return cls(
            max_seqs=max_seqs if isinstance(max_seqs, int) and not isinstance(max_seqs, bool) and max_seqs > 0 else 0,
            round_granular=leaf("serving", "round_granular") is True,
            tick_yield=leaf("serving", "tick_yield") is True,
            rollback=not refused(leaf("state", "rollback")),
            shared_prefix_seed=not refused(leaf("state", "shared_prefix_seed")),
            park_lossless=not refused(leaf("serving", "park_lossless")),
            park_lossy=not refused(leaf("serving", "park_lossy")),
        )


def refused(leaf: Any) -> bool:
    """Whether a capability leaf says no: false, or a string that says why."""
    return leaf is False or isinstance(leaf, str)


class ControlWords(Protocol):
    """The words of the control segment (`superfluid.shm.control.Control`): a running tick sees them change."""

    yield_requested: bool
    latency: bool


class EngineLink(Protocol):
    """One worker, connected: its rings are attached, its requests are answered one at a time.

    Every request raises WorkerGone once the worker is gone. A task that is cancelled while it waits for a reply
    leaves the link usable (the reply is awaited before the next request goes out).
    """

    @property
    def hello(self) -> linkw.HelloAckW: ...

    @property
    def record(self) -> dict[str, Any]:
        """The capability record; empty when the worker describes nothing."""

    @property
    def control(self) -> ControlWords: ...

    @property
    def window(self) -> int:
        """Longest stream in tokens: min(token-in slot payload, the record's `limits.max_seq_len`)."""

    @property
    def out_slots(self) -> int:
        """Slots of the token-out ring: the most lanes a tick may have."""

    @property
    def in_slots(self) -> int:
        """Slots of the token-in ring: the most spans that may be staged and not yet read."""

    def stage_prompt(self, tokens: Sequence[int] | npt.NDArray[np.uint32]) -> linkw.TokenRef:
        """Write tokens into the token-in ring; the slot is overwritten after `in_slots` more."""

    def read_tokens(self, ref: linkw.TokenRef) -> list[int]:
        """Tokens of the token-out ring. Raises superfluid.shm.ring.RingError for a stale or bad reference."""

    async def tick(
        self, plan: linkw.TickPlan, on_emit: OnEmit, texts: Mapping[int, TextOut] | None = None
    ) -> linkw.TickEvents:
        """Run a plan. Tokens of lanes in `texts` may go to their text as they come, and `on_emit` is told later.

        Raises EngineRefused (the plan left no trace), LinkFault, WorkerGone."""

    async def match(self, span: linkw.TokenRef, space_id: int = linkw.ALL_SPACES) -> linkw.MatchRes: ...

    async def seed_acquire(self, span: linkw.TokenRef, prefix_len: int, determinism: int = 0) -> linkw.SeedGranted:
        """Raises EngineRefused (-130 and others)."""

    def seed_release(self, handle: int) -> None:
        """Sent and forgotten; nothing happens once the worker is gone."""

    async def sync(self, request: linkw.StateSyncReq) -> linkw.StateSyncOk:
        """Raises EngineRefused."""

    async def begin(self, request: linkw.StateSyncReq) -> Callable[[], Awaitable[linkw.StateSyncOk]]:
        """Send a request that may take the worker long, and that it answers behind others then: ticks go on.

        The function waits for the answer, and raises EngineRefused; to leave it would lose what was made.
        """

    def grammar_free(self, handle: int) -> None:
        """Sent and forgotten; nothing happens once the worker is gone."""

    async def state_op(self, segment: Segment, make: Callable[[int], linkw.StateOp]) -> int:
        """Run the state operation that `make` makes of a buffer's id, with `segment` as that buffer, to its end.

        The bytes it moved. Raises EngineRefused when it is rejected or fails.
        """
