"""The run of `superfluid serve`: from a daemon that is put together to its exit code."""

import contextlib
import gc
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import trio

from superfluid.api.http.context import HttpSettings
from superfluid.api.http.listener import CannotListen
from superfluid.api.http.security import Access, is_loopback
from superfluid.api.http.server import run_http
from superfluid.api.socket import SocketTaken, run_socket
from superfluid.api.web.checks import TOKEN_FILE
from superfluid.api.web.server import run_web
from superfluid.cli.command import CommandError, fail, first_stderr, reason, say
from superfluid.cli.serve_options import ServeOptions
from superfluid.cli.stop_signals import stop_signals
from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Model, ModelFailed
from superfluid.daemon.notify import keep_watchdog_quiet, notify
from superfluid.daemon.overview import task_page
from superfluid.observe.log import configure_logging
from superfluid.scheduler.classes import parse_class
from superfluid.sessions.errors import StoreError

TEARDOWN = 30.0  # seconds that the teardown may take after a drain
TEARDOWN_CUT = 5.0  # and after a drain that was cut by its timeout or a second signal

GC_THRESHOLDS = (20_000, 20, 20)  # objects made, then generations, between collections

OK, FAILED, REFUSED = 0, 1, 2


@attrs.define
class Run:
    """What the tasks of a run share."""

    options: ServeOptions
    daemon: Daemon
    stop: trio.Event = attrs.Factory(trio.Event)  # a second signal: do not wait for anything
    http_over: trio.Event = attrs.Factory(trio.Event)
    cut: bool = False


def run(options: ServeOptions, daemon: Daemon, socket_path: Path) -> int:
    """Serve until a signal drains the daemon; the exit code."""
    with stop_signals.in_loop():
        return trio.run(serve, options, daemon, socket_path, strict_exception_groups=True)


async def serve(options: ServeOptions, daemon: Daemon, socket_path: Path) -> int:
    """Serve until a signal drains the daemon; the exit code."""
    try:
        configure_logging(options.log_filter, directory=Path(options.log_dir) if options.log_dir else None)
    except OSError as error:
        raise CommandError(f"--log-dir {options.log_dir}: {error.strerror or error}", FAILED) from None
    trio.lowlevel.current_task().name = "daemon"
    run = Run(options, daemon)
    failures: list[BaseException] = []
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, run, nursery.cancel_scope, name="signals")
            nursery.start_soon(keep_watchdog_quiet, name="watchdog")
            check_socket(socket_path)
            for model in daemon.everything:
                announce(model)
            await nursery.start(daemon.run, name="registry")
            for model in daemon.models:
                if model.codec.notice:
                    say(f"{model.name}: {model.codec.notice}")
            await nursery.start(run_socket, daemon, socket_path, name="session-socket")
            say(f"serving on {socket_path}")
            if options.address is None:
                run.http_over.set()
            else:
                await start_http(run, nursery)
            if options.web_address is not None:
                await start_web(run, nursery)
            if stop_signals.stopping:
                await trio.sleep_forever()  # the cancellation is on its way
            stop_signals.served = True
            first_stderr.let_go()
            settle_memory()
            notify("READY=1")
            await daemon.drain_started.wait()
            notify("STOPPING=1")
            await drain(run)
            nursery.cancel_scope.cancel()
            limit_teardown(TEARDOWN_CUT if run.cut else TEARDOWN)
    except* (ModelFailed, StoreError, SocketTaken, OSError, DialectRefused) as group:
        failures = leaves(group)
    for failure in failures:
        fail(reason(failure))
    if failures:
        return REFUSED if all(isinstance(error, DialectRefused) for error in failures) else FAILED
    return FAILED if stop_signals.stopping else OK


def announce(model: Model) -> None:
    """The lines that say what is about to be loaded."""
    runtime = model.config.runtime
    source = "in process" if model.config.in_process else runtime.worker.source
    say(f"runtime {runtime.id} serves {model.config.path} ({runtime.version}, {source}: {runtime.worker.path})")
    say(f"context window {model.planned.tokens} tokens ({model.planned.why})")


def check_socket(path: Path) -> None:
    """Raises SocketTaken where the session socket cannot be made; one on which a server answers is left alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SocketTaken(f"--socket {path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SocketTaken(f"--socket {path}: {path.parent} cannot be written")
    if os.path.lexists(path) and not path.is_socket():
        raise SocketTaken(f"--socket {path}: something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise SocketTaken(f"--socket {path}: another server answers there; name another path")


def settle_memory() -> None:
    """Leave what a server is made of out of every later collection, and collect less often: a sweep over it all
    takes as long as many tokens."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def start_http(run: Run, nursery: trio.Nursery) -> None:
    """Listen and serve; returns once that is so, and said."""
    options = run.options
    assert options.address is not None
    host = options.address[0]
    access = Access(host, options.api_key)
    settings = HttpSettings(
        parse_class(options.http_default_qos), not options.no_http_qos_header, options.http_allow_batch_invariant
    )

    async def http(task_status: trio.TaskStatus[int]) -> None:
        assert options.address is not None
        with naming(options.address_flag):
            await run_http(run.daemon, *options.address, access, settings, task_status)
        run.http_over.set()

    port = await nursery.start(http, name="http")
    say(f"openai api on http://{shown(host)}:{port} ({who_may_ask(access)})")


async def start_web(run: Run, nursery: trio.Nursery) -> None:
    """Listen and serve the session API over the web; returns once that is so, and said."""
    options = run.options
    assert options.web_address is not None
    host, port = options.web_address
    token_file = run.daemon.default.store.directory / TOKEN_FILE

    async def web(task_status: trio.TaskStatus[int]) -> None:
        with naming("--web"):
            await run_web(run.daemon, host, port, token_file, options.web_origin, task_status)

    port = await nursery.start(web, name="web")
    say(f"api-web on http://{shown(host)}:{port} (token: {token_file})")


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """An address that cannot be listened on is told with the flag that gave it."""
    try:
        yield
    except CannotListen as error:
        raise CannotListen(f"{flag} {error}") from None


def shown(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


async def drain(run: Run) -> None:
    """Let what is in flight finish, for the drain timeout or until a second signal."""
    say("draining: no new requests are taken")
    async with trio.open_nursery() as nursery:

        async def until_stopped() -> None:
            await run.stop.wait()
            run.cut = True
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_stopped, name="second-signal")
        with trio.move_on_after(run.options.drain_timeout) as limit:
            await run.daemon.idle()
            await run.http_over.wait()
        nursery.cancel_scope.cancel()
    if limit.cancelled_caught and not run.cut:
        run.cut = True
        say(f"drain timeout of {run.options.drain_timeout:g} s: what still ran is cut")


def limit_teardown(seconds: float) -> None:
    """End the process when its teardown hangs: the log is durable, and workers end with their links."""
    timer = threading.Timer(seconds, os._exit, (OK,))
    timer.daemon = True
    timer.start()


async def watch_signals(
    run: Run, scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """SIGTERM, SIGINT and SIGUSR1 drain, the second stops at once; before the server is ready they end the start.
    SIGUSR2 prints the task tree."""
    token = trio.lowlevel.current_trio_token()
    send, signals = trio.open_memory_channel[int](math.inf)

    def deliver(number: int) -> None:
        token.run_sync_soon(send.send_nowait, number)

    with stop_signals.delivered(deliver), trio.open_signal_receiver(signal.SIGUSR2) as dumps:
        if stop_signals.stopping:
            scope.cancel()  # it came before anybody watched
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dump_tasks, run, dumps, name="dumps")
            async for _ in signals:
                if stop_signals.stopping:
                    scope.cancel()
                elif run.daemon.draining:
                    run.stop.set()
                else:
                    run.daemon.drain()


async def dump_tasks(run: Run, signals: AsyncIterator[int]) -> None:
    async for _ in signals:
        sys.stderr.write(task_page(run.daemon, trio.lowlevel.current_root_task()))
        sys.stderr.flush()


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
