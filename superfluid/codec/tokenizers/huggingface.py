"""Hugging Face model directories: tokenizer.json through the `tokenizers` package, and the files beside it."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import tokenizers as huggingface

from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.tokenizers.decoder import TokenDecoder
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.utf8 import decode_utf8

PADDING = 1 << 20  # ids that a configuration may add to the tokenizer's own; more is a damaged file

Json = Any


@attrs.frozen
class ModelFiles:
    """What a model's files say about its tokenizer. `templates` by name, the default one under ""."""

    tokenizer: str
    tokenizer_config: Mapping[str, Json] = attrs.field(factory=dict)
    generation_config: Mapping[str, Json] = attrs.field(factory=dict)
    config: Mapping[str, Json] = attrs.field(factory=dict)
    templates: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def of_directory(cls, path: str | os.PathLike[str]) -> "ModelFiles":
        """The files of a model directory; a file's path means its directory. Raises TokenizerError."""
        folder = Path(path)
        if folder.is_file():
            folder = folder.parent
        try:
            tokenizer = (folder / "tokenizer.json").read_text()
        except OSError as error:
            raise TokenizerError(f"{folder} has no readable tokenizer.json: {error.strerror}") from None
        config = _read_object(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            templates = {"": template.read_text()}
        else:
            templates = named_templates(config.get("chat_template"))
            if not templates:
                templates = named_templates(_read_object(folder / "chat_template.json").get("chat_template"))
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text()
        return cls(
            tokenizer,
            config,
            _read_object(folder / "generation_config.json"),
            _read_object(folder / "config.json"),
            templates,
        )

    @classmethod
    def of_bundle(cls, path: str | os.PathLike[str]) -> "ModelFiles | None":
        """The tokenizer inside a `.base` bundle; None when it carries none. Raises OSError."""
        with open(path, "rb") as file:
            start = file.read(16)
            if len(start) < 16 or start[:4] != b"BASE":
                return None
            (size,) = struct.unpack_from("<Q", start, 8)
            if size == 0 or size > os.fstat(file.fileno()).st_size - 16:
                return None
            try:
                header = json.loads(file.read(size))
            except ValueError:
                return None
        part = header.get("tokenizer") if isinstance(header, dict) else None
        if not isinstance(part, dict) or part.get("tokenizer_type", "hf") != "hf" or "tokenizer.json" not in part:
            return None
        config = _object(part.get("tokenizer_config.json"))
        templates = named_templates(config.get("chat_template"))
        if isinstance(own := part.get("tokenizer.chat_template"), str) and own:
            templates = {**templates, "": own}
        tokenizer = part["tokenizer.json"]
        text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
        return cls(text, config, config=_object(header.get("config")), templates=templates)


def _object(value: Json) -> dict[str, Json]:
    """A JSON object, given as one or as its text; empty for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Json]:
    """A JSON object of a file; empty when there is no such file. Raises TokenizerError when it is something else."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def named_templates(value: Json) -> dict[str, str]:
    """Templates by name, of a string, a list of `{name, template}` or an object; "" is `default`, else the first."""
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, list):
        value = {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry
        }
    if not isinstance(value, dict):
        return {}
    found = {name: text for name, text in value.items() if isinstance(text, str)}
    if found:
        found[""] = found.get("default", next(iter(found.values())))
    return found


class HuggingFaceTokenizer:
    """A tokenizer.json with what its model's files say about end of sequence, size and templates.

    Raises TokenizerError when the files do not make a tokenizer.
    """

    def __init__(self, files: ModelFiles) -> None:
        try:
            self._tokenizer = huggingface.Tokenizer.from_str(files.tokenizer)
            described = json.loads(files.tokenizer)
        except Exception as error:  # the package raises nothing narrower
            raise TokenizerError(f"its tokenizer.json does not load: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = files.templates
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eos = _eos(files, vocabulary)
        self.stop_ids = frozenset([self.eos, *_end_ids(files.generation_config), *_end_ids(files.config)])
        self.bos = vocabulary.get(_token_text(files.tokenizer_config.get("bos_token")))
        own = max(vocabulary.values(), default=-1) + 1
        self.vocab_size = _vocab_size(files.config, own)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = [(token, made.content) for token, made in sorted(added.items())]
        decoder = TokenDecoder.read(described.get("decoder"), described.get("pre_tokenizer"))
        pieces = [b""] * self.vocab_size
        for text, token in vocabulary.items():
            if token not in added or not added[token].special:
                pieces[token] = decoder.of(text)
        self.table = TokenBytes(pieces)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "HuggingFaceTokenizer":
        """The tokenizer of a model directory. Raises TokenizerError."""
        return cls(ModelFiles.of_directory(path))

    def encode(self, text: str) -> list[int]:
        if not text.isascii():  # half of a surrogate pair is no text
            text = text.encode("utf-8", "replace").decode()
        # of the package's calls the one that keeps no offsets: quicker, and short while it holds the interpreter's lock
        ids: list[int] = self._tokenizer.encode_batch_fast([text])[0].ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.table.of(token)

    def special_tokens(self) -> list[tuple[int, str]]:
        return list(self._special)

    def template(self, name: str | None = None) -> str | None:
        return self._templates.get(name or "") or None

    def decode(self, tokens: Iterable[int]) -> str:
        return decode_utf8(self.table.join(tokens))


def _token_text(value: Json) -> str:
    """A special token of a tokenizer_config: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _parts(config: Mapping[str, Json]) -> Iterable[Mapping[str, Json]]:
    """A configuration, and that of its text model."""
    yield config
    if isinstance(inner := config.get("text_config"), dict):
        yield inner


def _end_ids(config: Mapping[str, Json]) -> list[int]:
    """The `eos_token_id` of a configuration, one or several."""
    for part in _parts(config):
        value = part.get("eos_token_id")
        ids = [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
        if ids:
            return ids
    return []


def _eos(files: ModelFiles, vocabulary: Mapping[str, int]) -> int:
    token = vocabulary.get(_token_text(files.tokenizer_config.get("eos_token")))
    if token is not None:
        return token
    ids = _end_ids(files.generation_config) or _end_ids(files.config)
    if not ids:
        raise TokenizerError(
            "it names no end of sequence: neither an eos_token of its vocabulary in tokenizer_config.json, nor an "
            "eos_token_id in generation_config.json or config.json"
        )
    return ids[0]


def _vocab_size(config: Mapping[str, Json], own: int) -> int:
    """With the ids that pad the model's matrix."""
    stated = next((part["vocab_size"] for part in _parts(config) if isinstance(part.get("vocab_size"), int)), 0)
    if stated > own + PADDING:
        raise TokenizerError(f"config.json says vocab_size {stated}, the tokenizer has only {own} tokens")
    return max(own, int(stated))
