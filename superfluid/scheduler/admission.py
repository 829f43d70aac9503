"""Admission: from a ticket to a lane that the next plan admits, seeded from the prefix cache where it can be."""

import logging
import struct
from copy import copy
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import trio

from superfluid.link import linkw
from superfluid.link.codes import PARAM_IGNORE_EOS, Sampling
from superfluid.link.events import Finish
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Failure, Job
from superfluid.scheduler.lanes import Lane, Source, Ticket
from superfluid.scheduler.link import EngineLink, EngineRefused, LinkFault, Record, WorkerGone, status_name
from superfluid.scheduler.seeds import Spaces

log = logging.getLogger(__name__)

MOST_REPLAYED = 1024
"""Tokens of a continued reply that are decoded again where no state has them, so that they are what they were: a
prefill adds up in another order. A longer one would take longer than anyone waits."""

SLOTS_PER_ADMISSION = 2
"""Inbound slots one admission may use: its prompt, and a resumed prefix."""

U64 = (1 << 64) - 1
Tokens = list[int] | npt.NDArray[np.uint32]


class ContextExceeded(ValueError):
    """A stream does not fit the window: `length` tokens against `limit`."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but your request has {length} tokens; shorten it"
        )
        self.length, self.limit = length, limit


class NotAdmitted(Exception):
    """A ticket ends before it reaches the engine."""

    def __init__(self, finish: int, code: str | None = None, reason: str | None = None, expired: bool = False) -> None:
        super().__init__(reason or "ended before admission")
        self.finish, self.code, self.reason, self.expired = finish, code, reason, expired


class NotYet(Exception):
    """A ticket waits for the file of a state that it is to start from."""


@attrs.frozen
class Restored:
    """A kept state is in the engine again: in its cache, or with `seed` as a seed of `length` tokens."""

    source: Source
    seed: int = 0
    length: int = 0


class KeeperLike(Protocol):
    async def warm(self, worker: "Worker", ticket: Ticket, offer: int) -> Restored | None:
        """Bring back a kept state that is better than the cache's `offer` tokens. Raises NotYet, WorkerGone."""


@attrs.define(eq=False)
class Worker:
    """One connected worker as the scheduler sees it."""

    link: EngineLink
    record: Record
    spaces: Spaces
    max_lanes: int
    keeper: KeeperLike | None = None
    staged: int = 0  # inbound slots written since the last tick read them

    @classmethod
    def open(cls, link: EngineLink, max_batch: int, keeper: KeeperLike | None = None) -> "Worker":
        record = Record.read(link.record)
        bounds = [max_batch, link.out_slots]
        if record.max_seqs:
            bounds.append(record.max_seqs)
        spaces = Spaces(link.hello.state_space_descriptors, record.rollback)
        return cls(link, record, spaces, max(1, min(bounds)), keeper)

    def lane_limit(self, max_batch: int) -> str | None:
        """Why there are fewer lanes than were asked for; none when there are not."""
        if self.max_lanes >= max_batch:
            return None
        limit = (
            f"the model runs at most {self.record.max_seqs} sequences"
            if self.record.max_seqs == self.max_lanes
            else f"the worker's token ring has {self.link.out_slots} slots"
        )
        return f"{self.max_lanes} lanes instead of {max_batch}: {limit}"

    def stage(self, tokens: Tokens) -> linkw.TokenRef:
        self.staged += 1
        return self.link.stage_prompt(tokens)

    @property
    def can_stage(self) -> bool:
        return self.staged + SLOTS_PER_ADMISSION <= self.link.in_slots

    async def place(self, ticket: Ticket, tag: int) -> Lane:
        """Make a ticket's lane: check it, stage its prompt, take a seed and its grammar and bias.

        Raises NotAdmitted when the ticket ends here, NotYet when it waits for a file; WorkerGone.
        """
        job = ticket.job
        now = trio.current_time()
        if ticket.cancelled:
            raise NotAdmitted(Finish.CANCELLED)
        if not job.stream:
            raise NotAdmitted(Finish.ERROR, Failure.EMPTY, "there is nothing to generate from: the prompt is empty")
        if ticket.past_deadline(now):
            raise NotAdmitted(Finish.LENGTH, expired=job.raw)
        stream = ticket.stream()
        window = self.link.window
        if len(stream) > window:
            raise NotAdmitted(Finish.ERROR, Failure.CONTEXT, str(ContextExceeded(len(stream), window)))
        if len(stream) == window:
            raise NotAdmitted(Finish.LENGTH)
        replay = len(ticket.produced)
        span = self.stage(stream)
        seed, seeded, source = 0, 0, None
        if not ticket.cold and not job.batch_invariant:
            seed, seeded, source = await self._seed(ticket, span, len(stream), replay)
        try:
            grammar, bias = await self._constraints(job)
        except NotAdmitted:
            if seed:
                self.link.seed_release(seed)
            raise
        if not replay and job.continued <= MOST_REPLAYED and seeded < len(stream) - 1:
            replay = min(job.continued, len(stream) - 1)
        prefill_end = max(len(stream) - replay, seeded)
        return Lane(
            tag,
            job.klass,
            prompt_len=len(stream),
            prefill_end=prefill_end,
            left=min(ticket.left, window - len(stream)),
            prefilled=seeded,
            replay=len(stream) - prefill_end,
            exclusive=job.batch_invariant,
            ticket=ticket,
            prompt=span,
            seed=seed,
            seeded=seeded,
            restored=source,
            grammar=grammar,
            bias=bias,
            publish=not job.fim,
            placed_at=now,
        )

    def count(self, lane: Lane, metrics: ModelMetrics) -> None:
        """Note an admission that the engine accepted; what a caller is told is its first one's."""
        if self.spaces.unservable:
            metrics.unservable_cold_admissions_total += 1
        if lane.seeded:
            metrics.warm_prefix_tokens_total += lane.seeded
        else:
            metrics.cold_admissions_total += 1
        metrics.resumes_total += lane.restored is Source.PARK
        metrics.disk_seeds_total += lane.restored is Source.DISK
        ticket = lane.ticket
        if ticket.warm_prefix is None:
            ticket.warm_prefix = lane.seeded
            ticket.admitted_at = lane.placed_at

    async def _seed(
        self, ticket: Ticket, span: linkw.TokenRef, length: int, replay: int
    ) -> tuple[int, int, Source | None]:
        """Take a seed for a staged prompt: (handle, tokens, where a kept state came from), zeros for a cold start."""
        spaces = self.spaces
        if spaces.unservable or length <= spaces.page:
            return 0, 0, None
        try:
            offer = spaces.seed_length(await self.link.match(span), length, replay) if spaces.cached else 0
            restored = await self._warm(ticket, offer)
            if restored is not None and restored.seed:
                return restored.seed, restored.length, restored.source
            if restored is not None:
                offer = spaces.seed_length(await self.link.match(span), length, replay)
            if offer:
                seed = await self.link.seed_acquire(span, offer)
                return seed.seed_handle, offer, None if restored is None else restored.source
        except (EngineRefused, LinkFault):
            pass  # a cache is never needed: the prompt is prefilled
        return 0, 0, None

    async def _warm(self, ticket: Ticket, offer: int) -> Restored | None:
        if self.keeper is None:
            return None
        try:
            return await self.keeper.warm(self, ticket, offer)
        except (NotYet, WorkerGone, EngineRefused, LinkFault):
            raise
        except Exception:  # a job starts cold rather than not at all
            log.exception("a kept state is not used")
            ticket.given_up = True
            return None

    async def _constraints(self, job: Job) -> tuple[int, int]:
        """Make a job's grammar and bias on the worker: their handles, 0 for none. Raises NotAdmitted."""
        grammar = bias = 0
        try:
            if job.grammar is not None:
                made = await self.link.sync(create_grammar(*job.grammar))
                assert isinstance(made, linkw.CreateGrammarOk)
                grammar = made.grammar_handle
            if job.logit_bias:
                values = [struct.unpack("<I", struct.pack("<f", value))[0] for value in job.logit_bias.values()]
                biased = await self.link.sync(linkw.CreateLogitBiasReq(list(job.logit_bias), values))
                assert isinstance(biased, linkw.CreateLogitBiasOk)
                bias = biased.handle
        except EngineRefused as refusal:
            await self.free(grammar, 0)
            what = "logit bias" if grammar or job.grammar is None else "grammar"
            raise NotAdmitted(
                Finish.ERROR, Failure.CONSTRAINT, f"the engine refused the {what} ({status_name(refusal.status)})"
            ) from None
        except LinkFault as fault:
            raise NotAdmitted(Finish.ERROR, Failure.CONSTRAINT, str(fault)) from None
        return grammar, bias

    async def free(self, grammar: int, bias: int) -> None:
        """Give a lane's grammar and bias back. Raises WorkerGone."""
        try:
            if grammar:
                await self.link.sync(linkw.FreeGrammarReq(grammar))
            if bias:
                await self.link.sync(linkw.FreeLogitBiasReq(bias))
        except (EngineRefused, LinkFault):
            pass  # gone already: nothing is held


def create_grammar(kind: str, text: str) -> linkw.StateSyncReq:
    """The request that makes a grammar: `kind` is structural or schema."""
    return linkw.CreateGrammarStructuralReq(text) if kind == "structural" else linkw.CreateGrammarReq(text)


def admit_of(lane: Lane) -> linkw.LaneAdmit:
    """A lane's admission in a plan."""
    job = lane.ticket.job
    params = job.params
    if job.ignore_eos:
        params = copy(params)
        params.flags |= PARAM_IGNORE_EOS
    replay = len(lane.ticket.produced)
    return linkw.LaneAdmit(
        lane.tag,
        lane.prompt,
        seed_handle=lane.seed,
        sampling=Sampling.GREEDY if params.temperature == 0 else Sampling.SAMPLED,
        params=params,
        rng_counter_base=(job.seed + lane.prompt_len) & U64,
        grammar_handle=lane.grammar,
        logit_bias_handle=lane.bias,
        want_logprobs=job.logprobs is not None,
        top_logprobs=min(job.logprobs or 0, 20),
        grammar_replay=lane.ticket.held_before + replay if lane.grammar else 0,
        decode_replay=lane.replay,
    )
