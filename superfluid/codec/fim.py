"""Fill-in-the-middle: which markers a vocabulary has for it, and prompts of a prefix and a suffix."""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import attrs

from superfluid.codec.channels import PairSplitter, Router
from superfluid.codec.framing import Encoder, Piece, content, framing


class FimMode(IntEnum):
    """In which order a prompt gives its parts."""

    PSM = 0  # prefix, suffix, middle
    SPM = 1  # suffix, then the prefix that the middle continues


class Markers(NamedTuple):
    """What stands before the prefix, before the suffix, and before the middle."""

    prefix: str
    suffix: str
    middle: str


FAMILIES = {
    "qwen": Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "codellama": Markers("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    "deepseek": Markers("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
}


@attrs.frozen
class Fim:
    """A vocabulary's way of asking for a middle."""

    family: str
    markers: Markers
    encoder: Encoder = attrs.field(repr=False)

    @classmethod
    def discover(cls, encoder: Encoder) -> "Fim | None":
        """The first family of which the vocabulary has every marker as one token; None when it has no whole one."""
        for family, markers in FAMILIES.items():
            if all(len(encoder.encode_framing(marker)) == 1 for marker in markers):
                return cls(family, markers, encoder.with_markers(markers))
        return None

    def prompt(self, prefix: str, suffix: str, mode: int = FimMode.PSM) -> list[int]:
        """The tokens that a middle is generated after; no text of the client forms a marker. Modes that are none read
        as prefix first."""
        before, after, middle = map(framing, self.markers)
        pieces: list[Piece] = [before, content(prefix), after, content(suffix), middle]
        if mode == FimMode.SPM and self.family != "deepseek":
            pieces = [before, after, content(suffix), middle, content(prefix)]
        return self.encoder.encode(pieces)

    def router(self, terminators: Iterable[int] = ()) -> Router:
        """The router of a lane that fills in a middle: all of it is text, up to a terminator."""
        ends = frozenset(terminators)
        return Router(lambda: PairSplitter(self.encoder.table, (), ends))
