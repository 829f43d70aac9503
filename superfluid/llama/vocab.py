"""The vocabulary of a GGUF file, as libllama tokenizes with it; no weights are read."""

import os
from typing import Any

from superfluid.link.ids import AT_ONCE, Ids, listed
from superfluid.llama.library import Library
from superfluid.llama.search import open_library

ATTR_UNUSED, ATTR_CONTROL, ATTR_USER_DEFINED = 2, 8, 16  # bits of a token's attributes


class Vocab:
    """A vocabulary that one thread or several may read. Close it, or use it as a context manager.

    `n_tokens` is the vocabulary size; `bos` and `eos` are ids, or None where the model has none.
    """

    def __init__(self, library: Library, model: Any, *, owned: bool) -> None:
        self.library = library
        self._model = model
        self._owned = owned
        self._api = library.api
        self._vocab = self._api.llama_model_get_vocab(model)
        self.n_tokens: int = self._api.llama_vocab_n_tokens(self._vocab)
        self.bos = self._id(self._api.llama_vocab_bos(self._vocab))
        self.eos = self._id(self._api.llama_vocab_eos(self._vocab))

    @classmethod
    def open(cls, path: str | os.PathLike[str], library: Library | None = None) -> "Vocab":
        """Open the file vocabulary-only. Raises LibraryError without a libllama, LoadError with its error lines."""
        library = library or open_library()
        params = library.api.llama_model_default_params()
        params.vocab_only = True
        return cls(library, library.load_model(path, params), owned=True)

    @classmethod
    def of_model(cls, library: Library, model: Any) -> "Vocab":
        """The vocabulary of a loaded model, which must outlive it."""
        return cls(library, model, owned=False)

    @staticmethod
    def _id(token: int) -> int | None:
        return token if token >= 0 else None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds what the family puts in front or behind."""
        raw = text.encode("utf-8", "replace")
        ffi = self.library.ffi
        room = len(raw) + 8
        out = ffi.new("llama_token[]", room)
        count = self._api.llama_tokenize(self._vocab, raw, len(raw), out, room, add_special, parse_special)
        if count < 0:
            room = -count
            out = ffi.new("llama_token[]", room)
            count = self._api.llama_tokenize(self._vocab, raw, len(raw), out, room, add_special, parse_special)
        if count > AT_ONCE:
            many = Ids("I")
            many.frombytes(ffi.buffer(out, ffi.sizeof("llama_token") * count))
            return listed(many)
        return list(ffi.unpack(out, count)) if count > 0 else []

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes a token stands for; `special` false gives none for control tokens."""
        self._check(token)
        ffi = self.library.ffi
        room = 64
        out = ffi.new("char[]", room)
        count = self._api.llama_token_to_piece(self._vocab, token, out, room, 0, special)
        if count < 0:
            room = -count
            out = ffi.new("char[]", room)
            count = self._api.llama_token_to_piece(self._vocab, token, out, room, 0, special)
        return bytes(ffi.buffer(out, count)) if count > 0 else b""

    def pieces(self, special: bool = True) -> list[bytes]:
        """`piece` of every token, in id order."""
        ffi, to_piece, vocab = self.library.ffi, self._api.llama_token_to_piece, self._vocab
        room = 256
        out = ffi.new("char[]", room)
        found = []
        for token in range(self.n_tokens):
            count = to_piece(vocab, token, out, room, 0, special)
            found.append(ffi.unpack(out, count) if count >= 0 else self.piece(token, special))
        return found

    def attr(self, token: int) -> int:
        """The attribute bits of a token (ATTR_*)."""
        self._check(token)
        return int(self._api.llama_vocab_get_attr(self._vocab, token))

    def text(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        self._check(token)
        return self.library.text(self._api.llama_vocab_get_text(self._vocab, token))

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return 0 <= token < self.n_tokens and bool(self._api.llama_vocab_is_eog(self._vocab, token))

    def template(self, name: str | None = None) -> str | None:
        """The chat template of that name, or the default one; an empty one counts as absent."""
        raw = self._api.llama_model_chat_template(self._model, name.encode() if name else self.library.ffi.NULL)
        return self.library.text(raw) or None

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None when it has none, or an array."""
        return self.library.metadata(self._model, key)

    def close(self) -> None:
        """Give the vocabulary's memory back; nothing may be asked afterwards."""
        if self._owned and self._model is not None:
            self._api.llama_model_free(self._model)
        self._model = self._vocab = None

    def __enter__(self) -> "Vocab":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise IndexError(f"token {token} is outside the vocabulary of {self.n_tokens}")
