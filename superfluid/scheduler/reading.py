"""Reading what a tick brought: logprob records, one per emitted token of a lane (pure)."""

import struct
from collections.abc import Iterable

from superfluid.link.linkw import LaneLogprob
from superfluid.scheduler.generation import TokenLogprob


class LaneLogprobs:
    """A lane's records of one tick, in emission order."""

    def __init__(self) -> None:
        self.records: list[LaneLogprob] = []

    def read(self, tokens: list[int]) -> list[TokenLogprob]:
        """The records of the tick's tokens, as numbers; fewer when the engine gave fewer."""
        return [
            TokenLogprob(
                token,
                _float(record.logprob_bits),
                list(zip(record.top_ids, _floats(record.top_logprob_bits), strict=False)),
            )
            for token, record in zip(tokens, self.records, strict=False)
        ]


def logprobs_by_lane(records: Iterable[LaneLogprob]) -> dict[int, LaneLogprobs]:
    """A tick's records by lane tag."""
    lanes: dict[int, LaneLogprobs] = {}
    for record in records:
        lanes.setdefault(record.lane_tag, LaneLogprobs()).records.append(record)
    return lanes


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _floats(bits: list[int]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *bits))
