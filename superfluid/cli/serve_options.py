"""The command line of `serve`: its flags, the options of runtimes among them, and the configuration file."""

import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from superfluid.cli.command import Command, CommandError, Number, did_you_mean, nearest
from superfluid.cli.serve_flags import DEFAULT_HOST, DEFAULT_PORT, IGNORED
from superfluid.daemon.runtimes import RuntimeCatalog
from superfluid.llama.search import home_directory


@attrs.define
class ServeOptions:
    """The command line of `serve`, read."""

    models: tuple[str, ...]
    runtime: tuple[str, ...]
    offline: bool
    http: str | None
    host: str | None
    port: int | None
    no_http: bool
    web: str | None
    web_origin: tuple[str, ...]
    socket: str | None
    sessions: str | None
    api_key: str | None
    drain_timeout: float
    max_context: str | None
    max_batch: int
    max_tokens: int | None
    kv_bits: str
    dialect: str
    tool_call_parser: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repeat_penalty: float | None
    sessions_ttl: float
    tool_lease_ms: int
    pin_budget_pct: int
    sessions_cache: bool
    park: bool | None
    park_lossy: bool
    park_budget_gb: float
    cache_disk_gb: float
    tick_decode_budget: int
    tick_target_ms: int
    prefill_budget: int
    starvation_ticks: int
    class_lanes: str
    http_default_qos: str
    no_http_qos_header: bool
    http_allow_batch_invariant: bool
    worker_process: bool
    fim_model: str | None
    fim_max_context: int | None
    fim_max_batch: int
    completion_deadline_ms: int
    completion_rate: float
    completion_burst: float
    log_filter: str
    log_dir: str | None
    log_file: str | None
    runtime_options: dict[str, str]

    @property
    def address(self) -> tuple[str, int] | None:
        """Where HTTP listens; none with --no-http."""
        if self.no_http:
            return None
        if self.http is not None:
            host, _, port = self.http.rpartition(":")
            return host.removeprefix("[").removesuffix("]"), int(port)
        return self.host or DEFAULT_HOST, DEFAULT_PORT if self.port is None else self.port

    @property
    def web_address(self) -> tuple[str, int] | None:
        """Where the session API over the web listens; none without --web."""
        if self.web is None:
            return None
        host, _, port = self.web.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def address_flag(self) -> str:
        """The flag that an error about the address names."""
        if self.http is not None:
            return "--http"
        return "--port" if self.port is not None else "--host" if self.host is not None else "--http"


class ServeCommand(Command):
    """`serve` also takes the options of a runtime, which its worker declares: `--<runtime>-<name> <value>`."""

    help_on_error = False  # it has screens of it; the message would be lost

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags: dict[str, click.Parameter] = {
            flag: param for param in self.params for flag in (*param.opts, *param.secondary_opts)
        }
        line = _Line(flags, RuntimeCatalog(home_directory()).ids())
        line.read(args)
        if line.config is not None:
            line.kept[:0] = list(line.from_file(Path(line.config)))
        ctx.meta["runtime_options"] = line.runtime_options
        ctx.meta["notices"] = line.notices
        return super().parse_args(ctx, line.kept)


class _Line:
    """Sorts a command line into what `serve` knows (`kept`), the options of runtimes, and what is ignored."""

    def __init__(self, flags: Mapping[str, click.Parameter], runtimes: list[str]) -> None:
        self.flags = flags
        self.runtimes = runtimes
        self.words: deque[str] = deque()
        self.kept: list[str] = []
        self.runtime_options: dict[str, str] = {}
        self.notices: list[str] = []
        self.config: str | None = None
        self.given: set[str] = set()  # names of parameters that the command line sets

    def read(self, args: list[str]) -> None:
        self.words = deque(args)
        while self.words:
            argument = self.words.popleft()
            if argument == "--":
                self.kept += [argument, *self.words]
                return
            flag, equals, value = argument.partition("=")
            param = self.flags.get(flag)
            if not flag.startswith("-"):
                self.kept.append(argument)
                self.given.add("models")
            elif param is not None:
                self.given.add(param.name or "")
                if getattr(param, "is_flag", False):
                    self.kept.append(argument)
                elif param.name == "config":
                    self.config = self._value(flag, equals, value)
                else:
                    self.kept += [flag, self._value(flag, equals, value)]
            elif not flag.startswith("--") or flag == "--help":
                self.kept.append(argument)
            elif flag in IGNORED:
                self._ignore(flag, equals, value)
            else:
                self._runtime_option(flag, equals, value)

    def _value(self, flag: str, equals: str, value: str) -> str:
        """The value of a flag: behind its `=`, else the next word."""
        if equals:
            return value
        if not self.words:
            raise CommandError(f"{flag} needs a value", 2)
        return self.words.popleft()

    def _ignore(self, flag: str, equals: str, value: str) -> None:
        takes_value, instead = IGNORED[flag]
        if takes_value:
            self._value(flag, equals, value)
        elif flag == "--continuous-batching" and self.words and self.words[0].isdecimal():
            self.kept += ["--max-batch", self.words.popleft()]
        self.notices.append(f"{flag} is ignored: {instead}")

    def _runtime_option(self, flag: str, equals: str, value: str) -> None:
        if flag.startswith("--pull-"):
            raise CommandError(f"{flag} is an option of fetching a model by its id, and no model is given by id", 2)
        owner = max((name for name in self.runtimes if flag.startswith(f"--{name}-")), key=len, default=None)
        if owner is None or flag == f"--{owner}-":
            hint = did_you_mean(flag, [name for name in self.flags if name.startswith("--")])
            raise CommandError(f"serve has no option {flag}{hint}", 2)
        text = self._value(flag, equals, value)
        if flag in self.runtime_options:
            raise CommandError(f"{flag} is given twice", 2)
        self.runtime_options[flag] = text

    def from_file(self, path: Path) -> Iterator[str]:
        """The flags of a configuration file that the command line does not set. Raises CommandError 2."""
        try:
            settings = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CommandError(f"--config {path}: {getattr(error, 'strerror', None) or error}", 2) from None
        for key, value in settings.items():
            if isinstance(value, dict):
                self._table(path, key, value)
                continue
            param = self.flags.get(f"--{key}")
            if param is None or key == "config":
                meant = nearest(f"--{key}", [name for name in self.flags if name.startswith("--")])
                hint = f" (did you mean {meant.removeprefix('--')}?)" if meant else ""
                raise CommandError(f"--config {path}: there is no key {key!r}{hint}", 2)
            if param.name not in self.given:
                yield from _as_flags(path, key, value, param)

    def _table(self, path: Path, runtime: str, table: dict[str, Any]) -> None:
        if runtime not in self.runtimes:
            raise CommandError(
                f"--config {path}: there is no runtime {runtime!r} here{did_you_mean(runtime, self.runtimes)}", 2
            )
        for name, value in table.items():
            if isinstance(value, dict | list):
                raise CommandError(f"--config {path}: {runtime}.{name} takes one value, got {value!r}", 2)
            text = ("off", "on")[value] if isinstance(value, bool) else str(value)
            self.runtime_options.setdefault(f"--{runtime}-{name}", text)


def _as_flags(path: Path, key: str, value: Any, param: click.Parameter) -> list[str]:
    def wrong(expected: str) -> CommandError:
        return CommandError(f"--config {path}: {key} expects {expected}, got {value!r}", 2)

    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise wrong("true or false")
        if value:
            return [f"--{key}"]
        return [off] if (off := f"--no-{key}") in param.secondary_opts else []
    values = value if getattr(param, "multiple", False) and isinstance(value, list) else [value]
    for one in values:
        number = isinstance(one, int | float) and not isinstance(one, bool)
        if isinstance(param.type, Number) and not number:
            raise wrong("a number")
        if not number and not isinstance(one, str):
            raise wrong("a string")
    return [word for one in values for word in (f"--{key}", str(one))]
