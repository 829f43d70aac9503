"""Models that tests and benchmarks run: scripted ones, and tiny random ones with a real vocabulary."""

import importlib.util
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
    tool.write(path, name, context)
    return path


def copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> int:
    """Copy every tokenizer field of a GGUF file; the vocabulary size."""
    n_tokens = 0
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type)
        if name == "tokenizer.ggml.tokens":
            n_tokens = len(value)
    return n_tokens


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
