"""Tokenizer libraries: a C interface through which any program ships its own tokenizer (spec: tokenizer_abi)."""

import os
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cffi import FFI

from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.utf8 import decode_utf8

ABI_VERSION = 1
PREFIX = "superfluid_tokenizer_"
REASON_BYTES = 1024  # room for why a model does not open
NONE_OF_THAT_NAME = (1 << (8 * struct.calcsize("N"))) - 1  # SIZE_MAX

_ffi = FFI()
_ffi.cdef(
    """
    uint32_t superfluid_tokenizer_abi_version(void);
    void *superfluid_tokenizer_open(const char *model, char *err, size_t err_len);
    void superfluid_tokenizer_close(void *handle);
    size_t superfluid_tokenizer_encode(void *handle, const uint8_t *text, size_t len, uint32_t *out, size_t cap);
    size_t superfluid_tokenizer_token_bytes(void *handle, uint32_t id, uint8_t *out, size_t cap);
    uint32_t superfluid_tokenizer_vocab_size(void *handle);
    size_t superfluid_tokenizer_special_tokens(void *handle, uint8_t *out, size_t cap);
    int64_t superfluid_tokenizer_bos(void *handle);
    uint32_t superfluid_tokenizer_eos(void *handle);
    size_t superfluid_tokenizer_chat_template(void *handle, const char *name, uint8_t *out, size_t cap);
    """
)
_SYMBOLS = (
    "abi_version", "open", "close", "encode", "token_bytes", "vocab_size", "special_tokens", "bos", "eos",
    "chat_template",
)  # fmt: skip


@cache
def load_library(path: Path) -> SimpleNamespace:
    """The functions of a tokenizer library, by their names without the prefix. Opened once and never unloaded.

    Raises TokenizerError: it does not load, lacks a symbol, or speaks another version.
    """
    try:
        library = _ffi.dlopen(str(path), _ffi.RTLD_NOW | _ffi.RTLD_LOCAL)
    except OSError as error:
        raise TokenizerError(f"the tokenizer library {path} does not load: {error}") from None
    functions: dict[str, Callable[..., Any]] = {}
    for symbol in _SYMBOLS:
        try:
            functions[symbol] = getattr(library, PREFIX + symbol)
        except AttributeError:
            raise TokenizerError(f"the tokenizer library {path} has no symbol {PREFIX}{symbol}") from None
    version = functions["abi_version"]()
    if version != ABI_VERSION:
        raise TokenizerError(
            f"the tokenizer library {path} speaks interface version {version}, this daemon {ABI_VERSION}"
        )
    return SimpleNamespace(library=library, **functions)  # which keeps the library's object


class LibraryTokenizer:
    """A model's tokenizer in a tokenizer library; close it, or use it as a context manager."""

    def __init__(self, functions: SimpleNamespace, handle: Any) -> None:
        self._api = functions
        self._handle = handle
        self.vocab_size = int(functions.vocab_size(handle))
        bos = int(functions.bos(handle))
        self.bos = bos if bos >= 0 else None
        self.eos = int(functions.eos(handle))
        self.stop_ids = frozenset([self.eos])
        self._special = list(_records(self._bytes(functions.special_tokens, handle, room=1 << 16)))
        token_bytes = functions.token_bytes
        self.table = TokenBytes(self._bytes(token_bytes, handle, token) for token in range(self.vocab_size))

    @classmethod
    def open(cls, library: str | os.PathLike[str], model: str | os.PathLike[str]) -> "LibraryTokenizer":
        """The tokenizer of a model by the library file at `library`. Raises TokenizerError with its reason."""
        functions = load_library(Path(library).resolve())
        reason = _ffi.new("char[]", REASON_BYTES)
        handle = functions.open(os.fsencode(model), reason, REASON_BYTES)
        if handle == _ffi.NULL:
            why = _ffi.string(reason, REASON_BYTES).decode("utf-8", "replace") or "it gives no reason"
            raise TokenizerError(f"the tokenizer library {library} does not open {os.fspath(model)}: {why}")
        return cls(functions, handle)

    @staticmethod
    def _bytes(function: Callable[..., int], *arguments: Any, room: int = 64) -> bytes:
        """What a function writes, called again when it needs more room."""
        while True:
            out = _ffi.new("uint8_t[]", room)
            size = function(*arguments, out, room)
            if size <= room:
                return bytes(_ffi.buffer(out, size))
            room = size

    def encode(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        while True:
            out = _ffi.new("uint32_t[]", room)
            count = self._api.encode(self._handle, raw, len(raw), out, room)
            if count <= room:
                return list(_ffi.unpack(out, count)) if count else []
            room = count

    def token_bytes(self, token: int) -> bytes:
        return self.table.of(token)

    def special_tokens(self) -> list[tuple[int, str]]:
        return list(self._special)

    def template(self, name: str | None = None) -> str | None:
        asked = _ffi.NULL if name is None else _ffi.new("char[]", name.encode())
        size = self._api.chat_template(self._handle, asked, _ffi.NULL, 0)
        if size in (0, NONE_OF_THAT_NAME):
            return None
        return self._bytes(self._api.chat_template, self._handle, asked, room=size).decode("utf-8", "replace")

    def decode(self, tokens: Iterable[int]) -> str:
        return decode_utf8(self.table.join(tokens))

    def close(self) -> None:
        """Free the library's handle; nothing may be asked afterwards."""
        handle, self._handle = self._handle, _ffi.NULL
        self._api.close(handle)

    def __enter__(self) -> "LibraryTokenizer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _records(data: bytes) -> Iterable[tuple[int, str]]:
    """The special tokens of a library's reply; a record that is cut off is left out."""
    at = 0
    while at + 8 <= len(data):
        token, size = struct.unpack_from("<II", data, at)
        at += 8
        if at + size > len(data):
            return
        yield token, data[at : at + size].decode("utf-8", "replace")
        at += size
