"""How much of a prompt a lane is seeded with from the prefix cache (pure)."""

from collections.abc import Sequence

from superfluid.link.codes import SPACE_NO_OPERATIONS, SPACE_NOT_CACHED, SpaceKind
from superfluid.link.linkw import MatchRes, StateSpaceDesc

PAGED = (SpaceKind.PAGED_KV, SpaceKind.DEPTH_PAGED_KV)


class Spaces:
    """The state spaces a worker announced, and what they allow. Encoder caches hold no part of a stream."""

    def __init__(self, spaces: Sequence[StateSpaceDesc], rollback: bool) -> None:
        self.streams = [space for space in spaces if space.kind != SpaceKind.ENCODER_CACHE]
        self.rollback = rollback
        self.page = max((space.page_size_tokens for space in self.streams if space.kind in PAGED), default=1) or 1

    @property
    def unservable(self) -> bool:
        """A space without state operations: nothing is seeded or parked."""
        return any(space.flags & SPACE_NO_OPERATIONS for space in self.streams)

    @property
    def cached(self) -> bool:
        """Whether the prefix cache serves every space."""
        return bool(self.streams) and not any(space.flags & SPACE_NOT_CACHED for space in self.streams)

    def seed_length(self, match: MatchRes, stream_len: int, decode_replay: int = 0) -> int:
        """The longest prefix every space serves, in tokens; 0 when there is none of a page.

        A paged space of an engine that can cut state back serves every page multiple up to its longest candidate;
        every other space exactly its candidates.
        """
        cap = min(stream_len - 1, stream_len - decode_replay)
        cap -= cap % self.page
        offers = {space.space_id: [candidate.prefix_len for candidate in space.candidates] for space in match.spaces}
        longest = cap
        exact: set[int] | None = None
        for space in self.streams:
            lengths = offers.get(space.space_id, [])
            if space.kind in PAGED and self.rollback:
                longest = min(longest, max(lengths, default=0))
            else:
                exact = set(lengths) if exact is None else exact & set(lengths)
        paged = any(space.kind in PAGED for space in self.streams) and self.rollback
        if exact is None:
            found = longest - longest % self.page
        else:
            fits = (n for n in exact if n <= longest and not (paged and n % self.page))
            found = max(fits, default=0)
        return found if found >= self.page else 0
