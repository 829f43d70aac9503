"""A worker's program: the commands a runtime answers, and serving one model over Link W."""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from superfluid.engines.engine import Engine, EngineFatal
from superfluid.engines.kit.check import check_report, passed
from superfluid.engines.kit.host import describe, facts
from superfluid.engines.kit.runtime import Arguments, Runtime, RuntimeUnavailable
from superfluid.engines.primitives import Primitives
from superfluid.link.linkw import RingSpec
from superfluid.worker.command_line import SERVE, CommandLine, UsageError, parse, usage
from superfluid.worker.hangup import HangupWatch

ENTRY_POINTS = "superfluid.runtimes"
MOCK = EntryPoint("mock", "superfluid.engines.mock.runtime:Mock", ENTRY_POINTS)
"""Served by `superfluid-workerd` alone, and never listed as a runtime."""

OK, FAILED, BAD_USAGE, MODEL_FAILED, ENGINE_DIED = 0, 1, 2, 3, 70


def main(runtime: Runtime, argv: Sequence[str] | None = None, name: str | None = None) -> int:
    """The program of one runtime's worker: runs one command, or serves. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name = name or f"superfluid-worker-{runtime.info().id}"
    try:
        line = parse(runtime, argv)
    except UsageError as error:
        print(f"{name}: {error}\n{usage(name, runtime)}", file=sys.stderr)
        return BAD_USAGE
    if line.command == SERVE:
        return _serve(runtime, line, name)
    try:
        return _answer(runtime, line)
    except Exception as error:  # NotOffered, RuntimeUnavailable, or whatever a broken library raises
        print(f"{name}: {error or type(error).__name__}", file=sys.stderr)
        return FAILED


def workerd(argv: Sequence[str] | None = None) -> int:
    """`superfluid-workerd --engine <id or alias> ...`: the workers of the runtimes in this environment."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = "superfluid-workerd"
    engine: str | None = None
    while "--engine" in words:
        at = words.index("--engine")
        if at + 1 == len(words):
            print(f"{name}: --engine needs a value", file=sys.stderr)
            return BAD_USAGE
        engine = words[at + 1]
        del words[at : at + 2]
    if engine is None and words and not words[0].startswith("--"):
        print(f"{name}: {words[0]} needs --engine <id>", file=sys.stderr)
        return BAD_USAGE
    try:
        runtime = find_runtime(engine or MOCK.name)
    except LookupError as error:
        print(f"{name}: {error.args[0]}", file=sys.stderr)
        return BAD_USAGE
    except RuntimeUnavailable as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    return main(runtime, words, name)


def find_runtime(name: str) -> Runtime:
    """The runtime of an id or alias. Raises LookupError for none, RuntimeUnavailable when its adapter is broken."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)} | {MOCK.name: MOCK}
    if name in points:
        return _load_adapter(points[name])
    for point in points.values():
        try:
            runtime = _load_adapter(point)
        except RuntimeUnavailable:
            continue
        if name in runtime.info().aliases:
            return runtime
    raise LookupError(f"no runtime {name!r} here (have: {', '.join(sorted(points))})")


def load(runtime: Runtime, args: Arguments) -> tuple[Engine, list[RingSpec]]:
    """Open the model and what drives it: an engine, and the rings to announce."""
    opened = runtime.open(args)
    if isinstance(opened.model, Engine):
        return opened.model, list(opened.rings)
    # imported here: the commands answer without either
    from superfluid.engines.executor import Executor
    from superfluid.shm.ring import ring_specs

    primitives: Primitives = opened.model
    engine = Executor(
        primitives,
        max_seq_len=opened.window,
        max_batch=args.max_batch,
        record_overrides=opened.record_overrides,
    )
    engine.warm_up()
    return engine, ring_specs(opened.window, primitives.describe().vocab_size, args.max_batch)


def _load_adapter(point: EntryPoint) -> Runtime:
    try:
        found = point.load()
        return found() if isinstance(found, type) else found  # type: ignore[no-any-return]
    except Exception as error:
        raise RuntimeUnavailable(f"the adapter of {point.name} ({point.value}) does not load: {error}") from error


def _serve(runtime: Runtime, line: CommandLine, name: str) -> int:
    from superfluid.worker.server import serve

    # a service manager's stop reaches every process of the service; the daemon must be able to drain
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert line.frames_fd is not None and line.fd_channel_fd is not None
    try:
        for fd in (line.frames_fd, line.fd_channel_fd):
            os.set_inheritable(fd, False)
        frames, descriptors = socket.socket(fileno=line.frames_fd), socket.socket(fileno=line.fd_channel_fd)
    except OSError as error:
        flags = f"--frames-fd {line.frames_fd} and --fd-channel-fd {line.fd_channel_fd}"
        print(f"{name}: {flags} are not both sockets: {error}", file=sys.stderr)
        return BAD_USAGE
    watch = HangupWatch(frames)
    try:
        runtime.prepare(line.args)
        engine, rings = load(runtime, line.args)
    except Exception as error:
        print(f"{name}: model load failed: {error or type(error).__name__}", file=sys.stderr)
        return MODEL_FAILED
    try:
        code = serve(engine, rings, frames, descriptors, name=name)
    except EngineFatal as error:
        print(f"{name}: {error}; the worker exits so that the daemon starts a clean one", file=sys.stderr, flush=True)
        os._exit(ENGINE_DIED)
    except Exception as error:
        print(f"{name}: exited with error: {error or type(error).__name__}", file=sys.stderr)
        return FAILED
    watch.exit_code = code  # freeing a large model may outlast the watch's patience
    engine.close()
    return code


def _answer(runtime: Runtime, line: CommandLine) -> int:
    args = line.args
    match line.command:
        case "version":
            runtime.prepare(args)
            print(runtime.probe(args).version)
        case "check":
            report = check_report(runtime, args)
            _print(report)
            return OK if passed(report) else FAILED
        case "plan":
            host = facts()
            _print({"host": host, "describe": describe(host)} | {"plans": runtime.plan(line.plan_request, host)})
        case "install":
            into, plan = line.given["--into"], line.given["--plan"]
            assert into is not None and plan is not None
            runtime.install(json.loads(plan), Path(into))
        case "versions":
            host, unlisted = facts(), runtime.unlisted()
            _print(
                {
                    "host": host,
                    "describe": describe(host),
                    "versions": runtime.versions(host),
                    "unlisted": {"describe": unlisted.describe, "requires": unlisted.requires} if unlisted else None,
                }
            )
        case "compat":
            _print(runtime.compat())
        case "pull":
            assert line.name is not None
            options = {flag[2:]: value for flag, value in line.given.items() if flag != "--offline"}
            print(runtime.pull(line.name, "--offline" in line.given, options))
    return OK


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(workerd())
