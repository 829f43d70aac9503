"""Log records: one frame per event, and the scan that finds them again (pure data, no I/O).

A frame is the payload's length (u32 LE), its XXH3-64 (u64 LE) and the payload: session, event id, epoch, time (version
2) and body, postcard. Bytes after the body are ignored.
"""

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from mmap import mmap
from struct import Struct
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from superfluid._native import ffi, lib
from superfluid.link.events import Body, Event
from superfluid.link.postcard import decode, encode

Mapped = mmap | bytes | memoryview

MAGIC = b"BRTWAL02"  # version 2; a log that begins otherwise is version 1
HEADER = Struct("<IQ")
LONGEST = 1 << 30  # a payload's bytes; a longer length is damage
SCAN_ROWS = 16384  # rows of one native call: 1.3 MB, so that a scan's memory does not grow with the log

ROW = np.dtype(
    [(name, "u8") for name in ("offset", "session", "event_id", "epoch", "ts_unix_ms", "a", "b")]
    + [(name, "u4") for name in ("length", "tokens", "variant", "flags")]
)


class Stop(IntEnum):
    """Why a scan ended where it did."""

    END = 0
    ROWS_FULL = 1
    PAST_END = 2
    TOO_LONG = 3
    CHECKSUM = 4
    UNDECODABLE = 5


@attrs.frozen
class Index:
    """Every frame of a log, in log order: equal-length columns, and `steps`, the full rows (dtype ROW) of the
    variants that change more than a count, each beside its position (`at`) in the columns."""

    offset: npt.NDArray[np.uint64]
    session: npt.NDArray[np.uint64]
    epoch: npt.NDArray[np.uint64]
    ts_unix_ms: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.uint32]
    variant: npt.NDArray[np.uint32]
    at: npt.NDArray[np.int64]
    steps: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.offset)


COLUMNS = ("offset", "session", "epoch", "ts_unix_ms", "tokens", "variant")
STEPS = frozenset({"Created", "Forked", "Rebased", "Purged", "Rerooted", "MetaUpdated", "Pinned", "QosSet"})
IS_STEP = np.array([body.variant_name in STEPS for body in Body.variants])


def scan(data: Mapped, start: int, version: int) -> tuple[Index, int, Stop]:
    """Index the frames of `data` from byte `start`; also where the scan stopped, and why."""
    rows = np.zeros(SCAN_ROWS, ROW)
    count, position = ffi.new("size_t *"), ffi.new("uint64_t *", start)
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    at: list[npt.NDArray[np.int64]] = []
    steps: list[npt.NDArray[Any]] = []
    total, stop = 0, Stop.ROWS_FULL
    with ffi.from_buffer("uint8_t[]", data) as bytes_, ffi.from_buffer("sf_wal_row[]", rows) as filled:
        while stop is Stop.ROWS_FULL:
            stop = Stop(lib.sf_wal_scan(bytes_, len(bytes_), version > 1, filled, SCAN_ROWS, count, position))
            taken = rows[: count[0]]
            columns.append(tuple(taken[name].copy() for name in COLUMNS))
            chosen = np.flatnonzero(IS_STEP[taken["variant"]])
            at.append(chosen + total)
            steps.append(taken[chosen])
            total += len(taken)
    joined = {name: np.concatenate(parts) for name, parts in zip(COLUMNS, zip(*columns, strict=True), strict=True)}
    return Index(at=np.concatenate(at), steps=np.concatenate(steps), **joined), position[0], stop


def touches_zero_sector(data: Mapped, offset: int, length: int) -> bool:
    """Whether a frame lies on a 512-byte sector of the file that is all zero: a page that was never written."""
    with ffi.from_buffer("uint8_t[]", data) as bytes_:
        return bool(lib.sf_wal_zero_sector(bytes_, len(bytes_), offset, length))


@lru_cache(maxsize=1024)  # the sessions, epochs and the time of a tick's records repeat
def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame(session: int, event: Event, version: int, behind: bytes = b"") -> bytes:
    """The frame of one record, with bytes behind its body that readers of the format ignore; a version 1 log drops
    the time."""
    time = varint(event.ts_unix_ms) if version > 1 else b""
    payload = b"".join((varint(session), varint(event.event_id), varint(event.epoch), time, encode(event.body), behind))
    return HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def head(payload: bytes, version: int) -> tuple[int, tuple[int, int, int], int]:
    """The session of one payload that the scan took, its event's id, epoch and time, and where the body begins."""
    position = 0
    heads = []
    for _ in range(4 if version > 1 else 3):
        value = shift = 0
        while True:
            byte = payload[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        heads.append(value)
    session, event_id, epoch, *time = heads
    return session, (event_id, epoch, time[0] if time else 0), position


def event(payload: bytes, version: int) -> tuple[int, Event]:
    """The session and the event of one payload that the scan took."""
    session, told, position = head(payload, version)
    return session, Event(*told, decode(Body, payload, position))


def events(payloads: Iterable[bytes], version: int) -> list[Event]:
    """The events of payloads that the scan took."""
    return [event(payload, version)[1] for payload in payloads]


def bumps(
    sessions: npt.NDArray[np.uint64],
    event_ids: npt.NDArray[np.uint64],
    epochs: npt.NDArray[np.uint64],
    ts_unix_ms: int,
    version: int,
) -> tuple[memoryview, npt.NDArray[np.uint8]]:
    """Frames of one EpochBump per session, and the bytes of each."""
    longest = 56  # header, four varints of ten bytes and the variant, rounded up
    out = np.empty(max(len(sessions), 1) * longest, np.uint8)
    sizes = np.empty(len(sessions), np.uint8)
    written = lib.sf_wal_bumps(
        *(ffi.from_buffer("uint64_t[]", column) for column in (sessions, event_ids, epochs)),
        ts_unix_ms,
        version > 1,
        len(sessions),
        ffi.from_buffer("uint8_t[]", out),
        ffi.from_buffer("uint8_t[]", sizes),
    )
    return out[:written].data, sizes
