"""What a runtime adapter is: one class that knows its library, its models and how to open one."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from superfluid.engines.engine import Engine
from superfluid.engines.kit.formats import Format
from superfluid.engines.kit.options import Option, PullOption, Value
from superfluid.engines.primitives import Primitives
from superfluid.link.linkw import RingSpec

LEAST_WINDOW = 512
DEFAULT_MAX_CONTEXT = 4096
DEFAULT_MAX_BATCH = 8

RUNTIME_ID = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
INSTALL_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*")


class RuntimeUnavailable(Exception):
    """The runtime does not run here; the message is the reason."""


class ModelRefused(Exception):
    """The runtime does not read or load a model; the message is the reason (a serving worker exits 3)."""


class NotOffered(Exception):
    """The adapter does not do what was asked (plan, install, pull); the message is the reason."""


@attrs.frozen
class TokenizerLibrary:
    """A native library with the tokenizer ABI, found by name."""

    name: str


TokenizerSource = Literal["huggingface", "engine"] | TokenizerLibrary


@attrs.frozen
class Info:
    """What a runtime is called and reads."""

    id: str
    formats: Sequence[Format] = ()
    aliases: Sequence[str] = ()
    tokenizer: TokenizerSource = "engine"


@attrs.frozen
class Device:
    """Something to run on. Bytes; `budget` is what a model and its cache are planned against, 0 when nothing is."""

    backend: str
    name: str
    memory: int = 0
    budget: int = 0


@attrs.frozen
class Probe:
    """A runtime that runs here. `abi` is the contract number a native library states."""

    version: str
    devices: Sequence[Device] = ()
    abi: int | None = None


@attrs.frozen
class Flag:
    """A flag of the runtime's own, beside its options; takes one value. `name` starts with `--`."""

    name: str
    about: str


@attrs.frozen
class Arguments:
    """A worker's command line. `flags` holds the runtime's own by their whole name (`--mock-record`), as text;
    `options` the parsed values of those options that were given, by name."""

    model: Path | None = None
    max_context: int = DEFAULT_MAX_CONTEXT
    max_batch: int = DEFAULT_MAX_BATCH
    kv_bits: int = 0
    flags: Mapping[str, str] = attrs.Factory(dict)
    options: Mapping[str, Value] = attrs.Factory(dict)

    @property
    def window(self) -> int:
        """The window a primitive runtime opens with: the asked one, at least 512 tokens."""
        return max(self.max_context, LEAST_WINDOW)


@attrs.frozen
class Loaded:
    """An opened model: either primitives, which the executor then drives, or a full engine with its own rings."""

    model: Primitives | Engine
    window: int = 0
    rings: Sequence[RingSpec] = ()
    record_overrides: Mapping[str, Any] = attrs.Factory(dict)

    @classmethod
    def primitives(
        cls, primitives: Primitives, window: int, record_overrides: Mapping[str, Any] | None = None
    ) -> "Loaded":
        """`window`: tokens a sequence may hold, as it was opened. `record_overrides` are laid over the executor's
        capability record, section by section."""
        return cls(primitives, window, record_overrides=record_overrides or {})

    @classmethod
    def engine(cls, engine: Engine, rings: Sequence[RingSpec]) -> "Loaded":
        return cls(engine, rings=rings)


@attrs.frozen
class PlanRequest:
    """What `plan` was asked; `source` is the path or URL of `--from`."""

    version: str | None = None
    backend: str | None = None
    source: str | None = None
    sha256: str | None = None
    untested: bool = False


@attrs.frozen
class Unlisted:
    """An adapter's rule for versions it does not list but installs: words, and what it asks of one."""

    describe: str
    requires: str


class Runtime(ABC):
    """A runtime adapter. Nothing here loads weights but `open`."""

    @abstractmethod
    def info(self) -> Info: ...

    @abstractmethod
    def probe(self, args: Arguments) -> Probe:
        """Raises RuntimeUnavailable with the reason why it does not run here."""

    @abstractmethod
    def open(self, args: Arguments) -> Loaded:
        """Load the model. Raises ModelRefused."""

    def flags(self) -> Sequence[Flag]:
        return ()

    def options(self) -> Sequence[Option]:
        return ()

    def reads_kv_bits(self) -> bool:
        """Whether `--kv-bits` other than 0 means something to it."""
        return False

    def needs_model(self) -> bool:
        return True

    def prepare(self, args: Arguments) -> None:
        """Process-wide set-up, before anything of the runtime is loaded."""
        return

    def named(self, args: Arguments) -> str | None:
        """The library or environment the operator named; none: the daemon may install one."""
        return None

    def static_capabilities(self) -> dict[str, Any]:
        """The part of the capability record that every model on this runtime has."""
        return {}

    def reads(self, path: Path) -> str | None:
        """Why it does not read `path`; none when it does."""
        if not path.exists():
            return f"{path}: no such file or directory"
        info = self.info()
        if any(format.matches(path) for format in info.formats):
            return None
        if not info.formats:
            return f"{info.id} reads no model files"
        return f"{path} is not {' or '.join(format.describe for format in info.formats)}"

    def model_facts(self, path: Path) -> dict[str, Any] | None:
        """{architecture, sampling_defaults?} of a model it reads, without loading it. Raises ModelRefused."""
        return None

    def sizing(self, path: Path, args: Arguments) -> dict[str, int] | None:
        """{budget_bytes, weight_bytes, kv_bytes_per_token, trained_context}. Raises ModelRefused with a reason."""
        return None

    # ---- installs and pulls

    def plan(self, request: PlanRequest, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What to install on `host`, in order of preference, at least one. Raises NotOffered."""
        raise NotOffered(f"{self.info().id} is not installed from a project")

    def compat(self) -> dict[str, Any]:
        return {}

    def versions(self, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every tested version, newest first, with its plan for this host or why there is none."""
        found: list[dict[str, Any]] = []
        for version in self.compat().get("tested", ()):
            try:
                found.append({"version": version, "plan": self.plan(PlanRequest(version=version), host)[0]})
            except NotOffered as error:
                found.append({"version": version, "error": str(error)})
        return found

    def unlisted(self) -> Unlisted | None:
        return None

    def install(self, plan: Mapping[str, Any], directory: Path) -> None:
        raise NotOffered(f"{self.info().id} is not installed by its worker yet")

    def pull_options(self) -> Sequence[PullOption] | None:
        """Options of `pull`; none: it pulls nothing by id."""
        return None

    def pull(self, name: str, offline: bool, options: Mapping[str, str | None]) -> Path:
        raise NotOffered(f"{self.info().id} pulls no models by id yet")
