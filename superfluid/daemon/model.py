"""One served model: its store, its codec, its scheduler, and the supervision of its worker."""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from superfluid.codec.codec import Codec
from superfluid.codec.tokenizer import GgufTokenizer, Tokenizer
from superfluid.daemon.capabilities import differing
from superfluid.daemon.client import WorkerLink
from superfluid.daemon.generation import GenerateOptions, Sampling, SamplingRung, settle
from superfluid.daemon.host import EngineHost, WorkerStartError
from superfluid.daemon.runtimes import Runtime
from superfluid.daemon.sessions import Sessions
from superfluid.daemon.sizing import Window, choose_window
from superfluid.link.codes import PARAM_IGNORE_EOS
from superfluid.link.events import Body, Channel, GenerationPrompt, GenParams
from superfluid.link.linkw import SamplingParams
from superfluid.llama.vocab import Vocab
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Generation, Job
from superfluid.scheduler.link import WorkerGone
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.scheduler.planner import Settings
from superfluid.sessions.errors import StreamTooLong
from superfluid.sessions.store import Store

RESPAWNS = 3  # in a row without a good tick; then the model is retired until its next request
RELOAD_PAUSE = 10.0  # seconds before a reload that failed is tried again
RENDER_THREADS = 2  # rendering and tokenizing that may be slow runs in these, off the event loop
ENDING = 1.0  # seconds that an ended link waits for the exit status of its process
DEFAULT_TICK_TARGET_MS = 2000

log = logging.getLogger(__name__)
R = TypeVar("R")


class ModelFailed(Exception):
    """The model does not serve; the message says why. `retry_after`: seconds after which a request may try again."""

    def __init__(self, message: str, retry_after: float = RELOAD_PAUSE) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
    max_tokens: int | None = None
    operator: SamplingRung = attrs.Factory(SamplingRung)
    tick_decode_budget: int = 0
    tick_target_ms: int = 2000
    prefill_budget: int = 4096
    starvation_ticks: int = 8
    class_lanes: dict[Class, int] = attrs.Factory(dict)
    worker_process: bool = True


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
        self.planned: Window = choose_window(config.max_context, facts.get("sizing"), config.max_batch)
        self.record: dict[str, Any] = {}
        self.window = self.planned.tokens
        self.loaded = False
        self._threads = trio.CapacityLimiter(RENDER_THREADS)
        self._wanted = trio.Event()  # a request asks for the retired model
        self._serving = trio.Event()
        self._retired: str | None = None
        self._changed = ""
        self._failed_at = -math.inf

    store: Store
    codec: Codec
    scheduler: Scheduler
    sessions: Sessions

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
        return {
            "enable_thinking": self.codec.supports_thinking,
            "reasoning_effort": False,
            "reasoning_effort_levels": [],
            "fim": False,
            "fim_model": None,
        }

    # ---- life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the store and the codec, start the worker, and keep it running; started when it serves.

        Raises ModelFailed when the model cannot be served at all, StoreError when its log cannot be opened.
        """
        async with trio.open_nursery() as nursery:
            await self._open_codec_and_store()
            await nursery.start(self.store.run, name=f"wal:{self.name}")
            config = SchedulerConfig(self.config.max_batch, self.config.class_lanes, self._settings())
            self.scheduler = Scheduler(self.store, self.codec, config, self.metrics, self.name)
            self.sessions = Sessions(self)
            try:
                await self._supervise(task_status)
            finally:
                nursery.cancel_scope.cancel()
                self.store.close()

    async def _open_codec_and_store(self) -> None:
        async def open_codec() -> None:
            tokenizer = await self.in_thread(open_tokenizer, self.config.path)
            self.codec = await self.in_thread(Codec.open, tokenizer, self.config.dialect)
            await self.in_thread(self.codec.fingerprint)

        async with trio.open_nursery() as loading:
            loading.start_soon(open_codec, name=f"codec:{self.name}")
            self.store = await trio.to_thread.run_sync(Store.open, self.config.store)

    def _settings(self) -> Settings:
        return Settings(
            tick_target=(self.config.tick_target_ms or DEFAULT_TICK_TARGET_MS) / 1000,
            prefill_budget=self.config.prefill_budget,
            starvation_ticks=self.config.starvation_ticks,
            decode_budget=self.config.tick_decode_budget or None,
        )

    async def _supervise(self, task_status: trio.TaskStatus[None]) -> None:
        """Start worker after worker: at most `RESPAWNS` in a row without a good tick, then only when asked to."""
        first = True
        tries = 0
        while True:
            ticks = self.metrics.ticks_total
            try:
                why = await self._live(task_status if first else None)
            except ModelFailed as error:
                if first:
                    raise
                why = str(error)
            else:
                first = False
                if self.metrics.ticks_total > ticks:
                    tries = 0
            self.loaded = False
            if tries >= RESPAWNS or self._changed:
                why = self._changed or why
                await self._retire(why)
                tries = 0
                self._changed = ""
                continue
            tries += 1
            self.metrics.worker_respawns_total += 1
            log.warning("%s: %s; starting it again (%d of %d)", self.name, why, tries, RESPAWNS)

    async def _live(self, task_status: trio.TaskStatus[None] | None) -> str:
        """One worker from start to end; why it ended. Raises ModelFailed when it did not come to serve."""
        command = self.config.runtime.serve_command(
            self.config.path,
            max_context=self.planned.tokens,
            max_batch=self.config.max_batch,
            kv_bits=self.config.kv_bits,
            options=self.config.options,
        )
        try:
            host = await EngineHost.spawn(command)
        except WorkerStartError as error:
            raise ModelFailed(str(error)) from error
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.wait, name=f"worker:{self.name}")

                async def how_it_ended() -> str:
                    with trio.move_on_after(ENDING):
                        await host.ended.wait()
                    return host.describe_end()

                try:
                    link = await WorkerLink.open(host.frames, host.descriptors)
                except WorkerGone as gone:
                    how = await how_it_ended()
                    nursery.cancel_scope.cancel()
                    raise ModelFailed(f"{gone}: {how}" if host.status is None else how) from gone
                try:
                    why = await self._schedule_over(link, nursery, how_it_ended, task_status)
                finally:
                    link.close()
                nursery.cancel_scope.cancel()
        except* ModelFailed as group:
            raise group.exceptions[0] from None
        finally:
            await host.close()
        return why

    async def _schedule_over(
        self,
        link: WorkerLink,
        nursery: trio.Nursery,
        how_it_ended: Callable[[], Awaitable[str]],
        task_status: trio.TaskStatus[None] | None,
    ) -> str:
        """Serve with a connected worker until it is gone, or its record says that it is another model now."""
        if self.record:
            changed = differing(self.record, link.record)
            if changed:
                self._changed = f"the model's capabilities changed with its new worker: {', '.join(changed)}"
                return self._changed
        self.record = link.record
        self.window = link.window
        ended = trio.Event()
        why = ""

        async def read_link() -> None:
            gone = await link.run(how_it_ended)
            with contextlib.suppress(WorkerGone):  # an idle scheduler learns of it by this
                await self.scheduler.side(partial(_raise_gone, gone))

        async def schedule() -> None:
            nonlocal why
            try:
                await self.scheduler.run(link)
            except WorkerGone as gone:
                why = str(gone)
            ended.set()

        nursery.start_soon(read_link, name=f"link:{self.name}")
        nursery.start_soon(schedule, name=f"scheduler:{self.name}")
        self.loaded = True
        self._retired = None
        self._serving.set()
        if task_status is not None:
            task_status.started()
        await ended.wait()
        return why

    async def _retire(self, why: str) -> None:
        """Fail everything and wait until a request asks for the model again."""
        self._retired = f"{why}; it loads again on its next request"
        self.scheduler.retire(f"generation failed: {self._retired}")
        self.record = {}
        self._failed_at = trio.current_time()
        self._serving.set()  # those who wait for a reload are told that it failed
        self._serving = trio.Event()
        log.error("%s: retired: %s", self.name, why)
        self._wanted = trio.Event()
        await self._wanted.wait()

    async def ensure_serving(self) -> None:
        """Return when the model serves; a retired one is loaded again. Raises ModelFailed when it is not to be had."""
        if self._retired is None:
            return
        wait = self._failed_at + RELOAD_PAUSE - trio.current_time()
        if wait > 0 and not self._wanted.is_set():
            raise ModelFailed(self._retired, wait)
        self._wanted.set()
        await self._serving.wait()
        if self._retired is not None:
            raise ModelFailed(self._retired)

    async def idle(self) -> None:
        """Wait until no generation is queued or runs."""
        await self.scheduler.wait_idle()

    # ---- generating

    async def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], arguments: dict[str, Any]
    ) -> list[Body]:
        """A conversation as the records to commit, the generation prompt last. Raises the codec's refusals."""
        rendered = await self.in_thread(self.codec.render, messages, tools, arguments)
        return list(rendered.bodies)

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
            start_channel = self.codec.start_channel(opener) if opener else Channel.TEXT
            job = Job(
                session=session,
                stream=stream,
                max_tokens=limit,
                router=self.codec.router(0, opener, ignore_eos=options.ignore_eos, plain=raw),
                params=wire_params(sampling, options.ignore_eos),
                seed=sampling.seed,
                klass=Class(options.klass),
                client=options.client,
                ignore_eos=options.ignore_eos,
                logprobs=options.logprobs,
                grammar=options.grammar,
                logit_bias=options.logit_bias or None,
                want_provisional=options.provisional,
                start_channel=start_channel,
                deadline=options.deadline,
                batch_invariant=options.batch_invariant,
                tools=options.tools,
                turn_point=length - len(opener) if opener else None,
            )
            started.append(Started(self.scheduler.submit(job), session, length, limit))
        return started


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, through libllama opened vocabulary-only. Raises what opening it raises."""
    return GgufTokenizer(Vocab.open(path))


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


async def _raise_gone(why: str, _: object) -> None:
    raise WorkerGone(why)
