"""The mock's own rules: hashes, provenance, statistics, memory, other workloads, knobs."""

import json
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from xxhash import xxh3_64_intdigest as xxh3

from superfluid.engines.contract import Driver, Wish
from superfluid.engines.engine import EngineError, EngineFatal
from superfluid.engines.kit.runtime import Arguments, ModelRefused
from superfluid.engines.mock import RECORD, Knobs, MockConfig, MockEngine
from superfluid.engines.mock.constraints import balanced_object
from superfluid.engines.mock.lanes import ngram_draft
from superfluid.engines.mock.runtime import Mock
from superfluid.engines.mock.state import advance
from superfluid.link import linkw
from superfluid.link.codes import PARAM_IGNORE_EOS, AdmitStatus, Sampling, Status
from superfluid.link.linkw import LaneCommit, LaneDecode, LanePrefill
from tests.engines.mock_subject import make_mock


@pytest.fixture
def mock() -> Iterator[Driver]:
    subject = make_mock(Wish())
    yield Driver(subject)
    subject.close()


def engine_of(driver: Driver) -> MockEngine:
    engine = driver.engine
    assert isinstance(engine, MockEngine)
    return engine


def token(stream: list[int], counter: int, grammar: int | None = None) -> int:
    data = struct.pack(f"<{len(stream)}IQ", *stream, counter & (2**64 - 1))
    return xxh3(data + (b"" if grammar is None else struct.pack("<Q", grammar))) % 32000


# ---- tokens


@pytest.mark.parametrize("sampling", [Sampling.GREEDY, Sampling.SAMPLED])
def test_a_token_is_a_hash_of_the_stream_and_the_counter(mock: Driver, sampling: Sampling) -> None:
    base = 2**64 - 2  # wraps after two draws
    stream = [5, 6, 7]
    got = mock.generate(1, stream, 4, rng_counter_base=base, sampling=sampling)
    expected = []
    for drawn in range(4):
        expected.append(token(stream + expected, base + drawn))
    assert got == expected


def test_a_grammar_adds_its_counter(mock: Driver) -> None:
    grammar = mock.engine.grammar_create("{}")
    got = mock.generate(1, [5, 6, 7], 2, grammar_handle=grammar, grammar_replay=2)
    first = token([5, 6, 7], 0, 2)
    assert got == [first, token([5, 6, 7, first], 1, 3)]


def test_a_host_row(mock: Driver) -> None:
    events = mock.start(1, [5, 6], decode=1, sampling=Sampling.HOST, rng_counter_base=9)
    ring = mock.subject.rings[linkw.RING_LOGITS]

    def row(stream: list[int], counter: int) -> np.ndarray:
        digests = [xxh3(struct.pack(f"<{len(stream)}IQQ", *stream, counter, i)) for i in range(8)]
        return np.array([digest % 1000 / 1000 for digest in digests], np.float32)

    emit = mock.emit(events, 1)
    assert np.array_equal(ring.read_row(emit.logits_row), row([5, 6], 9))
    commit = LaneCommit(1, 77, emit.logits_row.generation)
    events = mock.tick(commits=[commit], decodes=[LaneDecode(1, 1)])
    assert np.array_equal(ring.read_row(mock.emit(events, 1).logits_row), row([5, 6, 77], 10))


def test_logprobs_of_every_lane(mock: Driver) -> None:
    events = mock.start(1, [5, 6], decode=3)
    values = [struct.unpack("<f", struct.pack("<I", record.logprob_bits))[0] for record in events.logprobs]
    assert values == pytest.approx([-(t % 20 + 1) / 20 for t in mock.tokens(events, 1)])
    assert all(record.top_ids == [] for record in events.logprobs)


# ---- times, memory, provenance


def test_times_and_memory(mock: Driver) -> None:
    events = mock.start(1, [5] * 10, decode=3)
    assert events.timings == linkw.TickTimings(10 * 1563 + 3 * 2344, 10 * 1563, 3 * 2344, graph_hits=1)
    assert (events.mem.allocated_bytes, events.mem.pool_blocks_total) == (13 * 64, 1024)
    mock.start(2, [6] * 40)
    events = mock.tick(decodes=[LaneDecode(1, 2), LaneDecode(2, 5)])
    assert (events.timings.decode_ns, events.timings.graph_hits) == (5 * 2344, 2)
    events = mock.retire(2, publish=True)
    assert events.mem.allocated_bytes == (15 + 32) * 64
    assert events.mem.pool_bytes_evictable == 32 * 64


def test_provenance_follows_what_was_done(mock: Driver) -> None:
    prompt = [3] * 64
    mock.start(1, prompt, count=40)
    mock.tick(prefills=[LanePrefill(1, 40, 24)], decodes=[LaneDecode(1, 2)])
    mock.retire(1, publish=True)
    spaces = mock.engine.space_match(linkw.ALL_SPACES, mock.array([*prompt, 1]))
    expected = bytes(32)
    for operation, detail in ((1, 40), (1, 64), (2, 66)):
        expected = advance(expected, operation, detail)
    assert spaces[0].candidates[0].provenance_digest == expected
    assert expected[:8] != bytes(8)
    assert expected[8:] == bytes(24)
    seed = mock.acquire([*prompt, 1], 64)
    mock.start(2, [*prompt, 1], at=64, seed_handle=seed)
    sequence = mock.engine.lane_sequence(2)
    assert sequence is not None
    sealed = mock.export(sequence, 1, 64)
    assert sealed[56:88] == advance(advance(expected, 5, 64), 1, 65)


def test_an_envelope(mock: Driver) -> None:
    child = mock.bare([7] * 64)
    sealed = mock.export(child, 1, 64)
    provenance = advance(bytes(32), 1, 64)
    identity = xxh3(struct.pack("<IQQ", 1, 1, 0xBA5E0001)).to_bytes(8, "little") + bytes(24)
    word = xxh3(struct.pack("<8sQQQB", provenance[:8], 0, 64, 64 * 64, 0)).to_bytes(8, "little")
    payload = word * 512
    assert sealed[:16] == b"BRTSTATE" + struct.pack("<II", 1, 1)
    assert sealed[16:56] == identity + struct.pack("<Q", 1)
    assert sealed[56:96] == provenance + bytes(8)
    assert sealed[96:136] == struct.pack("<QQB3xIQQ", 0, 64, 0, 1, len(payload), xxh3(payload))
    assert sealed[136:] == payload
    sizes = [mock.engine.space_export_size(child, 1, 0, 64, encoding)[0] - 136 for encoding in (0, 1, 2)]
    assert sizes == [4096, 2048, 1024]
    assert mock.engine.space_export_size(child, 2, 64, 64, 0)[0] == 136 + 4096


def test_the_worked_example_of_the_metrics() -> None:
    """32 tokens appended, 40 generated, then 8: the second turn starts from 64 cached tokens."""
    subject = make_mock(Wish())
    mock = Driver(subject)
    prompt = mock.prompt(32)
    stream = prompt + mock.tokens(mock.start(1, prompt, decode=40), 1)
    mock.retire(1, publish=True)
    assert mock.offers(stream)[0] == 64
    seed = mock.acquire(stream, 64)
    events = mock.start(2, stream, decode=8, at=64, seed_handle=seed)
    assert len(mock.tokens(events, 2)) == 8
    assert events.timings.prefill_ns == 8 * 1563
    subject.close()


# ---- drafts


def test_drafts() -> None:
    def draft(stream: list[int], count: int = 4) -> list[int]:
        return ngram_draft(array("I", stream), count)

    assert draft([1, 2, 3, 4, 9, 9, 2, 3]) == [4, 9, 9, 2]
    assert draft([5, 6, 7, 8, 5, 6, 7]) == [8, 5, 6, 7]
    assert draft([1, 1, 1], 2) == [1]
    assert draft([4, 1, 2, 3, 1, 9, 1]) == [9, 1]
    assert draft([1, 2, 3]) == []
    assert draft([1, 2, 1], 0) == []
    assert draft([256, 1, 65536, 256, 1]) == [65536, 256, 1]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_a_draft_is_what_followed_before(stream: list[int], count: int) -> None:
    def plain() -> list[int]:
        for n in (3, 2, 1):
            for at in range(len(stream) - n - 1, -1, -1):
                if stream[at : at + n] == stream[-n:]:
                    return stream[at + n :][:count]
        return []

    assert ngram_draft(array("I", stream), count) == plain()


def test_prompt_lookup_is_certified_for_greedy_lanes(mock: Driver) -> None:
    registration = linkw.StrategyRegister("prompt-lookup", "1", bytes(32), bytes(32))
    grant = mock.engine.strategy_register(registration)
    (certificate,) = grant.certificates
    assert (certificate.exactness, certificate.sampling_modes, certificate.param_domain) == (2, 1, 1)
    assert certificate.verification_shape_class == 1
    script = [1, 2, 3, 4] * 4
    engine_of(mock).knobs.script = script
    events = mock.start(1, [9, 1, 2, 3, 4], decode=16, strategy_slot=grant.strategy_slot)
    spec = mock.emit(events, 1).spec
    assert mock.tokens(events, 1) == script
    assert spec.cert_id_in_effect == certificate.cert_id
    assert spec.proposed >= spec.accepted > 8


# ---- other workloads


def test_grammar_texts() -> None:
    good = ["{}", '  {"a": {"b": "}"}}\n', '{"a":"\\"}"}']
    bad = ["", "[]", "{", "}{", "{}}", '{"a}', "{}{", "x{}", '{"a":"}']
    assert [balanced_object(text) for text in good] == [True] * len(good)
    assert [balanced_object(text) for text in bad] == [False] * len(bad)


def test_embeddings(mock: Driver) -> None:
    tokens = list(range(100, 120))
    expected = np.zeros(8)
    for i, value in enumerate(tokens):
        expected[i % 8] += (value % 97 + 1) / (i + 1)
    expected /= np.linalg.norm(expected)
    assert np.allclose(mock.engine.embed(mock.array(tokens)), expected, atol=1e-6)


def test_pipeline_stages(mock: Driver) -> None:
    stage = mock.engine.forward_stage
    hidden = xxh3(struct.pack("<2I", 5, 6))
    assert stage([5, 6], 0, 0, None) == struct.pack("<Q", hidden)
    for layer in range(24):
        hidden = xxh3(struct.pack("<QI", hidden, layer))
    assert stage([5, 6], 0, 24, None) == hidden % 32000
    half = stage([5, 6], 0, 12, None)
    assert isinstance(half, bytes)
    assert stage([], 12, 24, half) == hidden % 32000
    for start, end in ((3, 2), (0, 25)):
        with pytest.raises(EngineError) as refused:
            stage([5], start, end, None)
        assert refused.value.status == Status.RejectBounds
    with pytest.raises(EngineError) as refused:
        stage([], 0, 1, b"1234567")
    assert refused.value.status == Status.RejectBadStruct


def test_transcription_stops_when_told(mock: Driver) -> None:
    def request(**fields: Any) -> linkw.TranscribeReq:
        return linkw.TranscribeReq(
            **{
                "audio_path": "a",
                "language": None,
                "translate": False,
                "timestamps": True,
                "prompt": None,
                "stream": False,
            }
            | fields
        )

    whole = mock.engine.transcribe(request(), None)
    assert (whole.text, whole.language, whole.duration_ms) == ("mock transcription", "en", 1000)
    (segment,) = whole.segments
    bits = (
        segment.avg_logprob_bits,
        segment.no_speech_prob_bits,
        segment.compression_ratio_bits,
        segment.temperature_bits,
    )
    assert struct.unpack("<4f", struct.pack("<4I", *bits)) == pytest.approx((-0.25, 0.01, 1.5, 0.0))
    said: list[str] = []

    def stop_after_two(segment: linkw.Segment) -> bool:
        said.append(segment.text)
        return len(said) < 2

    stopped = mock.engine.transcribe(request(prompt="one two", translate=True, stream=True), stop_after_two)
    assert stopped.text == "one two"
    assert [(s.start_ms, s.end_ms) for s in stopped.segments] == [(0, 250), (250, 500)]


def test_media_needs_an_image_token() -> None:
    with pytest.raises(EngineError) as refused:
        MockEngine().media_encode("x.png")
    assert refused.value.status == Status.Unsupported


# ---- knobs


def test_a_script_ends_its_lane(mock: Driver) -> None:
    engine_of(mock).knobs.script = [11, 12]
    events = mock.start(1, [5], decode=9, params=linkw.SamplingParams())
    assert (mock.tokens(events, 1), mock.emit(events, 1).finish) == ([11, 12, 2], 1)
    ignoring = mock.start(2, [5], decode=4, params=linkw.SamplingParams(flags=PARAM_IGNORE_EOS))
    assert mock.tokens(ignoring, 2)[:2] == [11, 12]
    assert (mock.emit(ignoring, 2).n_tokens, mock.emit(ignoring, 2).finish) == (4, 0)
    engine_of(mock).knobs.script = lambda tag, prompt: [tag, *prompt]
    assert mock.tokens(mock.start(3, [8, 9], decode=3), 3) == [3, 8, 9]


def test_forced_finishes_and_refused_admits(mock: Driver) -> None:
    knobs = engine_of(mock).knobs
    knobs.finishes[1] = 3
    events = mock.start(1, [5], decode=4)
    assert (mock.emit(events, 1).n_tokens, mock.emit(events, 1).finish) == (1, 3)
    knobs.refuse_admit = lambda admit: -107 if admit.lane_tag == 2 else None
    result = mock.start(2, [5], decode=4).admit_results[0]
    assert (result.status, result.reject_code) == (AdmitStatus.REJECTED, -107 & 0xFFFFFFFF)


def test_steps_can_be_watched_and_cut(mock: Driver) -> None:
    knobs = engine_of(mock).knobs
    steps: list[int] = []
    knobs.on_step = lambda: steps.append(1)
    knobs.yield_after = lambda done: done >= 3
    events = mock.start(1, [5], decode=9)
    assert mock.emit(events, 1).n_tokens == 2
    assert len(steps) == 3


def test_it_breaks_when_told() -> None:
    engine = MockEngine(knobs=Knobs(die_after=1))
    engine.tick(linkw.TickPlan(1))
    with pytest.raises(EngineFatal):
        engine.tick(linkw.TickPlan(2))


# ---- the runtime


def test_the_runtime() -> None:
    runtime = Mock()
    assert runtime.probe(Arguments()).version == "mock"
    assert not runtime.needs_model()
    record = '{"descriptor_version":1,"mine":true}'
    flags = {"--mock-record": record, "--mock-script": "1,2", "--mock-fault": "7=4", "--mock-refuse": "3=-107"}
    loaded = runtime.open(Arguments(max_batch=3, flags=flags))
    engine = loaded.model
    assert isinstance(engine, MockEngine)
    assert engine.capability_descriptor() == record
    assert (engine.config.max_batch, engine.knobs.script, engine.knobs.faults) == (3, [1, 2], {7: 4})
    assert [spec.slots for spec in loaded.rings] == [64, 256, 32]
    with pytest.raises(ModelRefused, match="--mock-finish"):
        runtime.open(Arguments(flags={"--mock-finish": "x"}))
    assert json.loads(RECORD)["architecture"] == "mock"
    assert MockConfig().record == RECORD
