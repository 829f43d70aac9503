"""The bytes of one token by a tokenizer.json's decoder: its steps, in order, up to the one that joins the tokens."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from superfluid.codec.tokenizers.errors import TokenizerError

Json = Mapping[str, Any]
Piece = str | bytes  # bytes are final: no later step touches them
Step = Callable[[str], Piece]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for every byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1)]
    shown += range(ord("\u00ae"), ord("\u00ff") + 1)
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


_ALPHABET = byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:  # an added token may be spelled in any characters
        return piece.encode()


def _byte_fallback(piece: str) -> Piece:
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece


def _replace(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new)


def _word_piece(prefix: str) -> Step:
    return lambda piece: piece[len(prefix) :] if piece.startswith(prefix) else " " + piece


def _strip(content: str, start: int, stop: int) -> Step:
    def strip(piece: str) -> str:
        for _ in range(start):
            piece = piece.removeprefix(content)
        for _ in range(stop):
            piece = piece.removesuffix(content)
        return piece

    return strip


class TokenDecoder:
    """`of(piece)`: the output bytes of a token by the text the vocabulary has for it."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    @classmethod
    def read(cls, decoder: Json | None, pre_tokenizer: Json | None) -> "TokenDecoder":
        """Of the `decoder` member of a tokenizer.json, or without one by its `pre_tokenizer`.

        Raises TokenizerError for a decoder that has no bytes for a single token.
        """
        if decoder is None:
            if any(part.get("type") == "ByteLevel" for part in _flat(pre_tokenizer, "pretokenizers")):
                return cls([_byte_level])
            return cls([_replace("\u2581", " "), _byte_fallback])
        steps: list[Step] = []
        for part in _flat(decoder, "decoders"):
            kind = part.get("type")
            if kind == "Fuse":
                break
            steps.append(_step(kind, part))
            if kind == "ByteLevel":
                break
        return cls(steps)

    def of(self, piece: str) -> bytes:
        for step in self._steps:
            made = step(piece)
            if isinstance(made, bytes):
                return made
            piece = made
        return piece.encode()


def _flat(part: Json | None, members: str) -> list[Json]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [inner for member in part.get(members, ()) for inner in _flat(member, members)]
    return [part]


def _step(kind: Any, part: Json) -> Step:
    match kind:
        case "ByteLevel":
            return _byte_level
        case "ByteFallback":
            return _byte_fallback
        case "Metaspace":
            return _replace(part.get("replacement", "\u2581"), " ")
        case "Replace" if isinstance(old := part.get("pattern", {}).get("String"), str):
            return _replace(old, part.get("content", ""))
        case "WordPiece":
            return _word_piece(part.get("prefix", "##"))
        case "BPEDecoder":
            return _replace_end(part.get("suffix", "</w>"))
        case "Strip":
            return _strip(part.get("content", " "), part.get("start", 0), part.get("stop", 0))
        case "Replace":
            raise TokenizerError("its decoder Replace takes a regular expression, which has no bytes for one token")
    raise TokenizerError(f"its decoder {kind} is not known here")


def _replace_end(suffix: str) -> Step:
    return lambda piece: piece.removesuffix(suffix) + " " if piece.endswith(suffix) else piece
