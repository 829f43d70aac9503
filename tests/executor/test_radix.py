import attrs
import numpy as np
from hypothesis import given, settings, strategies as st

from superfluid.engines.executor.radix import RadixTree


@attrs.define(eq=False)
class Item:
    tokens: np.ndarray
    resident: bool = True


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


paths = st.lists(st.integers(0, 2), max_size=9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(paths, st.booleans(), st.booleans(), st.booleans()), max_size=14), paths)
def test_the_tree_answers_as_a_list_would(items: list[tuple[list[int], bool, bool, bool]], span: list[int]) -> None:
    tree = RadixTree()
    held: list[Item] = []
    query = np.asarray(span, np.uint32)
    for path, resident, retier, remove in items:
        item = Item(np.asarray(path, np.uint32), resident)
        tree.insert(item)
        held.append(item)
        tree.root.shortest()
        if retier:
            item.resident = not item.resident
            tree.retier(item)
        if remove:
            tree.remove(held.pop(len(held) // 2))
    assert len(tree) == len(held)
    lengths = {id(item): shared(item.tokens.tolist(), span) for item in held}
    branches = tree.branches(query)
    assert [length for length, _ in branches] == sorted(set(lengths.values()))
    for length, node in branches:
        under = [item for item in held if lengths[id(item)] >= length]
        for tier, best in enumerate(node.shortest()):
            of_tier = [len(item.tokens) for item in under if item.resident is (tier == 0)]
            assert (None if best is None else len(best.tokens)) == min(of_tier, default=None)
    for least in range(len(span) + 1):
        found = {id(item): length for length, item in tree.sharing(query, least)}
        assert found == {key: length for key, length in lengths.items() if length >= least}
        node = tree.reaching(query, least)
        assert (node.count if node is not None else 0) == len(found)
    exact = tree.exact(query)
    assert {id(item) for item in exact} == {id(item) for item in held if item.tokens.tolist() == span}
