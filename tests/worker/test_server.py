"""Link W at the worker's end, over socket pairs and real rings, with the mock engine behind it."""

import os
import socket
import struct
from typing import Any

import numpy as np
import pytest

from superfluid.engines.mock import RECORD, RINGS, Knobs, MockConfig, MockEngine
from superfluid.link import linkw
from superfluid.link.codes import OpState, PlanFlag, Sampling, Status, TickStatus
from superfluid.link.envelope import EnvelopeError
from superfluid.link.errors import ProtocolError
from superfluid.link.handshake import NoCommonVersion
from superfluid.link.postcard import PostcardError
from superfluid.shm.descriptors import DescriptorError, send_descriptor
from superfluid.shm.ring import LayoutError, Ring
from superfluid.shm.segment import SegmentError
from tests.worker.link import worker

KV, BLOB = 1, 2


# ---- handshake


def test_the_worker_announces_itself() -> None:
    with worker() as (daemon, thread):
        hello = daemon.attach()
        assert hello.chosen_version == 8
        assert hello.engine_bundle_hash == bytes(32)
        assert hello.capabilities == RECORD
        assert [space.name for space in hello.state_space_descriptors] == ["kv.full", "gdn.blob"]
        assert hello.registered_strategies == []
        assert hello.limits == linkw.LinkWLimits(16_777_216, 16, RINGS)
        assert hello.kv_bits == 0
        daemon.close()
        assert thread.end() == 0


def test_the_highest_common_version_is_chosen() -> None:
    with worker() as (daemon, _):
        assert daemon.ask(linkw.Hello((2, 40), linkw.LinkRole.HeadDaemon, b"anything")).chosen_version == 8


@pytest.mark.parametrize("versions", [(1, 7), (9, 12)])
def test_no_common_version_ends_the_worker_without_a_reply(versions: tuple[int, int]) -> None:
    with worker() as (daemon, thread):
        daemon.channel.send(linkw.Hello(versions, linkw.LinkRole.NodeAgent))
        assert daemon.channel.recv() is None
        assert isinstance(thread.end(), NoCommonVersion)


def test_a_daemon_that_leaves_before_hello_is_a_clean_end() -> None:
    with worker() as (daemon, thread):
        daemon.close()
        assert thread.end() == 0


# ---- ticks


def test_a_tick_over_the_link() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        events = daemon.start(7, [1, 2, 3, 4], decode=3)
        assert (events.tick_status, events.emits[0].n_tokens) == (TickStatus.OK, 3)
        expected = MockEngine()
        tokens = daemon.tokens(events, 7)
        assert len(tokens) == 3
        assert all(token < expected.config.vocab_size for token in tokens)
        assert daemon.unsolicited == []


def test_partial_emits_come_before_the_result_and_are_its_tokens() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        daemon.start(1, [5] * 8)
        daemon.start(2, [6] * 8)
        decodes = [linkw.LaneDecode(2, 4), linkw.LaneDecode(1, 2)]
        events = daemon.tick(flags=PlanFlag.PARTIAL_EMITS, decodes=decodes)
        streamed: dict[int, list[int]] = {1: [], 2: []}
        for emit in daemon.unsolicited:
            assert isinstance(emit, linkw.TickEmit)
            assert emit.tokens
            streamed[emit.lane_tag] += emit.tokens
        assert streamed == {tag: daemon.tokens(events, tag) for tag in streamed}
        assert [emit.lane_tag for emit in daemon.unsolicited] == [2, 1, 2, 1, 2, 2]


def test_a_rounds_emits_are_one_write() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        for tag in range(4):
            daemon.start(tag, [tag + 1] * 8)
        plan = daemon.plan(flags=PlanFlag.PARTIAL_EMITS, decodes=[linkw.LaneDecode(tag, 1) for tag in range(4)])
        daemon.channel.send(linkw.TickSubmit(plan))
        first = daemon.frames.recv(1 << 16, socket.MSG_PEEK)
        sizes, at = [], 0
        while at < len(first):
            size = 4 + struct.unpack_from("<I", first, at)[0]
            sizes.append(size)
            at += size
        assert at == len(first)
        assert len(sizes) >= 4
        for _ in range(4):
            assert isinstance(daemon.next(), linkw.TickEmit)


def test_a_refused_plan_says_why_and_the_worker_goes_on() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        answer = daemon.ask(linkw.TickSubmit(daemon.plan(decodes=[linkw.LaneDecode(9, 1)])))
        assert answer == linkw.TickRejected(Status.RejectUnknownLane)
        assert len(daemon.tokens(daemon.start(1, [1, 2], decode=1), 1)) == 1


def test_a_host_lanes_row_is_in_the_logits_ring() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        admit = linkw.LaneAdmit(1, daemon.stage([1, 2, 3]), sampling=Sampling.HOST)
        events = daemon.tick(admits=[admit], prefills=[linkw.LanePrefill(1, 0, 3)], decodes=[linkw.LaneDecode(1, 1)])
        row = daemon.rings[linkw.RING_LOGITS].read_row(events.emits[0].logits_row)
        assert row.shape == (8,)
        assert ((row >= 0) & (row < 1)).all()


def test_the_yield_word_reaches_a_running_tick() -> None:
    engine = MockEngine(MockConfig(prefill_step_tokens=16))
    with worker(engine) as (daemon, _):
        daemon.attach()
        assert daemon.control is not None
        daemon.control.yield_requested = True
        events = daemon.start(1, [3] * 100)
        assert events.tick_status == TickStatus.SHED
        assert events.shed.entries[0].tokens == 84


def test_a_broken_runtime_in_process_is_a_refusal() -> None:
    with worker(MockEngine(knobs=Knobs(die_after=1)), in_process=True) as (daemon, _):
        daemon.attach()
        daemon.tick()
        assert daemon.ask(linkw.TickSubmit(daemon.plan())) == linkw.TickRejected(-1)


# ---- the prefix cache


def test_match_and_seeds() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        prompt = [i % 50 for i in range(64)]
        daemon.start(1, prompt)
        daemon.tick(retires=[linkw.LaneRetire(1, True)])
        span = daemon.stage([*prompt, 1])
        spaces = daemon.ask(linkw.MatchReq(linkw.ALL_SPACES, span)).spaces
        assert {space.space_id: [c.prefix_len for c in space.candidates] for space in spaces} == {
            KV: [64],
            BLOB: [64, 32],
        }
        assert daemon.ask(linkw.MatchReq(4711, span)).spaces == []
        grant = daemon.ask(linkw.SeedAcquire(span, 64))
        assert isinstance(grant, linkw.SeedGranted)
        assert (grant.ttl_ms, grant.ttl_ticks) == (1000, 8)
        daemon.channel.send(linkw.SeedRelease(grant.seed_handle))
        daemon.channel.send(linkw.SeedRelease(grant.seed_handle))
        assert daemon.ask(linkw.SeedAcquire(span, 63)) == linkw.SeedRefused(Status.SeedUnservable)
        stale = linkw.TokenRef(1, span.index, span.count, span.generation + 1)
        assert daemon.ask(linkw.SeedAcquire(stale, 64)) == linkw.SeedRefused(Status.RejectBadRefGeneration)
        assert daemon.sync(linkw.UnpublishReq(stale)) == Status.RejectBadRefGeneration
        assert daemon.sync(linkw.UnpublishReq(daemon.stage(prompt))) == linkw.UnpublishOk()
        assert [space.candidates for space in daemon.ask(linkw.MatchReq(linkw.ALL_SPACES, span)).spaces] == [[], []]


def test_spans_without_rings() -> None:
    with worker() as (daemon, _):
        daemon.shake_hands()
        ref = linkw.TokenRef(1, 0, 1, 1)
        for request in (linkw.PublishSequenceReq(1, ref), linkw.AdoptSequenceReq(1, ref), linkw.UnpublishReq(ref)):
            assert daemon.sync(request) == Status.RejectBadRefGeneration


# ---- state operations


def _bare(daemon: Any, tokens: list[int], tag: int = 50) -> int:
    """A bare sequence of these tokens."""
    daemon.start(tag, tokens)
    lane = daemon.sync(linkw.LaneSequenceReq(tag)).sequence
    child = daemon.sync(linkw.ForkReq(lane)).child_sequence
    daemon.tick(retires=[linkw.LaneRetire(tag)])
    return child


def test_a_state_goes_out_and_comes_back() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        prompt = [i % 50 for i in range(64)]
        source = _bare(daemon, prompt)
        states = {KV: daemon.buffer(1, 20_000), BLOB: daemon.buffer(2, 20_000)}
        target = daemon.sync(linkw.CreateSequenceReq()).sequence
        for space, segment in states.items():
            sized = daemon.sync(linkw.ExportSizeReq(source, space, linkw.TokenRange(64 if space == BLOB else 0, 64), 0))
            op = linkw.Snapshot(source, space, 64, space, sized.sizing_gen)
            accepted = daemon.ask(linkw.StateOpSubmit(op))
            done = daemon.next()
            assert done == linkw.StateOpDone(accepted.op_handle, OpState.DONE, 0, sized.required_bytes)
            assert bytes(segment.buf[:8]) == b"BRTSTATE"
            accepted = daemon.ask(linkw.StateOpSubmit(linkw.Restore(target, space, space)))
            done = daemon.next()
            assert done == linkw.StateOpDone(accepted.op_handle, OpState.DONE, 0, sized.required_bytes - 136)
        adopted = daemon.sync(linkw.AdoptSequenceReq(target, daemon.stage(prompt)))
        admit = linkw.LaneAdmit(3, daemon.stage([*prompt, 9]), seed_handle=adopted.seed_handle)
        events = daemon.tick(admits=[admit], prefills=[linkw.LanePrefill(3, 64, 1)], decodes=[linkw.LaneDecode(3, 1)])
        assert events.emits[0].n_tokens == 1
        assert {completion.op for completion in events.op_completions} <= {1, 2, 3, 4}


def test_buffers_that_will_not_do() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        source = _bare(daemon, [1] * 64)
        sized = daemon.sync(linkw.ExportSizeReq(source, KV, linkw.TokenRange(0, 64), 0))

        def submit(op: linkw.StateOp) -> int:
            answer = daemon.ask(linkw.StateOpSubmit(op))
            assert isinstance(answer, linkw.StateOpRejected), answer
            return answer.status

        gen = sized.sizing_gen
        assert submit(linkw.Snapshot(source, KV, 64, 77, gen)) == Status.UnknownHandle
        assert submit(linkw.Restore(source, KV, 77)) == Status.UnknownHandle
        daemon.buffer(1, sized.required_bytes - 1)
        assert submit(linkw.Snapshot(source, KV, 64, 1, gen)) == Status.BufferTooSmall
        daemon.buffer(2, sized.required_bytes)
        assert submit(linkw.Snapshot(source, KV, 64, 2, gen + 1)) == Status.StaleSizing
        daemon.buffer(3, 100)
        target = daemon.sync(linkw.CreateSequenceReq()).sequence
        assert submit(linkw.Restore(target, KV, 3)) == Status.EnvelopeMismatch
        for length in (1 << 20, (1 << 64) - 1):
            segment = daemon.buffer(4, 4096)
            struct.pack_into("<Q", segment.buf, 120, length)
            assert submit(linkw.Restore(target, KV, 4)) == Status.EnvelopeMismatch
        daemon.channel.send(linkw.BufRelease(2))
        daemon.channel.send(linkw.BufRelease(2))
        assert submit(linkw.Snapshot(source, KV, 64, 2, gen)) == Status.UnknownHandle


class _Stalled(MockEngine):
    """Operations run until `run` is set."""

    run = False

    def pump(self) -> list[linkw.OpComplete]:
        return super().pump() if self.run else []

    def tick(self, plan: linkw.TickPlan, on_emit: Any = None) -> linkw.TickEvents:
        self.run = bool(plan.flags & PlanFlag.CAPTURE_OK)  # how these tests reach the engine
        if self.run:
            super().pump()
        return super().tick(plan, on_emit)


def _snapshot(daemon: Any, source: int, buf_id: int) -> Any:
    sized = daemon.sync(linkw.ExportSizeReq(source, KV, linkw.TokenRange(0, 64), 0))
    daemon.buffer(buf_id, sized.required_bytes)
    return daemon.ask(linkw.StateOpSubmit(linkw.Snapshot(source, KV, 64, buf_id, sized.sizing_gen)))


def test_operations_that_end_in_a_tick_are_reported_before_its_result() -> None:
    with worker(_Stalled()) as (daemon, _):
        daemon.attach()
        accepted = _snapshot(daemon, _bare(daemon, [1] * 64), 1)
        daemon.tick()
        assert daemon.unsolicited == []
        events = daemon.tick(flags=PlanFlag.CAPTURE_OK)
        assert [done.op for done in events.op_completions] == [accepted.op_handle]
        assert [type(message) for message in daemon.unsolicited] == [linkw.StateOpDone]
        daemon.ask(linkw.Ping())
        assert len(daemon.unsolicited) == 1


def test_the_window_of_open_operations() -> None:
    with worker(_Stalled()) as (daemon, _):
        daemon.attach()
        source = _bare(daemon, [1] * 64)
        children = [daemon.sync(linkw.ForkReq(source)).child_sequence for _ in range(17)]
        answers = [_snapshot(daemon, child, buf_id) for buf_id, child in enumerate(children, 1)]
        assert all(isinstance(answer, linkw.StateOpAccepted) for answer in answers[:16])
        assert answers[16] == linkw.StateOpRejected(Status.Busy)
        assert daemon.ask(linkw.Ping()).queue_depth == 16
        daemon.channel.send(linkw.BufRelease(1))  # takes effect when the export ends
        daemon.tick(flags=PlanFlag.CAPTURE_OK)
        assert sorted(done.op_handle for done in daemon.unsolicited) == sorted(a.op_handle for a in answers[:16])
        assert bytes(daemon.segments[0].buf[:8]) == b"BRTSTATE"
        pong = daemon.ask(linkw.Ping())
        assert (pong.queue_depth, pong.mem.allocated_bytes) == (0, 18 * 64 * 64)


def test_cancel_and_drain() -> None:
    with worker(_Stalled()) as (daemon, _):
        daemon.attach()
        accepted = _snapshot(daemon, _bare(daemon, [1] * 64), 1)
        daemon.channel.send(linkw.OpCancel(accepted.op_handle))
        daemon.channel.send(linkw.OpCancel(4711))
        daemon.tick(flags=PlanFlag.CAPTURE_OK)
        assert daemon.unsolicited == [linkw.StateOpDone(accepted.op_handle, OpState.CANCELLED, 0, 0)]
        assert not any(daemon.segments[0].buf)
        assert daemon.ask(linkw.DrainReq()) == linkw.Drained()
        assert daemon.ask(linkw.Ping()).queue_depth == 0


def test_drain_pumps_until_nothing_is_open() -> None:
    class Slow(MockEngine):
        pumps = 0

        def pump(self) -> list[linkw.OpComplete]:
            self.pumps += 1
            return super().pump() if self.pumps % 5 == 0 else []

    with worker(Slow()) as (daemon, _):
        daemon.attach()
        source = _bare(daemon, [1] * 64)
        accepted = [_snapshot(daemon, daemon.sync(linkw.ForkReq(source)).child_sequence, i) for i in (1, 2)]
        assert daemon.ask(linkw.DrainReq()) == linkw.Drained()
        done = {message.op_handle for message in daemon.unsolicited if isinstance(message, linkw.StateOpDone)}
        assert done == {answer.op_handle for answer in accepted}
        assert daemon.ask(linkw.Ping()).queue_depth == 0


# ---- synchronous requests


def test_constraints_and_other_workloads() -> None:
    with worker(MockEngine(MockConfig(image_token=9))) as (daemon, _):
        daemon.attach()
        sync = daemon.sync
        assert sync(linkw.CreateGrammarReq('{"a":1}')) == linkw.CreateGrammarOk(1)
        assert sync(linkw.CreateGrammarStructuralReq("{}")) == linkw.CreateGrammarOk(2)
        assert sync(linkw.CreateGrammarReq("nonsense")) == Status.RejectBadStruct
        assert sync(linkw.FreeGrammarReq(1)) == linkw.FreeGrammarOk()
        assert sync(linkw.FreeGrammarReq(1)) == Status.UnknownHandle
        assert sync(linkw.CreateLogitBiasReq([-1, 5], [0x3F800000, 0xFF800000])) == linkw.CreateLogitBiasOk(1)
        assert sync(linkw.CreateLogitBiasReq([], [])) == Status.Unsupported
        assert sync(linkw.FreeLogitBiasReq(1)) == linkw.FreeLogitBiasOk()
        info = linkw.MediaInfo(4, 9, 0, 0, 0x4D4F434B)
        assert sync(linkw.MediaProbeReq("/i.png")) == linkw.MediaProbeOk(info)
        assert sync(linkw.MediaEncodeReq("/i.png")) == linkw.MediaEncodeOk(1, info)
        assert sync(linkw.MediaBindReq(5, 1, 0)) == linkw.MediaBindOk()
        assert sync(linkw.MediaReleaseReq(1)) == linkw.MediaReleaseOk()
        vector = np.frombuffer(sync(linkw.EmbedReq([1, 2, 3])).embedding, "<f4")
        assert vector.shape == (8,)
        assert abs(float(np.linalg.norm(vector)) - 1) < 1e-6
        half = sync(linkw.ForwardStageReq([5, 6], 0, 12, None))
        assert half.token is None
        rest = sync(linkw.ForwardStageReq([], 12, 24, half.hidden))
        assert (rest.hidden, rest.token) == (None, sync(linkw.ForwardStageReq([5, 6], 0, 24, None)).token)
        assert sync(linkw.LoraLoadReq("/l.gguf")) == linkw.LoraIdOk(None)
        assert sync(linkw.LoraUnloadReq()) == sync(linkw.LoraIdReq()) == linkw.LoraIdOk(None)
        assert sync(linkw.CapabilitiesReq()) == linkw.CapabilitiesOk(RECORD)


def test_sequences_and_eviction() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        sync = daemon.sync
        assert sync(linkw.LaneSequenceReq(1)) == Status.UnknownHandle
        source = _bare(daemon, [4] * 64)
        assert sync(linkw.SnapshotBoundaryReq(source, BLOB, 63)) == linkw.SnapshotBoundaryOk(32)
        assert sync(linkw.TrimReq(source, KV, 65)) == Status.RejectBounds
        child = sync(linkw.ForkReq(source, 1 << 16)).child_sequence
        assert sync(linkw.FreeSequenceReq(child)) == linkw.FreeSequenceOk()
        assert sync(linkw.PublishSequenceReq(source, daemon.stage([4] * 64))) == linkw.PublishSequenceOk()
        assert sync(linkw.CacheEvictEntriesReq([linkw.CacheKey(bytes(32), bytes(32))])) == Status.IdentityMismatch
        assert sync(linkw.CacheEvictReq(1 << 40, linkw.ShedPolicy())) == linkw.CacheEvictOk(64 * 64)


def test_strategies() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        register = linkw.StrategyRegister("prompt-lookup", "1", bytes(32), bytes(32))
        grant = daemon.ask(register).grant
        assert (grant.strategy_slot, [c.exactness for c in grant.certificates]) == (1, [2])
        unknown = linkw.StrategyRegister("x", "1", bytes(32), bytes(32), kernel_caps_required=8)
        assert daemon.ask(unknown) == linkw.StrategyRefused(Status.RegistrationRefused)


# ---- transcription


def test_a_transcription_in_one_piece_and_streamed() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        whole = daemon.sync(linkw.TranscribeReq("/a.wav", "auto", True, True, "well:", False))
        assert (whole.text, whole.language, whole.duration_ms) == ("well: mock translation", "en", 1000)
        assert len(whole.segments) == 1
        assert daemon.unsolicited == []
        streamed = daemon.sync(linkw.TranscribeReq("/a.wav", "de", False, True, None, True))
        assert (streamed.text, streamed.language) == ("mock transcription", "de")
        assert daemon.unsolicited == [
            linkw.TranscribeSegment(0, 500, "mock"),
            linkw.TranscribeSegment(500, 1000, "transcription"),
        ]


def test_a_streaming_transcription_is_cancelled_and_keeps_other_frames() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        prompt = " ".join("word" for _ in range(500))
        asked = daemon.channel.send(linkw.TranscribeReq("/a.wav", None, False, True, prompt, True))
        pinged = daemon.channel.send(linkw.Ping())
        daemon.channel.send(linkw.TranscribeCancel())
        answer = daemon.reply(asked)
        said = [message.text for message in daemon.unsolicited]
        assert 1 <= len(said) < 500
        assert answer.ok.text == " ".join(said)
        assert isinstance(daemon.reply(pinged), linkw.Pong)
        daemon.channel.send(linkw.TranscribeCancel())  # nothing runs
        assert isinstance(daemon.ask(linkw.Ping()), linkw.Pong)


def test_a_daemon_that_leaves_during_a_transcription() -> None:
    with worker() as (daemon, thread):
        daemon.attach()
        daemon.channel.send(linkw.TranscribeReq("/a.wav", None, False, True, "word " * 500, True))
        daemon.next()
        daemon.frames.shutdown(socket.SHUT_WR)
        assert thread.end() == 0


# ---- what ends the worker


def _violations() -> dict[str, tuple[Any, type[Exception]]]:
    """Name: what the daemon does after the handshake (or after the rings, `ringed`), and what ends the worker."""
    plan = linkw.TickSubmit(linkw.TickPlan(1))
    ref = linkw.TokenRef(1, 0, 1, 1)
    other = linkw.RingSpec(1, linkw.RingKind.Tokens, 1024, 64)
    return {
        "tick before the rings": (lambda d: d.channel.send(plan), ProtocolError),
        "match before the rings": (lambda d: d.channel.send(linkw.MatchReq(1, ref)), ProtocolError),
        "seed before the rings": (lambda d: d.channel.send(linkw.SeedAcquire(ref, 1)), ProtocolError),
        "unknown ring": (lambda d: d.channel.send(linkw.RingAttach(9, RINGS[0])), ProtocolError),
        "another layout": (lambda d: d.channel.send(linkw.RingAttach(1, other)), ProtocolError),
        "a worker's message": (lambda d: d.channel.send(linkw.Drained()), ProtocolError),
        "hello again": (lambda d: d.channel.send(linkw.Hello((8, 8), linkw.LinkRole.Worker)), ProtocolError),
        "another version": (lambda d: d.frames.sendall(_frame(b"", msg_type=0x19, version=7)), EnvelopeError),
        "unknown type": (lambda d: d.frames.sendall(_frame(b"", msg_type=0x77)), EnvelopeError),
        "undecodable payload": (lambda d: d.frames.sendall(_frame(b"\x01", msg_type=0x12)), PostcardError),
        "a frame cut short": (_cut_short, EnvelopeError),
        "another tag": (lambda d: _ring_with(d, tag=2), DescriptorError),
        "no descriptor": (_no_descriptor, DescriptorError),
        "a short segment": (_short_segment, LayoutError),
        "a wrong header": (_wrong_header, LayoutError),
        "a short buffer": (_short_buffer, SegmentError),
    }


def _frame(payload: bytes, msg_type: int, version: int = 8) -> bytes:
    return struct.pack("<IHHQQB", 21 + len(payload), version, msg_type, 2, 0, 0) + payload


def _cut_short(daemon: Any) -> None:
    daemon.frames.sendall(_frame(b"", 0x19)[:-3])
    daemon.frames.shutdown(socket.SHUT_WR)


def _ring_with(daemon: Any, tag: int) -> None:
    ring = Ring.create(RINGS[0])
    daemon.channel.send(linkw.RingAttach(1, RINGS[0]))
    send_descriptor(daemon.descriptors, tag, ring.fd)
    ring.close()


def _no_descriptor(daemon: Any) -> None:
    daemon.channel.send(linkw.RingAttach(1, RINGS[0]))
    daemon.descriptors.sendall(struct.pack("<Q", 1))


def _short_segment(daemon: Any) -> None:
    daemon.channel.send(linkw.RingAttach(1, RINGS[0]))
    fd = os.memfd_create("short")
    os.ftruncate(fd, 1000)
    send_descriptor(daemon.descriptors, 1, fd)
    os.close(fd)


def _wrong_header(daemon: Any) -> None:
    ring = Ring.create(linkw.RingSpec(2, linkw.RingKind.Tokens, RINGS[0].slot_bytes, RINGS[0].slots))
    daemon.channel.send(linkw.RingAttach(1, RINGS[0]))
    send_descriptor(daemon.descriptors, 1, ring.fd)
    ring.close()


def _short_buffer(daemon: Any) -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 100)
    daemon.channel.send(linkw.BufAttach(1, 4096))
    send_descriptor(daemon.descriptors, 1, fd)
    os.close(fd)


@pytest.mark.parametrize("name", list(_violations()))
def test_protocol_errors_end_the_worker_without_a_reply(name: str) -> None:
    violate, error = _violations()[name]
    with worker() as (daemon, thread):
        daemon.shake_hands()
        violate(daemon)
        assert daemon.channel.recv() is None
        ended = thread.end()
        assert isinstance(ended, error), ended


def test_a_match_whose_span_cannot_be_read_is_a_protocol_error() -> None:
    with worker() as (daemon, thread):
        daemon.attach()
        daemon.channel.send(linkw.MatchReq(1, linkw.TokenRef(1, 0, 1, 99)))
        assert daemon.channel.recv() is None
        assert isinstance(thread.end(), ProtocolError)


def test_a_request_before_hello_is_a_protocol_error() -> None:
    with worker() as (daemon, thread):
        daemon.channel.send(linkw.Ping())
        assert daemon.channel.recv() is None
        assert isinstance(thread.end(), ProtocolError)


def test_droppable_frames_are_ignored() -> None:
    with worker() as (daemon, _):
        daemon.attach()
        daemon.channel.send(linkw.Telemetry(b"spans"))
        daemon.frames.sendall(struct.pack("<IHHQQB", 21, 8, 0x8777, 99, 0, 1))
        assert isinstance(daemon.ask(linkw.Ping()), linkw.Pong)
