"""One served model: its store, its codec, its scheduler, and what keeps its worker running."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from superfluid.codec.channels import Router
from superfluid.codec.codec import Codec
from superfluid.codec.tokenizer import Tokenizer
from superfluid.codec.tokenizers.errors import TokenizerError
from superfluid.codec.tokenizers.source import open_tokenizer
from superfluid.codec.toolcalls.constraints import NO_CALLS
from superfluid.daemon.generation import GenerateOptions, Sampling, SamplingRung, settle
from superfluid.daemon.grammars import Grammars
from superfluid.daemon.host import EngineHost, Host
from superfluid.daemon.in_process import ServeInProcess, ThreadHost
from superfluid.daemon.log_files import WatchedFiles
from superfluid.daemon.runtimes import Runtime
from superfluid.daemon.sessions import Sessions
from superfluid.daemon.sizing import Window, choose_window
from superfluid.daemon.supervisor import ModelFailed as ModelFailed, Supervisor
from superfluid.link.codes import PARAM_IGNORE_EOS
from superfluid.link.events import Body, Channel, GenerationPrompt, GenParams
from superfluid.link.linkw import SamplingParams
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Generation, Job
from superfluid.scheduler.keeping import Keeper, KeepSettings
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.scheduler.pins import BUDGET_PCT
from superfluid.scheduler.planner import Settings
from superfluid.sessions.errors import StoreError, StreamTooLong
from superfluid.sessions.store import Store

REOPEN_PAUSE = 1.0  # seconds between two tries to read the log back after a sync of it failed
RENDER_THREADS = 2  # rendering and tokenizing that may be slow runs in these, off the event loop
DEFAULT_TICK_TARGET_MS = 2000

log = logging.getLogger(__name__)
R = TypeVar("R")


@attrs.frozen
class ModelConfig:
    """What a model is served with; everything is known before anything is loaded."""

    name: str
    path: Path
    runtime: Runtime
    store: Path
    options: Sequence[str] = ()
    max_context: int | None = None
    max_batch: int = 8
    kv_bits: int = 0
    dialect: str = "auto"
    tool_call_parser: str = "auto"
    max_tokens: int | None = None
    operator: SamplingRung = attrs.Factory(SamplingRung)
    tick_decode_budget: int = 0
    tick_target_ms: int = 2000
    prefill_budget: int = 4096
    starvation_ticks: int = 8
    class_lanes: dict[Class, int] = attrs.Factory(dict)
    keep: KeepSettings = attrs.Factory(KeepSettings)
    sessions_afresh: bool = False
    sessions_ttl: float = 0.0
    tool_lease_ms: int = 0
    pin_budget_pct: int = BUDGET_PCT
    in_process: ServeInProcess | None = None


@attrs.frozen
class Started:
    """A generation that was admitted to the queue."""

    generation: Generation
    session: int | None
    prompt_tokens: int
    max_tokens: int


class Model:
    """Made by the command that serves it; `run` must be running for everything else."""

    def __init__(self, config: ModelConfig, metrics: ModelMetrics) -> None:
        self.config = config
        self.name = config.name
        self.metrics = metrics
        facts = config.runtime.report.get("model") or {}
        self.planned: Window = choose_window(
            config.max_context, facts.get("sizing"), config.max_batch, self.most_by_itself
        )
        self.supervisor = Supervisor(self.name, self._spawn, metrics, respawns=config.in_process is None)
        self._threads = trio.CapacityLimiter(RENDER_THREADS)
        self._tools_noted = False
        self._opened = trio.Event()  # the store is
        self._examined = trio.Event()  # nothing is wrong with the model's files and the log
        self.passed = trio.Event()  # nor with its first worker: its log may be begun
        self._ready = trio.Event()  # everything but the worker is

    window_flag = "--max-context"
    most_by_itself: int | None = None  # tokens of a window that nobody asked for
    store: Store
    codec: Codec
    keeper: Keeper
    scheduler: Scheduler
    sessions: Sessions
    grammars: Grammars

    @property
    def loaded(self) -> bool:
        """Whether a worker serves it now."""
        return self.supervisor.loaded

    @property
    def record(self) -> dict[str, Any]:
        """The capability record of the loaded model; empty while it is retired."""
        return self.supervisor.record

    @property
    def window(self) -> int:
        """Longest stream in tokens, as the last worker allowed."""
        return self.supervisor.window or self.planned.tokens

    @property
    def larger_window(self) -> str | None:
        """The flag that would give a longer window, unless the model was trained for no more than it has."""
        sizing = (self.config.runtime.report.get("model") or {}).get("sizing")
        trained = sizing.get("trained_context", 0) if isinstance(sizing, dict) else 0
        return None if trained and self.window >= trained else self.window_flag

    @property
    def runtime_id(self) -> str:
        return self.config.runtime.id

    @property
    def tokenizer(self) -> Tokenizer:
        return self.codec.tokenizer

    async def in_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        """Run codec work in a thread, so that a long document does not stall the event loop."""
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._threads)

    def dialect_capabilities(self) -> dict[str, Any]:
        """Of a capability record's `dialect`, what the model itself decides."""
        return {
            "enable_thinking": self.codec.supports_thinking,
            "reasoning_effort": self.codec.effort.supported,
            "reasoning_effort_levels": self.codec.effort.levels,
        }

    # ---- life

    async def run(
        self,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        *,
        cleared: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """Read the store and the codec while the first worker loads, then keep one running; started when it serves.

        The log is read only, until the model has `passed` and `cleared` returns. Raises ModelFailed when the model
        cannot be served at all, DialectRefused, StoreError when its log cannot be opened.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._open, nursery, cleared, name=f"open:{self.name}")
                await self.supervisor.run(self._when_opened, task_status, examined=self._examined.wait)
        finally:
            if self._opened.is_set():
                self.store.close()

    async def _open(self, nursery: trio.Nursery, cleared: Callable[[], Awaitable[None]]) -> None:
        files = WatchedFiles()
        read = partial(Store.read, self.config.store, files, afresh=self.config.sessions_afresh)
        async with trio.open_nursery() as opening:
            opening.start_soon(self._open_codec, name=f"codec:{self.name}")
            self.store = await trio.to_thread.run_sync(read)
            self._opened.set()
            self.keeper = await trio.to_thread.run_sync(Keeper.open, self.config.store, self.config.keep, self.metrics)
        self._examined.set()
        await self.supervisor.connected.wait()
        self.passed.set()
        await cleared()  # a start that fails leaves the sessions as they are
        await trio.to_thread.run_sync(self.store.begin)
        await nursery.start(self.store.run, name=f"wal:{self.name}")
        nursery.start_soon(self._keep_log_open, files, name=f"log:{self.name}")
        await nursery.start(self.keeper.run, name=f"keeper:{self.name}")
        config = SchedulerConfig(
            self.config.max_batch,
            self.config.class_lanes,
            self._settings(),
            pin_budget_pct=self.config.pin_budget_pct,
            tool_lease_ms=self.config.tool_lease_ms,
        )
        self.scheduler = Scheduler(self.store, self.codec, config, self.metrics, self.name, self.keeper)
        self.sessions = Sessions(self)
        purges = self.sessions.purges
        await purges.remove_leftovers()
        self.sessions.enforce_pins()
        nursery.start_soon(purges.erase, name=f"compaction:{self.name}")
        if self.config.sessions_ttl:
            nursery.start_soon(purges.keep_purging, self.config.sessions_ttl, name=f"retention:{self.name}")
        self.grammars = Grammars(self.scheduler, self.ensure_serving)
        self._ready.set()

    async def _open_codec(self) -> None:
        runtime = self.config.runtime
        try:
            tokenizer = await self.in_thread(open_tokenizer, self.config.path, runtime.tokenizer, runtime.worker.file)
        except TokenizerError as error:
            raise ModelFailed(f"the tokenizer of {self.config.path} does not open: {error}") from None
        self.codec = await self.in_thread(Codec.open, tokenizer, self.config.dialect, self.config.tool_call_parser)
        await self.in_thread(self.codec.fingerprint)

    async def _when_opened(self) -> Scheduler:
        await self._ready.wait()
        return self.scheduler

    async def _keep_log_open(self, files: WatchedFiles) -> None:
        """After a sync that failed: read back what is on the disk, as soon as that can be done.

        Until then everything that would be written is refused; what is durable stays as it is.
        """
        while True:
            await files.sync_failed.wait()
            files.sync_failed = trio.Event()
            with contextlib.suppress(StoreError):
                await self.store.commit([])  # those whose records are lost are told first
            why = "a sync of the log failed"
            while self.store.failed:
                log.error("%s: nothing is taken until the log can be written again: %s", self.name, why)
                await trio.sleep(REOPEN_PAUSE)
                try:
                    await self.store.reopen_behind()
                except StoreError as error:
                    why = str(error)
                else:
                    log.warning("%s: the log was read back and is written again", self.name)

    def _settings(self) -> Settings:
        return Settings(
            tick_target=(self.config.tick_target_ms or DEFAULT_TICK_TARGET_MS) / 1000,
            prefill_budget=self.config.prefill_budget,
            starvation_ticks=self.config.starvation_ticks,
            decode_budget=self.config.tick_decode_budget or None,
        )

    async def _spawn(self) -> Host:
        """Start a worker. Raises WorkerStartError."""
        config = self.config
        arguments = config.runtime.serve_arguments(
            config.path,
            max_context=self.planned.tokens,
            max_batch=config.max_batch,
            kv_bits=config.kv_bits,
            options=config.options,
        )
        if config.in_process is not None:
            return ThreadHost.start(config.in_process, arguments)
        return await EngineHost.spawn([*config.runtime.worker.program, *config.runtime.worker.prefix, *arguments])

    async def ensure_serving(self) -> None:
        """Return when the model serves; a retired one is loaded again. Raises ModelFailed when it is not to be had."""
        await self.supervisor.ensure_serving()

    @property
    def generating(self) -> bool:
        """Whether a generation is queued or runs."""
        return bool(self.scheduler.lanes) or any(self.scheduler.queue_depths)

    async def idle(self) -> None:
        """Wait until no generation is queued or runs, and the states of parked sessions are written."""
        await self.scheduler.wait_idle()
        await self.keeper.flush()

    # ---- generating

    async def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], arguments: dict[str, Any]
    ) -> list[Body]:
        """A conversation as the records to commit, the generation prompt last. Raises the codec's refusals."""
        self.note_tools(tools)
        rendered = await self.in_thread(self.codec.render, messages, tools, arguments)
        return list(rendered.bodies)

    def note_tools(self, tools: Sequence[object]) -> None:
        """Log, once, that tools were declared to a model that calls none."""
        if tools and not self._tools_noted and not self.codec.calls_tools:
            self._tools_noted = True
            log.info("%s: a request declares tools, but %s: none will be called", self.name, NO_CALLS)

    def settle(self, options: GenerateOptions) -> Sampling:
        """Sampling of a request, filled up from the operator's flags and the model's published defaults."""
        return settle(options.sampling, self.config.operator, SamplingRung.published(self.record))

    async def begin_all(
        self, bodies: Sequence[Body], choices: Sequence[GenerateOptions], *, raw: bool = False
    ) -> list[Started]:
        """Start a generation per choice over one prompt, each in a fresh durable session.

        The prompt's records are durable before anything is queued. Raises StreamTooLong, StoreError.
        """
        stream = [token for body in bodies for token in getattr(body, "span", ())]
        length = len(stream)
        if length > self.window:
            raise StreamTooLong(length, self.window)
        opener = bodies[-1].span if isinstance(bodies[-1], GenerationPrompt) else []
        samplings = [self.settle(options) for options in choices]
        sessions = await self.sessions.create_filled(bodies, [gen_params(sampling) for sampling in samplings])
        started: list[Started] = []
        room = max(1, self.window - length)
        default = room if self.config.max_tokens is None else self.config.max_tokens
        for session, options, sampling in zip(sessions, choices, samplings, strict=True):
            limit = default if options.max_tokens is None else options.max_tokens
            router = self._router(options, opener, raw)
            job = Job(
                session=session,
                stream=stream,
                max_tokens=limit,
                router=router,
                params=wire_params(sampling, options.ignore_eos),
                seed=sampling.seed,
                seed_chosen=options.seed_chosen,
                klass=Class(options.klass),
                client=options.client,
                ignore_eos=options.ignore_eos,
                logprobs=options.logprobs,
                grammar=options.grammar,
                logit_bias=options.logit_bias or None,
                want_provisional=options.provisional,
                want_calls=options.provisional_calls,
                start_channel=router.channel,
                deadline=options.deadline,
                batch_invariant=options.batch_invariant,
                tools=options.tools,
                turn_point=length - len(opener) if opener else None,
                early_end=True,
                thinking_budget=options.thinking_budget,
                thought_end=self.codec.close_reasoning() or [] if options.thinking_budget is not None else [],
            )
            started.append(Started(self.submit(job), session, length, limit))
        return started

    def _router(self, options: GenerateOptions, opener: Sequence[int], raw: bool) -> Router:
        """A lane's router; a demanded call starts it in the call."""
        if options.start_channel == Channel.TOOL_CALL:
            return self.codec.forced_router(ignore_eos=options.ignore_eos)
        return self.codec.router(0, opener, ignore_eos=options.ignore_eos, plain=raw)

    def submit(self, job: Job) -> Generation:
        """Queue a job; should the model just have been retired, it is a request that loads it again.

        Raises ContextExceeded.
        """
        generation = self.scheduler.submit(job)
        try:
            self.supervisor.want()
        except ModelFailed as error:
            self.scheduler.retire(f"generation failed: {error}")
        return generation


def gen_params(sampling: Sampling) -> GenParams:
    """What a session records of its sampling."""
    return GenParams(sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed)


def wire_params(sampling: Sampling, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        freq_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repeat_penalty=sampling.repeat_penalty,
        flags=PARAM_IGNORE_EOS if ignore_eos else 0,
    )
