"""Options: ranges, what they set, and how they enter a state's identity."""

import struct
from pathlib import Path

import pytest
import xxhash

from superfluid.engines.kit.options import OptionError, Value
from superfluid.engines.llamacpp.identity import weights_identity
from superfluid.engines.llamacpp.options import OPTIONS, Settings
from superfluid.llama.search import open_library

BY_NAME = {option.name: option for option in OPTIONS}


def parsed(**given: str) -> dict[str, Value]:
    names = {name.replace("_", "-"): text for name, text in given.items()}
    return {name: BY_NAME[name].parse(text) for name, text in names.items()}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("n-gpu-layers", "-2", "at least -1 expected, got -2"),
        ("main-gpu", "-1", "at least 0 expected, got -1"),
        ("threads", "513", "0 to 512 expected, got 513"),
        ("batch-size", "0", "1 to 1048576 expected, got 0"),
        ("ubatch-size", "1048577", "1 to 1048576 expected, got 1048577"),
        ("yarn-orig-ctx", "4294967296", "0 to 4294967295 expected, got 4294967296"),
        ("rope-freq-base", "-1", "at least 0 expected, got -1"),
        ("cache-type-k", "q3_k", "one of f16, bf16, f32, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl expected"),
        ("flash-attn", "yes", "one of auto, on, off expected"),
    ],
)
def test_ranges(name: str, text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        BY_NAME[name].parse(text)


@pytest.mark.parametrize("text", ["0,0", "1,-1", "a", "", "1,,2", "inf"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="--tensor-split"):
        Settings.of({"tensor-split": text})


def test_shares_are_padded_with_zeros() -> None:
    library = open_library()
    room = library.api.llama_max_devices()
    array = Settings.of({"tensor-split": "3,1"}).split(library)
    assert list(array) == [3, 1] + [0] * (room - 2)
    with pytest.raises(OptionError, match=f"at most {room} shares expected, got {room + 1}"):
        Settings.of({"tensor-split": ",".join(["1"] * (room + 1))}).split(library)


def test_a_quantized_v_needs_flash_attention() -> None:
    with pytest.raises(OptionError, match=r"--cache-type-v: .* got q8_0"):
        Settings.of(parsed(cache_type_v="q8_0", flash_attn="off"))
    Settings.of(parsed(cache_type_v="q8_0", flash_attn="on"))
    Settings.of(parsed(cache_type_k="q8_0", flash_attn="off"))


def test_what_is_not_given_is_the_library_s() -> None:
    library = open_library()
    settings = Settings.of({})
    given = settings.context_params(library, on_cpu=False, cores=3)
    default = library.api.llama_context_default_params()
    changed = {
        name
        for name, _ in library.ffi.typeof("struct llama_context_params").fields
        if getattr(given, name) != getattr(default, name)
    }
    assert changed <= {"n_threads", "n_threads_batch", "n_outputs_max_per_seq", "no_perf"}
    assert (given.n_threads, given.n_threads_batch, given.n_outputs_max_per_seq, given.no_perf) == (3, 3, 8, True)
    model, model_default = settings.model_params(library), library.api.llama_model_default_params()
    for name, _ in library.ffi.typeof("struct llama_model_params").fields:
        assert getattr(model, name) == getattr(model_default, name)


def test_what_is_given_is_set() -> None:
    library = open_library()
    settings = Settings.of(
        parsed(
            n_gpu_layers="0",
            split_mode="row",
            load_mode="mmap-mlock",
            lazy_mode="off",
            repack="off",
            threads="5",
            threads_batch="7",
            batch_size="100",
            ubatch_size="300",
            cache_type_k="q8_0",
            cache_type_v="iq4_nl",
            kv_offload="off",
            op_offload="off",
            swa_full="off",
            rope_scaling="yarn",
            rope_freq_base="10000",
            yarn_orig_ctx="2048",
        )
    )
    model = settings.model_params(library)
    assert (model.n_gpu_layers, model.split_mode, model.load_mode, model.lazy_mode) == (0, 2, 3, 0)
    assert not model.use_extra_bufts
    context = settings.context_params(library, on_cpu=True, cores=1)
    assert (context.n_threads, context.n_threads_batch, context.n_batch, context.n_ubatch) == (5, 7, 100, 100)
    assert (context.type_k, context.type_v, context.flash_attn_type) == (8, 20, 1)
    assert not (context.offload_kqv or context.op_offload or context.swa_full)
    assert (context.rope_scaling_type, context.rope_freq_base, context.yarn_orig_ctx) == (2, 10000, 2048)


@pytest.mark.parametrize(("flash", "on_cpu", "expected"), [(None, True, 1), (None, False, -1), ("off", True, 0)])
def test_flash_attention_is_on_when_every_layer_is_on_the_cpu(flash: str | None, on_cpu: bool, expected: int) -> None:
    settings = Settings.of(parsed(flash_attn=flash) if flash else {})
    assert settings.context_params(open_library(), on_cpu=on_cpu, cores=1).flash_attn_type == expected


def folded(identity: bytes, *settings: tuple[int, int]) -> bytes:
    text = identity + b"".join(struct.pack("<Bq", tag, value) for tag, value in settings)
    return xxhash.xxh3_128(text).intdigest().to_bytes(16, "little") + identity[16:]


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"cache_type_v": "q4_0", "cache_type_k": "q8_0"}, [(9, 8), (10, 2)]),
        ({"rope_scaling": "none", "rope_freq_base": "10000"}, [(1, 0), (2, bits(10000))]),
        ({"rope_freq_scale": "0.5", "yarn_ext_factor": "0"}, [(3, bits(0.5)), (4, 0)]),
        (
            {"yarn_attn_factor": "1", "yarn_beta_fast": "32", "yarn_beta_slow": "1"},
            [(5, bits(1)), (6, bits(32)), (7, bits(1))],
        ),
        ({"yarn_orig_ctx": "4294967295"}, [(8, 4294967295)]),
    ],
)
def test_settings_in_effect_are_folded_in(
    tmp_path: Path, given: dict[str, str], settings: list[tuple[int, int]]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    plain = weights_identity([path])
    assert plain == xxhash.xxh3_128(b"weights").intdigest().to_bytes(16, "little") + (7).to_bytes(8, "little") + bytes(
        8
    )
    assert weights_identity([path], Settings.of(parsed(**given)).identity_suffix()) == folded(plain, *settings)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cache_type_k": "f16", "cache_type_v": "f16"},
        {"rope_freq_base": "0", "rope_freq_scale": "0", "yarn_orig_ctx": "0"},
        {"yarn_ext_factor": "-1", "yarn_beta_slow": "-0.5"},
        {"threads": "3", "batch_size": "64", "flash_attn": "off", "n_gpu_layers": "0", "swa_full": "off"},
    ],
)
def test_settings_that_change_no_key(given: dict[str, str]) -> None:
    assert Settings.of(parsed(**given)).identity_suffix() == b""


def test_shards_are_one_stream(tmp_path: Path) -> None:
    one, two, whole = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    one.write_bytes(b"first")
    two.write_bytes(b"second")
    whole.write_bytes(b"firstsecond")
    assert weights_identity([one, two]) == weights_identity([whole])
