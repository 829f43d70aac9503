"""Incremental UTF-8: complete characters pass at once, an unfinished tail waits for the next bytes."""

from codecs import utf_8_decode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Utf8Stream:
    """One lane's bytes as text. A byte that can never continue is U+FFFD at once, one per maximal invalid part."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._tail)

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        if self._tail:
            data = self._tail + data
        elif data.isascii():
            return data.decode("ascii")
        text, used = utf_8_decode(data, "replace", False)
        tail = data[used:]
        if tail[:1] == b"\xed" and tail[1:2] >= b"\xa0":  # half a surrogate pair, for which the decoder waits in vain
            text += REPLACEMENT * len(tail)
            tail = b""
        self._tail = tail
        return text

    def flush(self) -> str:
        """U+FFFD for an unfinished tail, else nothing. The stream starts anew."""
        if not self._tail:
            return ""
        self._tail = b""
        return REPLACEMENT


def decode_utf8(data: bytes) -> str:
    """All of `data` as one finished stream."""
    return data.decode("utf-8", "replace")
