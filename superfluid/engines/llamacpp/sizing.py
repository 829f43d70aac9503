"""How much memory a model's cells take, and how many fit."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import attrs

from superfluid.llama.header import Header
from superfluid.llama.library import DEVICE_GPU, Device, Library

GIB = 1 << 30
KV_SHARE = 0.60  # of what is free; the rest is for compute buffers and others
BUDGET_SHARE = 0.85  # of a device's memory
LEAST_RESERVE = GIB
EXPORT_LIMIT = 8 * GIB
CELL_STEP = 256  # the library rounds a buffer up to this many cells
LEAST_CELLS = 512
SIZED_BACKENDS = ("Metal", "CUDA")  # whose memory figure was checked

_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
_BLOCK = 32
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "iq4_nl": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24}
_PARTLY_RECURRENT = ("qwen3next", "qwen35", "qwen35moe", "minimax-01")


def row_bytes(width: int, element: str) -> int:
    """Bytes of `width` cached elements of one type; a partial block counts whole."""
    if element in _ELEMENT_BYTES:
        return width * _ELEMENT_BYTES[element]
    return -(-width // _BLOCK) * _BLOCK_BYTES[element]


def _recurrent_layers(header: Header, n_layer: int) -> list[bool]:
    if header.architecture not in _PARTLY_RECURRENT:
        return [False] * n_layer
    marked = header.value("attention.recurrent_layers")
    if isinstance(marked, list):
        return [bool(marked[layer]) if layer < len(marked) else False for layer in range(n_layer)]
    if marked is not None:
        return [bool(marked)] * n_layer
    interval = header.number("full_attention_interval")
    return [interval > 0 and (layer + 1) % interval != 0 for layer in range(n_layer)]


def cell_bytes(header: Header, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes one token takes in the KV cache of every layer that has one; at least 1."""
    n_layer = header.number("block_count")
    owning = n_layer - header.number("attention.shared_kv_layers")
    n_head = _first(header.value("attention.head_count")) or 1
    heads = header.value("attention.head_count_kv")
    default_width = header.number("embedding_length") // n_head
    keys = header.number("attention.key_length") or default_width
    values = header.number("attention.value_length") or default_width
    keys_swa = header.number("attention.key_length_swa") or keys
    values_swa = header.number("attention.value_length_swa") or values
    pattern = header.value("attention.sliding_window_pattern")
    marked = pattern if isinstance(pattern, list) and len(pattern) >= n_layer else None
    recurrent = _recurrent_layers(header, n_layer)
    total = 0
    for layer in range(owning):
        if recurrent[layer]:
            continue
        if isinstance(heads, list):
            count = int(heads[layer]) if layer < len(heads) else 0
        else:
            count = int(heads) if heads else n_head
        if marked is None:
            widths = max(keys, keys_swa), max(values, values_swa)
        else:
            widths = (keys_swa, values_swa) if marked[layer] else (keys, values)
        total += count * (row_bytes(widths[0], type_k) + row_bytes(widths[1], type_v))
    return max(total, 1)


def _first(value: object) -> int:
    if isinstance(value, list):
        return next((int(entry) for entry in value if entry), 0)
    return int(value) if isinstance(value, int | float) else 0


def reserve_bytes(budget: int) -> int:
    """What is left free of a device's budget for compute buffers and others."""
    return max(LEAST_RESERVE, budget // 8)


def round_cells(tokens: int) -> int:
    return -(-tokens // CELL_STEP) * CELL_STEP


def offload_device(devices: Sequence[Device]) -> Device | None:
    """The first discrete GPU, else the first integrated one."""
    gpus = [device for device in devices if device.is_gpu]
    return next((device for device in gpus if device.kind == DEVICE_GPU), gpus[0] if gpus else None)


def host_memory() -> tuple[int, int]:
    """Bytes of host memory (available, in all), as this process may use it; (0, 0) where it cannot be told."""
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            figures[name] = int(value.split()[0]) * 1024
    available, total = figures.get("MemAvailable", 0), figures.get("MemTotal", 0)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total = min(total, limit) if total else limit
        available = min(available, max(limit - used, 0)) if available else max(limit - used, 0)
    return available, total


@attrs.frozen
class Memory:
    """The memory a model's cells come from: bytes free and in all, 0 when unknown."""

    free: int
    total: int
    on_device: bool

    @property
    def budget(self) -> int:
        return int(BUDGET_SHARE * self.total)

    @property
    def headroom(self) -> int:
        """What stays free once the cells are there."""
        return reserve_bytes(self.budget) // 2

    def affordable_cells(self, wanted: int, per_cell: int, least: int) -> int:
        """As many of the wanted cells as the free memory's share holds, at least `least`."""
        if not self.free:
            return wanted
        return max(min(wanted, int(KV_SHARE * self.free) // per_cell), least)

    def export_cells(self, cells: int, per_cell: int) -> int:
        """How many cells the prefix cache may keep exported."""
        room = EXPORT_LIMIT
        if self.on_device:
            room = min(room, int(KV_SHARE * max(self.free - self.headroom, 0)))
        return min(cells, room // per_cell)


def memory_of(library: Library, gpu_layers: int) -> Memory:
    """The memory of the device that layers go to, or the host's."""
    device = offload_device(library.devices()) if gpu_layers != 0 else None
    if device is not None:
        return Memory(device.free, device.memory, True)
    return Memory(*host_memory(), False)


class Unsized(Exception):
    """A model's window cannot be sized here; the message is the reason."""


def report(header: Header, library: Library, gpu_layers: int, per_cell: int) -> dict[str, int]:
    """The sizing part of a check report. Raises Unsized."""
    device = offload_device(library.devices()) if gpu_layers != 0 else None
    if device is not None and device.kind != DEVICE_GPU:
        raise Unsized(f"{device.name} is an integrated GPU, which reports system memory as its own")
    if device is not None and device.backend not in SIZED_BACKENDS:
        raise Unsized(f"the memory figure of {device.backend} is not checked")
    trained = header.number("context_length")
    if not header.number("block_count") or not trained:
        raise Unsized("the header has no layer count or no trained context")
    memory = memory_of(library, gpu_layers)
    if not memory.free:
        raise Unsized("the memory available here is not known")
    return {
        "budget_bytes": min(memory.free, memory.budget),
        "weight_bytes": header.n_bytes,
        "kv_bytes_per_token": per_cell,
        "trained_context": trained,
    }
