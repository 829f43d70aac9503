"""A runtime adapter that declares one of everything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from superfluid.engines.kit.formats import DirectoryRule, FileRule, Format
from superfluid.engines.kit.options import Option, PullOption
from superfluid.engines.kit.runtime import (
    Arguments,
    Device,
    Flag,
    Info,
    Loaded,
    ModelRefused,
    NotOffered,
    PlanRequest,
    Probe,
    Runtime,
    RuntimeUnavailable,
    TokenizerLibrary,
)

FORMATS = (
    Format("toy", "a toy file", FileRule(("toy",), "TOYS")),
    Format("toybox", "a toy directory", directory=DirectoryRule(("config.json",), ("bin",))),
)


@attrs.define
class Toy(Runtime):
    unavailable: str | None = None
    seen: list[Arguments] = attrs.Factory(list)

    def info(self) -> Info:
        return Info("toy", FORMATS, ("toys", "toy.lib"), TokenizerLibrary("libtoy"))

    def flags(self) -> Sequence[Flag]:
        return (Flag("--toy-lib", "the library"),)

    def options(self) -> Sequence[Option]:
        return (
            Option("threads", "int", "0", "threads", least=0, most=512),
            Option("scale", "float", "the model's", "a scale", least=0.0),
            Option("repack", "on-off", "on", "repack weights"),
            Option("split", "choice", "layer", "how to split", ("none", "layer")),
            Option("label", "text", "none", "a label"),
        )

    def probe(self, args: Arguments) -> Probe:
        if self.unavailable is not None:
            raise RuntimeUnavailable(self.unavailable)
        return Probe("toy 1.0", (Device("CPU", "a processor", 8 << 30),), abi=3)

    def open(self, args: Arguments) -> Loaded:
        self.seen.append(args)
        raise ModelRefused("toys hold no weights")

    def named(self, args: Arguments) -> str | None:
        return args.flags.get("--toy-lib")

    def static_capabilities(self) -> dict[str, Any]:
        return {"descriptor_version": 1, "load": {"kv_bits": "toys have no cache"}}

    def model_facts(self, path: Path) -> dict[str, Any]:
        return {"architecture": "toy"}

    def sizing(self, path: Path, args: Arguments) -> dict[str, int]:
        raise ModelRefused("no GPU")

    def compat(self) -> dict[str, Any]:
        return {"tested": ["2.0", "1.0"]}

    def plan(self, request: PlanRequest, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        if request.version == "1.0":
            raise NotOffered("1.0 has no build for this host")
        return [{"id": "toy", "version": request.version or "2.0", "backend": request.backend or "cpu"}]

    def pull_options(self) -> Sequence[PullOption]:
        return (PullOption("file", True, "which file"), PullOption("no-extras", False, "without extras"))

    def pull(self, name: str, offline: bool, options: Mapping[str, str | None]) -> Path:
        return Path("/models") / name / f"{'off' if offline else 'on'}line-{sorted(options.items())}"
