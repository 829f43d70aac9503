"""The options of the llama.cpp runtime and what they set in the library's parameters."""

import struct
from collections.abc import Mapping
from typing import Any

import attrs

from superfluid.engines.kit.options import Option, OptionError, Value
from superfluid.llama.library import Library

CACHE_TYPES = {
    "f16": 1,
    "bf16": 30,
    "f32": 0,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "iq4_nl": 20,
}
PLAIN_CACHE_TYPES = frozenset({"f16", "bf16", "f32"})
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap-mlock": 3, "direct-io": 4}
LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
FLASH_MODES = {"auto": -1, "on": 1, "off": 0}
ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}

MOST_THREADS = 512
MOST_BATCH = 1 << 20
ROWS_PER_SEQUENCE = 8  # the most rows a verified draft takes: 7 drafted tokens and the one before


def _choice(name: str, choices: Mapping[str, int], default: str, about: str) -> Option:
    return Option(name, "choice", default, about, choices=tuple(choices))


def _yarn(name: str, about: str) -> Option:
    return Option(name, "float", "model", f"{about}; negative: the model's")


OPTIONS = (
    Option("lib", "text", "install", "the libllama to load, a file or a directory"),
    Option("n-gpu-layers", "int", "-1", "layers on the GPU; -1 all, 0 none", least=-1),
    Option("main-gpu", "int", "0", "the GPU that holds what is not split", least=0),
    _choice("split-mode", SPLIT_MODES, "layer", "how a model is split over GPUs"),
    Option("tensor-split", "text", "even", "comma-separated shares of the GPUs"),
    _choice("load-mode", LOAD_MODES, "auto", "how weights are read"),
    _choice("lazy-mode", LAZY_MODES, "auto", "whether weights are read when first used"),
    Option("repack", "on-off", "on", "repack weights for the CPU"),
    Option("threads", "int", "0", "threads that decode; 0 all cores", least=0, most=MOST_THREADS),
    Option("threads-batch", "int", "0", "threads that prefill; 0 as threads", least=0, most=MOST_THREADS),
    Option("batch-size", "int", "2048", "most tokens of a step", least=1, most=MOST_BATCH),
    Option("ubatch-size", "int", "512", "most tokens computed at once", least=1, most=MOST_BATCH),
    _choice("flash-attn", FLASH_MODES, "auto", "flash attention"),
    _choice("cache-type-k", CACHE_TYPES, "f16", "element type of cached keys"),
    _choice("cache-type-v", CACHE_TYPES, "f16", "element type of cached values"),
    Option("kv-offload", "on-off", "on", "keep the KV cache on the GPU"),
    Option("op-offload", "on-off", "on", "run host operations on the GPU"),
    Option("swa-full", "on-off", "on", "keep the whole context of sliding-window layers"),
    _choice("rope-scaling", ROPE_SCALINGS, "model", "RoPE scaling method"),
    Option("rope-freq-base", "float", "model", "RoPE base frequency; 0 the model's", least=0),
    Option("rope-freq-scale", "float", "model", "RoPE frequency scale; 0 the model's", least=0),
    _yarn("yarn-ext-factor", "YaRN extrapolation mix"),
    _yarn("yarn-attn-factor", "YaRN attention magnitude"),
    _yarn("yarn-beta-fast", "YaRN low correction dimension"),
    _yarn("yarn-beta-slow", "YaRN high correction dimension"),
    Option("yarn-orig-ctx", "int", "model", "context the model was trained for", least=0, most=(1 << 32) - 1),
)

_IDENTITY_TAGS = {
    "rope-scaling": 1,
    "rope-freq-base": 2,
    "rope-freq-scale": 3,
    "yarn-ext-factor": 4,
    "yarn-attn-factor": 5,
    "yarn-beta-fast": 6,
    "yarn-beta-slow": 7,
    "yarn-orig-ctx": 8,
    "cache-type-k": 9,
    "cache-type-v": 10,
}


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < float("inf") for share in shares) or not any(shares):
        raise OptionError(f"--tensor-split: comma-separated shares of at least 0, not all 0 expected, got {text}")
    return shares


@attrs.frozen
class Settings:
    """The options that were given, by name; what is not given leaves the library's default."""

    given: Mapping[str, Value]
    tensor_split: tuple[float, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Value]) -> "Settings":
        """Check what no single option can. Raises OptionError, naming the option."""
        text = given.get("tensor-split")
        settings = cls(given, _shares(str(text)) if text is not None else ())
        if settings.type_v not in PLAIN_CACHE_TYPES and given.get("flash-attn") == "off":
            raise OptionError(f"--cache-type-v: f16, bf16 or f32 expected with --flash-attn off, got {settings.type_v}")
        return settings

    @property
    def library(self) -> str | None:
        value = self.given.get("lib")
        return None if value is None else str(value)

    @property
    def type_k(self) -> str:
        return str(self.given.get("cache-type-k", "f16"))

    @property
    def type_v(self) -> str:
        return str(self.given.get("cache-type-v", "f16"))

    @property
    def gpu_layers(self) -> int:
        return int(self.given.get("n-gpu-layers", -1))

    @property
    def kv_layers(self) -> int:
        """Layers whose cells are on the GPU, as `gpu_layers`."""
        return self.gpu_layers if self.given.get("kv-offload", True) else 0

    def model_params(self, library: Library) -> Any:
        """A struct llama_model_params with what was given. Raises OptionError."""
        params = library.api.llama_model_default_params()
        for option, field, values in (
            ("n-gpu-layers", "n_gpu_layers", None),
            ("main-gpu", "main_gpu", None),
            ("split-mode", "split_mode", SPLIT_MODES),
            ("load-mode", "load_mode", LOAD_MODES),
            ("lazy-mode", "lazy_mode", LAZY_MODES),
            ("repack", "use_extra_bufts", None),
        ):
            self._set(params, option, field, values)
        return params

    def split(self, library: Library) -> Any:
        """The array `tensor_split` points to, which must outlive the load; None without one. Raises OptionError."""
        if not self.tensor_split:
            return None
        room = library.api.llama_max_devices()
        if len(self.tensor_split) > room:
            raise OptionError(f"--tensor-split: at most {room} shares expected, got {len(self.tensor_split)}")
        return library.ffi.new("float[]", [*self.tensor_split, *[0.0] * (room - len(self.tensor_split))])

    def context_params(self, library: Library, *, on_cpu: bool, cores: int) -> Any:
        """A struct llama_context_params with what was given; sequences and cells are the caller's to set."""
        params = library.api.llama_context_default_params()
        threads = int(self.given.get("threads", 0)) or cores
        params.n_threads = threads
        params.n_threads_batch = int(self.given.get("threads-batch", 0)) or threads
        for option, field, values in (
            ("batch-size", "n_batch", None),
            ("ubatch-size", "n_ubatch", None),
            ("flash-attn", "flash_attn_type", FLASH_MODES),
            ("cache-type-k", "type_k", CACHE_TYPES),
            ("cache-type-v", "type_v", CACHE_TYPES),
            ("kv-offload", "offload_kqv", None),
            ("op-offload", "op_offload", None),
            ("swa-full", "swa_full", None),
            ("rope-scaling", "rope_scaling_type", ROPE_SCALINGS),
            ("rope-freq-base", "rope_freq_base", None),
            ("rope-freq-scale", "rope_freq_scale", None),
            ("yarn-ext-factor", "yarn_ext_factor", None),
            ("yarn-attn-factor", "yarn_attn_factor", None),
            ("yarn-beta-fast", "yarn_beta_fast", None),
            ("yarn-beta-slow", "yarn_beta_slow", None),
            ("yarn-orig-ctx", "yarn_orig_ctx", None),
        ):
            self._set(params, option, field, values)
        params.n_ubatch = min(params.n_ubatch, params.n_batch)
        if on_cpu and self.given.get("flash-attn", "auto") == "auto":
            params.flash_attn_type = FLASH_MODES["on"]  # the library's own choice is slower over a long context there
        params.n_outputs_max_per_seq = ROWS_PER_SEQUENCE
        params.no_perf = True
        return params

    def _set(self, params: Any, option: str, field: str, values: Mapping[str, int] | None) -> None:
        value = self.given.get(option)
        if value is not None:
            setattr(params, field, value if values is None else values[str(value)])

    def identity_suffix(self) -> bytes:
        """Tag and value of each setting in effect that changes what a cached key means; empty when there is none."""
        found = b""
        for name, tag in _IDENTITY_TAGS.items():
            value = self.given.get(name)
            if value is None:
                continue
            if name == "rope-scaling":
                code = ROPE_SCALINGS[str(value)]
            elif name.startswith("cache-type"):
                if value == "f16":
                    continue
                code = CACHE_TYPES[str(value)]
            elif isinstance(value, float):
                if value < 0 or (value == 0 and name.startswith("rope")):
                    continue
                (code,) = struct.unpack("<I", struct.pack("<f", value))
            else:
                code = int(value)
                if code == 0:
                    continue
            found += struct.pack("<Bq", tag, code)
        return found
