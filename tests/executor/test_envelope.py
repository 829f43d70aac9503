"""Sealed states against golden bytes, and every refusal in its order."""

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.envelope import BYTES, CHECKSUM_XXH3, Space, seal, seal_into, unseal

SPACE = Space(1, bytes(range(32)), 7)


def golden(shared: Path, op: str) -> list[dict]:  # type: ignore[type-arg]
    lines = (shared / "data/golden/fingerprints.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["op"] == op]


def test_golden_seal(shared: Path) -> None:
    (line,) = golden(shared, "seal")
    provenance = next(
        bytes.fromhex(digest["hex"])
        for digest in golden(shared, "content_digest")
        if digest["tokens"] == line["provenance_tokens"]
    )
    space = Space(line["kind"], bytes.fromhex(line["compat_hex"]), line["version_tag"])
    payload = bytes.fromhex(line["payload_hex"])
    sealed = seal(
        payload,
        space,
        start=line["start"],
        end=line["end"],
        encoding=line["encoding"],
        taint=line["taint_bits"],
        provenance=provenance,
    )
    assert sealed.hex() == line["hex"]
    opened = unseal(sealed, space)
    assert bytes(opened.payload) == payload
    assert (opened.start, opened.end, opened.encoding, opened.taint) == (0, 3, 0, 1)
    assert opened.provenance == provenance


@given(
    st.binary(max_size=500),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([1, 2]),
)
@settings(max_examples=100, deadline=None)
def test_round_trip(
    payload: bytes, start: int, end: int, encoding: int, taint: int, provenance: bytes, kind: int
) -> None:
    space = attrs.evolve(SPACE, checksum_kind=kind)
    sealed = seal(payload, space, start=start, end=end, encoding=encoding, taint=taint, provenance=provenance)
    assert len(sealed) == BYTES + len(payload)
    opened = unseal(sealed, space)
    assert bytes(opened.payload) == payload
    assert attrs.astuple(opened)[1:] == (start, end, encoding, taint, provenance)


def refusal(sealed: bytes, space: Space = SPACE) -> int:
    with pytest.raises(EngineError) as caught:
        unseal(sealed, space)
    return caught.value.status


def test_refusals() -> None:
    sealed = seal(b"state", SPACE, end=5)
    assert refusal(sealed[: BYTES - 1]) == Status.EnvelopeMismatch
    assert refusal(sealed[:-1]) == Status.EnvelopeMismatch
    assert refusal(sealed + b"\0") == Status.EnvelopeMismatch
    assert refusal(sealed, attrs.evolve(SPACE, kind=3)) == Status.EnvelopeMismatch
    assert refusal(sealed, attrs.evolve(SPACE, compat_identity=bytes(32))) == Status.IdentityMismatch
    assert refusal(sealed, attrs.evolve(SPACE, version_tag=8)) == Status.IdentityMismatch
    assert refusal(sealed, attrs.evolve(SPACE, checksum_kind=CHECKSUM_XXH3)) == Status.EnvelopeMismatch
    # of two things wrong, the one checked first answers
    assert refusal(sealed[:-1], attrs.evolve(SPACE, version_tag=8)) == Status.IdentityMismatch
    assert refusal(sealed, attrs.evolve(SPACE, kind=3, version_tag=8)) == Status.EnvelopeMismatch


@given(st.integers(0, 8 * (BYTES + 40) - 1))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_never_changes_what_is_restored(bit: int) -> None:
    """Fields outside the checks (position, provenance, taint, encoding, padding) pass; the payload is never wrong."""
    payload = bytes(range(40))
    sealed = bytearray(seal(payload, SPACE, end=40))
    sealed[bit // 8] ^= 1 << bit % 8
    unchecked = [range(56, 116)]
    try:
        opened = unseal(bytes(sealed), SPACE)
    except EngineError as error:
        assert error.status in (Status.EnvelopeMismatch, Status.IdentityMismatch, Status.Checksum)
    else:
        assert any(bit // 8 in span for span in unchecked)
        assert bytes(opened.payload) == payload


def test_a_short_buffer_is_left_alone() -> None:
    out = bytearray(b"\xee" * (BYTES + 4))
    with pytest.raises(EngineError) as caught:
        seal_into(memoryview(out), b"state", SPACE, end=5)
    assert caught.value.status == Status.BufferTooSmall
    assert out == b"\xee" * (BYTES + 4)
