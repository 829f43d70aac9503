import pytest

from superfluid.engines.engine import EngineError, OpState, Status
from superfluid.engines.executor.cache import content_digest
from superfluid.engines.primitives import FaultError
from superfluid.link import linkw
from tests.executor.rig import Rig, greedy, ids, some


def status_of(call) -> int:
    with pytest.raises(EngineError) as refused:
        call()
    return refused.value.status


def parked(rig: Rig, tag: int, end: int) -> bytes:
    handle = rig.engine.lane_sequence(tag)
    size, generation = rig.engine.space_export_size(handle, 1, 0, end, 0)
    out = bytearray(size)
    op = rig.engine.space_snapshot(handle, 1, end, memoryview(out), generation)
    (done,) = rig.engine.pump()
    assert done == linkw.OpComplete(op, OpState.DONE, 0, size)
    assert not rig.engine.pump()
    return bytes(out)


def test_park_and_resume() -> None:
    rig = Rig()
    prompt = some(40)
    tokens, _ = rig.start(1, prompt, 5)
    sealed = parked(rig, 1, 44)
    rig.retire(1, publish=False)
    bare = rig.engine.create_sequence()
    rig.engine.space_restore(bare, 1, memoryview(sealed))
    stream = [*prompt, *tokens]
    rig.engine.publish_sequence(bare, ids(stream[:44]))
    seed = rig.acquire(stream, 32)
    resumed, _ = rig.start(2, stream, 4, seed=seed, offset=32)
    assert resumed == greedy(stream, 4)


def test_sizing_goes_stale_with_any_change() -> None:
    rig = Rig()
    rig.start(1, some(40), 2)
    handle = rig.engine.lane_sequence(1)
    size, old = rig.engine.space_export_size(handle, 1, 0, 40, 0)
    assert rig.engine.space_export_size(handle, 1, 0, 20, 0)[1] == old
    out = memoryview(bytearray(size))
    assert status_of(lambda: rig.engine.space_snapshot(handle, 1, 40, out[:-1], old)) == Status.BufferTooSmall
    assert not any(out)
    rig.decode(1, 1)
    assert status_of(lambda: rig.engine.space_snapshot(handle, 1, 40, out, old)) == Status.StaleSizing
    size, fresh = rig.engine.space_export_size(handle, 1, 0, 20, 0)
    assert fresh != old
    rig.engine.space_snapshot(handle, 1, 20, memoryview(bytearray(size)), fresh)


@pytest.mark.parametrize("sized", [True, False])
def test_a_state_is_made_once(sized: bool) -> None:
    rig = Rig(sizes_exports=sized)
    rig.start(1, some(40))
    assert parked(rig, 1, 32) == parked(rig, 1, 32)
    made = rig.fake.calls
    assert (made["seq_export_into"], made["seq_export"]) == ((2, 0) if sized else (0, 2))


@pytest.mark.parametrize("sized", [True, False])
def test_an_export_that_fails_can_be_tried_again(sized: bool) -> None:
    rig = Rig(sizes_exports=sized)
    rig.start(1, some(40))
    handle = rig.engine.lane_sequence(1)
    size, generation = rig.engine.space_export_size(handle, 1, 0, 32, 0)
    out = memoryview(bytearray(size))
    if sized:
        rig.fake.fail_next("seq_export_into", FaultError(5))
        assert status_of(lambda: rig.engine.space_snapshot(handle, 1, 32, out, generation)) == Status.Fatal
        assert not rig.engine.pump()
    rig.engine.space_snapshot(handle, 1, 32, out, generation)
    rig.engine.pump()
    assert bytes(out) == parked(rig, 1, 32)


def test_refusals_of_sizing() -> None:
    rig = Rig(export_encodings=(0, 1))
    rig.start(1, some(40))
    handle = rig.engine.lane_sequence(1)
    for expected, arguments in (
        (Status.UnknownHandle, (handle + 7, 1, 0, 8, 0)),
        (Status.UnknownHandle, (handle, 2, 0, 8, 0)),
        (Status.Unsupported, (handle, 1, 4, 8, 0)),
        (Status.RejectBounds, (handle, 1, 0, 0, 0)),
        (Status.RejectBounds, (handle, 1, 0, 41, 0)),
        (Status.Unsupported, (handle, 1, 0, 8, 2)),
    ):
        assert status_of(lambda a=arguments: rig.engine.space_export_size(*a)) == expected


def test_refusals_of_a_restore() -> None:
    rig = Rig()
    rig.start(1, some(40))
    sealed = parked(rig, 1, 39)
    bare = rig.engine.create_sequence()

    def damaged(at: int) -> memoryview:
        copy = bytearray(sealed)
        copy[at] ^= 1
        return memoryview(copy)

    for expected, buffer in (
        (Status.EnvelopeMismatch, memoryview(sealed)[:100]),
        (Status.EnvelopeMismatch, damaged(0)),
        (Status.IdentityMismatch, damaged(20)),
        (Status.Checksum, damaged(140)),
    ):
        assert status_of(lambda b=buffer: rig.engine.space_restore(bare, 1, b)) == expected
    lane = rig.engine.lane_sequence(1)
    assert status_of(lambda: rig.engine.space_restore(lane, 1, memoryview(sealed))) == Status.Busy
    short = bytearray(sealed)
    short[104] = 38  # the range's end
    op = rig.engine.space_restore(bare, 1, memoryview(short))
    failed = rig.engine.op_poll(op)
    assert (failed.state, failed.error, failed.bytes_moved) == (OpState.FAILED, Status.EnvelopeMismatch, 0)
    assert rig.tick().op_completions[-1] == linkw.OpComplete(op, OpState.FAILED, -124 & 0xFFFFFFFF, 0)
    rig.engine.space_restore(bare, 1, memoryview(sealed))
    assert status_of(lambda: rig.engine.space_restore(bare, 1, memoryview(sealed))) == Status.Busy
    rig.engine.space_trim(bare, 1, 16)
    assert status_of(lambda: rig.engine.space_trim(bare, 1, 17)) == Status.RejectBounds
    assert status_of(lambda: rig.engine.op_poll(99)) == Status.UnknownHandle
    assert rig.engine.space_snapshot_boundary(bare, 1, 99) == 16


def test_a_lossy_export_taints_what_is_made_of_it() -> None:
    rig = Rig(export_encodings=(0, 1))
    rig.start(1, some(40))
    handle = rig.engine.lane_sequence(1)
    size, generation = rig.engine.space_export_size(handle, 1, 0, 32, 1)
    out = bytearray(size)
    rig.engine.space_demote(handle, 1, 0, 32, 1, memoryview(out), generation)
    assert out[56:88] == content_digest(ids(some(32)))
    rig.retire(1, publish=False)
    bare = rig.engine.create_sequence()
    rig.engine.space_restore(bare, 1, memoryview(out))
    rig.engine.publish_sequence(bare, ids(some(32)))
    (offer,) = rig.engine.space_match(1, ids(some(32)))[0].candidates
    assert offer.taint_bits == 1
    assert status_of(lambda: rig.acquire(some(32), 32, 1)) == Status.SeedUnservable
    rig.start(2, some(40), seed=rig.acquire(some(40), 32), offset=32)
    handle = rig.engine.lane_sequence(2)
    size, generation = rig.engine.space_export_size(handle, 1, 0, 39, 0)
    out = bytearray(size)
    rig.engine.space_snapshot(handle, 1, 39, memoryview(out), generation)
    assert out[88] == 1, "taint survives a lossless export"


def test_demoting_a_whole_bare_sequence_frees_it() -> None:
    rig = Rig()
    rig.start(1, some(40))
    bare = rig.engine.seq_fork(rig.engine.lane_sequence(1), 0)
    rig.retire(1, publish=False)
    size, generation = rig.engine.space_export_size(bare, 1, 0, 39, 0)
    out = memoryview(bytearray(size))
    rig.engine.space_demote(bare, 1, 0, 39, 0, out, generation)
    assert rig.fake.cells_used == 0
    assert status_of(lambda: rig.engine.space_demote(bare, 1, 0, 39, 0, out, generation)) == Status.RejectBounds
    assert status_of(lambda: rig.engine.space_promote(bare, 1, 0, 39, out)) == Status.Unsupported
