"""The llama.cpp runtime: how its library, its options and its models meet the worker's command line."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superfluid.engines.executor.record import static_record
from superfluid.engines.kit.formats import FileRule, Format
from superfluid.engines.kit.options import Option, OptionError
from superfluid.engines.kit.runtime import (
    Arguments,
    Device,
    Info,
    Loaded,
    ModelRefused,
    Probe,
    Runtime,
    RuntimeUnavailable,
    TokenizerLibrary,
)
from superfluid.engines.llamacpp import sizing
from superfluid.engines.llamacpp.model import RUNTIME_ID, open_model, sampling_defaults
from superfluid.engines.llamacpp.options import OPTIONS, Settings
from superfluid.engines.primitives import Description
from superfluid.llama.header import MAGIC, Header, HeaderError, check_magic, read_header
from superfluid.llama.library import Library, LibraryError, LoadError
from superfluid.llama.search import LIBRARY_VARIABLE, named_library, open_library
from superfluid.llama.vocab import Vocab

PROCESS_ENVIRONMENT = {
    "GGML_NO_BACKTRACE": "1",  # on an assertion ggml would attach a debugger and print for seconds
}

_EVERY_MODEL = Description(
    id=RUNTIME_ID,
    version="",
    max_batch=0,
    max_seq_len=0,
    vocab_size=0,
    engine_sampling=True,
    verify_rows=True,
    verify_batches=True,
)
"""What the static record is made from: the part that holds for every model."""


class LlamaCpp(Runtime):
    """Primitives over libllama; reads GGUF files."""

    def info(self) -> Info:
        return Info(
            id=RUNTIME_ID,
            formats=(Format("gguf", "a GGUF file", file=FileRule(("gguf",), MAGIC.decode())),),
            aliases=("llama.cpp", "llama-cpp"),
            tokenizer=TokenizerLibrary("llama"),
        )

    def options(self) -> Sequence[Option]:
        return OPTIONS

    def prepare(self, args: Arguments) -> None:
        for name, value in PROCESS_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        library = args.options.get("lib")
        if library is not None:
            os.environ[LIBRARY_VARIABLE] = str(library)  # whatever opens the library here opens this one

    def named(self, args: Arguments) -> str | None:
        library = args.options.get("lib")
        return named_library(None if library is None else str(library))

    def probe(self, args: Arguments) -> Probe:
        try:
            library = self._library(args)
            Settings.of(args.options).split(library)
        except (LibraryError, OptionError) as error:
            raise RuntimeUnavailable(str(error)) from None
        devices = [
            Device(
                device.backend,
                device.name,
                device.memory,
                int(sizing.BUDGET_SHARE * device.memory) if device.is_gpu else 0,
            )
            for device in library.devices()
        ]
        return Probe(library.version, devices)

    def static_capabilities(self) -> dict[str, Any]:
        return static_record(_EVERY_MODEL)

    def reads(self, path: Path) -> str | None:
        return check_magic(path)

    def model_facts(self, path: Path) -> dict[str, Any]:
        """Also opens the vocabulary, as the daemon does next: where the library aborts on it, a probe ends."""
        header = _header(path)
        try:
            Vocab.open(path).close()
        except (LibraryError, LoadError) as error:
            raise ModelRefused(str(error)) from None
        facts: dict[str, Any] = {"architecture": header.architecture}
        defaults = sampling_defaults(header)
        if defaults:
            facts["sampling_defaults"] = defaults
        return facts

    def sizing(self, path: Path, args: Arguments) -> dict[str, int]:
        header = _header(path)
        try:
            settings = Settings.of(args.options)
            per_cell = sizing.cell_bytes(header, settings.type_k, settings.type_v)
            return sizing.report(header, self._library(args), settings.kv_layers, per_cell)
        except (sizing.Unsized, OptionError, LibraryError) as error:
            raise ModelRefused(str(error)) from None

    def open(self, args: Arguments) -> Loaded:
        if args.model is None:
            raise ModelRefused("no model was named (--model)")
        try:
            primitives = open_model(
                self._library(args),
                args.model,
                Settings.of(args.options),
                window=args.window,
                lanes=args.max_batch,
            )
        except (LibraryError, OptionError) as error:
            raise ModelRefused(str(error)) from None
        return Loaded.primitives(primitives, primitives.describe().max_seq_len)

    @staticmethod
    def _library(args: Arguments) -> Library:
        library = args.options.get("lib")
        return open_library(None if library is None else str(library))


def _header(path: Path) -> Header:
    try:
        return read_header(path)
    except (HeaderError, OSError) as error:
        raise ModelRefused(str(error)) from None
