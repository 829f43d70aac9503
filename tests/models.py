"""Models that tests and benchmarks run: scripted ones, and tiny random ones with a real vocabulary."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_scripted(shared: Path, name: str, path: Path, context: int = 4096) -> Path:
    """A model whose greedy reply is the script `name`; see the tool it is written with."""
    spec = importlib.util.spec_from_file_location("scripted_gguf", shared / "tools/scripted_gguf.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    # a call in pieces, so that a limit may cut it anywhere
    pieces = ["<tool_call>", '\n{"name": "get_weather", ', '"arguments": {"city": ', '"Par', 'is"}}\n', "</tool_call>"]
    tool.SCRIPTS["split_tool"] = ("tools", [*pieces, tool.END])
    tool.write(path, name, context)
    return path


def _strings(data: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    size_at = struct.Struct("<Q").unpack_from
    found = []
    for _ in range(count):
        end = at + 8 + size_at(data, at)[0]
        found.append(data[at + 8 : end])
        at = end
    return found, at


def tokenizer_fields(source: Path) -> dict[str, tuple[gguf.GGUFValueType, gguf.GGUFValueType | None, Any]]:
    """The tokenizer's metadata of a GGUF file: type, element type of an array, value. Quicker than the gguf package,
    which takes seconds over a vocabulary."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    data = source.read_bytes()
    _, count = struct.unpack_from("<QQ", data, 8)
    at = 24
    found = {}
    for _ in range(count):
        (key,), at = _strings(data, at, 1)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        element, n_values = (struct.unpack_from("<IQ", data, at)) if kind == gguf.GGUFValueType.ARRAY else (kind, 1)
        at += 12 if kind == gguf.GGUFValueType.ARRAY else 0
        values: Any
        if element == gguf.GGUFValueType.STRING:
            values, at = _strings(data, at, n_values)
        else:
            values = struct.unpack_from(f"<{n_values}{scalars[element]}", data, at)
            at += struct.calcsize(f"<{n_values}{scalars[element]}")
        if key.startswith(b"tokenizer."):
            array = kind == gguf.GGUFValueType.ARRAY
            value = list(values) if array else values[0]
            if kind == gguf.GGUFValueType.STRING:
                value = bytes(value).decode()
            found[key.decode()] = (gguf.GGUFValueType(kind), gguf.GGUFValueType(element) if array else None, value)
    return found


def copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> int:
    """Copy every tokenizer field of a GGUF file; the vocabulary size."""
    fields = tokenizer_fields(source)
    for name, (kind, element, value) in fields.items():
        writer.add_key_value(name, value, kind, element)
    return len(fields["tokenizer.ggml.tokens"][2])


def write_vocabulary(path: Path, source: Path, **changed: Any) -> Path:
    """A model of nothing but the vocabulary of `source`, with `tokenizer.ggml.<key>` fields of other values."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (kind, element, value) in tokenizer_fields(source).items():
        writer.add_key_value(name, changed.get(name.removeprefix("tokenizer.ggml."), value), kind, element)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_random(
    path: Path,
    vocabulary: Path,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    heads_kv: int = 2,
    feed_forward: int = 128,
    context: int = 4096,
    window: int = 0,
    seed: int = 1,
) -> Path:
    """A random llama-shaped model with the vocabulary of the GGUF file `vocabulary`; the same file for the same seed.

    A `window` above 0 makes it a sliding-window model (Gemma 2's shape has one on every other layer).
    """
    random = np.random.default_rng(seed)
    arch = "gemma2" if window else "llama"
    head = width // heads
    writer = gguf.GGUFWriter(str(path), arch)
    n_tokens = copy_tokenizer(vocabulary, writer)
    writer.add_name("tiny-random")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_tokens)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if window:
        writer.add_sliding_window(window)
        writer.add_key_length(head)
        writer.add_value_length(head)
    else:
        writer.add_rope_dimension_count(head)

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float16)

    ones = np.ones(width, np.float32)
    writer.add_tensor("token_embd.weight", random.standard_normal((n_tokens, width)).astype(np.float16))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        block = f"blk.{layer}"
        norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if window else [])
        for norm in norms:
            writer.add_tensor(f"{block}.{norm}.weight", ones)
        writer.add_tensor(f"{block}.attn_q.weight", matrix(width, width))
        writer.add_tensor(f"{block}.attn_k.weight", matrix(head * heads_kv, width))
        writer.add_tensor(f"{block}.attn_v.weight", matrix(head * heads_kv, width))
        writer.add_tensor(f"{block}.attn_output.weight", matrix(width, width))
        writer.add_tensor(f"{block}.ffn_gate.weight", matrix(feed_forward, width))
        writer.add_tensor(f"{block}.ffn_up.weight", matrix(feed_forward, width))
        writer.add_tensor(f"{block}.ffn_down.weight", matrix(width, feed_forward))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
