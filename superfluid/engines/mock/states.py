"""States of the mock: a payload that names where it came from, sealed with an XXH3-64 checksum (kind 1)."""

import struct

from xxhash import xxh3_64_intdigest

from superfluid.engines.executor import envelope
from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.state import Sequence
from superfluid.link import linkw
from superfluid.link.codes import Encoding, SpaceKind

ENVELOPE_BYTES = envelope.BYTES
TAINT_QUANTIZED = 1
_PAYLOAD = struct.Struct("<8sQQQB")


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
    return envelope.seal_into(
        out,
        (word * (length // 8 + 1))[:length],
        _space(config, space),
        start=start,
        end=end,
        encoding=enc,
        taint=sequence.taint | (TAINT_QUANTIZED if enc != Encoding.LOSSLESS else 0),
        provenance=sequence.provenance,
    )


def unseal(sealed: memoryview, config: MockConfig, space: linkw.StateSpaceDesc) -> envelope.Opened:
    """Raises EngineError -124, -126, -125, in the order of the checks."""
    return envelope.unseal(sealed, _space(config, space))


def _space(config: MockConfig, space: linkw.StateSpaceDesc) -> envelope.Space:
    return envelope.Space(space.kind, config.compat_identity(space), space.version_tag, envelope.CHECKSUM_XXH3)
