"""Every hash that another program can see, as pure functions. All integers go in as little-endian bytes.

FNV-1a with 64 bits is native; XXH3 comes from the xxhash package.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from superfluid._native import ffi, lib

BASIS = 0xCBF29CE484222325
_MASK = 0xFFFFFFFFFFFFFFFF

CODEC_VERSION = 2
SAMPLING_VERSION = 1
PROJECTION_VERSION = 2
GRAMMAR_VERSION = 0

Ids = Sequence[int] | npt.NDArray[np.uint32]


def fnv1a(data: bytes | bytearray | memoryview | npt.NDArray[Any], basis: int = BASIS) -> int:
    """FNV-1a, 64 bits, of contiguous bytes; pass a result as `basis` to go on with it."""
    view = ffi.from_buffer("uint8_t[]", data)
    digest: int = lib.sf_fnv1a(view, len(view), basis)
    return digest


def _words(ids: Ids) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(ids, dtype="<u4")


# ---- token spans ---------------------------------------------------------------------------------------------------


def prefix_digest(ids: Ids) -> int:
    """The u64 that names a token prefix in park artifacts and pins."""
    return fnv1a(_words(ids))


def content_digest(ids: Ids) -> bytes:
    """The 32 bytes that name a span's content: executor states, match candidates, cache keys."""
    words = _words(ids)
    return struct.pack("<QQ16x", fnv1a(words), fnv1a(words, ~BASIS & _MASK))


def block_chain(ids: Ids, page: int, space_id: int) -> list[int]:
    """One digest per whole page of `page` tokens in a paged space, each continuing the one before."""
    words = _words(ids)
    digest = fnv1a(struct.pack("<I", space_id), 0)
    chain = []
    for start in range(0, len(words) - page + 1, page):
        digest = fnv1a(words[start : start + page], digest)
        chain.append(digest)
    return chain


def blob_chain(ids: Ids, space_id: int) -> list[int]:
    """The one digest of a blob space's block chain."""
    return [fnv1a(_words(ids), fnv1a(struct.pack("<I", space_id), 1))]


# ---- tagged records ------------------------------------------------------------------------------------------------


FIELD_U32 = np.dtype([("tag", "u1"), ("length", "<u4"), ("value", "<u4")])


class Record:
    """A digest over tagged fields, kept apart by their tags and lengths."""

    __slots__ = ("digest",)

    def __init__(self) -> None:
        self.digest = BASIS

    def field(self, tag: int, data: bytes) -> "Record":
        self.digest = fnv1a(struct.pack("<BI", tag, len(data)) + data, self.digest)
        return self

    def u32(self, tag: int, value: int) -> "Record":
        return self.field(tag, struct.pack("<I", value))

    def u32s(self, tag: int, values: Ids) -> "Record":
        """A u32 field for each of the values."""
        fields = np.empty(len(values), FIELD_U32)
        fields["tag"], fields["length"], fields["value"] = tag, 4, _words(values)
        self.digest = fnv1a(fields.view(np.uint8), self.digest)
        return self

    def u64(self, tag: int, value: int) -> "Record":
        return self.field(tag, struct.pack("<Q", value))

    def f32(self, tag: int, value: float) -> "Record":
        return self.field(tag, struct.pack("<f", value))


def behaviour_fingerprint(
    codec_id: str,
    tokenizer: int,
    markers: int,
    *,
    codec_version: int = CODEC_VERSION,
    sampling_version: int = SAMPLING_VERSION,
    projection_version: int = PROJECTION_VERSION,
    grammar_version: int = GRAMMAR_VERSION,
    speculation: int | None = None,
) -> int:
    """Names everything but the weights that decides what tokens a session's text becomes, and back.

    `tokenizer` is a tokenizer_hash, `markers` a marker_digest, `speculation` a speculation_identity.
    """
    record = Record().field(1, codec_id.encode()).u32(2, codec_version).u64(3, tokenizer).u64(4, markers)
    record.u32(5, sampling_version).u32(6, projection_version).u32(7, grammar_version)
    return record.field(8, b"" if speculation is None else struct.pack("<Q", speculation)).digest


def tokenizer_hash(vocabulary: Iterable[bytes]) -> int:
    """Hash of the bytes of every token, in id order (special tokens have none)."""
    return fnv1a(b"".join([struct.pack("<I", len(token)) + token for token in vocabulary]))


def marker_digest(markers: Iterable[tuple[int, int, int]]) -> int:
    """Digest of channel markers (open id, close id, channel), in the codec's order."""
    record = Record()
    for i, marker in enumerate(markers):
        record.field(i % 256, struct.pack("<III", *marker))
    return record.digest


def speculation_identity(strategy_id: str, impl_hash: bytes, config_hash: bytes) -> int:
    """Identity of a strategy that may change tokens; the hashes are 32 bytes each."""
    return Record().field(1, strategy_id.encode()).field(2, impl_hash).field(3, config_hash).digest


def fim_key(
    prompt: Ids,
    mode: int,
    max_tokens: int,
    fingerprint: int | None,
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repeat_penalty: float = 0.0,
    ignore_eos: bool = False,
) -> int:
    """Cache key of a greedy fill-in-the-middle answer."""
    record = Record().u32s(1, prompt).u32(2, mode).u32(3, max_tokens)
    if fingerprint is not None:
        record.u64(4, fingerprint)
    record.f32(5, presence_penalty).f32(6, frequency_penalty).f32(7, repeat_penalty)
    return record.u32(8, ignore_eos).digest


# ---- state identities ----------------------------------------------------------------------------------------------


def compat_identity(kind: int, version_tag: int, runtime: str, version: str, weights: bytes) -> bytes:
    """The 32 bytes that say which executor states fit: kind u32, version_tag u64, `weights` 32 bytes."""
    made_of = struct.pack("<IQ", kind, version_tag) + b"%s\0%s\0" % (runtime.encode(), version.encode()) + weights
    first = fnv1a(made_of)
    return struct.pack("<QQ16x", first, fnv1a(made_of, first))


def mock_compat_identity(kind: int, version_tag: int, bundle: int) -> bytes:
    """The mock engine's identity, 32 bytes; `bundle` is its bundle fingerprint."""
    return struct.pack("<Q24x", xxhash.xxh3_64_intdigest(struct.pack("<IQQ", kind, version_tag, bundle)))


def version_tag(
    weights: int, architecture: str, n_layers: int, kv_dim: int, head_dim: int, page_size: int, layout_flags: int = 0
) -> int:
    """A native engine's tag of a paged space; `page_size` in tokens, flag bit 0: sparse-attention keys kept in V."""
    made_of = struct.pack("<IQ", 2, weights) + architecture.encode()
    made_of += struct.pack("<IIII", n_layers, kv_dim, head_dim, page_size)
    return fnv1a(made_of + struct.pack("<I", layout_flags) if layout_flags else made_of)


@attrs.define
class Lineage:
    """What was done to a native engine's state, folded into a digest; taint bits are only ever added."""

    digest: int = BASIS
    taint: int = 0

    def append(self, op: int, detail: int, taint: int = 0) -> None:
        """Ops: 1 prefill, 2 decode, 3 seed, 4 restore, 5 promote, 6 fork."""
        self.digest = fnv1a(struct.pack("<QIQ", self.digest, op, detail))
        self.taint |= taint


def weights_identity(xxh3_128: int, size: int) -> bytes:
    """32 bytes that name a model file: the XXH3-128 of its bytes (all shards in order), and their total size."""
    return xxh3_128.to_bytes(16, "little") + struct.pack("<Q8x", size)


def fnv_hash32(text: bytes) -> bytes:
    """A strategy's impl_hash (of its tag) or config_hash (of its configuration text): the FNV and 24 zero bytes."""
    return struct.pack("<Q24x", fnv1a(text))
