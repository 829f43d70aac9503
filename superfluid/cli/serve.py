"""`superfluid serve`: the command line, the order of refusals at start, and the run of the daemon."""

import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import trio

from superfluid.api.http.app import listen
from superfluid.api.http.context import HttpSettings
from superfluid.api.http.security import Access, is_loopback
from superfluid.api.http.server import run_http
from superfluid.api.socket import SocketTaken, run_socket
from superfluid.cli.command import HELP_FLAGS, Command, CommandError, did_you_mean, say
from superfluid.cli.demo import fetch_demo
from superfluid.cli.serve_flags import DEFAULT_PORT, FLAGS
from superfluid.daemon.daemon import Daemon, served_names
from superfluid.daemon.generation import SamplingRung
from superfluid.daemon.model import Model, ModelConfig, ModelFailed
from superfluid.daemon.runtimes import RuntimeCatalog, RuntimeUnusable
from superfluid.daemon.start import ServeLock, ServeLocked, store_directory
from superfluid.llama.search import LIBRARY_VARIABLE, home_directory
from superfluid.observe import tasks
from superfluid.observe.log import LogFilter, configure_logging
from superfluid.observe.metrics import Metrics
from superfluid.scheduler.classes import parse_class, parse_class_lanes

MAX_SOCKET_PATH = 108 if sys.platform == "linux" else 104  # bytes of a socket address, its NUL included
TEARDOWN = 30.0  # seconds the teardown may take after a drain
TEARDOWN_CUT = 5.0  # and after a drain that was cut by its timeout
RUNTIME_OPTION = re.compile(r"--([a-z0-9._-]+?)-([a-z0-9][a-z0-9-]*)\Z")


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
    socket: str | None
    sessions: str | None
    api_key: str | None
    drain_timeout: float
    max_context: str
    max_batch: int
    max_tokens: int | None
    kv_bits: str
    dialect: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repeat_penalty: float | None
    tick_decode_budget: int
    tick_target_ms: int
    prefill_budget: int
    starvation_ticks: int
    class_lanes: str
    http_default_qos: str
    no_http_qos_header: bool
    http_allow_batch_invariant: bool
    worker_process: bool
    log_filter: str
    log_file: str | None
    runtime_options: dict[str, str]

    @property
    def address(self) -> tuple[str, int] | None:
        """Where HTTP listens; none with --no-http."""
        if self.no_http:
            return None
        if self.http is not None:
            host, _, port = self.http.rpartition(":")
            return host.strip("[]"), int(port)
        return self.host or "127.0.0.1", DEFAULT_PORT if self.port is None else self.port


class ServeCommand(Command):
    """`serve` also takes the options of a runtime, which its worker declares: `--<runtime>-<name> <value>`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {flag: param for param in self.params for flag in (*param.opts, *param.secondary_opts)}
        kept: list[str] = []
        found: dict[str, str] = {}
        runtimes = RuntimeCatalog(home_directory()).ids()
        rest = iter(args)
        for argument in rest:
            flag, equals, value = argument.partition("=")
            if not flag.startswith("--") or flag in known or flag == "--help":
                kept.append(argument)
                takes_value = isinstance(known.get(flag), click.Option) and not known[flag].is_flag  # type: ignore[attr-defined]
                if takes_value and not equals:
                    kept += [following for following in [next(rest, None)] if following is not None]
                continue
            owner = max((name for name in runtimes if flag.startswith(f"--{name}-")), key=len, default=None)
            if owner is None:
                hint = did_you_mean(flag, [name for name in known if name.startswith("--")])
                raise CommandError(f"serve has no option {flag}{hint}", 2)
            if not equals:
                following = next(rest, None)
                if following is None:
                    raise CommandError(f"{flag} needs a value", 2)
                value = following
            if flag in found:
                raise CommandError(f"{flag} is given twice", 2)
            found[flag] = value
        ctx.meta["runtime_options"] = found
        return super().parse_args(ctx, kept)


def run_serve(bare: tuple[str, ...], models: tuple[str, ...], verbose: bool, **flags: Any) -> int:
    """Serve models over HTTP and the session socket.

    A MODEL is the path of a model file. With none, or the name demo, the demo model is served.
    """
    flags["log_filter"] = "debug" if verbose else flags["log_filter"]
    runtime_options = click.get_current_context().meta["runtime_options"]
    return start(ServeOptions(models=(*models, *bare), runtime_options=runtime_options, **flags))


command = ServeCommand("serve", params=FLAGS, callback=run_serve, help=run_serve.__doc__, context_settings=HELP_FLAGS)


def start(options: ServeOptions) -> int:
    """Check everything that can be checked, in the order operators rely on, then serve. Raises CommandError."""
    check_contradictions(options)
    home = home_directory()
    if options.log_file is not None:
        redirect_stderr(options.log_file)
    socket_path = choose_socket(options.socket, home)
    address = options.address
    if address is not None:
        check_port(*address)
    paths = [model_path(model, home, options.offline) for model in options.models or ("demo",)]
    if "--llamacpp-lib" in options.runtime_options:  # worker and tokenizer must use the same build
        os.environ[LIBRARY_VARIABLE] = options.runtime_options["--llamacpp-lib"]
    catalog = RuntimeCatalog(home, worker_options(options, home))
    sessions = Path(options.sessions) if options.sessions else home / "sessions"
    metrics = Metrics(os.environ.get("SUPERFLUID_NODE_NAME", "").strip() or socket.gethostname())
    try:
        models = make_models(options, paths, catalog, sessions, metrics)
        with ServeLock(sessions):
            return trio.run(
                serve, options, Daemon(home, models, metrics), socket_path, address, strict_exception_groups=True
            )
    except RuntimeUnusable as error:
        raise CommandError(str(error), error.exit_code) from None
    except ServeLocked as error:
        raise CommandError(str(error), 1) from None


def check_contradictions(options: ServeOptions) -> None:
    if options.no_http and (options.http or options.host or options.port is not None):
        raise CommandError("--no-http contradicts --http, --host and --port", 2)
    if options.http is not None and not re.fullmatch(r".+:\d{1,5}", options.http):
        raise CommandError(f'--http expects <address>:<port>, got "{options.http}"', 2)
    if options.max_context != "auto" and not options.max_context.isdigit():
        raise CommandError(f'--max-context expects a number or auto, got "{options.max_context}"', 2)
    try:
        LogFilter.parse(options.log_filter)
    except ValueError as error:
        say(f"--log-filter: {error}; using info")
        options.log_filter = "info"
    try:
        parse_class_lanes(options.class_lanes, options.max_batch)
        parse_class(options.http_default_qos)
    except ValueError as error:
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


def check_port(host: str, port: int) -> None:
    """Bind the address once and free it, so that a taken port is told before a model loads."""
    try:
        listen(host, port).close()
    except OSError as error:
        taken = " (another process listens there)" if isinstance(error, OSError) and error.errno == 98 else ""
        raise CommandError(f"--http {host}:{port}: {error.strerror or error}{taken}", 1) from None


def model_path(model: str, home: Path, offline: bool) -> Path:
    """The file of a model argument; the demo model is fetched. Raises CommandError (1 fetch failed, 2 not there)."""
    if model == "demo":
        return fetch_demo(home, offline)
    path = Path(model).expanduser()
    if not path.exists():
        raise CommandError(f"{model}: no such file or directory", 2)
    return path.resolve()


def worker_options(options: ServeOptions, home: Path) -> dict[str, list[str]]:
    """The runtimes' own options, by runtime id, as their workers take them."""
    by_runtime: dict[str, list[str]] = {}
    ids = RuntimeCatalog(home).ids()
    for name, value in options.runtime_options.items():
        owner = max((identity for identity in ids if name.startswith(f"--{identity}-")), key=len)
        by_runtime.setdefault(owner, []).extend([f"--{name.removeprefix(f'--{owner}-')}", value])
    return by_runtime


def runtime_picks(values: Sequence[str]) -> dict[str | None, str | None]:
    """`--runtime`: none is the pick for all models; the last of the same key wins, auto takes it back."""
    picks: dict[str | None, str | None] = {}
    for value in values:
        model, equals, name = value.rpartition("=")
        picks[model if equals else None] = None if name == "auto" else name
    return picks


def make_models(
    options: ServeOptions, paths: Sequence[Path], catalog: RuntimeCatalog, sessions: Path, metrics: Metrics
) -> list[Model]:
    """The models, each with the runtime that serves it and its facts, nothing loaded yet."""
    picks = runtime_picks(options.runtime)
    models: list[Model] = []
    unique = list(dict.fromkeys(paths))
    for index, (path, name) in enumerate(zip(unique, served_names(unique), strict=True)):
        pick = picks.get(str(path), picks.get(path.stem, picks.get(name, picks.get(None))))
        catalog.pick(path, pick)
        runtime = catalog.check(catalog.pick(path, pick).id, path)
        facts = runtime.report.get("model") or {}
        if facts.get("reads") is not True and runtime.formats:
            raise CommandError(f"{path}: {facts.get('reads') or 'its runtime does not read it'}", 2)
        unusable_options(runtime.report, options)
        config = ModelConfig(
            name=name,
            path=path,
            runtime=runtime,
            options=catalog.options.get(runtime.id, []),
            store=store_directory(sessions, name, default=index == 0),
            max_context=None if options.max_context == "auto" else int(options.max_context),
            max_batch=options.max_batch,
            kv_bits=int(options.kv_bits),
            dialect=options.dialect,
            max_tokens=options.max_tokens,
            operator=SamplingRung(
                options.temperature, options.top_p, options.top_k, options.min_p, options.repeat_penalty
            ),
            tick_decode_budget=options.tick_decode_budget,
            tick_target_ms=options.tick_target_ms,
            prefill_budget=options.prefill_budget,
            starvation_ticks=options.starvation_ticks,
            class_lanes=parse_class_lanes(options.class_lanes, options.max_batch),
            worker_process=options.worker_process,
        )
        models.append(Model(config, metrics.model(name)))
    return models


def unusable_options(report: dict[str, Any], options: ServeOptions) -> None:
    """Refuse (2) what the runtime's static record declines, in the runtime's own words."""
    load = (report.get("capabilities") or {}).get("load") or {}
    leaf = load.get("kv_bits") if isinstance(load, dict) else None
    if options.kv_bits != "0" and (leaf is False or isinstance(leaf, str)):
        raise CommandError(f"--kv-bits {options.kv_bits}: {leaf or 'not supported'}", 2)


def redirect_stderr(path: str) -> None:
    """Append stderr, the workers' included, to a file. Raises CommandError 1."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise CommandError(f"--log-file {path}: {error.strerror}", 1) from None
    os.dup2(descriptor, 2)
    os.close(descriptor)


async def serve(options: ServeOptions, daemon: Daemon, socket_path: Path, address: tuple[str, int] | None) -> int:
    """Serve until a signal drains the daemon; the exit code."""
    configure_logging(options.log_filter)
    trio.lowlevel.current_task().name = "daemon"
    ready = failed = False
    code = 1
    try:
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            await nursery.start(watch_signals, daemon, stop, nursery.cancel_scope, name="signals")
            for model in daemon.models:
                runtime = model.config.runtime
                say(
                    f"runtime {runtime.id} serves {model.config.path} "
                    f"({runtime.version}, {runtime.worker.source}: {runtime.worker.path})"
                )
                say(f"context window {model.planned.tokens} tokens ({model.planned.why})")
            await nursery.start(daemon.run, name="registry")
            await nursery.start(run_socket, daemon, socket_path, name="session-socket")
            say(f"serving on {socket_path}")
            if address is not None:
                access = Access(address[0], options.api_key)
                settings = HttpSettings(
                    parse_class(options.http_default_qos),
                    not options.no_http_qos_header,
                    options.http_allow_batch_invariant,
                )
                port = await nursery.start(
                    run_http, daemon, *address, access, settings, options.drain_timeout, name="http"
                )
                shown = f"[{address[0]}]" if ":" in address[0] else address[0]
                say(f"openai api on http://{shown}:{port} ({who_may_ask(access)})")
            ready = True
            await daemon.drain_started.wait()
            await drain(options, daemon, stop)
            code = 0
            nursery.cancel_scope.cancel()
    except* (ModelFailed, SocketTaken, OSError) as group:
        for error in leaves(group):
            say(str(error))
        failed = True
    if failed:
        return 1
    return code if ready or daemon.draining else 1


async def drain(options: ServeOptions, daemon: Daemon, stop: trio.Event) -> None:
    """Let what is in flight finish, for the drain timeout or until a second signal."""
    say("draining: no new requests are taken")
    async with trio.open_nursery() as nursery:

        async def until_stopped() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_stopped, name="second-signal")
        with trio.move_on_after(options.drain_timeout) as limit:
            await daemon.idle()
        nursery.cancel_scope.cancel()
    if limit.cancelled_caught:
        say(f"drain timeout of {options.drain_timeout:g} s: what still ran is cut")


async def watch_signals(
    daemon: Daemon,
    stop: trio.Event,
    scope: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """SIGTERM, SIGINT and SIGUSR1 drain, the second stops at once, SIGUSR2 prints the task tree."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGUSR2:
                sys.stderr.write(tasks.dump_text(trio.lowlevel.current_root_task()))
                sys.stderr.flush()
            elif daemon.draining:
                stop.set()
            elif not all(model.loaded for model in daemon.models):
                scope.cancel()  # not ready yet: there is nothing to drain
            else:
                daemon.drain()


def who_may_ask(access: Access) -> str:
    if not access.open:
        return "an API key is wanted"
    if is_loopback(access.listen_host):
        return "open to this machine, no API key"
    return "OPEN TO THE NETWORK, no API key"


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The exceptions of a group and of the groups inside it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
