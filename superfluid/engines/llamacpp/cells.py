"""Which sequence of a shared pool owns which cells, so that a prefix several hold is counted once."""

from collections.abc import Collection, Iterable

import attrs


@attrs.define(eq=False)
class _Holder:
    """Cells [shared, length) are its own; those before are its parent's."""

    length: int = 0
    shared: int = 0
    parent: "_Holder | None" = None
    children: "set[_Holder]" = attrs.Factory(set)


class SharedCells:
    """A forest of sequences: a copy hangs under the one that holds the cells it shares.

    A child shares more than its parent does, else it would hang higher up.
    """

    def __init__(self) -> None:
        self._holders: dict[int, _Holder] = {}
        self.used = 0

    def add(self, seq: int) -> None:
        self._holders[seq] = _Holder()

    def grow(self, seq: int, n_tokens: int) -> None:
        self._holders[seq].length += n_tokens
        self.used += n_tokens

    def copy(self, source: int, target: int, length: int) -> None:
        """The empty `target` shares the first `length` cells of `source`."""
        holder = self._holders[target]
        holder.length = length
        self._attach(holder, self._holders[source], length)

    def cut(self, seq: int, length: int) -> None:
        holder = self._holders[seq]
        if length >= holder.length:
            return
        self.used -= holder.length - max(length, holder.shared)
        self._hand_over(holder, max(length, holder.shared))
        holder.length = length
        if holder.parent is not None and length < holder.shared:
            parent = holder.parent
            parent.children.discard(holder)
            self._attach(holder, parent, length)

    def remove(self, seq: int) -> None:
        self.cut(seq, 0)
        holder = self._holders.pop(seq)
        if holder.parent is not None:
            holder.parent.children.discard(holder)

    def released(self, seqs: Iterable[int]) -> int:
        """Cells that freeing all of `seqs` gives back."""
        leaving = {id(self._holders[seq]) for seq in seqs}
        given = 0
        for holder in self._holders.values():
            if id(holder) in leaving:
                held = max((child.shared for child in holder.children if _stays(child, leaving)), default=0)
                given += max(0, holder.length - max(holder.shared, held))
        return given

    def _attach(self, holder: _Holder, parent: _Holder, shared: int) -> None:
        above: _Holder | None = parent
        while above is not None and shared <= above.shared:
            above = above.parent
        holder.shared = shared if above is not None else 0
        holder.parent = above
        if above is not None:
            above.children.add(holder)

    def _hand_over(self, holder: _Holder, kept: int) -> None:
        """Children that share more than the first `kept` cells go under the longest of them, which owns the rest."""
        beyond = sorted((child for child in holder.children if child.shared > kept), key=lambda child: -child.shared)
        if not beyond:
            return
        heir = beyond[0]
        holder.children.difference_update(beyond)
        self.used += heir.shared - kept
        for child in beyond[1:]:
            child.parent = heir
            heir.children.add(child)
        self._attach(heir, holder, kept)


def _stays(holder: _Holder, leaving: Collection[int]) -> bool:
    """Whether the sequence, or one that shares all it shares, is not among those that leave."""
    return id(holder) not in leaving or any(_stays(child, leaving) for child in holder.children)
