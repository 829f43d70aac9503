"""An open libllama: its functions, its log, its version and the devices it sees."""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import cffi

from superfluid.llama.declaration import (
    CONTEXT_DEFAULTS,
    FUNCTIONS,
    LAYOUTS,
    MODEL_DEFAULTS,
    OPTIONAL_FUNCTIONS,
    VERSION_FUNCTION,
    Layout,
)
from superfluid.llama.proof import LayoutError, prove

LOG_VARIABLE = "SUPERFLUID_LLAMA_LOG"
LOG_ERROR, LOG_CONTINUED = 4, 5  # ggml's levels: an error line, and the rest of the line before
KEPT_ERRORS = 8
BESIDE = ("libggml", "libggml-base")  # a split build keeps its devices and its log there

DEVICE_CPU, DEVICE_GPU, DEVICE_IGPU = 0, 1, 2


class LibraryError(Exception):
    """No usable libllama; the text says which was tried, why not and what to do."""


class LoadError(Exception):
    """The library refused a model or a context; the text quotes its error lines."""


@attrs.frozen
class Device:
    """A compute device as the library sees it; memory in bytes."""

    backend: str
    name: str
    memory: int
    free: int
    kind: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in (DEVICE_GPU, DEVICE_IGPU)


class ErrorLog:
    """The library's last error lines. It is called from whatever thread the library logs on."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_ERRORS)
        self._lock = threading.Lock()
        self._open = False

    def line(self, level: int, text: str) -> None:
        with self._lock:
            if level == LOG_ERROR:
                self._lines.append(text)
            elif level == LOG_CONTINUED and self._open and self._lines:
                self._lines[-1] += text
            if level != LOG_CONTINUED:
                self._open = level == LOG_ERROR

    def take(self) -> list[str]:
        """The lines kept, oldest first; they are forgotten."""
        with self._lock:
            lines = [line.strip() for line in self._lines]
            self._lines.clear()
        return [line for line in lines if line]

    def failure(self, what: str) -> LoadError:
        """`<what>: <error lines joined by "; ">`."""
        lines = self.take()
        return LoadError(f"{what}: {'; '.join(lines)}" if lines else what)


class Library:
    """libllama, loaded, proved and initialized; never unloaded. `api` has every declared function by its name.

    Not constructed directly: use `superfluid.llama.search.open_library` or `load`.
    """

    def __init__(self, path: str, ffi: Any, layout: Layout, api: Any) -> None:
        self.path = path
        self.ffi = ffi
        self.layout = layout
        self.api = api
        self.errors = ErrorLog()
        self._callback: Any = None
        if os.environ.get(LOG_VARIABLE) != "1":
            self._callback = ffi.callback("void(int, char *, void *)", self._log)
            api.llama_log_set(ffi.cast("ggml_log_callback", self._callback), ffi.NULL)
        api.llama_backend_init()
        directory = os.path.dirname(path)
        if api.ggml_backend_reg_count() == 0 and directory:
            api.ggml_backend_load_all_from_path(os.fsencode(directory))

    def _log(self, level: int, text: Any, user_data: Any) -> None:
        if level >= LOG_ERROR:
            self.errors.line(level, self.text(text))

    def text(self, pointer: Any) -> str:
        """A C string; empty for NULL."""
        return bytes(self.ffi.string(pointer)).decode("utf-8", "replace") if pointer else ""

    @property
    def version(self) -> str:
        """`llama.cpp <v>`: of the install the library lies in, else its own."""
        installed = _installed_version(Path(self.path))
        if installed:
            return f"llama.cpp {installed}"
        own = getattr(self.api, VERSION_FUNCTION, None)
        text = self.text(own()) if own is not None else ""
        return f"llama.cpp {text}" if text else f"llama.cpp (unversioned build {self.path})"

    def devices(self) -> list[Device]:
        """GPUs, discrete and integrated, first; then the others."""
        found = []
        free, total = self.ffi.new("size_t *"), self.ffi.new("size_t *")
        for index in range(self.api.ggml_backend_dev_count()):
            device = self.api.ggml_backend_dev_get(index)
            self.api.ggml_backend_dev_memory(device, free, total)
            backend = self.text(self.api.ggml_backend_reg_name(self.api.ggml_backend_dev_backend_reg(device)))
            name = self.text(self.api.ggml_backend_dev_description(device)) or self.text(
                self.api.ggml_backend_dev_name(device)
            )
            found.append(
                Device(
                    backend="Metal" if backend == "MTL" else backend,
                    name=name,
                    memory=int(total[0]),
                    free=int(free[0]),
                    kind=int(self.api.ggml_backend_dev_type(device)),
                )
            )
        return sorted(found, key=lambda device: not device.is_gpu)

    @contextmanager
    def model(self, path: str | os.PathLike[str], params: Any) -> Iterator[Any]:
        """A loaded model for the time of a block. Raises LoadError."""
        model = self.load_model(path, params)
        try:
            yield model
        finally:
            self.api.llama_model_free(model)

    def load_model(self, path: str | os.PathLike[str], params: Any) -> Any:
        """Load with `params` (a struct llama_model_params); free with `api.llama_model_free`. Raises LoadError."""
        self.errors.take()
        model = self.api.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise self.errors.failure(f"{os.fspath(path)} does not load")
        return model

    def metadata(self, model: Any, key: str) -> str | None:
        """A value of the model's metadata as text; None when it has none, or an array."""
        size = self.api.llama_model_meta_val_str(model, key.encode(), self.ffi.NULL, 0)
        if size < 0:
            return None
        out = self.ffi.new("char[]", size + 1)
        self.api.llama_model_meta_val_str(model, key.encode(), out, size + 1)
        return self.text(out)


def _installed_version(path: Path) -> str | None:
    try:
        manifest = json.loads((path.resolve().parent.parent / "runtime.json").read_text())
        return str(manifest["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(path: str, layouts: Sequence[Layout] = LAYOUTS) -> Library:
    """Open the library at `path` (a file, or a name for the system's loader) and prove it.

    Raises LibraryError, naming the library and what it lacks or where its structs differ.
    """
    probe = cffi.FFI()
    probe.cdef("".join(f"void {name}(void);\n" for name in (*FUNCTIONS, *OPTIONAL_FUNCTIONS)))
    flags = probe.RTLD_NOW | probe.RTLD_LOCAL
    try:
        handles = [probe.dlopen(path, flags)]
    except OSError as error:
        raise LibraryError(f"{path} does not load: {error}") from None
    for name in BESIDE:
        for sibling in _siblings(path, name):
            try:
                handles.append(probe.dlopen(sibling, flags))
            except OSError:
                continue
            break

    def address(name: str) -> int | None:
        for handle in handles:
            try:
                return int(probe.cast("uintptr_t", probe.addressof(handle, name)))
            except AttributeError:
                continue
        return None

    addresses = {name: address(name) for name in (*FUNCTIONS, *OPTIONAL_FUNCTIONS)}
    missing = [name for name in FUNCTIONS if addresses[name] is None]
    if missing:
        raise LibraryError(f"{path} is no libllama this build can use: it has no function {missing[0]}")
    getters = {"model": addresses[MODEL_DEFAULTS], "context": addresses[CONTEXT_DEFAULTS]}
    try:
        layout, ffi = prove(path, lambda struct: getters[struct] or 0, layouts)
    except LayoutError as error:
        raise LibraryError(str(error)) from None
    api = SimpleNamespace(handles=handles)  # a handle that is collected would close its library
    for name, prototype in {**FUNCTIONS, **OPTIONAL_FUNCTIONS}.items():
        if addresses[name] is not None:
            setattr(api, name, ffi.cast(prototype.format("(*)"), addresses[name]))
    return Library(path, ffi, layout, api)


def _siblings(path: str, name: str) -> list[str]:
    directory = os.path.dirname(path)
    names = [name + suffix for suffix in (".so", ".so.0", ".dylib", ".0.dylib")]
    return [os.path.join(directory, entry) for entry in names] if directory else names
