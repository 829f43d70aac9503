"""A radix tree over token paths: which entries share how long a prefix with a span.

Edges hold runs of ids as numpy arrays and are compared whole. A node remembers, per tier, the shortest entry under it
(the cheapest to copy, the likeliest to be served), so that a lookup costs the length of the path, whatever hangs
beside it.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint32]


class Cached(Protocol):
    """What the tree holds: a token path and whether its state is in the pool (else it is an export)."""

    @property
    def tokens(self) -> TokenArray: ...

    @property
    def resident(self) -> bool: ...


E = TypeVar("E", bound=Cached)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading ids two arrays share."""
    room = min(len(a), len(b))
    differ = a[:room] != b[:room]
    first = int(differ.argmax()) if room else 0
    return first if room and differ[first] else room


class Node:
    """The end of a run of ids. `entries` end exactly here; `count` are all entries in the subtree."""

    __slots__ = ("_shortest", "children", "count", "depth", "entries", "parent", "run")

    def __init__(self, run: TokenArray, depth: int, parent: "Node | None") -> None:
        self.run = run
        self.depth = depth
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.entries: list[Cached] = []
        self.count = 0
        self._shortest: tuple[Cached | None, Cached | None] | None = (None, None)

    def shortest(self) -> tuple[Cached | None, Cached | None]:
        """The shortest entry of the subtree in the pool, and the shortest export."""
        if self._shortest is None:
            best: list[Cached | None] = [None, None]
            own = [(entry if entry.resident else None, None if entry.resident else entry) for entry in self.entries]
            for pair in [*own, *(child.shortest() for child in self.children.values())]:
                for tier, entry in enumerate(pair):
                    held = best[tier]
                    if entry is not None and (held is None or len(entry.tokens) < len(held.tokens)):
                        best[tier] = entry
            self._shortest = (best[0], best[1])
        return self._shortest

    def gained(self, entry: Cached) -> None:
        """An entry came into the subtree."""
        if self._shortest is not None:
            tier = 0 if entry.resident else 1
            held = self._shortest[tier]
            if held is None or len(entry.tokens) < len(held.tokens):
                self._shortest = (entry, self._shortest[1]) if tier == 0 else (self._shortest[0], entry)

    def lost(self, entry: Cached) -> None:
        """An entry left the subtree, or changed its tier."""
        if self._shortest is not None and entry in self._shortest:
            self._shortest = None


class RadixTree:
    """Entries by their token paths. Several entries may have the same path."""

    def __init__(self) -> None:
        self.root = Node(np.empty(0, np.uint32), 0, None)

    def __len__(self) -> int:
        return self.root.count

    def insert(self, entry: Cached) -> None:
        tokens = entry.tokens
        node, at = self._descend(tokens)
        if at < node.depth:
            node = self._split(node, at)
        if at < len(tokens):
            leaf = Node(tokens[at:], len(tokens), node)
            node.children[int(tokens[at])] = leaf
            node = leaf
        node.entries.append(entry)
        up: Node | None = node
        while up is not None:
            up.count += 1
            up.gained(entry)
            up = up.parent

    def remove(self, entry: Cached) -> None:
        """Take an entry out. Raises ValueError when it is not in the tree."""
        tokens = entry.tokens
        node, at = self._descend(tokens)
        if at != node.depth or at != len(tokens):
            raise ValueError("the entry is not in the tree")
        node.entries.remove(entry)
        up: Node | None = node
        while up is not None:
            up.count -= 1
            up.lost(entry)
            up = up.parent
        self._prune(node)

    def retier(self, entry: Cached) -> None:
        """Note that the entry's `resident` has changed."""
        node: Node | None = self._descend(entry.tokens)[0]
        while node is not None:
            node.lost(entry)
            node.gained(entry)
            node = node.parent

    def exact(self, tokens: TokenArray) -> list[Cached]:
        """The entries whose path is exactly `tokens`."""
        node, at = self._descend(tokens)
        return list(node.entries) if at == node.depth == len(tokens) else []

    def branches(self, span: TokenArray) -> list[tuple[int, Node]]:
        """The lengths at which entries part from `span`, shortest first, each with the node of all entries that
        share at least so much."""
        found: list[tuple[int, Node]] = []
        node, at = self.root, 0
        while True:
            child = node.children.get(int(span[at])) if at < len(span) else None
            if child is None:
                if node.count:
                    found.append((at, node))
                return found
            if node.count > child.count:
                found.append((at, node))
            step = common_prefix(child.run, span[at:])
            at += step
            node = child
            if step < len(child.run):
                found.append((at, node))
                return found

    def reaching(self, span: TokenArray, length: int) -> Node | None:
        """The node of all entries that share at least `length` ids with `span`."""
        node, at = self._descend(span[:length])
        return node if at >= length else None

    def sharing(self, tokens: TokenArray, least: int) -> Iterator[tuple[int, Cached]]:
        """Entries that share at least `least` ids with `tokens`, each with how many it shares."""
        below: Node | None = None
        for length, node in reversed(self.branches(tokens)):
            if length < least:
                return
            for entry in _subtree(node, below):
                yield length, entry
            below = node

    def _descend(self, tokens: TokenArray) -> tuple[Node, int]:
        """The node that `tokens` reach (perhaps inside its run) and how many ids were matched."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            step = common_prefix(child.run, tokens[at:])
            at += step
            node = child
            if step < len(child.run):
                break
        return node, at

    def _split(self, node: Node, at: int) -> Node:
        """Cut the run into `node` at depth `at`; the new upper node."""
        parent = node.parent
        assert parent is not None
        cut = at - parent.depth
        upper = Node(node.run[:cut], at, parent)
        upper.children[int(node.run[cut])] = node
        upper.count = node.count
        upper._shortest = node._shortest
        parent.children[int(node.run[0])] = upper
        node.run = node.run[cut:]
        node.parent = upper
        return upper

    def _prune(self, node: Node) -> None:
        """Drop empty leaves and join a node that only passes on to one child."""
        while node.parent is not None and not node.entries and not node.children:
            del node.parent.children[int(node.run[0])]
            node = node.parent
        if node.parent is not None and not node.entries and len(node.children) == 1:
            (child,) = node.children.values()
            child.run = np.concatenate((node.run, child.run))
            child.parent = node.parent
            node.parent.children[int(node.run[0])] = child


def _subtree(node: Node, without: Node | None) -> Iterator[Cached]:
    """Every entry under `node` but those under `without`."""
    pending = [node]
    while pending:
        here = pending.pop()
        if here is without:
            continue
        yield from here.entries
        pending.extend(here.children.values())
