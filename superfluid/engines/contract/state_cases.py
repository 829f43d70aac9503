"""Sequences and state operations."""

import struct
from typing import Any

from superfluid.engines.contract.cases import New, case
from superfluid.engines.contract.driver import ENVELOPE_BYTES, REFUSED_ADOPT, Driver, need
from superfluid.link import linkw
from superfluid.link.codes import FORK_PRIVATE, OpState, SpaceKind, Status
from superfluid.link.linkw import LaneDecode

UNKNOWN = 987_654
IDENTITY = slice(16, 48)  # compat_identity in the envelope
SEALED = struct.Struct("<QII32sQ32sII QQ B3xI QQ")


@case
def unknown_handles(new: New) -> None:
    d = new()
    engine = d.engine
    need(d.can.sequences, "no sequences")
    sequence = d.bare(d.prompt(d.unit))
    space = d.spaces[0].space_id
    out, end = memoryview(bytearray(ENVELOPE_BYTES)), d.unit
    calls: list[tuple[Any, ...]] = [
        ("fork", engine.seq_fork, UNKNOWN, 0),
        ("free", engine.free_sequence, UNKNOWN),
        ("trim", engine.space_trim, UNKNOWN, space, 0),
        ("export size", engine.space_export_size, UNKNOWN, space, 0, end, 0),
        ("snapshot", engine.space_snapshot, UNKNOWN, space, end, out, 0),
        ("restore", engine.space_restore, UNKNOWN, space, out),
        ("boundary", engine.space_snapshot_boundary, UNKNOWN, space, end),
        ("publish", engine.publish_sequence, UNKNOWN, d.array([1])),
        ("adopt", engine.seed_adopt, UNKNOWN, d.array([1])),
        ("export size of an unknown space", engine.space_export_size, sequence, UNKNOWN, 0, end, 0),
        ("trim of an unknown space", engine.space_trim, sequence, UNKNOWN, 0),
        ("boundary of an unknown space", engine.space_snapshot_boundary, sequence, UNKNOWN, end),
        ("poll", engine.op_poll, UNKNOWN),
        ("cancel", engine.op_cancel, UNKNOWN),
    ]
    for words, call, *arguments in calls:
        d.refuses(Status.UnknownHandle, words, call, *arguments)
    d.equal(engine.lane_sequence(UNKNOWN), None, "sequence of an unknown lane")


@case
def handles_are_never_reused(new: New) -> None:
    d = new()
    need(d.can.sequences, "no sequences")
    seen = set()
    for _ in range(5):
        sequence = d.engine.create_sequence()
        seen.add(sequence)
        d.engine.free_sequence(sequence)
        d.refuses(Status.UnknownHandle, "free again", d.engine.free_sequence, sequence)
    d.equal(len(seen), 5, "different handles")
    d.start(1, d.prompt(4))
    lane = d.engine.lane_sequence(1)
    assert lane is not None
    d.refuses(Status.UnknownHandle, "free of a lane's sequence", d.engine.free_sequence, lane)


@case
def a_fork_is_a_bare_copy(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    longer = [*prompt, 3]
    cold = d.generate(1, longer, 3)
    before = d.allocated()
    for flags in (0, FORK_PRIVATE):
        child = d.bare(prompt, flags=flags)
        grandchild = d.engine.seq_fork(child, flags)
        d.engine.free_sequence(child)
        seed = d.engine.seed_adopt(grandchild, d.array(prompt))
        events = d.start(1, longer, decode=3, at=n, seed_handle=seed)
        d.same(d.tokens(events, 1), cold, "tokens of a lane on a fork's fork")
        d.retire(1)
    d.equal(d.allocated(), before, "bytes allocated when forks and lanes are gone")


@case
def a_space_that_no_operation_serves(new: New) -> None:
    d = new(unserved_space=True)
    space = next(space for space in d.engine.state_spaces() if space.flags & 1).space_id
    n = d.unit
    prompt = d.prompt(n)
    sequence = d.bare(prompt)
    none = Status.Unsupported
    d.refuses(none, "export size", d.engine.space_export_size, sequence, space, 0, n, 0)
    d.refuses(none, "trim", d.engine.space_trim, sequence, space, 0)
    d.refuses(none, "boundary", d.engine.space_snapshot_boundary, sequence, space, n)
    d.refuses(none, "restore", d.engine.space_restore, sequence, space, memoryview(bytes(200)))
    d.publish(prompt)
    d.refuses(Status.SeedUnservable, "a seed", d.acquire, [*prompt, 1], n)
    d.refuses(Status.SeedUnservable, "an adopted seed", d.engine.seed_adopt, sequence, d.array(prompt))


@case
def exports_are_sized_first(new: New) -> None:
    d = new()
    need(d.can.sequences, "no sequences")
    n = d.unit
    for space in d.spaces:
        prompt = [*d.prompt(n), 1, 2]
        d.start(1, prompt, count=n)
        sequence = d.engine.lane_sequence(1)
        assert sequence is not None
        start = n if space.kind == SpaceKind.BLOB else 0
        size, sizing = d.engine.space_export_size(sequence, space.space_id, start, n, 0)
        d.true(size > ENVELOPE_BYTES, "an export has a payload")
        out = bytearray(size)

        take = (d.engine.space_snapshot, sequence, space.space_id, n)
        short = memoryview(out)[:-1]
        d.refuses(Status.BufferTooSmall, "a buffer one byte short", *take, short, sizing)
        d.refuses(Status.StaleSizing, "a generation that never was", *take, memoryview(out), sizing + 1_000_000)
        d.true(not any(out), "a refused export wrote nothing")
        op = d.engine.space_snapshot(sequence, space.space_id, n, memoryview(out), sizing)
        done = d.finish(op)
        d.equal((done.state, done.bytes_moved), (OpState.DONE, size), "state and bytes of the export")
        d.equal(d.engine.op_poll(op).state, OpState.DONE, "state when polled")
        d.equal(len(out) - ENVELOPE_BYTES, SEALED.unpack_from(out)[-2], "payload length in the envelope")
        d.tick(prefills=[linkw.LanePrefill(1, n, 1)])
        d.refuses(Status.StaleSizing, "a generation from before the lane grew", *take, memoryview(out), sizing)
        d.retire(1)


@case
def ranges_and_encodings_of_an_export(new: New) -> None:
    d = new()
    n = d.unit
    sequence = d.bare(d.prompt(n))
    for space in d.spaces:
        size = d.engine.space_export_size
        sid = space.space_id
        blob = space.kind == SpaceKind.BLOB
        past = (n + d.step, n + d.step) if blob else (0, n + 1)
        d.refuses(Status.RejectBounds, "past the content", size, sequence, sid, *past, 0)
        if blob:
            d.refuses(Status.Unsupported, "a lossy blob", size, sequence, sid, n, n, 1)
            off = n - 1
            d.refuses(Status.OutOfBoundary, "off a boundary", size, sequence, sid, off, off, 0)
        else:
            d.refuses(Status.RejectBounds, "an empty range", size, sequence, sid, 0, 0, 0)


@case
def boundaries(new: New) -> None:
    d = new()
    n = d.unit
    sequence = d.bare(d.prompt(n))
    for space in d.spaces:
        at = d.engine.space_snapshot_boundary
        d.equal(at(sequence, space.space_id, n), n, "boundary at the head")
        d.equal(at(sequence, space.space_id, n + 1000), n, "boundary under a cap past the head")
        d.equal(at(sequence, space.space_id, 0), 0, "boundary under a cap of 0")
        below = at(sequence, space.space_id, n - 1)
        d.true(below < n and below % d.page == 0, f"a boundary under the head, got {below}")


@case
def a_state_comes_back(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    longer = [*prompt, 3]
    cold = d.generate(1, longer, 3)
    empty = d.allocated()
    source = d.bare(prompt)
    states = {space.space_id: d.export(source, space.space_id, n) for space in d.spaces}
    d.engine.free_sequence(source)
    d.equal(d.allocated(), empty, "bytes allocated when the source is gone")
    published = d.engine.create_sequence()
    adopted = d.engine.create_sequence()
    for space_id, sealed in states.items():
        d.restore(published, space_id, sealed)
        d.restore(adopted, space_id, sealed)
        d.refuses(
            Status.Busy,
            "a restore into a sequence that is not empty",
            d.engine.space_restore,
            published,
            space_id,
            memoryview(sealed),
        )
    seed = d.engine.seed_adopt(adopted, d.array(prompt))
    events = d.start(1, longer, decode=3, at=n, seed_handle=seed)
    d.same(d.tokens(events, 1), cold, "tokens of a lane on a restored state")
    d.retire(1)
    d.engine.publish_sequence(published, d.array(prompt))
    d.refuses(Status.UnknownHandle, "publish consumes the sequence", d.engine.free_sequence, published)
    seed = d.acquire(longer, n)
    events = d.start(1, longer, decode=3, at=n, seed_handle=seed)
    d.same(d.tokens(events, 1), cold, "tokens of a lane seeded from a published restore")


@case
def states_that_are_refused(new: New) -> None:
    d = new()
    n = d.unit
    source = d.bare(d.prompt(n))
    space = d.spaces[0]
    sealed = d.export(source, space.space_id, n)
    target = d.engine.create_sequence()
    mismatch, identity = Status.EnvelopeMismatch, Status.IdentityMismatch

    def damaged(at: int) -> bytes:
        return sealed[:at] + bytes([sealed[at] ^ 0xFF]) + sealed[at + 1 :]

    for status, words, state in (
        (mismatch, "nothing at all", b""),
        (mismatch, "less than an envelope", sealed[: ENVELOPE_BYTES - 1]),
        (mismatch, "a truncated payload", sealed[:-1]),
        (mismatch, "bytes after the payload", sealed + b"\0"),
        (mismatch, "another magic", damaged(0)),
        (mismatch, "another version", damaged(8)),
        (mismatch, "another space kind", damaged(12)),
        (identity, "another identity", damaged(IDENTITY.start)),
        (identity, "another version tag", damaged(48)),
        (mismatch, "another checksum kind", damaged(116)),
        (mismatch, "another payload length", damaged(120)),
        (Status.Checksum, "another checksum", damaged(128)),
        (Status.Checksum, "a damaged payload", damaged(len(sealed) - 1)),
    ):
        d.refuses(status, words, d.engine.space_restore, target, space.space_id, memoryview(state))
    d.restore(target, space.space_id, sealed)


@case
def a_running_operation_is_busy(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    sequence = d.bare(prompt)
    op, out, size = _running_snapshot(d, sequence, n)
    space = d.spaces[0].space_id
    busy = Status.Busy
    again, sizing = bytearray(size), d.engine.space_export_size(sequence, space, *_range(d, n), 0)[1]
    view = memoryview(again)
    d.refuses(busy, "another operation", d.engine.space_snapshot, sequence, space, n, view, sizing)
    d.refuses(busy, "fork", d.engine.seq_fork, sequence, 0)
    d.refuses(busy, "trim", d.engine.space_trim, sequence, space, 0)
    d.refuses(busy, "free", d.engine.free_sequence, sequence)
    d.refuses(busy, "publish", d.engine.publish_sequence, sequence, d.array(prompt))
    d.refuses(busy, "adopt", d.engine.seed_adopt, sequence, d.array(prompt))
    d.equal(d.finish(op).state, OpState.DONE, "state at the end")
    d.true(any(out), "the export was written")
    d.engine.free_sequence(sequence)


@case
def an_operation_is_reported_once(new: New) -> None:
    d = new()
    n = d.unit
    sequence = d.bare(d.prompt(n))
    space = d.spaces[0].space_id
    d.tick()
    size, sizing = d.engine.space_export_size(sequence, space, *_range(d, n), 0)
    op = d.engine.space_snapshot(sequence, space, n, memoryview(bytearray(size)), sizing)
    d.finish(op)
    d.equal(d.engine.pump(), [], "what a second pump reports")
    d.equal([done.op for done in d.tick().op_completions], [op], "completions in the next tick")
    d.equal(d.tick().op_completions, [], "completions in the tick after")
    d.engine.op_cancel(op)
    d.equal(d.engine.op_poll(op).state, OpState.DONE, "state of an ended operation that is cancelled")


@case
def a_cancelled_operation_leaves_nothing(new: New) -> None:
    d = new()
    n = d.unit
    sequence = d.bare(d.prompt(n))
    op, out, _ = _running_snapshot(d, sequence, n)
    d.engine.op_cancel(op)
    d.equal(d.finish(op).state, OpState.CANCELLED, "state of a cancelled operation")
    d.true(not any(out), "its output is gone")
    d.engine.free_sequence(sequence)


@case
def trims(new: New) -> None:
    d = new()
    n = d.unit
    sequence = d.bare(d.prompt(2 * n))
    for space in d.spaces:
        trim = (d.engine.space_trim, sequence, space.space_id)
        d.refuses(Status.RejectBounds, "longer than the sequence", *trim, 2 * n + 1)
        if space.kind == SpaceKind.BLOB or d.can.head_only:
            d.refuses(Status.OutOfBoundary, "off a boundary", *trim, 2 * n - 1)
        if not d.can.head_only:
            d.engine.space_trim(sequence, space.space_id, n)
        d.engine.space_trim(sequence, space.space_id, 0)
    d.equal(d.allocated(), 0, "bytes allocated after trims to 0")


@case
def what_cannot_be_published(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    sequence = d.bare(prompt)
    more = d.array([*prompt, 1])
    d.refuses(Status.OutOfBoundary, "more tokens than it holds", d.engine.publish_sequence, sequence, more)
    d.engine.publish_sequence(sequence, d.array(prompt))
    d.true(n in d.offers([*prompt, 1]), "what was published is offered")
    d.refuses(Status.UnknownHandle, "publish again", d.engine.publish_sequence, sequence, d.array(prompt))


@case
def what_cannot_be_adopted(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    longer = [*prompt, 3]
    sequence, empty = d.bare(prompt), d.engine.create_sequence()
    adopt = d.engine.seed_adopt
    d.refuses(REFUSED_ADOPT, "an empty sequence", adopt, empty, d.array([]))
    d.refuses(REFUSED_ADOPT, "a shorter span", adopt, sequence, d.array(prompt[:-1]))
    d.refuses(REFUSED_ADOPT, "a longer span", adopt, sequence, d.array(longer))
    d.start(1, prompt)
    lane = d.engine.lane_sequence(1)
    assert lane is not None
    d.refuses(Status.UnknownHandle, "a lane's sequence", adopt, lane, d.array(prompt))
    seed = adopt(sequence, d.array(prompt))
    d.refuses(Status.Busy, "adopted twice", adopt, sequence, d.array(prompt))
    d.refuses(Status.Busy, "free while a seed holds it", d.engine.free_sequence, sequence)
    d.refused(
        Status.RejectStaleSeed,
        "another determinism class than an adopted seed has",
        admits=[d.admit(2, longer, seed_handle=seed, determinism_class=1)],
    )
    d.start(2, longer, decode=1, at=n, seed_handle=seed)
    d.equal(len(d.subject.lane_tokens(2)), n + 2, "committed length")


@case
def eviction_by_keys(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    longer = d.array([*prompt, 1])
    source = d.bare(prompt)
    sealed = d.export(source, d.spaces[0].space_id, n)
    ours = bytes(sealed[IDENTITY])
    d.engine.publish_sequence(source, d.array(prompt))
    offered = d.engine.space_match(d.spaces[0].space_id, longer)[0].candidates
    digest = offered[0].provenance_digest
    evict = d.engine.cache_evict_entries
    foreign = linkw.CacheKey(bytes(32), digest)
    ok = linkw.CacheKey(ours, digest)
    d.refuses(Status.IdentityMismatch, "a key of another engine", evict, [ok, foreign])
    evict([linkw.CacheKey(ours, b"\x77" * 32)])
    d.true(n in d.offers([*prompt, 1]), "refused and absent keys evict nothing")
    evict([ok])
    d.equal(d.offers([*prompt, 1]), [], "offers after the entry was evicted by its key")


# ---- demotion and taint


@case
def a_range_is_demoted_and_promoted(new: New) -> None:
    d = new()
    need(d.can.promotes, "demoted ranges are not promoted")
    n = d.unit
    prompt = d.prompt(n)
    space = d.spaces[0]
    sequence = d.bare(prompt)
    before = d.allocated()
    start, end = 0, n // 2
    size, sizing = d.engine.space_export_size(sequence, space.space_id, start, end, 0)
    out = bytearray(size)
    op = d.engine.space_demote(sequence, space.space_id, start, end, 0, memoryview(out), sizing)
    if d.engine.op_poll(op).state == OpState.RUNNING:
        d.equal(d.allocated(), before, "bytes allocated while the demotion runs")
    d.finish(op)
    demoted = d.allocated()
    d.true(demoted < before, "a demotion frees memory when it completes")
    again = (d.engine.space_export_size, sequence, space.space_id, start, end, 0)
    d.refuses(Status.RejectBounds, "demoting a demoted range", *again)
    promote = d.engine.space_promote
    sealed = memoryview(out)
    other = (sequence, space.space_id, start, end - 1, sealed)
    d.refuses(Status.RejectBounds, "another range than was demoted", promote, *other)
    d.finish(promote(sequence, space.space_id, start, end, sealed))
    d.equal(d.allocated(), before, "bytes allocated after the promotion")
    d.refuses(Status.RejectBounds, "promoting twice", promote, sequence, space.space_id, start, end, sealed)
    d.engine.publish_sequence(sequence, d.array(prompt))
    d.engine.seed_release(d.acquire([*prompt, 1], n, determinism=1))


@case
def precision_that_was_lost_stays_marked(new: New) -> None:
    d = new()
    lossy = d.can.lossy
    need(lossy is not None, "no lossy encoding")
    assert lossy is not None
    n = d.unit
    prompt = d.prompt(n)
    longer = [*prompt, 3]
    source = d.bare(prompt)
    states = {
        space.space_id: d.export(source, space.space_id, n, 0 if space.kind == SpaceKind.BLOB else lossy)
        for space in reversed(d.spaces)
    }
    restored = d.engine.create_sequence()
    for space_id, sealed in states.items():
        d.restore(restored, space_id, sealed)
    child = d.engine.seq_fork(restored, 0)
    lossless = d.export(child, d.spaces[0].space_id, n)
    d.true(SEALED.unpack_from(lossless)[6] & 1, "a lossless export of a tainted state is tainted")
    d.engine.publish_sequence(restored, d.array(prompt))
    d.true(d.engine.space_match(linkw.ALL_SPACES, d.array(longer))[0].candidates[0].taint_bits & 1, "a tainted offer")
    d.refuses(Status.SeedUnservable, "a deterministic seed of it", d.acquire, longer, n, 1)
    seed = d.acquire(longer, n)
    d.start(1, longer, decode=1, at=n, seed_handle=seed)
    tokens = d.subject.lane_tokens(1)
    lane = d.engine.lane_sequence(1)
    assert lane is not None
    fork = d.engine.seq_fork(lane, 0)
    cut = d.engine.space_snapshot_boundary(fork, d.spaces[0].space_id, len(tokens))
    if cut:
        passed = d.export(fork, d.spaces[0].space_id, cut)
        d.true(SEALED.unpack_from(passed)[6] & 1, "the state of a lane seeded from a tainted entry is tainted")
    d.tick(decodes=[LaneDecode(1, 1)])


def _range(d: Driver, end: int) -> tuple[int, int]:
    return (end, end) if d.spaces[0].kind == SpaceKind.BLOB else (0, end)


def _running_snapshot(d: Driver, sequence: int, end: int) -> tuple[int, bytearray, int]:
    """A snapshot of the first space that still runs. Raises NotApplicable when it ends at once."""
    space = d.spaces[0].space_id
    size, sizing = d.engine.space_export_size(sequence, space, *_range(d, end), 0)
    out = bytearray(size)
    op = d.engine.space_snapshot(sequence, space, end, memoryview(out), sizing)
    running = d.engine.op_poll(op).state in (OpState.PENDING, OpState.RUNNING)
    need(running, "operations end when they are submitted")
    return op, out, size
