"""Tick contract, cases 10 to 13 and 15: the prefix cache, seeds, replays, room."""

from typing import Any

from superfluid.engines.contract.cases import New, case
from superfluid.engines.contract.driver import EVERYTHING, Driver, need
from superfluid.engines.engine import EngineError
from superfluid.link import linkw
from superfluid.link.codes import (
    PARAM_IGNORE_EOS,
    SHED_EVICTION,
    CacheClass,
    Sampling,
    Status,
    TickStatus,
)
from superfluid.link.linkw import LaneCommit, LaneDecode, LanePrefill, LaneRetire, ShedPolicy

SAMPLED = linkw.SamplingParams(temperature=0.9, flags=PARAM_IGNORE_EOS)
NOTHING = ShedPolicy(evictable_cache_classes=0)


# ---- seeds


@case
def a_published_prompt_seeds_the_next_lane(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    longer = [*prompt, 3]
    cold = d.generate(1, longer, 3)
    d.publish(prompt)
    d.true(n in d.offers(longer), f"{n} is offered, of {d.offers(longer)}")
    d.true(all(length % d.page == 0 for length in d.offers(longer)), "offers are whole pages")
    d.equal(d.offers(d.prompt(n, salt=5)), [], "offers for another prompt")
    seed = d.acquire(longer, n)
    early = [LanePrefill(1, 0, n + 1)]
    admit = d.admit(1, longer, seed_handle=seed)
    d.refused(Status.RejectIllegalCombination, "a prefill of what the seed brought", admits=[admit], prefills=early)
    events = d.start(1, longer, decode=1, at=n, seed_handle=seed)
    d.equal(len(d.subject.lane_tokens(1)), n + 2, "committed length of the seeded lane")
    d.same(d.tokens(events, 1) + d.decode(1, 2), cold, "tokens of the seeded lane")
    d.refused(Status.RejectStaleSeed, "the seed again", admits=[d.admit(2, longer, seed_handle=seed)])
    d.still_works(1)


@case
def the_whole_span_as_a_seed(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    cold = d.generate(1, prompt, 3)
    d.publish(prompt)
    try:
        seed = d.acquire(prompt, n)
    except EngineError as error:
        d.equal(Status(error.status), Status.SeedUnservable, "refusal of a seed that is the whole span")
        return
    d.true(not d.can.head_only, "a head-only engine refuses a seed that is the whole span")
    events = d.tick(admits=[d.admit(1, prompt, seed_handle=seed)], decodes=[LaneDecode(1, 3)])
    d.same(d.tokens(events, 1), cold, "tokens of a lane whose whole prompt was seeded")
    d.same(d.subject.lane_tokens(1), prompt + cold, "committed tokens")


@case
def seeds_at_lengths_that_cannot_be_served(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    d.publish(prompt)
    longer = [*prompt, *d.prompt(d.unit, salt=9)]
    unservable = Status.SeedUnservable
    if d.page > 1:
        d.refuses(unservable, "no whole page", d.acquire, longer, n - 1)
    d.refuses(unservable, "longer than what is cached", d.acquire, longer, n + d.step)
    d.refuses(unservable, "longer than the span", d.acquire, prompt, n + d.step)
    d.refuses(unservable, "length 0", d.acquire, longer, 0)
    d.refuses(unservable, "another prompt", d.acquire, d.prompt(n + 1, salt=5), n)
    if d.can.head_only and n > d.page:
        d.refuses(unservable, "a part of an entry", d.acquire, longer, n - d.page)


@case
def a_released_seed_is_gone(new: New) -> None:
    d = new()
    n = d.unit
    longer = [*d.prompt(n), 3]
    d.publish(longer[:n])
    seed = d.acquire(longer, n)
    d.engine.seed_release(seed)
    d.refuses(Status.UnknownHandle, "a second release", d.engine.seed_release, seed)
    d.refused(Status.RejectStaleSeed, "a released seed", admits=[d.admit(1, longer, seed_handle=seed)])


@case
def a_lease_ends_after_its_ticks(new: New) -> None:
    d = new()
    lease = d.engine.seed_lease_ticks()
    need(lease is not None, "seeds have no lease")
    assert lease is not None
    n = d.unit
    longer = [*d.prompt(n), 3]
    d.publish(longer[:n])
    seed = d.acquire(longer, n)
    for _ in range(lease):
        d.refused(Status.RejectUnknownLane, "not a tick", decodes=[LaneDecode(77, 1)])
        d.tick()
    d.start(1, longer, at=n, seed_handle=seed)
    d.retire(1)
    d.publish(longer[:n])  # the lane may have taken the entry over
    seed = d.acquire(longer, n)
    pinned = d.evict_everything()
    d.equal(pinned, 0, "bytes evicted while a seed pins the entry")
    for _ in range(lease + 1):
        d.tick()
    d.refused(Status.RejectStaleSeed, "an expired seed", admits=[d.admit(1, longer, seed_handle=seed)])
    freed = d.evict_everything()
    d.true(freed > 0 or d.can.exports_entries, "an expired lease unpins its entry")
    d.equal(d.allocated(), 0, "bytes allocated")


@case
def seeds_that_no_longer_fit_the_admit(new: New) -> None:
    d = new()
    n = d.unit
    longer = [*d.prompt(n), 3]
    d.publish(longer[:n])
    stale = Status.RejectStaleSeed
    d.refused(stale, "an unknown seed", admits=[d.admit(1, longer, seed_handle=4711)])
    seed = d.acquire(longer, n)
    twice = [d.admit(1, longer, seed_handle=seed), d.admit(2, longer, seed_handle=seed)]
    d.refused(stale, "the same seed twice", admits=twice)
    other = d.admit(1, longer, seed_handle=seed, determinism_class=1)
    d.refused(stale, "another determinism class", admits=[other])
    d.refused(stale, "another prompt", admits=[d.admit(1, d.prompt(n + 1, salt=5), seed_handle=seed)])
    d.refused(stale, "a prompt shorter than the seed", admits=[d.admit(1, longer[: n - 1], seed_handle=seed)])
    d.start(1, longer, decode=1, at=n, seed_handle=seed)


@case
def two_lanes_seeded_from_one_entry(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(n)
    tails = {1: [*prompt, 3], 2: [*prompt, 4]}
    cold = {tag: d.generate(9, tokens, 4) for tag, tokens in tails.items()}
    d.publish(prompt)
    seeds = {tag: d.acquire(tokens, n) for tag, tokens in tails.items()}
    events = d.tick(
        admits=[d.admit(tag, tokens, seed_handle=seeds[tag]) for tag, tokens in tails.items()],
        prefills=[LanePrefill(tag, n, 1) for tag in tails],
        decodes=[LaneDecode(tag, 4) for tag in tails],
    )
    for tag in tails:
        d.same(d.tokens(events, tag), cold[tag], f"tokens of lane {tag}")


# ---- replays


@case
def a_resumed_lane_replays_its_decoded_tail(new: New) -> None:
    for mode in ({}, {"sampling": Sampling.SAMPLED, "params": SAMPLED}):
        d = new()
        prompt = d.prompt(20)
        whole = d.generate(1, prompt, 12, rng_counter_base=40, **mode)
        resumed, tail = prompt + whole[:8], 8
        fields: dict[str, Any] = {**mode, "decode_replay": tail, "rng_counter_base": 48}
        events = d.start(1, resumed, decode=tail + 4, count=20, **fields)
        d.same(d.tokens(events, 1), whole[8:], "tokens when the grant comes at once")
        d.same(d.subject.lane_tokens(1), prompt + whole, "committed tokens")
        d.retire(1)
        d.start(1, resumed, count=20, **fields)
        for count in (3, 3, 2):
            emit = d.emit(d.tick(decodes=[LaneDecode(1, count)]), 1)
            d.equal((emit.n_tokens, emit.finish), (0, 0), "emit of a grant that replay used up")
        d.same(d.decode(1, 4), whole[8:], "tokens when the grants come in pieces")
        d.retire(1)
        d.start(1, resumed, count=20, **fields)
        d.same(d.decode(1, 5) + d.decode(1, 7), whole[8:], "tokens when a grant ends past the tail")


@case
def what_a_replaying_lane_may_not_do(new: New) -> None:
    d = new()
    prompt = d.prompt(12)
    too_long = Status.RejectBounds
    d.refused(too_long, "a replay as long as the prompt", admits=[d.admit(1, prompt, decode_replay=12)])
    admit = d.admit(1, prompt, decode_replay=4)
    d.refused(too_long, "a prefill into the tail", admits=[admit], prefills=[LanePrefill(1, 0, 9)])
    d.tick(admits=[admit], prefills=[LanePrefill(1, 0, 6)])
    early = [LaneDecode(1, 1)]
    d.refused(Status.RejectIllegalCombination, "a decode before the tail's start", decodes=early)
    d.refused(too_long, "a prefill into the tail", prefills=[LanePrefill(1, 6, 3)])
    events = d.tick(prefills=[LanePrefill(1, 6, 2)], decodes=[LaneDecode(1, 5)])
    d.equal(len(d.tokens(events, 1)), 1, "tokens after four replayed")


@case
def a_seed_shortens_the_replayed_tail(new: New) -> None:
    d = new()
    n = d.unit
    prompt = [*d.prompt(n), 3, 4]
    cold = d.generate(1, prompt, 3)
    d.publish(prompt[:n])
    seed = d.acquire(prompt, n)
    events = d.tick(admits=[d.admit(1, prompt, seed_handle=seed, decode_replay=10)], decodes=[LaneDecode(1, 5)])
    d.same(d.tokens(events, 1), cold, "tokens after the two that the seed left to replay")


@case
def a_grammar_is_replayed_before_the_first_draw(new: New) -> None:
    d = new()
    sample = d.can.grammar
    need(sample is not None, "no grammars")
    assert sample is not None
    create = d.engine.grammar_create
    prompt = d.prompt(10)
    grammar = create(sample.text)
    whole = d.generate(1, prompt + sample.accepted, 6, grammar_handle=grammar, grammar_replay=len(sample.accepted))
    resumed = prompt + sample.accepted + whole[:3]
    replay = len(sample.accepted) + 3
    got = d.generate(1, resumed, 3, grammar_handle=grammar, grammar_replay=replay, rng_counter_base=3)
    d.same(got, whole[3:6], "tokens of a lane resumed under its grammar")


@case
def grammars_that_refuse_the_plan(new: New) -> None:
    d = new()
    sample = d.can.grammar
    need(sample is not None, "no grammars")
    assert sample is not None
    create, free = d.engine.grammar_create, d.engine.grammar_free
    prompt = [*d.prompt(4), *sample.accepted]
    n = len(sample.accepted)
    grammar = create(sample.text)
    illegal = Status.RejectIllegalCombination

    def admit(tag: int = 2, tokens: list[int] = prompt, **fields: int) -> list[linkw.LaneAdmit]:
        return [d.admit(tag, tokens, **fields)]

    d.refused(illegal, "an unknown grammar", admits=admit(grammar_handle=grammar + 100))
    too_long = len(prompt) + 1
    d.refused(illegal, "a replay longer than the prompt", admits=admit(grammar_handle=grammar, grammar_replay=too_long))
    d.refused(illegal, "a replay without a grammar", admits=admit(grammar_replay=1))
    if sample.refused is not None:
        refused = [*d.prompt(4), *sample.refused]
        fields = {"grammar_handle": grammar, "grammar_replay": len(sample.refused)}
        d.refused(illegal, "a replay the grammar refuses", admits=admit(tokens=refused, **fields))
    both = admit(2, grammar_handle=grammar) + admit(3, grammar_handle=grammar)
    d.refused(illegal, "one grammar for two lanes of a plan", admits=both)
    d.start(1, prompt, grammar_handle=grammar, grammar_replay=n)
    d.refused(illegal, "a grammar in use", admits=admit(grammar_handle=grammar))
    d.retire(1)
    d.start(1, prompt, grammar_handle=grammar, grammar_replay=n)
    free(grammar)
    d.refuses(Status.UnknownHandle, "a grammar freed twice", free, grammar)
    d.true(d.decode(1, 2), "a grammar freed in use serves its lane to the end")
    d.retire(1)
    d.refused(illegal, "a grammar freed", admits=admit(grammar_handle=grammar))


# ---- room


def _pool(new: New) -> tuple[Driver, list[int]]:
    """A pool of two units, one of them cached."""
    probe = new()
    n = probe.unit
    d = new(pool_tokens=2 * n)
    cached = d.prompt(n, salt=8)
    d.publish(cached)
    return d, cached


@case
def a_plan_that_never_fits(new: New) -> None:
    n = new().unit
    d = new(pool_tokens=2 * n)
    full, replan = d.prompt(2 * n + 1), Status.NeedsReplan
    d.refused(replan, "prefill", admits=[d.admit(1, full)], prefills=[LanePrefill(1, 0, 2 * n + 1)])
    d.tick(prefill_token_budget=n, admits=[d.admit(1, full)], prefills=[LanePrefill(1, 0, 2 * n + 1)])
    d.refused(replan, "the rest of it", prefills=[LanePrefill(1, n, n + 1)])
    d.retire(1)
    d.start(1, full[:8])
    d.refused(replan, "a grant", decodes=[LaneDecode(1, 2 * n)])
    d.tick(
        retires=[LaneRetire(1)],
        admits=[d.admit(2, full[: 2 * n - 4], decode_replay=n)],
        prefills=[LanePrefill(2, 0, n - 4)],
    )
    d.refused(replan, "replayed tokens and a grant", decodes=[LaneDecode(2, n + 5)])
    d.equal(len(d.decode(2, n + 2)), 2, "tokens of a grant that fits")
    d.refused(replan, "a grant", decodes=[LaneDecode(2, 4)])
    d.equal(len(d.decode(2, 1)), 1, "tokens after a refusal")


@case
def commits_need_room(new: New) -> None:
    n = new().unit
    d = new(pool_tokens=2 * n)
    need(d.can.host_logits, "no host logits")
    prompt = d.prompt(2 * n - 1)
    events = d.start(1, prompt, decode=1, sampling=Sampling.HOST)
    for token, fits in ((5, True), (6, False)):
        fields: dict[str, Any] = {
            "commits": [LaneCommit(1, token, d.emit(events, 1).logits_row.generation)],
            "decodes": [LaneDecode(1, 1)],
        }
        if fits:
            events = d.tick(**fields)
        else:
            d.refused(Status.NeedsReplan, "a commit into a full pool", **fields)
    d.equal(d.subject.lane_tokens(1), [*prompt, 5], "committed tokens")


@case
def evictions_make_room_within_the_policy(new: New) -> None:
    d, cached = _pool(new)
    need(not d.can.exports_entries, "cache entries are not in the pool")
    n = d.unit
    held = d.allocated()
    prompt = d.prompt(n + n // 2)
    admits, chunk = [d.admit(1, prompt)], [LanePrefill(1, 0, len(prompt))]
    replan = Status.NeedsReplan
    for words, policy in (
        ("no class may be evicted", NOTHING),
        ("only shared prefixes may be evicted", ShedPolicy(evictable_cache_classes=CacheClass.SHARED_PREFIX)),
        ("only exports may be evicted", ShedPolicy(evictable_cache_classes=CacheClass.HOST_EXPORT)),
        ("no byte may be evicted", ShedPolicy(max_evict_bytes=0)),
        ("too few bytes may be evicted", ShedPolicy(max_evict_bytes=held // 2 - 1)),
        ("the quota protects everything", ShedPolicy(protected_quota_bytes=held)),
    ):
        d.refused(replan, words, admits=admits, prefills=chunk, shed_policy=policy)
    seed = d.acquire([*cached, 1], n)
    d.refused(replan, "a seed pins the entry", admits=admits, prefills=chunk)
    d.engine.seed_release(seed)
    d.equal(d.allocated(), held, "bytes allocated after the refusals")
    d.true(n in d.offers([*cached, 1]), "the entry is still offered after the refusals")
    events = d.tick(admits=admits, prefills=chunk)
    d.status(events, TickStatus.SHED, "of a tick that evicted")
    d.equal(events.shed.evictions_performed, 1, "evictions")
    d.equal(events.shed.bytes_evicted, held, "bytes evicted")
    evicted = [entry for entry in events.shed.entries if entry.kind == SHED_EVICTION]
    d.equal([(entry.lane_tag, entry.bytes) for entry in evicted], [(0, held)], "eviction entries")
    d.equal(d.offers([*cached, 1]), [], "offers of what was evicted")


@case
def retires_give_room_to_the_same_plan(new: New) -> None:
    n = new().unit
    d = new(pool_tokens=2 * n)
    d.start(1, d.prompt(2 * n - 2))
    prompt = d.prompt(n, salt=2)
    cold: dict[str, Any] = {"admits": [d.admit(2, prompt)], "prefills": [LanePrefill(2, 0, n)]}
    d.refused(Status.NeedsReplan, "no room beside the first lane", **cold)
    events = d.tick(retires=[LaneRetire(1)], decodes=[LaneDecode(2, 1)], **cold)
    d.status(events, TickStatus.OK, "of a lane in the room of another")


@case
def copies_of_seeds_count(new: New) -> None:
    d, cached = _pool(new)
    need(d.can.seeds_copy, "seeds share cells or take entries over")
    n = d.unit
    d.start(2, d.prompt(n // 2, salt=3))
    longer = [*cached, 1]
    seed = d.acquire(longer, n)
    admit = d.admit(1, longer, seed_handle=seed)
    d.refused(Status.NeedsReplan, "the copy of a seed", admits=[admit], prefills=[LanePrefill(1, n, 1)])
    d.still_works(2)


@case
def evicting_the_cache(new: New) -> None:
    d = new()
    need(not d.can.exports_entries, "cache entries are not in the pool")
    n = d.unit
    a, b = d.prompt(n, salt=1), d.prompt(n, salt=2)
    d.publish(a)
    size = d.allocated()
    d.publish(b)
    evict = d.engine.cache_evict
    d.equal(evict(0, ShedPolicy()), 0, "bytes freed for a target of 0")
    d.equal(evict(EVERYTHING, NOTHING), 0, "bytes freed when no class may go")
    d.equal(evict(EVERYTHING, ShedPolicy(max_evict_bytes=size - 1)), 0, "bytes freed within less than an entry")
    d.equal(evict(EVERYTHING, ShedPolicy(protected_quota_bytes=2 * size)), 0, "bytes freed past the quota")
    exports_only = ShedPolicy(evictable_cache_classes=CacheClass.HOST_EXPORT)
    d.equal(evict(EVERYTHING, exports_only), 0, "pool bytes freed by evicting exports")
    shared_only = ShedPolicy(evictable_cache_classes=CacheClass.SHARED_PREFIX)
    d.equal(evict(EVERYTHING, shared_only), 0, "bytes freed by evicting shared prefixes when there are none")
    seed = d.acquire([*a, 1], n)
    d.equal(evict(size, ShedPolicy()), size, "bytes freed for a target of one entry")
    d.equal((d.offers([*a, 1])[:1], d.offers([*b, 1])), ([n], []), "what is left: the entry that is pinned")
    d.equal(d.evict_everything(), 0, "bytes freed of what is pinned")
    d.engine.seed_release(seed)
    d.equal(d.evict_everything(), size, "bytes freed of the rest")
    d.equal(d.allocated(), 0, "bytes allocated")


@case
def publishing_what_is_cached_strands_nothing(new: New) -> None:
    d = new()
    n = d.unit
    prompt = d.prompt(2 * n)
    for length in (n, 2 * n, n, 2 * n, n + d.page):
        d.publish(prompt[:length])
    if d.can.sequences:
        for length in (n, 2 * n):
            d.engine.publish_sequence(d.bare(prompt[:length]), d.array(prompt[:length]))
    d.evict_everything()
    d.engine.cache_evict(EVERYTHING, ShedPolicy(evictable_cache_classes=CacheClass.HOST_EXPORT))
    mem = d.tick().mem
    d.equal((mem.allocated_bytes, mem.host_retained_bytes), (0, 0), "bytes held when everything was evicted")
    d.equal(d.offers([*prompt, 1]), [], "offers of an empty cache")


@case
def unpublish_drops_one_entry(new: New) -> None:
    d = new()
    n = d.unit
    a, b = d.prompt(n, salt=1), d.prompt(n, salt=2)
    d.publish(a)
    d.publish(b)
    seed = d.acquire([*a, 1], n)
    d.engine.unpublish(d.array(a))
    d.true(n in d.offers([*a, 1]), "an entry a seed holds stays")
    d.engine.seed_release(seed)
    d.engine.unpublish(d.array(a))
    d.engine.unpublish(d.array(a))
    d.equal((d.offers([*a, 1]), d.offers([*b, 1])[:1]), ([], [n]), "offers")
