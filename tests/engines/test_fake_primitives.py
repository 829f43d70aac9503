"""The fake runtime keeps the contract that the executor is tested against."""

import numpy as np
import pytest

from superfluid.engines.primitives import CapacityError, FaultError, Feed, OutOfBoundaryError, UnknownSeqError
from tests.engines.fake_primitives import FakePrimitives, row_of, uniform


def feed(seq: int, tokens: list[int], wants_row: bool = True) -> Feed:
    return Feed(seq, np.array(tokens, np.uint32), wants_row)


def test_a_row_depends_on_the_tokens_alone() -> None:
    runtime = FakePrimitives()
    a, b = runtime.seq_create(), runtime.seq_create()
    runtime.step([feed(a, [1, 2, 3], wants_row=False), feed(b, [1])])
    rows = runtime.step([feed(a, [4]), feed(b, [2, 3, 4])])
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], row_of([1, 2, 3, 4]))
    assert rows.dtype == np.float32


def test_rows_are_gone_after_the_next_step() -> None:
    runtime = FakePrimitives()
    seq = runtime.seq_create()
    rows = runtime.step([feed(seq, [1])])
    runtime.step([feed(seq, [2])])
    assert np.isnan(rows).all()


@pytest.mark.parametrize("shares", [False, True])
def test_cells_are_counted_as_copies_share_them(shares: bool) -> None:
    runtime = FakePrimitives(copy_shares_cells=shares, cells_total=20)
    a, b = runtime.seq_create(), runtime.seq_create()
    runtime.step([feed(a, list(range(8)))])
    runtime.seq_copy(a, b, 6)
    assert runtime.cells_used == (8 if shares else 14)
    assert runtime.cells_released([a]) == (2 if shares else 8)
    assert runtime.cells_released([a, b]) == runtime.cells_used
    with pytest.raises(CapacityError):
        runtime.step([feed(b, [1] * 13)])
    runtime.seq_free(a)
    assert runtime.cells_used == 6
    with pytest.raises(UnknownSeqError):
        runtime.seq_len(a)


def test_head_only_state_is_cut_nowhere_but_to_nothing() -> None:
    runtime = FakePrimitives(head_only=True)
    a, b = runtime.seq_create(), runtime.seq_create()
    runtime.step([feed(a, [1, 2, 3])])
    for call in (lambda: runtime.seq_truncate(a, 2), lambda: runtime.seq_copy(a, b, 2)):
        with pytest.raises(OutOfBoundaryError):
            call()
    assert runtime.seq_boundary(a, 2) == 0
    runtime.seq_copy(a, b, 3)
    runtime.seq_truncate(a, 0)
    assert (runtime.seq_len(a), runtime.tokens(b)) == (0, [1, 2, 3])


def test_an_export_comes_back_whole() -> None:
    runtime = FakePrimitives()
    a, b = runtime.seq_create(), runtime.seq_create()
    runtime.step([feed(a, [7, 8, 9])])
    payload = runtime.seq_export(a, 2, 0)
    assert runtime.seq_import(b, memoryview(payload)) == 2
    assert runtime.tokens(b) == [7, 8]
    runtime.seq_truncate(b, 0)
    with pytest.raises(FaultError):
        runtime.seq_import(b, memoryview(payload[:-1]))


def test_an_export_is_sized_and_written_where_it_goes() -> None:
    runtime = FakePrimitives()
    seq = runtime.seq_create()
    runtime.step([feed(seq, [7, 8, 9])])
    size = runtime.seq_export_size(seq, 2, 0)
    assert size is not None
    out = bytearray(size)
    runtime.seq_export_into(seq, 2, 0, memoryview(out))
    assert bytes(out) == runtime.seq_export(seq, 2, 0)
    unsized = FakePrimitives(sizes_exports=False)
    seq = unsized.seq_create()
    unsized.step([feed(seq, [7])])
    assert unsized.seq_export_size(seq, 1, 0) is None


def test_an_injected_failure_hits_one_call() -> None:
    runtime = FakePrimitives()
    seq = runtime.seq_create()
    runtime.fail_next("step", FaultError(3), after=1)
    runtime.step([feed(seq, [1])])
    with pytest.raises(FaultError):
        runtime.step([feed(seq, [2])])
    assert runtime.tokens(seq) == [1]
    runtime.step([feed(seq, [2])])


def test_uniform_draws() -> None:
    assert uniform(0) == 0.8833108082136426
    assert uniform(2**64 - 1) == 0.8939429202831845
