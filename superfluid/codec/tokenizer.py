"""What the codec asks of a vocabulary."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A vocabulary; immutable once open, so it may be used from several threads at once."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]:
        """Every end-of-generation id: the engine's stop set."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special strings parse and the family's BOS policy applies."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The token's output bytes; empty for a control or unused token and out of range."""
        ...

    def special_tokens(self) -> list[tuple[int, str]]: ...
    def template(self, name: str | None = None) -> str | None:
        """The default chat template, or the one of that name."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of a finished span; special tokens print nothing."""
        ...


class TokenBytes:
    """The output bytes of every token, packed: one buffer and its offsets instead of a Python object per token."""

    __slots__ = ("data", "offsets", "size")

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.offsets = array("L", [0])
        chunks: list[bytes] = []
        end = 0
        for piece in pieces:
            chunks.append(piece)
            end += len(piece)
            self.offsets.append(end)
        self.data = b"".join(chunks)
        self.size = len(self.offsets) - 1

    def of(self, token: int) -> bytes:
        """Bytes of one token; empty out of range."""
        if 0 <= token < self.size:
            return self.data[self.offsets[token] : self.offsets[token + 1]]
        return b""

    def join(self, tokens: Iterable[int]) -> bytes:
        """Bytes of a span."""
        data, offsets, size = self.data, self.offsets, self.size
        return b"".join([data[offsets[t] : offsets[t + 1]] for t in tokens if 0 <= t < size])


def bytes_table(tokenizer: Tokenizer) -> TokenBytes:
    """The tokenizer's packed bytes: its own table, or one made by asking for every id."""
    table = getattr(tokenizer, "table", None)
    if isinstance(table, TokenBytes):
        return table
    return TokenBytes(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id when `text` encodes to exactly one token (never with a BOS in front)."""
    ids = tokenizer.encode(text)
    return ids[0] if len(ids) == 1 else None


def is_prefix(short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether a token span begins with another."""
    return len(short) <= len(long) and list(long[: len(short)]) == list(short)
