"""`superfluid serve`: what is checked before anything is loaded, in the order that operators rely on."""

import errno
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import trio

from superfluid.cli.command import HELP_FLAGS, CommandError, did_you_mean, say
from superfluid.cli.demo import fetch_demo
from superfluid.cli.serve_flags import FLAGS
from superfluid.cli.serve_options import ServeCommand, ServeOptions
from superfluid.cli.serving import serve
from superfluid.cli.stop_signals import stop_signals
from superfluid.codec.codec import DIALECTS, UnknownDialect
from superfluid.codec.toolcalls.parsers import PARSERS, UnknownParser
from superfluid.daemon.capabilities import refusal
from superfluid.daemon.daemon import Daemon, served_names
from superfluid.daemon.generation import SamplingRung
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.runtimes import Runtime, RuntimeCatalog, RuntimeUnusable, runtime_picks
from superfluid.daemon.start import ServeLock, ServeLocked, make_private, store_directory
from superfluid.engines.kit.options import Option as RuntimeOption, OptionError
from superfluid.llama.demo import DemoError, demo_model
from superfluid.llama.search import LIBRARY_VARIABLE, home_directory
from superfluid.observe.log import LogFilter
from superfluid.observe.metrics import Metrics
from superfluid.scheduler.classes import parse_class, parse_class_lanes
from superfluid.scheduler.keeping import GIGABYTE, KeepSettings, ParkMode

MAX_SOCKET_PATH = 108 if sys.platform == "linux" else 104  # bytes of a socket address, its NUL included
LEAST_PREFILL = 64  # a smaller --prefill-budget would not fill a step
OWNER_ALONE = 0o077  # whatever the server makes is for its owner

MODEL_ID = re.compile(r"(?![./~])[^:]*/.*", re.DOTALL)  # of a model that is not on disk (spec: installs, models by id)
MODEL_FILE = (".gguf", ".base")


def run_serve(bare: tuple[str, ...], models: tuple[str, ...], verbose: bool, **flags: Any) -> int:
    """Serve models over HTTP and the session socket.

    A MODEL is the path of a model file. With none, or the name demo, the demo model is served.
    """
    flags["log_filter"] = "debug" if verbose else flags["log_filter"]
    meta = click.get_current_context().meta
    for notice in meta["notices"]:
        say(notice)
    return start(ServeOptions(models=(*models, *bare), runtime_options=meta["runtime_options"], **flags))


command = ServeCommand("serve", params=FLAGS, callback=run_serve, help=run_serve.__doc__, context_settings=HELP_FLAGS)


def start(options: ServeOptions) -> int:
    """Check everything that can be checked, then serve; the exit code. Raises CommandError."""
    os.umask(OWNER_ALONE)
    home = home_directory()
    named = options.models or ("demo",)
    check_contradictions(options)
    if options.offline and "demo" in named:
        demo_offline(home)
    socket_path = choose_socket(options.socket, home)
    address = options.address
    if address is not None:
        check_port(options.address_flag, *address)
    if "--llamacpp-lib" in options.runtime_options:  # worker and tokenizer must use the same build
        os.environ[LIBRARY_VARIABLE] = options.runtime_options["--llamacpp-lib"]
    catalog = RuntimeCatalog(home)
    catalog.options = worker_options(options.runtime_options, catalog.ids())
    sessions = Path(options.sessions) if options.sessions else home / "sessions"
    try:
        chosen = choose_runtimes(options, named, home, catalog)
        check_capabilities(options, chosen)
        check_runtime_options(options.runtime_options, catalog, chosen)
        check_classes(options)
        if options.log_file is not None:
            redirect_stderr(options.log_file)
        with ServeLock(sessions):
            make_private(home)
            daemon = make_daemon(options, chosen, home, sessions)
            return trio.run(serve, options, daemon, socket_path, stop_signals, strict_exception_groups=True)
    except RuntimeUnusable as error:
        raise CommandError(str(error), error.exit_code) from None
    except (ServeLocked, OSError) as error:
        raise CommandError(str(error), 1) from None


# ---- the command line


def check_contradictions(options: ServeOptions) -> None:
    if options.no_http and (options.http or options.host or options.port is not None):
        raise CommandError("--no-http contradicts --http, --host and --port", 2)
    if options.http is not None:
        host, _, port = options.http.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
            raise CommandError(f'--http expects <address>:<port>, got "{options.http}"', 2)
    if options.max_context is not None and options.max_context != "auto" and not options.max_context.isdecimal():
        raise CommandError(f'--max-context expects a number or auto, got "{options.max_context}"', 2)
    if 0 < options.prefill_budget < LEAST_PREFILL:
        raise CommandError(f"--prefill-budget expects 0, or {LEAST_PREFILL} to 4096, got {options.prefill_budget}", 2)
    if options.park_lossy and options.park is False:
        raise CommandError("--park-lossy contradicts --no-park", 2)
    if options.park_lossy and options.kv_bits not in ("0", "16"):
        raise CommandError(f"--park-lossy needs --kv-bits 16, got {options.kv_bits}", 2)
    if options.dialect not in DIALECTS:
        raise CommandError(str(UnknownDialect(options.dialect)), 2)
    if options.tool_call_parser not in PARSERS:
        raise CommandError(str(UnknownParser(options.tool_call_parser)), 2)
    try:
        LogFilter.parse(options.log_filter)
    except ValueError as error:
        say(f"--log-filter: {error}; using info")
        options.log_filter = "info"


def demo_offline(home: Path) -> None:
    """Refuse (2) to serve a demo model that would have to be fetched."""
    try:
        demo_model(home, offline=True)
    except DemoError as error:
        raise CommandError(str(error), 2) from None


def choose_socket(asked: str | None, home: Path) -> Path:
    """The session socket's path. A default that does not fit a socket address falls back to a temporary place."""
    if asked is not None:
        if len(os.fsencode(asked)) >= MAX_SOCKET_PATH:
            raise CommandError(f"--socket: {asked} does not fit a socket address ({MAX_SOCKET_PATH - 1} bytes)", 2)
        return Path(asked)
    name = f"superfluid-{os.getuid()}.sock"
    for path in (home / "superfluid.sock", Path(tempfile.gettempdir()) / name):
        if len(os.fsencode(path)) < MAX_SOCKET_PATH:
            return path
    return Path("/tmp") / name


def check_port(flag: str, host: str, port: int) -> None:
    """Bind the address once and free it, so that a taken port is told before a model is looked at."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        taken = " (another process listens there)" if error.errno == errno.EADDRINUSE else ""
        raise CommandError(f"{flag} {host}:{port}: {error.strerror or error}{taken}", 1) from None


# ---- models and runtimes


@attrs.frozen
class Chosen:
    """A model to serve and the runtime that serves it, with what that says of the model."""

    path: Path
    name: str
    runtime: Runtime


def choose_runtimes(options: ServeOptions, named: Sequence[str], home: Path, catalog: RuntimeCatalog) -> list[Chosen]:
    """Each model's file and runtime, in order, a path given twice once. Raises CommandError and RuntimeUnusable."""
    for model in named:
        if is_model_id(model):
            raise CommandError(f"{model}: no runtime here fetches models by id yet; give the path of a file", 1)
    picks = runtime_picks(options.runtime)
    paths: list[Path] = []
    written: dict[Path, str] = {}
    for model in named:
        check_pick(model, picks, catalog)
        path = model_path(model, home, options.offline)
        if path not in written:
            written[path] = model
            paths.append(path)
    chosen: list[Chosen] = []
    for path, name in zip(paths, served_names(paths), strict=True):
        runtime = catalog.pick(path, asked_for(path, written[path], name, picks))
        reads = runtime.model.get("reads")
        if reads is not True:
            raise CommandError(f"{reads or f'runtime {runtime.id} does not read {path}'}", 2)
        chosen.append(Chosen(path, name, runtime))
    return chosen


def is_model_id(model: str) -> bool:
    if os.path.exists(model) or model.lower().endswith(MODEL_FILE):
        return False
    return MODEL_ID.fullmatch(model) is not None


def check_pick(model: str, picks: Mapping[str | None, str | None], catalog: RuntimeCatalog) -> None:
    """Refuse (2) a pick for `model` that names no runtime, before its file is looked at."""
    asked = asked_for(Path(model), model, "", picks)
    if asked is not None:
        catalog.resolve(asked)


def asked_for(path: Path, written: str, name: str, picks: Mapping[str | None, str | None]) -> str | None:
    """The runtime that `--runtime` picks for a model: by its path, then its stem or served name, else for all."""
    for key in (written, str(path), path.stem, name, None):
        if key in picks:
            return picks[key]
    return None


def model_path(model: str, home: Path, offline: bool) -> Path:
    """The file of a model argument; the demo model is fetched. Raises CommandError (1 fetch failed, 2 not there)."""
    if model == "demo":
        return fetch_demo(home, offline)
    path = Path(model).expanduser()
    if not path.exists():
        raise CommandError(f"{model}: no such file or directory", 2)
    return path.resolve()


def check_capabilities(options: ServeOptions, chosen: Sequence[Chosen]) -> None:
    """Refuse (2) what a runtime's static record declines, in the runtime's own words."""
    for one in chosen:
        if options.kv_bits != "0" and (why := refusal(one.runtime.capabilities, "load", "kv_bits")):
            raise CommandError(f"--kv-bits {options.kv_bits}: {why}", 2)
        if (
            options.park_lossy
            and generates(one.runtime)
            and (why := refusal(one.runtime.capabilities, "serving", "park_lossy"))
        ):
            raise CommandError(f"--park-lossy: {why}", 2)


def generates(runtime: Runtime) -> bool:
    """Whether a runtime's models generate text, as far as it says."""
    return refusal(runtime.capabilities, "workload", "causal_generation") is None


def owner_of(flag: str, runtimes: Sequence[str]) -> str:
    """The runtime whose option a flag is: the longest id that fits."""
    return max((name for name in runtimes if flag.startswith(f"--{name}-")), key=len)


def worker_options(given: Mapping[str, str], runtimes: Sequence[str]) -> dict[str, list[str]]:
    """The runtimes' own options, by runtime id, as their workers take them."""
    found: dict[str, list[str]] = {}
    for flag, value in given.items():
        owner = owner_of(flag, runtimes)
        found.setdefault(owner, []).extend([f"--{flag.removeprefix(f'--{owner}-')}", value])
    return found


def check_runtime_options(given: Mapping[str, str], catalog: RuntimeCatalog, chosen: Sequence[Chosen]) -> None:
    """Check options of runtimes against what their workers declare. Raises CommandError 2, RuntimeUnusable."""
    runtimes = {one.runtime.id: one.runtime for one in chosen}
    for flag, value in given.items():
        owner = owner_of(flag, catalog.ids())
        try:
            runtime = runtimes.get(owner) or catalog.check(owner)
        except RuntimeUnusable as error:
            raise CommandError(f"{flag} cannot be checked: {error}", 2) from None
        if not runtime.available:
            raise CommandError(f"{flag} cannot be checked: runtime {owner} cannot run here: {runtime.reason}", 2)
        declared = {f"--{owner}-{entry['name']}": RuntimeOption.from_report(entry) for entry in runtime.options}
        if flag not in declared:
            takes = ", ".join(declared) or "none"
            raise CommandError(
                f"runtime {owner} has no option {flag}{did_you_mean(flag, declared)}; it takes {takes}", 2
            )
        try:
            declared[flag].parse(value)
        except OptionError as error:
            raise CommandError(f"{flag}: {error}", 2) from None
    for one in chosen:
        if one.runtime.id in catalog.refused_options:  # none by itself is wrong
            raise catalog.refused_options[one.runtime.id]


def check_classes(options: ServeOptions) -> None:
    try:
        parse_class_lanes(options.class_lanes, options.max_batch)
        parse_class(options.http_default_qos)
    except ValueError as error:
        text = str(error)
        raise CommandError(text if text.startswith("--") else f"--http-default-qos: {text}", 2) from None


# ---- the daemon


def redirect_stderr(path: str) -> None:
    """Append stderr, the workers' included, to a file. Raises CommandError 1."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise CommandError(f"--log-file {path}: {error.strerror}", 1) from None
    os.fchmod(descriptor, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def make_daemon(options: ServeOptions, chosen: Sequence[Chosen], home: Path, sessions: Path) -> Daemon:
    """The daemon and its models, nothing loaded yet. Raises CommandError 2 when `auto` finds no window."""
    metrics = Metrics(os.environ.get("SUPERFLUID_NODE_NAME", "").strip() or socket.gethostname())
    models: list[Model] = []
    for index, one in enumerate(chosen):
        config = ModelConfig(
            name=one.name,
            path=one.path,
            runtime=one.runtime,
            options=worker_options(options.runtime_options, [one.runtime.id]).get(one.runtime.id, []),
            store=store_directory(sessions, one.name, default=index == 0),
            max_context=None if options.max_context in (None, "auto") else int(options.max_context),
            max_batch=options.max_batch,
            kv_bits=16 if options.park_lossy else int(options.kv_bits),
            dialect=options.dialect,
            tool_call_parser=options.tool_call_parser,
            max_tokens=options.max_tokens,
            operator=SamplingRung(
                options.temperature, options.top_p, options.top_k, options.min_p, options.repeat_penalty
            ),
            tick_decode_budget=options.tick_decode_budget,
            tick_target_ms=options.tick_target_ms,
            prefill_budget=options.prefill_budget,
            starvation_ticks=options.starvation_ticks,
            class_lanes=parse_class_lanes(options.class_lanes, options.max_batch),
            keep=keep_settings(options),
            in_process=choose_in_process(options, chosen),
        )
        model = Model(config, metrics.model(one.name))
        if options.max_context == "auto" and not model.planned.sized:
            raise CommandError(f"--max-context auto: {model.planned.why}; give a number", 2)
        models.append(model)
    return Daemon(home, models, metrics)


def keep_settings(options: ServeOptions) -> KeepSettings:
    """What is kept of finished lanes."""
    park = ParkMode.WITHIN_BUDGET
    if options.park or options.park_lossy:
        park = ParkMode.ALWAYS
    elif options.park is False:
        park = ParkMode.NEVER
    return KeepSettings(
        park, options.park_lossy, int(options.park_budget_gb * GIGABYTE), int(options.cache_disk_gb * GIGABYTE)
    )


def choose_in_process(options: ServeOptions, chosen: Sequence[Chosen]) -> Any:
    """With --no-worker-process, the worker to run on a thread; none where a process of its own is needed."""
    if options.worker_process:
        return None
    if len(chosen) > 1:
        say("--no-worker-process is ignored: several models are served, each by a process of its own")
        return None
    runtime = chosen[0].runtime
    if not runtime.built_in:
        say(f"--no-worker-process is ignored: the worker of {runtime.id} is a program of its own")
        return None
    from superfluid.cli.in_process import in_process_worker  # an engine comes into this process only when asked for

    return in_process_worker(runtime.id)
