"""Facts of this machine that decide which build of a runtime it can run."""

import ctypes.util
import platform
import re
import sys
from pathlib import Path
from typing import Any

NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
CUDA_DIRECTORIES = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64")
ROCM_DEVICE, ROCM_DIRECTORY = Path("/dev/kfd"), Path("/opt/rocm")
VULKAN_DRIVERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")

_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def facts() -> dict[str, Any]:
    """{os, arch, nvidia_driver, cuda_runtime, rocm, vulkan} of this machine; none for a driver or runtime not here."""
    machine = platform.machine().lower()
    linux = sys.platform == "linux"
    return {
        "os": "macos" if sys.platform == "darwin" else "linux",
        "arch": _ARCHITECTURES.get(machine, machine),
        "nvidia_driver": _nvidia_driver() if linux else None,
        "cuda_runtime": _cuda_runtime() if linux else None,
        "rocm": linux and ROCM_DEVICE.exists() and ROCM_DIRECTORY.is_dir(),
        "vulkan": linux and _vulkan(),
    }


def describe(host: dict[str, Any]) -> str:
    """The facts in words: `Linux x64, NVIDIA driver 580.95.05, CUDA runtime 13, ROCm, Vulkan`."""
    words = [f"{'macOS' if host['os'] == 'macos' else 'Linux'} {host['arch']}"]
    if host["nvidia_driver"]:
        words.append(f"NVIDIA driver {host['nvidia_driver']}")
    if host["cuda_runtime"]:
        words.append(f"CUDA runtime {host['cuda_runtime']}")
    return ", ".join(words + ["ROCm"] * bool(host["rocm"]) + ["Vulkan"] * bool(host["vulkan"]))


def _nvidia_driver() -> str | None:
    try:
        found = re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", NVIDIA_VERSION.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _cuda_runtime() -> int | None:
    """The newest major for which both libcudart and libcublas are found."""
    majors = [_majors("cudart"), _majors("cublas")]
    return max(majors[0] & majors[1], default=None)


def _majors(library: str) -> set[int]:
    names = [path.name for directory in CUDA_DIRECTORIES for path in Path(directory).glob(f"lib{library}.so.*")]
    if (cached := ctypes.util.find_library(library)) is not None:
        names.append(cached)
    return {int(found[1]) for name in names if (found := re.search(r"\.so\.(\d+)", name))}


def _vulkan() -> bool:
    manifests = any(any(Path(directory).glob("*.json")) for directory in VULKAN_DRIVERS)
    return manifests and ctypes.util.find_library("vulkan") is not None
