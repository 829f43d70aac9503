"""Hugging Face model directories with the vocabularies of published GGUF files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.models import tokenizer_fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of a GGUF file
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}


def build(vocabulary: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a GGUF vocabulary as the `tokenizers` package makes it, and its tokenizer_config."""
    fields = {key.removeprefix("tokenizer.ggml."): value[2] for key, value in tokenizer_fields(vocabulary).items()}
    texts = [text.decode() for text in fields["tokens"]]
    kinds = fields["token_type"]
    ids = {text: token for token, text in enumerate(texts)}
    made = _sentencepiece(ids, fields) if fields["model"] == "llama" else _byte_level(ids, fields, vocabulary)
    made.add_special_tokens([AddedToken(texts[i], special=True) for i, kind in enumerate(kinds) if kind == CONTROL])
    made.add_tokens([AddedToken(texts[i]) for i, kind in enumerate(kinds) if kind == USER_DEFINED])
    config = {"eos_token": texts[fields["eos_token_id"]]}
    if "bos_token_id" in fields:
        config["bos_token"] = texts[fields["bos_token_id"]]
    if fields.get("add_bos_token", fields["model"] == "llama"):
        bos = config["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fields["bos_token_id"])]
        )
    return made, config


def _byte_level(ids: dict[str, int], fields: dict[str, Any], vocabulary: Path) -> Tokenizer:
    merges = [tuple(merge.decode().split(" ")) for merge in fields["merges"]]
    name = vocabulary.stem.removeprefix("ggml-vocab-")
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=name == "llama-bpe"))
    if name in SPLITS:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(ids: dict[str, int], fields: dict[str, Any]) -> Tokenizer:
    scores = fields["scores"]
    normal = {text for text, token in ids.items() if fields["token_type"][token] == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for text in normal:
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in normal and right in normal:
                ranked.append((-scores[ids[text]], ids[left], left, right))
    ranked.sort()
    merges = [(left, right) for _, _, left, right in ranked]
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def write(folder: Path, vocabulary: Path, **files: Any) -> Path:
    """A model directory with that vocabulary; `files` by name, `config="..."` as text or objects as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    made, config = build(vocabulary)
    made.enable_truncation(16)
    made.enable_padding(length=32)
    made.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
