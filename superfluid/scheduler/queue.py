"""Queues of one model: a FIFO per class and client, and the rule that picks the next job (pure)."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from superfluid.scheduler.classes import Class


class Queued(Protocol):
    """What a queue reads of an entry; `order` and `enqueued_tick` are stamped once, and kept when it comes back."""

    @property
    def klass(self) -> Class: ...
    @property
    def client(self) -> str: ...
    @property
    def order(self) -> int: ...
    @property
    def enqueued_tick(self) -> int: ...
    @property
    def exclusive(self) -> bool: ...


E = TypeVar("E", bound=Queued)


class ClassQueue(Generic[E]):
    """One class: first in, first out per client, round-robin over clients."""

    def __init__(self) -> None:
        self._clients: dict[str, deque[E]] = {}  # the first client is the next one served
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __iter__(self) -> Iterator[E]:
        """Entries in the order in which `pop` would take them."""
        lines = [list(line) for line in self._clients.values()]
        for turn in range(max(map(len, lines), default=0)):
            for line in lines:
                if turn < len(line):
                    yield line[turn]

    def push(self, entry: E) -> None:
        self._clients.setdefault(entry.client, deque()).append(entry)
        self._count += 1

    def push_front(self, entry: E) -> None:
        """Put an entry back at the head of the class."""
        line = self._clients.pop(entry.client, deque())
        line.appendleft(entry)
        self._clients = {entry.client: line, **self._clients}
        self._count += 1

    @property
    def head(self) -> E | None:
        for line in self._clients.values():
            return line[0]
        return None

    def pop(self) -> E:
        """Take the head; its client's turn comes again after every other client's. Raises IndexError when empty."""
        for client, line in self._clients.items():
            entry = line.popleft()
            self._count -= 1
            del self._clients[client]
            if line:
                self._clients[client] = line
            return entry
        raise IndexError("the queue is empty")

    def remove(self, entry: E) -> bool:
        line = self._clients.get(entry.client)
        if line is None or entry not in line:
            return False
        line.remove(entry)
        self._count -= 1
        if not line:
            del self._clients[entry.client]
        return True


class Queues(Generic[E]):
    """The four classes' queues."""

    def __init__(self) -> None:
        self._classes: dict[Class, ClassQueue[E]] = {klass: ClassQueue() for klass in Class}

    def __getitem__(self, klass: Class) -> ClassQueue[E]:
        return self._classes[klass]

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __bool__(self) -> bool:
        return any(self._classes.values())

    def __iter__(self) -> Iterator[E]:
        for queue in self._classes.values():
            yield from queue

    def depths(self) -> list[int]:
        """Entries per class, best class first."""
        return [len(queue) for queue in self._classes.values()]

    @property
    def urgent(self) -> bool:
        """Whether a job of class 0 or 1 waits."""
        return bool(self._classes[Class.INTERACTIVE] or self._classes[Class.COMPLETION])

    def push(self, entry: E) -> None:
        self._classes[entry.klass].push(entry)

    def push_front(self, entry: E) -> None:
        self._classes[entry.klass].push_front(entry)

    def remove(self, entry: E) -> bool:
        return self._classes[entry.klass].remove(entry)

    def pop_next(
        self,
        tick: int,
        starvation_ticks: int,
        lanes: Mapping[Class, int],
        caps: Mapping[Class, int],
    ) -> E | None:
        """Take the next job to admit, or none when nothing may be admitted now.

        `lanes` are the lanes each class holds, `caps` the most it may. The lowest effective class wins (its class
        less one for every `starvation_ticks` waited), then the better native class; of an agent and a background job
        that have both aged to 0, the one enqueued first. An exclusive head waits until there is no lane, and holds
        back its effective class and every worse one meanwhile.
        """
        heads: list[tuple[int, E]] = []
        any_lane = any(lanes.values())
        held_from = len(Class)
        for klass, queue in self._classes.items():
            head = queue.head
            if head is None or lanes.get(klass, 0) >= caps.get(klass, lanes.get(klass, 0) + 1):
                continue
            aged = (tick - head.enqueued_tick) // starvation_ticks
            effective = klass - min(aged, klass)
            heads.append((effective, head))
            if head.exclusive and any_lane:
                held_from = min(held_from, effective)
        best: tuple[int, E] | None = None
        for effective, head in heads:
            if effective >= held_from:
                continue
            if best is None or effective < best[0] or _aged_before(effective, head, best):
                best = (effective, head)
        if best is None:
            return None
        return self._classes[best[1].klass].pop()


def _aged_before(effective: int, head: Queued, best: tuple[int, Queued]) -> bool:
    """Whether a background head goes before an agent's: both have aged to 0, and it was enqueued first."""
    return (
        effective == best[0] == 0
        and best[1].klass == Class.AGENT
        and head.klass == Class.BACKGROUND
        and head.order < best[1].order
    )
