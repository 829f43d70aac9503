"""The adapter against the kit's conformance suite, and what it says of models."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.engines.kit import conformance
from superfluid.engines.kit.check import check_report
from superfluid.engines.kit.runtime import Arguments, ModelRefused, RuntimeUnavailable
from superfluid.engines.llamacpp.runtime import LlamaCpp

Scripted = Callable[[str], Path]


def test_conformance() -> None:
    conformance.runtime(LlamaCpp())


def test_the_worker_s_conformance() -> None:
    conformance.worker([sys.executable, "-m", "superfluid.engines.llamacpp.worker"], "llamacpp")


def test_facts_of_a_model(scripted_gguf: Scripted) -> None:
    report = check_report(LlamaCpp(), Arguments(model=scripted_gguf("plain")))
    assert report["model"]["reads"] is True
    assert report["model"]["facts"] == {"architecture": "llama"}
    sizing = report["model"]["sizing"]
    assert sizing["trained_context"] == 4096
    assert sizing["weight_bytes"] == scripted_gguf("plain").stat().st_size


def test_a_model_with_a_damaged_vocabulary_has_no_facts(tmp_path: Path, scripted_gguf: Scripted) -> None:
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(scripted_gguf("plain").read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mode1"))
    facts = check_report(LlamaCpp(), Arguments(model=damaged))["model"]["facts"]
    assert isinstance(facts, str)
    assert "does not load: " in facts


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"holds no lib"):
        LlamaCpp().probe(Arguments(options={"lib": str(tmp_path)}))


def test_the_named_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERFLUID_LLAMA_LIB", raising=False)
    assert LlamaCpp().named(Arguments()) is None
    assert LlamaCpp().named(Arguments(options={"lib": "/a"})) == "/a"
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", "/b")
    assert LlamaCpp().named(Arguments()) == "/b"


def test_prepare_leaves_what_the_operator_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NO_BACKTRACE", "0")
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", "")
    LlamaCpp().prepare(Arguments(options={"lib": "/a"}))
    assert os.environ["GGML_NO_BACKTRACE"] == "0"
    assert os.environ["SUPERFLUID_LLAMA_LIB"] == "/a"


def test_open_refuses(tmp_path: Path, scripted_gguf: Scripted) -> None:
    runtime = LlamaCpp()
    text = tmp_path / "notes.gguf"
    text.write_text("hello")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(scripted_gguf("plain").read_bytes()[:100_000])
    for path, options, words in (
        (text, {}, "no GGUF magic"),
        (cut, {}, "does not load: "),
        (scripted_gguf("plain"), {"cache-type-v": "q8_0", "flash-attn": "off"}, "--cache-type-v"),
    ):
        with pytest.raises(ModelRefused, match=words):
            runtime.open(Arguments(model=path, options=options))


def test_open_has_at_least_the_least_window(scripted_gguf: Scripted) -> None:
    loaded = LlamaCpp().open(Arguments(model=scripted_gguf("plain"), max_context=100, max_batch=2))
    assert loaded.window == 512
    loaded.model.close()
