"""Rings: their bytes, their references, what they refuse, and a race of two processes."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from superfluid._native import ffi, lib

from superfluid.link.linkw import RingKind, RingRef, RingSpec, TokenRef
from superfluid.shm.ring import (
    HEADER_BYTES,
    MAGIC,
    LayoutError,
    OutOfBounds,
    PayloadTooLong,
    Ring,
    RingError,
    StaleReference,
    ring_specs,
)

SPEC = RingSpec(2, RingKind.Tokens, 40, 4)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(SPEC)
    yield made
    made.close()


@pytest.fixture
def reader(ring: Ring) -> Iterator[Ring]:
    made = Ring.attach(os.dup(ring.fd), SPEC)
    yield made
    made.close()


def test_the_image_of_a_ring(shared: Path) -> None:
    golden = json.loads((shared / "data" / "golden" / "ring.json").read_text())
    ring = Ring.create(RingSpec(golden["ring_id"], RingKind.Tokens, golden["slot_bytes"], golden["slots"]))
    for push in golden["pushes"]:
        ref = ring.push(bytes.fromhex(push["payload_hex"]))
        assert ref == RingRef(golden["ring_id"], push["index"], push["generation"])
        assert ring.read(ref.index, ref.generation).hex() == push["payload_hex"]
    assert bytes(ring.segment.buf).hex() == golden["image_hex"]
    ring.close()


def test_spans_cross_the_ring(ring: Ring, reader: Ring) -> None:
    for ids in ([], [1], [0, 70_000, 0xFFFFFFFF], np.arange(6, dtype=np.uint32), np.arange(4)[::2]):
        ref = ring.push_tokens(ids)
        assert ref.count == len(ids)
        read = reader.read_tokens(ref)
        assert read.dtype == np.uint32
        assert read.tolist() == list(ids)


def test_rows_cross_the_ring() -> None:
    spec = RingSpec(3, RingKind.Logits, 40, 2)
    ring = Ring.create(spec)
    row = np.array([0.5, -1.0, np.inf, 3.25], np.float32)
    assert ring.read_row(ring.push_row(row)).tolist() == row.tolist()
    assert ring.read_row(ring.push_row(np.zeros(6))).tolist() == [0.0] * 6
    with pytest.raises(OutOfBounds):
        ring.read_row(ring.push(b"12345"))
    ring.close()


def test_a_read_is_a_copy(ring: Ring) -> None:
    read = ring.read_tokens(ring.push_tokens([1, 2, 3]))
    for _ in range(SPEC.slots):
        ring.push_tokens([9, 9, 9])
    assert read.tolist() == [1, 2, 3]


def test_a_recycled_slot_is_stale(ring: Ring, reader: Ring) -> None:
    refs = [ring.push_tokens([i]) for i in range(SPEC.slots + 1)]
    assert [ref.index for ref in refs] == [0, 1, 2, 3, 0]
    with pytest.raises(StaleReference):
        reader.read_tokens(refs[0])
    assert [reader.read_tokens(ref).tolist() for ref in refs[1:]] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("generation", [0, 2, 99])
def test_a_generation_that_is_not_the_slots_is_stale(ring: Ring, generation: int) -> None:
    ring.push_tokens([1])
    for index in (0, 1):  # written, never written
        with pytest.raises(StaleReference):
            ring.read(index, generation)


def test_a_slot_that_is_being_written_is_stale(ring: Ring) -> None:
    ref = ring.push_tokens([1])
    struct.pack_into("<Q", ring.segment.buf, HEADER_BYTES, 0)
    for generation in (ref.generation, 0):
        with pytest.raises(StaleReference):
            ring.read(ref.index, generation)


def test_references_out_of_bounds(ring: Ring) -> None:
    ref = ring.push_tokens([1, 2])
    for wrong in (
        TokenRef(1, ref.index, ref.count, ref.generation),
        TokenRef(2, SPEC.slots, ref.count, ref.generation),
        TokenRef(2, 0xFFFFFFFF, ref.count, ref.generation),
        TokenRef(2, ref.index, 1, ref.generation),
        TokenRef(2, ref.index, 3, ref.generation),
        TokenRef(2, ref.index, 0xFFFFFFFF, ref.generation),
    ):
        with pytest.raises(OutOfBounds):
            ring.read_tokens(wrong)
    with pytest.raises(OutOfBounds):
        ring.read_row(RingRef(3, ref.index, ref.generation))
    assert ring.read_tokens(ref).tolist() == [1, 2]


def test_a_stored_length_over_the_room_is_out_of_bounds(ring: Ring) -> None:
    ref = ring.push_tokens([1, 2])
    struct.pack_into("<I", ring.segment.buf, HEADER_BYTES + 8, ring.room + 1)
    with pytest.raises(OutOfBounds):
        ring.read(ref.index, ref.generation)
    with pytest.raises(OutOfBounds):
        ring.read_tokens(ref)


def test_a_payload_over_the_room_is_an_error_and_writes_nothing(ring: Ring) -> None:
    before = bytes(ring.segment.buf)
    with pytest.raises(PayloadTooLong, match="28 bytes, slots hold 24"):
        ring.push_tokens(range(7))
    assert bytes(ring.segment.buf) == before
    assert ring.push_tokens(range(6)).generation == 1


@pytest.mark.parametrize("ids", [[-1], [1 << 32]])
def test_ids_are_u32(ring: Ring, ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        ring.push_tokens(ids)


@pytest.mark.parametrize(
    "other",
    [
        RingSpec(1, RingKind.Tokens, 40, 4),
        RingSpec(2, RingKind.Tokens, 32, 4),
        RingSpec(2, RingKind.Tokens, 40, 3),
        RingSpec(2, RingKind.Tokens, 40, 5),  # longer than the segment
        RingSpec(2, RingKind.Tokens, 36, 4),  # no multiple of 8
        RingSpec(2, RingKind.Tokens, 16, 4),  # no room
        RingSpec(2, RingKind.Tokens, 40, 0),
    ],
)
def test_attaching_another_layout_is_refused(ring: Ring, other: RingSpec) -> None:
    fd = os.dup(ring.fd)
    with pytest.raises(LayoutError):
        Ring.attach(fd, other)
    with pytest.raises(OSError):  # it was closed
        os.fstat(fd)


def test_attaching_another_magic_is_refused(ring: Ring) -> None:
    struct.pack_into("<Q", ring.segment.buf, 0, MAGIC + 1)
    with pytest.raises(LayoutError, match="magic"):
        Ring.attach(os.dup(ring.fd), SPEC)


@pytest.mark.parametrize("slot_bytes", [36, 16, 8, 0])
def test_creating_a_shape_that_is_none_is_refused(slot_bytes: int) -> None:
    with pytest.raises(LayoutError):
        Ring.create(RingSpec(2, RingKind.Tokens, slot_bytes, 4))


def test_a_longer_segment_is_fine(ring: Ring) -> None:
    fd = os.memfd_create("longer")
    os.write(fd, bytes(ring.segment.buf) + bytes(5000))
    attached = Ring.attach(fd, SPEC)
    assert len(attached.segment.buf) == HEADER_BYTES + 4 * 40
    attached.close()


def test_what_a_worker_announces() -> None:
    inbound, outbound, logits = ring_specs(4097, 50_257, 8)
    assert inbound == RingSpec(1, RingKind.Tokens, 16 + 4098 * 4, 64)
    assert outbound == RingSpec(2, RingKind.Tokens, 16 + 1024 * 4, 64)
    assert logits == RingSpec(3, RingKind.Logits, 16 + 50_258 * 4, 8)
    assert ring_specs(4096, 49_152, 64)[0].slot_bytes == 16_400
    assert ring_specs(100, 32, 65)[0].slot_bytes == 16 + 512 * 4
    assert ring_specs(100, 32, 65)[1].slots == 256


@pytest.mark.parametrize(("slots", "slot_bytes", "count"), [(1, 16 + 2048, 150_000), (4, 16 + 64, 150_000)])
def test_a_race_of_two_processes_finds_whole_payloads_or_staleness(slots: int, slot_bytes: int, count: int) -> None:
    ring = Ring.create(RingSpec(2, RingKind.Tokens, slot_bytes, slots))
    words = ring.room // 8
    base = ffi.from_buffer("uint8_t[]", ring.segment.buf)
    os.set_inheritable(ring.fd, True)
    command = [sys.executable, "-m", "tests.shm.ring_writer", *map(str, (ring.fd, slots, slot_bytes, count))]
    whole = stale = 0
    with subprocess.Popen(command, pass_fds=[ring.fd], cwd=ROOT) as writer:
        while writer.poll() is None:
            for index in range(slots):
                for _ in range(200):
                    generation = lib.sf_word_load(base, HEADER_BYTES + index * slot_bytes)
                    try:
                        payload = ring.read(index, generation)
                    except StaleReference:
                        stale += 1
                        continue
                    assert payload == generation.to_bytes(8, "little") * (1 + generation % words)
                    assert (generation - 1) % slots == index
                    whole += 1
        assert writer.returncode == 0
    ffi.release(base)
    last = [ring.read(index, count - (count - 1 - index) % slots) for index in range(slots)]
    assert max(int.from_bytes(payload[:8], "little") for payload in last) == count
    assert whole + stale > 0
    ring.close()


def test_ring_errors_are_one_family() -> None:
    assert all(issubclass(e, RingError) for e in (StaleReference, OutOfBounds, PayloadTooLong, LayoutError))
