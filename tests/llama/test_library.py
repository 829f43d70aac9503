"""Search, functions and layout proof of libllama, on the library of this environment."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from superfluid.llama import library as library_module
from superfluid.llama.declaration import FUNCTIONS, LAYOUTS
from superfluid.llama.library import ErrorLog, Library, LibraryError, load
from superfluid.llama.proof import FILL, RESULT_BYTES, call_getter, wrong_fields
from superfluid.llama.search import NAMES, open_library, search


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


def compile_library(path: Path, source: str) -> Path:
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"], input=source.encode(), check=True)
    return path


def fake_source(*, missing: str = "", context: bytes = bytes(168), model: bytes = bytes(80)) -> str:
    """A library with every function, whose getters give these parameters."""
    getters = {"llama_context_default_params": context, "llama_model_default_params": model}
    lines = []
    for name in FUNCTIONS:
        if name == missing:
            continue
        if name in getters:
            values = ", ".join(str(byte) for byte in getters[name])
            lines.append(f"struct {name}_s {{ unsigned char b[{len(getters[name])}]; }};")
            lines.append(f"struct {name}_s {name}(void) {{ struct {name}_s r = {{{{ {values} }}}}; return r; }}")
        else:
            lines.append(f"void *{name}(void) {{ return 0; }}")
    return "\n".join(lines)


def default_params(library: Library, name: str) -> bytes:
    address = int(library.ffi.cast("uintptr_t", getattr(library.api, f"llama_{name}_default_params")))
    return bytes(call_getter(address)[: library.ffi.sizeof(f"struct llama_{name}_params")])


def test_the_library_is_found_proved_and_versioned(library: Library) -> None:
    assert library.layout in LAYOUTS
    assert library.version.startswith("llama.cpp ")
    assert library.devices()


def test_it_is_loaded_once(library: Library) -> None:
    assert open_library() is library


@pytest.mark.parametrize(("index", "size"), [(0, 160), (1, 168)])
def test_sizes_of_the_declared_layouts(index: int, size: int) -> None:
    ffi = LAYOUTS[index].declare()
    assert ffi.sizeof("struct llama_context_params") == size
    assert ffi.sizeof("struct llama_model_params") == 80


def test_offsets_of_what_is_zero_by_default() -> None:
    """The order of these fields cannot be proved by their values."""
    for layout, shift in ((LAYOUTS[0], 0), (LAYOUTS[1], 8)):
        ffi = layout.declare()
        context = {name: field.offset for name, field in ffi.typeof("struct llama_context_params").fields}
        assert context["cb_eval"] == 88
        assert context["cb_eval_user_data"] == 96
        assert context["abort_callback"] == 112 + shift
        assert context["abort_callback_data"] == 120 + shift
        assert context["samplers"] == 136 + shift
        assert context["n_samplers"] == 144 + shift
        assert context["ctx_other"] == 152 + shift
        model = {name: field.offset for name, field in ffi.typeof("struct llama_model_params").fields}
        assert model["devices"] == 0
        assert model["tensor_split"] == 40
        assert model["kv_overrides"] == 64
        assert model["vocab_only"] == 72
        assert model["load_mtp"] == 77


def test_the_getter_writes_into_our_buffer(library: Library) -> None:
    address = int(library.ffi.cast("uintptr_t", library.api.llama_context_default_params))
    result = call_getter(address)
    size = library.ffi.sizeof("struct llama_context_params")
    assert len(result) == RESULT_BYTES
    assert set(result[size:]) == {FILL}
    assert wrong_fields(library.ffi, result, "struct llama_context_params", {"n_ctx": 511}) == [
        "n_ctx is 512, tested 511"
    ]


def test_a_damaged_layout_is_refused_with_each_wrong_field(library: Library) -> None:
    lines = library.layout.context.replace("uint32_t n_batch;", "", 1).replace(
        "uint32_t n_ubatch;", "uint32_t n_ubatch; uint32_t n_batch;", 1
    )
    with pytest.raises(LibraryError) as refusal:
        load(library.path, [attrs.evolve(library.layout, context=lines)])
    text = str(refusal.value)
    assert library.path in text
    assert library.layout.builds in text
    assert "context.n_batch is 512, tested 2048" in text
    assert "context.n_ubatch is 2048, tested 512" in text
    assert "model." not in text


def test_each_build_takes_its_own_layout(tmp_path: Path, library: Library) -> None:
    """The parameters of the older builds are the newer ones without the eight bytes of moe_cache_size."""
    context, model = default_params(library, "context"), default_params(library, "model")
    assert len(context) == 168
    older = compile_library(tmp_path / "old.so", fake_source(context=context[:112] + context[120:], model=model))
    newer = compile_library(tmp_path / "new.so", fake_source(context=context, model=model))
    assert load(str(older)).layout is LAYOUTS[0]
    assert load(str(newer)).layout is LAYOUTS[1]


@pytest.mark.parametrize("struct", ["context", "model"])
def test_longer_parameters_are_refused(tmp_path: Path, library: Library, struct: str) -> None:
    params = {name: default_params(library, name) for name in ("context", "model")}
    params[struct] += bytes(8)
    path = compile_library(tmp_path / "libllama.so", fake_source(**params))
    with pytest.raises(LibraryError, match=f"the {struct} parameters are longer than the tested builds'"):
        load(str(path))


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "libllama.so", fake_source(missing="llama_synchronize"))
    with pytest.raises(LibraryError, match="llama_synchronize"):
        load(str(path))


def test_zeroed_parameters_are_refused(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "libllama.so", fake_source())
    with pytest.raises(LibraryError, match=r"n_ctx is 0, tested 512"):
        load(str(path))


def test_functions_may_lie_in_ggml_beside_it(tmp_path: Path) -> None:
    moved = "ggml_backend_dev_count"
    compile_library(tmp_path / "libggml.so", f"unsigned long {moved}(void) {{ return 0; }}")
    path = compile_library(tmp_path / "libllama.so", fake_source(missing=moved))
    with pytest.raises(LibraryError, match="another layout"):
        load(str(path))


def test_a_named_directory_without_it(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=f"{tmp_path} holds no {NAMES[0]}"):
        search(str(tmp_path))


def test_the_variable_excludes_every_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", str(tmp_path / "nothing.so"))
    with pytest.raises(LibraryError, match=r"nothing\.so"):
        search()
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", "")
    assert search().layout in LAYOUTS


def test_the_option_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", str(tmp_path))
    assert search(library.path) is library


@pytest.mark.parametrize("place", ["own", "lib", "home"])
def test_an_installed_library_that_fails_ends_the_search(tmp_path: Path, place: str) -> None:
    own, home = tmp_path / "bin", tmp_path / "home"
    directory = {"own": own, "lib": tmp_path / "lib", "home": home / "runtimes/llamacpp/current/lib"}[place]
    directory.mkdir(parents=True)
    (directory / NAMES[0]).write_bytes(b"not a library")
    with pytest.raises(LibraryError, match=str(directory)):
        search(own_directory=own, home=home)


def test_what_this_environment_lacks_is_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibraryError) as refusal:
        search(own_directory=tmp_path, home=tmp_path)
    for words in (*NAMES, "pip install xllamacpp", "--llamacpp-lib"):
        assert words in str(refusal.value)


def test_the_version_of_an_install_is_its_manifest_s(tmp_path: Path, library: Library) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "runtime.json").write_text('{"id": "llamacpp", "version": "b11480", "worker": "bin/w"}')
    os.symlink(library.path, tmp_path / "lib" / "libllama.so")
    assert library_module._installed_version(tmp_path / "lib" / "plain.so") == "b11480"
    assert library_module._installed_version(tmp_path / "elsewhere" / "x" / "plain.so") is None


def test_error_lines_are_kept_with_what_continues_them() -> None:
    log = ErrorLog()
    log.line(2, "an info line\n")
    log.line(5, " goes on\n")
    for number in range(10):
        log.line(4, f"error {number}")
        log.line(5, " and more\n")
    log.line(3, "a warning")
    assert log.take() == [f"error {number} and more" for number in range(2, 10)]
    assert log.take() == []
    assert str(log.failure("x does not load")) == "x does not load"


def test_the_log_is_silent_unless_asked(library: Library, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom superfluid.llama.vocab import Vocab\n"
        "try:\n    Vocab.open(sys.argv[1])\nexcept Exception as error:\n    print(error)\n"
    )
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(20))
    command = [sys.executable, "-c", script, str(bad)]
    quiet = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert quiet.stderr == ""
    assert quiet.stdout.startswith(f"{bad} does not load: ")
    loud = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "SUPERFLUID_LLAMA_LOG": "1"}
    )
    assert loud.stderr
