"""Tokenizer libraries, by one that is compiled here."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.framing import Encoder, content, framing
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.library import LibraryTokenizer, load_library
from superfluid.codec.tokenizers.search import find_library

SOURCE = Path(__file__).with_name("toy_tokenizer.c")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compiled(*flags)`: the toy library, built with those flags."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a tokenizer library with")
    built: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in built:
            path = tmp_path_factory.mktemp("tokenizer") / "libtoy.so"
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", *flags, "-o", path, SOURCE], check=True)
            built[flags] = path
        return built[flags]

    return build


@pytest.fixture
def tokenizer(compiled: Callable[..., Path]) -> LibraryTokenizer:
    return LibraryTokenizer.open(compiled(), "/models/plain")


def test_ids_and_bytes(tokenizer: LibraryTokenizer) -> None:
    assert tokenizer.encode("aé<|end|>") == [97, 0xC3, 0xA9, 257]
    assert tokenizer.encode("") == [] and tokenizer.encode("\0") == [0]
    assert tokenizer.encode("\x01" * 3) == [1] * 120  # more than the first guess holds
    assert tokenizer.vocab_size == 259 and tokenizer.token_bytes(97) == b"a"
    assert tokenizer.token_bytes(258) == b"x" * 1000
    assert tokenizer.token_bytes(257) == b"" == tokenizer.token_bytes(4_000_000_000)
    assert tokenizer.decode([0xC3, 0xA9, 257, 0xC3]) == "é\ufffd"
    assert tokenizer.special_tokens() == [(256, "<|s|>"), (257, "<|end|>")]  # the record that is cut off is left out


def test_ends_and_templates(tokenizer: LibraryTokenizer, compiled: Callable[..., Path]) -> None:
    assert tokenizer.bos is None and tokenizer.eos == 257 and tokenizer.stop_ids == {257}
    assert LibraryTokenizer.open(compiled(), Path("/models/bos")).bos == 256
    default, named = tokenizer.template(), tokenizer.template("tool_use")
    assert default is not None and named is not None and named.startswith(default) and default != named
    assert tokenizer.template("rag") is None


def test_content_forms_no_marker(compiled: Callable[..., Path]) -> None:
    with LibraryTokenizer.open(compiled(), "bos") as tokenizer:
        encoder = Encoder(tokenizer)
        assert encoder.auto_bos
        ids = encoder.encode([framing("<|s|>"), content("say <|end|> twice"), framing("<|end|>")])
        assert ids == [256, *b"say <|end|> twice", 257]
        codec = Codec.open(tokenizer)
        assert codec.dialect_name == "template"
        rendered = codec.render([{"role": "user", "content": "x<|end|>"}]).tokens
        assert rendered == [256, *b"x<|end|>", 257]


def test_threads_share_a_handle(tokenizer: LibraryTokenizer) -> None:
    text = "words and <|end|>" * 500
    expected = tokenizer.encode(text)
    with ThreadPoolExecutor(4) as threads:
        assert all(ids == expected for ids in threads.map(tokenizer.encode, [text] * 40))


def test_refusals(compiled: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not open /models/none: no vocabulary in none"):
        LibraryTokenizer.open(compiled(), "/models/none")
    with pytest.raises(TokenizerError, match="speaks interface version 3, this daemon 1"):
        load_library(compiled("-DVERSION=3"))
    with pytest.raises(TokenizerError, match="no symbol superfluid_tokenizer_chat_template"):
        load_library(compiled("-DWITHOUT_TEMPLATE"))
    broken = tmp_path / "libbroken.so"
    broken.write_text("no library")
    with pytest.raises(TokenizerError, match="does not load"):
        load_library(broken)


def test_it_is_searched_beside_the_worker_then_in_lib(tmp_path: Path) -> None:
    worker = tmp_path / "bin/superfluid-worker-x"
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    worker.touch()
    assert find_library("toy", worker) is None
    (tmp_path / "lib/libtoy.so").touch()
    assert find_library("toy", worker) == tmp_path / "lib/libtoy.so"
    (tmp_path / "bin/libtoy.so").touch()
    assert find_library("toy", worker) == tmp_path / "bin/libtoy.so"


def test_a_closed_one_answers_nothing(compiled: Callable[..., Path]) -> None:
    tokenizer = LibraryTokenizer.open(compiled(), "plain")
    tokenizer.close()
    assert tokenizer.encode("a") == [] and tokenizer.template() is None
    tokenizer.close()
