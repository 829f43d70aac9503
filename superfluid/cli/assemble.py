"""The daemon that a checked command line describes."""

import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from superfluid.cli.choosing import Chosen, worker_options
from superfluid.cli.command import CommandError, say
from superfluid.cli.serve_options import ServeOptions
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.fim import FimService
from superfluid.daemon.generation import SamplingRung
from superfluid.daemon.in_process import ServeInProcess
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.satellite import Satellite
from superfluid.daemon.start import store_directory
from superfluid.observe.metrics import Metrics, ModelMetrics
from superfluid.scheduler.classes import parse_class_lanes
from superfluid.scheduler.fim import Rate
from superfluid.scheduler.keeping import GIGABYTE, KeepSettings, ParkMode
from superfluid.sessions.shelve import shelve


def make_daemon(
    options: ServeOptions, chosen: Sequence[Chosen], satellite: Chosen | None, home: Path, sessions: Path
) -> Daemon:
    """The daemon and its models, nothing loaded yet. Raises CommandError 2 when `auto` finds no window."""
    metrics = Metrics(os.environ.get("SUPERFLUID_NODE_NAME", "").strip() or socket.gethostname())
    models: list[Model] = []
    for index, one in enumerate(chosen):
        config = ModelConfig(
            name=one.name,
            path=one.path,
            runtime=one.runtime,
            options=own_options(options, one),
            store=store_directory(sessions, one.name, default=index == 0),
            max_context=None if options.max_context in (None, "auto") else int(options.max_context),
            max_batch=options.max_batch,
            kv_bits=16 if options.park_lossy else int(options.kv_bits),
            dialect=options.dialect,
            tool_call_parser=options.tool_call_parser,
            max_tokens=options.max_tokens,
            operator=operator_defaults(options),
            tick_decode_budget=options.tick_decode_budget,
            tick_target_ms=options.tick_target_ms,
            prefill_budget=options.prefill_budget,
            starvation_ticks=options.starvation_ticks,
            class_lanes=parse_class_lanes(options.class_lanes, options.max_batch),
            keep=keep_settings(options),
            sessions_afresh=options.sessions_cache,
            sessions_ttl=options.sessions_ttl,
            tool_lease_ms=options.tool_lease_ms,
            pin_budget_pct=options.pin_budget_pct,
            in_process=choose_in_process(options, chosen),
        )
        model = Model(config, metrics.model(one.name))
        if options.max_context == "auto" and not model.planned.sized:
            raise CommandError(f"--max-context auto: {model.planned.why}; give a number", 2)
        models.append(model)
    rate = Rate(options.completion_rate, options.completion_burst)
    fim = FimService(metrics, rate, options.completion_deadline_ms)
    if satellite is not None:
        fim.satellite = make_satellite(options, satellite, metrics, sessions)
    aside = partial(put_aside, sessions) if options.sessions_cache else None
    return Daemon(home, models, metrics, fim, put_logs_aside=aside)


def put_aside(sessions: Path) -> None:
    """Keep the logs of the last run, and say where. Raises LogIOError."""
    for log in shelve(sessions):
        say(f"the log of the last run is kept as {log}")


def own_options(options: ServeOptions, one: Chosen) -> list[str]:
    """The options of a model's runtime."""
    return worker_options(options.runtime_options, [one.runtime.id]).get(one.runtime.id, [])


def make_satellite(options: ServeOptions, one: Chosen, metrics: Metrics, sessions: Path) -> Satellite:
    """The model of `--fim-model`, with a series of its own on the metrics page."""
    config = ModelConfig(
        name=one.name,
        path=one.path,
        runtime=one.runtime,
        options=own_options(options, one),
        store=sessions / "fim",
        max_context=options.fim_max_context,
        max_batch=options.fim_max_batch,
        kv_bits=int(options.kv_bits),
        dialect="raw",
        max_tokens=options.max_tokens,
        operator=operator_defaults(options),
        tick_decode_budget=options.tick_decode_budget,
        tick_target_ms=options.tick_target_ms,
        prefill_budget=options.prefill_budget,
        starvation_ticks=options.starvation_ticks,
    )
    numbers = ModelMetrics()
    metrics.fim_satellite = one.name, numbers
    return Satellite(config, numbers)


def operator_defaults(options: ServeOptions) -> SamplingRung:
    return SamplingRung(options.temperature, options.top_p, options.top_k, options.min_p, options.repeat_penalty)


def keep_settings(options: ServeOptions) -> KeepSettings:
    """What is kept of finished lanes."""
    park = ParkMode.WITHIN_BUDGET
    if options.park or options.park_lossy:
        park = ParkMode.ALWAYS
    elif options.park is False or options.sessions_cache:
        park = ParkMode.NEVER
    return KeepSettings(
        park, options.park_lossy, int(options.park_budget_gb * GIGABYTE), int(options.cache_disk_gb * GIGABYTE)
    )


def choose_in_process(options: ServeOptions, chosen: Sequence[Chosen]) -> ServeInProcess | None:
    """With --no-worker-process, the worker to run on a thread; none where a process of its own is needed."""
    if options.worker_process:
        return None
    if options.fim_model is not None:
        say("--no-worker-process is ignored: the model of --fim-model has a process of its own, and so has every other")
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
