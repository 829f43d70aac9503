"""The header of a GGUF file."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, strategies as st

from superfluid.llama.header import HeaderError, check_magic, read_header, shards


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_context_length(2048)
    writer.add_array("llama.attention.head_count_kv", [4, 0, 4])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_bool("llama.flag", True)
    writer.add_array("llama.attention.sliding_window_pattern", [True, False, True])
    writer.add_name("büro")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf"))
    assert header.architecture == "llama"
    assert header.number("block_count") == 3
    assert header.value("attention.head_count_kv") == [4, 0, 4]
    assert header.value("attention.sliding_window_pattern") == [True, False, True]
    assert header.number("attention.head_count_kv") == header.number("no.such") == 0
    assert header.metadata["general.sampling.temp"] == 0.5
    assert header.metadata["general.name"] == "büro"
    assert header.metadata["llama.flag"] is True
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.n_bytes == (tmp_path / "m.gguf").stat().st_size


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("hello")
    assert check_magic(text) == f"{text} is not a GGUF file (no GGUF magic)"
    assert check_magic(tmp_path) == f"{tmp_path} is not a file; a GGUF model is one file"
    os.mkfifo(tmp_path / "fifo")
    assert check_magic(tmp_path / "fifo") == f"{tmp_path / 'fifo'} is not a file; a GGUF model is one file"
    assert "no such file" in (check_magic(tmp_path / "none") or "")
    named_otherwise = tmp_path / "blob"
    named_otherwise.write_bytes(b"GGUF")
    assert check_magic(named_otherwise) is None


def test_shards(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00003.gguf"
    names = [path.name for path in shards(first)]
    assert names == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    assert shards(tmp_path / "m-1-of-3.gguf") == (tmp_path / "m-1-of-3.gguf",)
    with pytest.raises(HeaderError, match=r"m-00002-of-00003\.gguf is not beside it"):
        read_header(write(first))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("header") / "m.gguf").read_bytes()


@given(data=st.data())
def test_damage_is_told_and_never_crashes(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(damaged[: data.draw(st.integers(4, len(whole)))]))
    try:
        read_header(path)
    except HeaderError as error:
        assert str(path) in str(error)
