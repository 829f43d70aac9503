"""Sealed states of the mock: the 136-byte envelope with an XXH3-64 checksum (kind 1) over the payload."""

import struct

import attrs
from xxhash import xxh3_64_intdigest

from superfluid.engines.engine import EngineError
from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.state import Sequence
from superfluid.link import linkw
from superfluid.link.codes import Encoding, SpaceKind, Status

MAGIC = 0x4554415453545242
VERSION = 1
BYTES = 136
CHECKSUM_XXH3 = 1
TAINT_QUANTIZED = 1
_HEADER = struct.Struct("<QII32sQ32sII QQ B3x I QQ")
_PAYLOAD = struct.Struct("<8sQQQB")


@attrs.frozen
class Opened:
    """What a state's envelope says."""

    start: int
    end: int
    encoding: int
    taint: int
    provenance: bytes


def payload_bytes(space: linkw.StateSpaceDesc, start: int, end: int, encoding: int) -> int:
    """Payload of a range: Q8 is half of lossless, Q4 a quarter."""
    whole = space.blob_bytes if space.kind == SpaceKind.BLOB else (end - start) * space.bytes_per_token
    return whole >> {Encoding.LOSSLESS: 0, Encoding.Q8: 1, Encoding.Q4: 2}[Encoding(encoding)]


def seal_into(
    out: memoryview, config: MockConfig, space: linkw.StateSpaceDesc, sequence: Sequence, start: int, end: int, enc: int
) -> int:
    """Write the sealed range at offset 0 of `out`; its bytes."""
    length = payload_bytes(space, start, end, enc)
    word = xxh3_64_intdigest(_PAYLOAD.pack(sequence.provenance[:8], start, end, length, enc)).to_bytes(8, "little")
    payload = (word * (length // 8 + 1))[:length]
    taint = sequence.taint | (TAINT_QUANTIZED if enc != Encoding.LOSSLESS else 0)
    _HEADER.pack_into(
        out,
        0,
        MAGIC,
        VERSION,
        space.kind,
        config.compat_identity(space),
        space.version_tag,
        sequence.provenance,
        taint,
        0,
        start,
        end,
        enc,
        CHECKSUM_XXH3,
        length,
        xxh3_64_intdigest(payload),
    )
    out[BYTES : BYTES + length] = payload
    return BYTES + length


def unseal(sealed: memoryview, config: MockConfig, space: linkw.StateSpaceDesc) -> Opened:
    """Check a sealed state of `space`. Raises EngineError -124, -126, -125, in the order of the checks."""
    if len(sealed) < BYTES:
        raise EngineError(Status.EnvelopeMismatch, f"{len(sealed)} bytes; an envelope alone has {BYTES}")
    (magic, version, kind, identity, tag, provenance, taint, _, start, end, enc, checksum_kind, length, checksum) = (
        _HEADER.unpack_from(sealed, 0)
    )
    if (magic, version, kind) != (MAGIC, VERSION, space.kind):
        raise EngineError(
            Status.EnvelopeMismatch, f"magic {magic:#x}, version {version}, kind {kind}; space kind is {space.kind}"
        )
    if identity != config.compat_identity(space) or tag != space.version_tag:
        raise EngineError(Status.IdentityMismatch, f"made by another engine or layout (version tag {tag})")
    if len(sealed) - BYTES != length:
        raise EngineError(Status.EnvelopeMismatch, f"{len(sealed) - BYTES} payload bytes, the envelope says {length}")
    if checksum_kind != CHECKSUM_XXH3:
        raise EngineError(Status.EnvelopeMismatch, f"checksum kind {checksum_kind}; this engine seals with 1")
    if xxh3_64_intdigest(sealed[BYTES:]) != checksum:
        raise EngineError(Status.Checksum, "the payload is damaged")
    return Opened(start, end, enc, taint, provenance)
