"""Shared cells against a model that names every cell."""

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from superfluid.engines.llamacpp.cells import SharedCells


class Cells(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cells = SharedCells()
        self.held: dict[int, list[int]] = {}
        self.next_cell = self.next_seq = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(n_tokens=st.integers(0, 6))
    def create(self, n_tokens: int) -> None:
        self.cells.add(self.next_seq)
        self.held[self.next_seq] = []
        self.grow_by(self.next_seq, n_tokens)
        self.next_seq += 1

    def grow_by(self, seq: int, n_tokens: int) -> None:
        self.cells.grow(seq, n_tokens)
        self.held[seq] += range(self.next_cell, self.next_cell + n_tokens)
        self.next_cell += n_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n_tokens=st.integers(1, 6))
    def grow(self, data: st.DataObject, n_tokens: int) -> None:
        self.grow_by(self.pick(data), n_tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source = self.pick(data)
        length = data.draw(st.integers(0, len(self.held[source])))
        self.cells.add(self.next_seq)
        self.cells.copy(source, self.next_seq, length)
        self.held[self.next_seq] = self.held[source][:length]
        self.next_seq += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.held[seq])))
        self.cells.cut(seq, length)
        del self.held[seq][length:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cells.remove(seq)
        del self.held[seq]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def released(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.held))))
        staying = {cell for seq, cells in self.held.items() if seq not in leaving for cell in cells}
        going = {cell for seq in leaving for cell in self.held[seq]}
        assert self.cells.released(leaving) == len(going - staying)

    @invariant()
    def used(self) -> None:
        assert self.cells.used == len({cell for cells in self.held.values() for cell in cells})


TestCells = Cells.TestCase
TestCells.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
