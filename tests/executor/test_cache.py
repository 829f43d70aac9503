from superfluid.engines.engine import EngineError, Status, TickStatus
from superfluid.engines.primitives import FaultError
from superfluid.link import linkw
from tests.executor.rig import Rig, greedy, ids, some

EVERYTHING = 1 << 62


def status_of(call) -> int:
    try:
        call()
    except EngineError as error:
        return error.status
    raise AssertionError("it was accepted")


def test_offers_are_whole_pages_longest_first_each_once() -> None:
    rig = Rig()
    stem = some(64)
    rig.publish(1, [*stem, *some(32, 1)])
    rig.publish(1, [*stem, *some(48, 2)])
    rig.publish(1, stem[:20])
    assert rig.offers([*stem, *some(32, 1)]) == [(96, 0), (64, 0), (16, 0)]
    assert rig.offers(some(30, 5)) == []


def test_acquire_refuses_what_it_cannot_serve() -> None:
    rig = Rig(seed_min_tokens=32)
    rig.publish(1, some(64))
    for length in (0, 8, 80, 16, 33):
        assert status_of(lambda n=length: rig.acquire(some(64), n)) == Status.SeedUnservable, length
    seed = rig.acquire(some(64), 48)
    rig.engine.seed_release(seed)
    assert status_of(lambda: rig.engine.seed_release(seed)) == Status.UnknownHandle


def test_leases_expire_after_their_ticks() -> None:
    rig = Rig()
    prompt = some(64)
    rig.publish(1, prompt)
    for late in (False, True):
        seed = rig.acquire(prompt, 64)
        for _ in range(rig.engine.seed_lease_ticks() + late):
            rig.tick()
        if late:
            assert rig.refused(admits=[rig.admit(2, [*prompt, 1], seed_handle=seed)]) == Status.RejectStaleSeed
            assert rig.engine.cache_evict(EVERYTHING, linkw.ShedPolicy()) == 64 * 64
        else:
            assert rig.engine.cache_evict(EVERYTHING, linkw.ShedPolicy()) == 0
            rig.start(2, [*prompt, 1], seed=seed, offset=64)
            rig.retire(2, publish=False)


def test_a_full_pool_evicts_the_oldest_within_the_policy() -> None:
    rig = Rig(cells_total=200)
    for salt in (1, 2):
        rig.publish(1, some(64, salt))
    prompt = some(80, 3)
    admit, prefill = rig.admit(5, prompt), linkw.LanePrefill(5, 0, 80)
    for policy in (
        linkw.ShedPolicy(evictable_cache_classes=2),
        linkw.ShedPolicy(max_evict_bytes=63 * 64),
        linkw.ShedPolicy(protected_quota_bytes=65 * 64),
    ):
        assert rig.refused(admits=[admit], prefills=[prefill], shed_policy=policy) == Status.NeedsReplan
    assert len(rig.fake.sequences) == 2
    events = rig.tick(admits=[admit], prefills=[prefill])
    assert events.tick_status == TickStatus.SHED
    assert events.shed.entries == [linkw.ShedEntry(0, 2, 0, 64 * 64, 64)]
    assert rig.offers(some(64, 1)) == [] and rig.offers(some(64, 2)) == [(64, 0)]


def test_shared_prefixes_go_last() -> None:
    rig = Rig(cells_total=200)
    shared = some(48, 1)
    rig.publish(1, shared)
    for tag in (2, 3):
        rig.start(tag, [*shared, 7], seed=rig.acquire(shared, 48), offset=48)
        rig.retire(tag, publish=False)
    rig.publish(1, some(64, 2))
    assert rig.engine.cache_evict(EVERYTHING, linkw.ShedPolicy(evictable_cache_classes=1)) == 64 * 64
    assert rig.offers(shared) == [(48, 0)]
    assert rig.engine.cache_evict(EVERYTHING, linkw.ShedPolicy(evictable_cache_classes=3)) == 48 * 64


def test_a_seed_takes_its_entry_over_when_nothing_else_fits() -> None:
    rig = Rig(cells_total=100)
    prompt = some(64)
    rig.publish(1, prompt)
    whole = [*prompt, *some(10, 9)]
    seed = rig.acquire(whole, 64)
    events = rig.tick(
        admits=[rig.admit(2, whole, seed_handle=seed)],
        prefills=[linkw.LanePrefill(2, 64, 10)],
        decodes=[linkw.LaneDecode(2, 4)],
    )
    assert events.shed.entries == [linkw.ShedEntry(2, 2, 0, 64 * 64, 64)]
    assert rig.tokens(events, 2) == greedy(whole, 4)
    assert rig.offers(whole) == []
    assert not rig.fake.calls["seq_copy"]


def test_takeover_preferred_follows_a_chat_and_copies_for_a_branch() -> None:
    rig = Rig(takeover_preferred=True, page_size_tokens=1)
    chat = some(64)
    tokens, _ = rig.start(1, chat, 8)
    rig.retire(1)
    grown = [*chat, *tokens, 1, 2]
    rig.start(2, grown, seed=rig.acquire(grown, 72), offset=72)
    assert not rig.fake.calls["seq_copy"] and rig.offers(grown) == []
    rig.retire(2)
    rig.start(3, [*chat[:40], 5], seed=rig.acquire(chat, 40), offset=40)
    assert rig.fake.calls["seq_copy"] == 1 and rig.offers(grown)[0] == (74, 0)


def test_entries_are_exported_and_come_back() -> None:
    rig = Rig(cells_total=220, cache_exported_cells=500)
    rig.publish(1, some(96, 1))
    rig.publish(1, some(96, 2))
    events = rig.tick(admits=[rig.admit(2, some(100, 3))], prefills=[linkw.LanePrefill(2, 0, 100)])
    assert events.tick_status == TickStatus.OK, "an export is not an eviction"
    assert events.mem.host_retained_bytes == 96 * 64 + 12
    assert rig.offers(some(96, 1)) == [(96, 1)]
    rig.retire(2, publish=False)
    prompt = [*some(96, 1)[:32], 9]
    tokens, _ = rig.start(3, prompt, 3, seed=rig.acquire(prompt, 32), offset=32)
    assert tokens == greedy(prompt, 3)
    assert rig.offers([*some(96, 1)[:8]]) == [], "less than an eighth of an export is not served"
    rig.engine.cache_evict(0, linkw.ShedPolicy(evictable_cache_classes=4))
    assert rig.offers(some(96, 1)) == []


def test_a_lost_export_is_prefilled_by_its_lane() -> None:
    rig = Rig(cells_total=200, cache_exported_cells=500)
    rig.publish(1, some(96, 1))
    rig.start(2, some(120, 3))
    rig.retire(2, publish=False)
    prompt = [*some(96, 1), 9]
    rig.fake.fail_next("seq_import", FaultError(5))
    tokens, events = rig.start(3, prompt, 3, seed=rig.acquire(prompt, 96), offset=96)
    assert tokens == greedy(prompt, 3)
    assert events.shed.entries == [linkw.ShedEntry(3, 2, 0, 0, 96)]
    assert rig.offers(prompt) == []
    seed = None
    rig.retire(3)
    whole = some(96, 1)
    seed = rig.acquire(whole, 96)
    assert rig.start(4, whole, 3, seed=seed, offset=96)[0] == greedy(whole, 3)


def test_a_whole_prompt_of_a_lost_export() -> None:
    rig = Rig(cells_total=200, cache_exported_cells=500, prefill_step_tokens=32)
    whole = some(96, 1)
    rig.publish(1, whole)
    rig.start(2, some(120, 3))
    rig.retire(2, publish=False)
    rig.fake.fail_next("seq_import", FaultError(5))
    seed = rig.acquire(whole, 96)
    rig.control.yield_requested = True
    tokens, _ = rig.start(4, whole, 3, seed=seed, offset=96)
    assert tokens == []
    rig.control.yield_requested = False
    assert rig.decode(4, 3) == greedy(whole, 3)


def test_settling_keeps_the_pool_under_its_bound() -> None:
    rig = Rig(cache_resident_cells=128)
    for salt in (1, 2, 3):
        rig.publish(1, some(64, salt))
    assert [rig.offers(some(64, salt)) for salt in (1, 2, 3)] == [[], [(64, 0)], [(64, 0)]]
    grown = [*some(64, 2), *some(64, 5)]
    rig.publish(1, grown)
    assert rig.offers(grown) == [(128, 0)], "the entry it covers and the older one left"


def test_slots_count_lanes_entries_and_bare_sequences() -> None:
    rig = Rig(max_seqs=3)
    rig.publish(1, some(32, 1))
    bare = rig.engine.create_sequence()
    rig.start(2, some(32, 2))
    events = rig.tick(admits=[rig.admit(3, some(8, 3))])
    assert events.shed.evictions_performed == 1
    assert rig.refused(admits=[rig.admit(4, some(8, 4))]) == Status.NeedsReplan
    assert status_of(rig.engine.create_sequence) == Status.NeedsReplan
    rig.engine.free_sequence(bare)
    rig.tick(admits=[rig.admit(4, some(8, 4))])
    rig.tick(admits=[rig.admit(5, some(8, 5))], retires=[linkw.LaneRetire(4)])


def test_publishing_the_same_again_strands_nothing() -> None:
    for shares in (False, True):
        rig = Rig(copy_shares_cells=shares)
        for _ in range(3):
            rig.publish(1, some(64))
        seed = rig.acquire(some(64), 64)
        rig.start(2, [*some(64), 1], seed=seed, offset=64)
        rig.retire(2)
        before = rig.tick().mem
        assert before.pool_bytes_evictable == before.allocated_bytes
        assert rig.engine.cache_evict(EVERYTHING, linkw.ShedPolicy()) == before.pool_bytes_evictable
        assert rig.tick().mem.allocated_bytes == 0 and not rig.fake.sequences


def test_adopt_fork_publish() -> None:
    rig = Rig()
    rig.start(1, some(40))
    lane = rig.engine.lane_sequence(1)
    child = rig.engine.seq_fork(lane, 0)
    assert status_of(lambda: rig.engine.seed_adopt(lane, ids(some(39)))) == Status.UnknownHandle
    assert status_of(lambda: rig.engine.seed_adopt(child, ids(some(38)))) == Status.OutOfBoundary
    seed = rig.engine.seed_adopt(child, ids(some(39)))
    for call in (
        lambda: rig.engine.seed_adopt(child, ids(some(39))),
        lambda: rig.engine.free_sequence(child),
        lambda: rig.engine.space_trim(child, 1, 4),
        lambda: rig.engine.publish_sequence(child, ids(some(39))),
    ):
        assert status_of(call) == Status.Busy
    tokens, _ = rig.start(2, some(40), 2, seed=seed, offset=39)
    assert tokens == greedy(some(40), 2)
    other = rig.engine.seq_fork(lane, 0)
    assert status_of(lambda: rig.engine.publish_sequence(other, ids(some(60)))) == Status.OutOfBoundary
    rig.engine.publish_sequence(other, ids(some(39)))
    assert rig.offers(some(40)) == [(32, 0)]
    rig.engine.unpublish(ids(some(32)))
    assert rig.offers(some(40)) == []


def test_evict_by_keys() -> None:
    rig = Rig()
    rig.publish(1, some(64))
    digest = rig.engine.space_match(1, ids(some(64)))[0].candidates[0].provenance_digest
    identity = rig.engine._state.space.compat_identity
    foreign = linkw.CacheKey(bytes(32), digest)
    ours = linkw.CacheKey(identity, digest)
    assert status_of(lambda: rig.engine.cache_evict_entries([ours, foreign])) == Status.IdentityMismatch
    rig.engine.cache_evict_entries([linkw.CacheKey(identity, bytes(32))])
    assert rig.offers(some(64)) == [(64, 0)]
    rig.engine.cache_evict_entries([ours])
    assert rig.offers(some(64)) == []
