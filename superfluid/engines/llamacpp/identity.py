"""Who a model's state belongs to: its weights, and the settings that change what a cached key means."""

from collections.abc import Sequence
from pathlib import Path

import xxhash

_CHUNK = 8 << 20


def weights_identity(files: Sequence[Path], settings: bytes = b"") -> bytes:
    """32 bytes: XXH3-128 of the files as one stream, their size, zeros; `settings` (see Settings) folded in."""
    digest = xxhash.xxh3_128()
    size = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    identity = digest.intdigest().to_bytes(16, "little") + size.to_bytes(8, "little") + bytes(8)
    if settings:
        identity = xxhash.xxh3_128(identity + settings).intdigest().to_bytes(16, "little") + identity[16:]
    return identity
