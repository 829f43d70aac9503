"""The lanes of a model."""

from collections.abc import Iterator

from superfluid.scheduler.classes import Class
from superfluid.scheduler.lanes import Lane


class Roster:
    """Lanes in the order of their admission, and by tag. `lanes` is the list itself: read only."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._by_tag: dict[int, Lane] = {}
        self._tags = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.lanes)

    def __len__(self) -> int:
        return len(self.lanes)

    @property
    def by_tag(self) -> dict[int, Lane]:
        """Read only."""
        return self._by_tag

    def next_tag(self) -> int:
        """The tag of a lane that is to be added; tags grow."""
        return self._tags + 1

    def add(self, lane: Lane) -> None:
        self._tags = lane.tag
        self.lanes.append(lane)
        self._by_tag[lane.tag] = lane

    def remove(self, lane: Lane) -> None:
        self.lanes.remove(lane)
        del self._by_tag[lane.tag]

    def clear(self) -> list[Lane]:
        """Take all lanes out."""
        lanes, self.lanes = self.lanes, []
        self._by_tag.clear()
        return lanes

    def held(self) -> dict[Class, int]:
        """Lanes per class; one that gives way no longer counts."""
        held = dict.fromkeys(Class, 0)
        for lane in self.lanes:
            held[Class(lane.klass)] += not lane.preempted
        return held

    def free(self, most: int) -> int:
        """How many more there may be; one that gives way no longer counts."""
        return most - sum(1 for lane in self.lanes if not lane.preempted)
