"""Sealed states: a 136-byte envelope that names space, weights, position and encoding, then the payload.

The checksum runs natively over the bytes where they lie, as a long state is tens of megabytes.
"""

import struct
from collections.abc import Callable
from typing import Final

import attrs
from xxhash import xxh3_64_intdigest

from superfluid._native import ffi, lib
from superfluid.engines.engine import EngineError, Status

MAGIC: Final = 0x4554415453545242  # the bytes BRTSTATE
VERSION: Final = 1
BYTES: Final = 136
CHECKSUM_XXH3: Final = 1
CHECKSUM_FNV1A: Final = 2
FNV_BASIS: Final = 0xCBF29CE484222325

Buffer = bytes | bytearray | memoryview

_HEADER = struct.Struct("<QII32sQ32sII QQ B3x I QQ")
assert _HEADER.size == BYTES


def _fnv1a(data: Buffer) -> int:
    return int(lib.sf_fnv1a(ffi.cast("const uint8_t *", ffi.from_buffer(data)), len(data), FNV_BASIS))


_CHECKSUMS: dict[int, Callable[[Buffer], int]] = {
    CHECKSUM_XXH3: xxh3_64_intdigest,
    CHECKSUM_FNV1A: _fnv1a,
}


@attrs.frozen
class Space:
    """Which state an envelope is of: the kind of space, whose state it is (32 bytes) and the layout's version."""

    kind: int
    compat_identity: bytes
    version_tag: int = 1
    checksum_kind: int = CHECKSUM_FNV1A


@attrs.frozen
class Opened:
    """What a sealed state holds. `payload` is a view into the buffer it was opened from; the range is [start, end)."""

    payload: memoryview
    start: int
    end: int
    encoding: int
    taint: int
    provenance: bytes


def body(out: memoryview, length: int) -> memoryview:
    """Where in `out` a payload of `length` bytes is sealed. Raises EngineError -121 when `out` is short."""
    total = BYTES + length
    if len(out) < total:
        raise EngineError(Status.BufferTooSmall, f"the sealed state takes {total} bytes, the buffer has {len(out)}")
    return out[BYTES:total]


def seal_in_place(
    out: memoryview,
    length: int,
    space: Space,
    *,
    start: int = 0,
    end: int,
    encoding: int = 0,
    taint: int = 0,
    provenance: bytes = bytes(32),
) -> int:
    """Write the envelope of the payload that stands in the `body` of `out`; the bytes of both."""
    checksum = _CHECKSUMS[space.checksum_kind](body(out, length))
    _HEADER.pack_into(
        out,
        0,
        MAGIC,
        VERSION,
        space.kind,
        space.compat_identity,
        space.version_tag,
        provenance,
        taint,
        0,
        start,
        end,
        encoding,
        space.checksum_kind,
        length,
        checksum,
    )
    return BYTES + length


def seal_into(
    out: memoryview,
    payload: Buffer,
    space: Space,
    *,
    start: int = 0,
    end: int,
    encoding: int = 0,
    taint: int = 0,
    provenance: bytes = bytes(32),
) -> int:
    """Write the sealed `payload` at the start of `out`; the bytes written. Raises EngineError -121 when it is short."""
    body(out, len(payload))[:] = payload
    return seal_in_place(
        out, len(payload), space, start=start, end=end, encoding=encoding, taint=taint, provenance=provenance
    )


def seal(
    payload: Buffer,
    space: Space,
    *,
    start: int = 0,
    end: int,
    encoding: int = 0,
    taint: int = 0,
    provenance: bytes = bytes(32),
) -> bytes:
    """The sealed `payload` as bytes of its own."""
    out = bytearray(BYTES + len(payload))
    seal_into(
        memoryview(out), payload, space, start=start, end=end, encoding=encoding, taint=taint, provenance=provenance
    )
    return bytes(out)


def unseal(sealed: Buffer, space: Space) -> Opened:
    """Check a sealed state and open it.

    Raises EngineError, in this order: -124 too short, another magic, version or kind; -126 another identity or version
    tag; -124 another length or checksum kind; -125 a damaged payload.
    """
    view = memoryview(sealed)
    if len(view) < BYTES:
        raise EngineError(Status.EnvelopeMismatch, f"{len(view)} bytes; an envelope alone has {BYTES}")
    header = _HEADER.unpack_from(view)
    magic, version, kind, identity, version_tag, provenance, taint, _, start, end = header[:10]
    encoding, checksum_kind, length, checksum = header[10:]
    if magic != MAGIC or version != VERSION:
        raise EngineError(Status.EnvelopeMismatch, f"magic {magic:#x}, version {version}: not a state of version 1")
    if kind != space.kind:
        raise EngineError(Status.EnvelopeMismatch, f"a state of space kind {kind}, not {space.kind}")
    if identity != space.compat_identity:
        raise EngineError(Status.IdentityMismatch, "made by another runtime, version or weights")
    if version_tag != space.version_tag:
        raise EngineError(Status.IdentityMismatch, f"version tag {version_tag}, not {space.version_tag}")
    payload = view[BYTES:]
    if len(payload) != length:
        raise EngineError(Status.EnvelopeMismatch, f"{len(payload)} payload bytes, the envelope says {length}")
    if checksum_kind != space.checksum_kind:
        raise EngineError(Status.EnvelopeMismatch, f"checksum kind {checksum_kind}, not {space.checksum_kind}")
    if _CHECKSUMS[checksum_kind](payload) != checksum:
        raise EngineError(Status.Checksum, f"the {length} payload bytes are damaged")
    return Opened(payload, start, end, encoding, taint, provenance)
