"""A GGUF file's tokenizer, through libllama opened vocabulary-only."""

from collections.abc import Iterable

from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.utf8 import decode_utf8
from superfluid.codec.words import BLOCK, Cuts, WordEncoder
from superfluid.link.ids import listed, packed
from superfluid.llama.vocab import ATTR_CONTROL, ATTR_UNUSED, ATTR_USER_DEFINED, Vocab


class GgufTokenizer:
    """A vocabulary of libllama, which this owns. Texts of any length encode in time linear in them."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.vocab_size = vocab.n_tokens
        self.bos = vocab.bos
        self.eos = vocab.eos or 0
        ids = range(self.vocab_size)
        attrs = [vocab.attr(i) for i in ids]
        self.stop_ids = frozenset(i for i in ids if vocab.is_eog(i))
        self._special = [
            (i, text) for i in ids if attrs[i] & (ATTR_CONTROL | ATTR_USER_DEFINED) and (text := vocab.text(i))
        ]
        silent = ATTR_CONTROL | ATTR_UNUSED
        self.table = TokenBytes(b"" if a & silent else p for a, p in zip(attrs, vocab.pieces(), strict=True))
        self.cuts = Cuts.learn(self._plain, self.table, [text for _, text in self._special])
        self._words = WordEncoder(self._bounded, self.cuts, self.table)
        around = vocab.encode("", add_special=True)
        leads = bool(around) and around[0] == self.bos
        self._before, self._behind = (around[:1], around[1:]) if leads else ([], around)

    def _plain(self, text: str) -> list[int]:
        """Ids without what the family puts in front or behind."""
        return self.vocab.encode(text, add_special=False, parse_special=True)

    def _bounded(self, text: str) -> list[int]:
        """The same of a text of any length."""
        if len(text) <= BLOCK:
            return self._plain(text)
        first, *rest = self.cuts.blocks(text)
        ids = packed(self._plain(first))
        for block in rest:
            ids.extend(self.cuts.following(self._plain, block))
        return listed(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special strings parse, and what the family adds in front and behind is added. A run of more
        than BLOCK characters without a newline or without anything but white space may be cut inside a word."""
        if len(text) <= BLOCK:
            return self.vocab.encode(text, add_special=True, parse_special=True)
        ids = packed(self._words.encode(text))
        for token in reversed(self._before):
            ids.insert(0, token)
        ids.extend(self._behind)
        return listed(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.table.of(token)

    def special_tokens(self) -> list[tuple[int, str]]:
        return list(self._special)

    def template(self, name: str | None = None) -> str | None:
        return self.vocab.template(name) or None

    def decode(self, tokens: Iterable[int]) -> str:
        return decode_utf8(self.table.join(tokens))
