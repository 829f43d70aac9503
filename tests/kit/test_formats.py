"""Formats: which paths match, without opening what is no regular file."""

import os
from pathlib import Path

import pytest

from superfluid.engines.kit.formats import DirectoryRule, FileRule, Format
from tests.kit.toy_runtime import Toy

GGUF = FileRule(("gguf",), "GGUF")


def test_an_extension_is_enough(tmp_path: Path) -> None:
    assert GGUF.matches(tmp_path / "not-there.gguf")
    assert GGUF.matches(tmp_path / "not-there.GgUf")
    assert not GGUF.matches(tmp_path / "gguf")
    assert not GGUF.matches(tmp_path / "model.gguf.part")


def test_a_magic_needs_a_regular_file(tmp_path: Path) -> None:
    named = tmp_path / "weights"
    named.write_bytes(b"GGUF....")
    assert GGUF.matches(named)
    named.write_bytes(b"GGU")
    assert not GGUF.matches(named)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert not GGUF.matches(fifo)  # opening it would block for ever
    assert not GGUF.matches(Path("/dev/zero"))
    assert not GGUF.matches(tmp_path)


def test_a_directory_needs_every_file_and_one_extension(tmp_path: Path) -> None:
    rule = DirectoryRule(("config.json", "tokenizer.json"), ("safetensors",))
    assert not rule.matches(tmp_path / "missing")
    for name in ("config.json", "tokenizer.json", "model.SAFETENSORS"):
        assert not rule.matches(tmp_path)
        (tmp_path / name).write_text("{}")
    assert not rule.matches(tmp_path)  # exact case
    (tmp_path / "model.safetensors").write_text("")
    assert rule.matches(tmp_path)
    assert not rule.matches(tmp_path / "config.json")


def test_reports_read_back() -> None:
    for form in Toy().info().formats:
        assert Format.from_report(form.report()) == form
    assert Format.from_report({"id": "x", "describe": "neither rule"}) is None


@pytest.mark.parametrize("name", ["notes.txt", "missing.bin"])
def test_a_refusal_names_the_path_and_what_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refused = Toy().reads(tmp_path / name)
    assert refused is not None
    assert str(tmp_path / name) in refused
    assert "a toy file or a toy directory" in refused or "no such file or directory" in refused
