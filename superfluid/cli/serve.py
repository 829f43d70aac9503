"""`superfluid serve`: what is checked before anything is loaded, in the order that operators rely on."""

import contextlib
import errno
import importlib
import os
import re
import resource
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import click

from superfluid.cli.choosing import (
    check_capabilities,
    check_runtime_options,
    choose_runtimes,
    choose_satellite,
    worker_options,
)
from superfluid.cli.command import HELP_FLAGS, CommandError, first_stderr, reason, say
from superfluid.cli.serve_flags import FIM_LANES, FLAGS
from superfluid.cli.serve_options import ServeCommand, ServeOptions
from superfluid.daemon.runtimes import RuntimeCatalog, RuntimeUnusable
from superfluid.daemon.start import ServeLock, ServeLocked, make_private
from superfluid.llama.demo import DemoError, demo_model
from superfluid.llama.search import LIBRARY_VARIABLE, home_directory
from superfluid.observe.log import LogFilter
from superfluid.scheduler.classes import parse_class_lanes
from superfluid.sessions.errors import StoreError

MAX_SOCKET_PATH = 108 if sys.platform == "linux" else 104  # bytes of a socket address, its NUL included
LEAST_RATE = 0.001  # of --completion-rate that is on
LEAST_PREFILL = 64  # a smaller --prefill-budget would not fill a step
NO_FIM = "no model is given by --fim-model"
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")  # where --web may listen
DESCRIPTORS = 1 << 16  # asked for; many systems give a process 1024
OWNER_ALONE = 0o077  # whatever the server makes is for its owner


def run_serve(bare: tuple[str, ...], models: tuple[str, ...], verbose: bool, **flags: Any) -> int:
    """Serve models over HTTP and the session socket.

    A MODEL is the path of a model file. With none, or the name demo, the demo model is served.
    """
    flags["log_filter"] = "debug" if verbose else flags["log_filter"]
    meta = click.get_current_context().meta
    for notice in meta["notices"]:
        say(notice)
    return start(ServeOptions(models=(*bare, *models), runtime_options=meta["runtime_options"], **flags))


command = ServeCommand("serve", params=FLAGS, callback=run_serve, help=run_serve.__doc__, context_settings=HELP_FLAGS)


def start(options: ServeOptions) -> int:
    """Check everything that can be checked, then serve; the exit code. Raises CommandError."""
    os.umask(OWNER_ALONE)
    raise_descriptor_limit()
    home = home_directory()
    named = options.models or ("demo",)
    check_contradictions(options)
    if options.offline and "demo" in named:
        demo_offline(home)
    socket_path = choose_socket(options.socket, home)
    address = options.address
    if address is not None:
        check_port(options.address_flag, *address, instead="--port" if options.http is None else "--http")
    if options.web_address is not None:
        check_port("--web", *options.web_address, instead="--web")
    if "--llamacpp-lib" in options.runtime_options:  # worker and tokenizer must use the same build
        os.environ[LIBRARY_VARIABLE] = options.runtime_options["--llamacpp-lib"]
    threading.Thread(target=import_server, daemon=True).start()  # while the runtimes are asked
    catalog = RuntimeCatalog(home)
    catalog.options = worker_options(options.runtime_options, catalog.ids())
    sessions = Path(options.sessions) if options.sessions else home / "sessions"
    try:
        chosen = choose_runtimes(options, named, home, catalog)
        check_capabilities(options, chosen)
        satellite = choose_satellite(options, home, catalog)
        every = chosen if satellite is None else [*chosen, satellite]
        check_runtime_options(options.runtime_options, catalog, every)
        check_classes(options)
        if options.log_file is not None:
            redirect_stderr(options.log_file)
        with ServeLock(sessions):
            make_private(home)
            from superfluid.cli.assemble import make_daemon
            from superfluid.cli.serving import run

            return run(options, make_daemon(options, chosen, satellite, home, sessions), socket_path)
    except RuntimeUnusable as error:
        raise CommandError(str(error), error.exit_code) from None
    except (ServeLocked, StoreError, OSError) as error:
        raise CommandError(reason(error), 1) from None


def raise_descriptor_limit() -> None:
    """Every connection takes a descriptor, and one that its client closed holds it for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def import_server() -> None:
    """Import the modules of a running server, which take a while."""
    with contextlib.suppress(Exception):  # whoever needs them is told
        for name in ("assemble", "serving"):
            importlib.import_module(f"superfluid.cli.{name}")


# ---- the command line


def check_contradictions(options: ServeOptions) -> None:
    if options.no_http and (options.http or options.host or options.port is not None):
        raise CommandError("--no-http contradicts --http, --host and --port", 2)
    if options.api_key is not None and not options.api_key.strip():
        raise CommandError("--api-key is blank (an unset variable?): leave the flag out, or give a key", 2)
    if options.http is not None:
        host, _, port = options.http.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
            raise CommandError(f'--http expects <address>:<port>, got "{options.http}"', 2)
    if options.web is not None:
        host, _, port = options.web.rpartition(":")
        if host not in LOOPBACK or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
            raise CommandError(f'--web listens on loopback only: 127.0.0.1:<port>, got "{options.web}"', 2)
    check_addresses(options)
    if options.max_context is not None and options.max_context != "auto" and not options.max_context.isdecimal():
        raise CommandError(f'--max-context expects a number or auto, got "{options.max_context}"', 2)
    if 0 < options.prefill_budget < LEAST_PREFILL:
        raise CommandError(f"--prefill-budget expects 0, or {LEAST_PREFILL} to 4096, got {options.prefill_budget}", 2)
    if 0 < options.completion_rate < LEAST_RATE:
        raise CommandError(
            f"--completion-rate expects 0, or at least {LEAST_RATE:g}, got {options.completion_rate:g}", 2
        )
    if options.completion_rate and options.completion_burst < 1:
        raise CommandError(f"--completion-burst expects at least 1, got {options.completion_burst:g}", 2)
    if options.park_lossy and options.park is False:
        raise CommandError("--park-lossy contradicts --no-park", 2)
    if options.park_lossy and options.kv_bits not in ("0", "16"):
        raise CommandError(f"--park-lossy needs --kv-bits 16, got {options.kv_bits}", 2)
    if options.sessions_cache and (options.park or options.park_lossy):
        raise CommandError("--sessions-cache contradicts --park and --park-lossy: its sessions end with the server", 2)
    check_names(options)
    tell_ignored(options)
    try:
        LogFilter.parse(options.log_filter)
    except ValueError as error:
        say(f"--log-filter: {error}; using info")
        options.log_filter = "info"


def check_addresses(options: ServeOptions) -> None:
    """Refuse (2) two listeners at one address."""
    http, web = options.address, options.web_address
    if http is None or web is None or http[1] != web[1] or not http[1]:
        return
    names = {"localhost": "127.0.0.1"}
    host, other = (names.get(name, name) for name in (http[0], web[0]))
    every = {"0.0.0.0": "127.0.0.1", "::": other}  # what also takes the loopback address
    if other in (host, every.get(host)):
        shown = f"{http[0]}:{http[1]}"
        raise CommandError(f"--web {options.web}: HTTP listens at {shown}; give --web another port", 2)


def tell_ignored(options: ServeOptions) -> None:
    """Say which flags do nothing because of another."""
    no_http = "there is no HTTP listener with --no-http"
    ignored = {
        "--fim-max-context": (options.fim_max_context is not None and not options.fim_model, NO_FIM),
        "--fim-max-batch": (options.fim_max_batch != FIM_LANES and not options.fim_model, NO_FIM),
        "--web-origin": (options.web_origin and options.web is None, "the session API is on the web with --web only"),
        "--host": (options.host and options.http, "--http says where HTTP listens"),
        "--port": (options.port is not None and options.http, "--http says where HTTP listens"),
        "--api-key": (options.api_key and options.no_http, no_http),
        "--no-http-qos-header": (options.no_http_qos_header and options.no_http, no_http),
        "--http-allow-batch-invariant": (options.http_allow_batch_invariant and options.no_http, no_http),
    }
    for flag, (given, why) in ignored.items():
        if given:
            say(f"{flag} is ignored: {why}")


def check_names(options: ServeOptions) -> None:
    """Refuse (2) a dialect or a parser that does not exist."""
    if (options.dialect, options.tool_call_parser) == ("auto", "auto"):
        return  # without importing the codec for it
    from superfluid.codec.codec import DIALECTS, UnknownDialect
    from superfluid.codec.toolcalls.parsers import PARSERS, UnknownParser

    if options.dialect not in DIALECTS:
        raise CommandError(str(UnknownDialect(options.dialect)), 2)
    if options.tool_call_parser not in PARSERS:
        raise CommandError(str(UnknownParser(options.tool_call_parser)), 2)


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


def check_port(flag: str, host: str, port: int, instead: str) -> None:
    """Bind the address once and free it, so that a taken port is told before a model is looked at; `instead` is the
    flag that names another."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        taken = f" (another process listens there; name another port with {instead})" if in_use else ""
        unknown = isinstance(error, socket.gaierror) or not error.errno  # its number is none of the system's
        why = error.strerror or error if unknown else os.strerror(error.errno or 0)
        raise CommandError(f"{flag} {host}:{port}: {why}{taken}", 1) from None


def check_classes(options: ServeOptions) -> None:
    try:
        parse_class_lanes(options.class_lanes, options.max_batch)
    except ValueError as error:
        raise CommandError(str(error), 2) from None


def redirect_stderr(path: str) -> None:
    """Append stderr, the workers' included, to a file. Raises CommandError 1."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise CommandError(f"--log-file {path}: {error.strerror}", 1) from None
    first_stderr.keep()
    os.fchmod(descriptor, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
