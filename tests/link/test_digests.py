"""The hashes other programs see, against the specification's vectors and an independent implementation's."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from superfluid.link.digests import (
    BASIS,
    Lineage,
    Record,
    behaviour_fingerprint,
    blob_chain,
    block_chain,
    compat_identity,
    content_digest,
    fim_key,
    fnv1a,
    fnv_hash32,
    marker_digest,
    mock_compat_identity,
    prefix_digest,
    speculation_identity,
    tokenizer_hash,
    version_tag,
    weights_identity,
)
from tests.link.golden import lines


@pytest.mark.parametrize(
    ("data", "digest"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_fnv(data: bytes, digest: int) -> None:
    assert fnv1a(data) == digest


@given(st.binary(max_size=200), st.integers(0, 200))
def test_hashing_in_pieces_equals_hashing_the_whole(data: bytes, at: int) -> None:
    assert fnv1a(data[at:], fnv1a(data[:at])) == fnv1a(data)


BLOCK = 128 * 256
"""What is hashed as spans side by side; the rest goes byte by byte."""


def by_the_book(data: bytes, basis: int) -> int:
    for byte in data:
        basis = (basis ^ byte) * 0x100000001B3 % (1 << 64)
    return basis


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3 * BLOCK), st.integers(0, 9), st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 32))
@example(BLOCK - 1, 0, BASIS, 1)
@example(BLOCK, 1, BASIS, 1)
@example(2 * BLOCK + 1, 7, 0, 1)
def test_long_inputs_hash_as_short_ones_do(length: int, offset: int, basis: int, seed: int) -> None:
    data = memoryview(np.random.default_rng(seed).bytes(offset + length))[offset:]
    assert fnv1a(data, basis) == by_the_book(bytes(data), basis)


@pytest.mark.parametrize("fill", [0, 1, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("basis", [0, 1, BASIS, (1 << 64) - 1])
def test_long_runs_of_one_byte(fill: int, basis: int) -> None:
    data = bytes([fill]) * (BLOCK + 3)
    assert fnv1a(data, basis) == by_the_book(data, basis)


def test_others_run_while_a_long_input_is_hashed() -> None:
    data, ready, ran = bytes(1 << 20), threading.Event(), threading.Event()

    def other() -> None:
        ready.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to let go of the interpreter
    try:
        ready.set()
        for _ in range(10_000):
            if ran.is_set():
                break
            fnv1a(data)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_token_digests() -> None:
    digest = content_digest([1, 2, 3])
    assert digest == bytes.fromhex("9503eb81430f1ffd bac346231c6d9d0d") + bytes(16)
    assert prefix_digest([1, 2, 3]) == 0xFD1F0F4381EB0395
    assert content_digest(np.array([1, 2, 3], np.uint32)) == content_digest(np.arange(1, 4)) == digest


def test_block_chains() -> None:
    ids = list(range(10))
    first = fnv1a(np.array(ids[:4], np.uint32), fnv1a(b"\x05\0\0\0", 0))
    assert block_chain(ids, 4, 5) == [first, fnv1a(np.array(ids[4:8], np.uint32), first)]
    assert block_chain(ids[:3], 4, 5) == []
    assert block_chain(ids[:8], 4, 5) == block_chain(ids, 4, 5)
    assert blob_chain(ids, 5) == [fnv1a(np.array(ids, np.uint32), fnv1a(b"\x05\0\0\0", 1))]


def test_vectors_of_the_specification() -> None:
    earlier = {"codec_version": 1, "projection_version": 1}
    assert behaviour_fingerprint("chatml", 0x1111, 0x2222, **earlier) == 0x2174D7B84F5D03DF
    assert behaviour_fingerprint("chatml", 0x1111, 0x2222, **earlier, speculation=0) == 0x06882E849ADB3037
    assert tokenizer_hash([b"a", b"bc"]) == 0xA49DB729A8992B5A
    assert marker_digest([(1, 2, 1)]) == 0x06D2E1F4D2836431
    assert marker_digest([]) == BASIS
    identity = compat_identity(1, 1, "llamacpp", "llama.cpp b1", bytes(32))
    assert identity == bytes.fromhex("bae1b531176fcb6c 290b6823ae307609") + bytes(16)
    weights = 0x1122334455667788
    assert version_tag(weights, "qwen3", 28, 1024, 128, 16) == 0x311DA57C1A4BB441
    assert version_tag(0, "qwen3", 28, 1024, 128, 16) == 0x0076E3BBB2DAE839
    assert version_tag(weights, "qwen3", 28, 1024, 128, 16, layout_flags=1) == 0x00D160D44E801840
    lineage = Lineage()
    lineage.append(1, 7)
    assert lineage.digest == 0xE453CC119B299C5A
    assert fnv_hash32(b"prompt-lookup/1") == (0x03DB97BD44E56820).to_bytes(8, "little") + bytes(24)


def test_golden_digests(shared: Path) -> None:
    lineage = Lineage()
    for line in lines(shared, "fingerprints.jsonl"):
        match line["op"]:
            case "content_digest":
                assert content_digest(line["tokens"]).hex() == line["hex"]
            case "version_tag":
                shape = (line["n_layers"], line["kv_dim"], line["head_dim"], line["page_size_tokens"])
                tag = version_tag(line["weights_identity"], line["architecture"], *shape, line["layout_flags"])
                assert tag == line["tag"]
            case "lineage":
                lineage.append(line["op_kind"], line["detail"], line["taint_bits"])
                assert (lineage.digest, lineage.taint) == (line["digest"], line["taint"])
            case "behavior_fingerprint":
                assert marker_digest([tuple(m) for m in line["markers"]]) == line["marker_digest"]
                digest = behaviour_fingerprint(
                    line["codec_id"],
                    line["tokenizer_hash"],
                    line["marker_digest"],
                    codec_version=line["codec_version"],
                    sampling_version=line["sampling_impl_version"],
                    projection_version=line["block_projection_version"],
                    grammar_version=line["grammar_version"],
                    speculation=line["speculation"],
                )
                assert digest == line["digest"]
            case "vocab_hash":
                vocabulary = [b"" if i % 7 == 0 else str(i).encode() for i in range(line["vocab"])]
                assert tokenizer_hash(vocabulary) == line["hash"]
            case "compat_identity":
                weights = bytes.fromhex(line["weights_hex"])
                identity = compat_identity(line["kind"], line["version_tag"], line["runtime"], line["version"], weights)
                assert identity.hex() == line["hex"]
            case "seal":
                assert content_digest(line["provenance_tokens"]).hex() in line["hex"]
            case other:
                pytest.fail(f"no digest for {other}")


def test_records_keep_their_fields_apart() -> None:
    assert Record().digest == BASIS
    assert Record().field(1, b"ab").digest != Record().field(1, b"a").field(1, b"b").digest
    assert Record().u32(1, 7).digest == fnv1a(bytes.fromhex("01 04000000 07000000"))
    assert speculation_identity("s", bytes(32), bytes(32)) == (
        Record().field(1, b"s").field(2, bytes(32)).field(3, bytes(32)).digest
    )


def test_fim_keys_tell_requests_apart() -> None:
    keys = {
        fim_key([1, 2], 0, 16, None),
        fim_key([1, 2], 1, 16, None),
        fim_key([1, 2], 0, 17, None),
        fim_key([1, 2], 0, 16, 0),
        fim_key([1], 0, 16, None),
        fim_key([1, 2], 0, 16, None, presence_penalty=0.5),
        fim_key([1, 2], 0, 16, None, ignore_eos=True),
    }
    assert len(keys) == 7
    prompt = Record().u32(1, 1).u32(1, 2).u32(2, 0).u32(3, 16)
    assert fim_key([1, 2], 0, 16, None) == prompt.u32(5, 0).u32(6, 0).u32(7, 0).u32(8, 0).digest


def test_identities_of_32_bytes() -> None:
    assert weights_identity(0x0102, 500) == b"\x02\x01" + bytes(14) + b"\xf4\x01" + bytes(14)
    identity = mock_compat_identity(1, 1, 7)
    assert len(identity) == 32
    assert identity[8:] == bytes(24)
    assert identity != mock_compat_identity(2, 1, 7)
