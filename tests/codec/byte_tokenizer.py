"""A tokenizer of bytes and special strings, small enough to reason about in tests."""

import re
from collections.abc import Iterable

from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.utf8 import decode_utf8


class ByteTokenizer:
    """256 byte tokens, then `specials` in order. `silent` ones are control tokens: they have no bytes."""

    def __init__(
        self,
        specials: Iterable[str] = (),
        *,
        silent: Iterable[str] = (),
        bos: str | None = None,
        eos: str | None = None,
        auto_bos: bool = False,
        templates: dict[str | None, str] | None = None,
    ) -> None:
        self.specials = list(specials)
        self.ids = {text: 256 + i for i, text in enumerate(self.specials)}
        silent = set(silent)
        self.vocab_size = 256 + len(self.specials)
        self.bos = self.ids[bos] if bos else None
        self.eos = self.ids[eos] if eos else 0
        self.auto_bos = auto_bos
        self.stop_ids = frozenset([self.eos])
        self.templates = templates or {}
        self.table = TokenBytes(
            [bytes([b]) for b in range(256)] + [b"" if s in silent else s.encode() for s in self.specials]
        )
        words = sorted(map(re.escape, self.specials), key=len, reverse=True)
        self._pattern = re.compile("|".join(words)) if words else re.compile(r"(?!)")
        self.encoded: list[str] = []  # every text that was asked for

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        out = [self.bos] if self.auto_bos and self.bos is not None else []
        at = 0
        for match in self._pattern.finditer(text):
            out += text[at : match.start()].encode()
            out.append(self.ids[match[0]])
            at = match.end()
        return [*out, *text[at:].encode()]

    def token_bytes(self, token: int) -> bytes:
        return self.table.of(token)

    def special_tokens(self) -> list[tuple[int, str]]:
        return [(token, text) for text, token in self.ids.items()]

    def template(self, name: str | None = None) -> str | None:
        return self.templates.get(name)

    def decode(self, tokens: Iterable[int]) -> str:
        return decode_utf8(self.table.join(tokens))

    def spell(self, tokens: Iterable[int]) -> str:
        """Text of tokens with specials spelled out, for assertions."""
        return b"".join(bytes([t]) if t < 256 else self.specials[t - 256].encode() for t in tokens).decode()


CHATML_MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CHATML_SILENT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def chatml_tokenizer(template: str | None = None, tool_use: str | None = None) -> ByteTokenizer:
    """A ChatML vocabulary over bytes."""
    templates: dict[str | None, str] = {}
    if template is not None:
        templates[None] = template
    if tool_use is not None:
        templates["tool_use"] = tool_use
    return ByteTokenizer(CHATML_MARKERS, silent=CHATML_SILENT, eos="<|im_end|>", templates=templates)
