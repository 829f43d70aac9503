"""Lanes and tickets: a ticket is a job's way through the scheduler, a lane its place in the engine."""

from enum import Enum

import attrs
import numpy as np
import numpy.typing as npt

from superfluid.link.events import (
    CONTINUED,
    Body,
    Channel,
    Event,
    Finish,
    Generated,
    GenerationPrompt,
    ToolExpired,
    ToolParseFailure,
    ToolUse,
)
from superfluid.link.linkw import TokenRef
from superfluid.link.relay import TextOut
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import CodecLike, Ended, Generation, Job, OpenCall
from superfluid.scheduler.planner import PlannedLane
from superfluid.sessions.leases import Leasing

TOOL_CALL = 2


class Source(Enum):
    """Where the state came from that a lane started from, when it was not in the engine's own cache."""

    PARK = 0
    DISK = 1


LEAST_TOKEN_SECONDS = 0.001
"""Under this per token a decode rate says nothing."""


@attrs.define(eq=False)
class Ticket:
    """A job in the queue or in a lane, over all its admissions. `order` counts submissions.

    `produced` are the tokens of this generation so far, since its thought was ended if it was; `made_before` counts
    those ahead of that. `warm_prefix` is the first admission's seed length.
    """

    job: Job
    generation: Generation
    order: int
    enqueued_tick: int
    produced: list[int] = attrs.Factory(list)
    made_before: int = 0
    held_before: int = 0  # tokens that a grammar has seen ahead of `produced`
    reasoned: int = 0  # tokens of reasoning
    thought_ended: bool = False  # and its lane is not gone yet
    requeued: bool = False
    cold: bool = False  # the engine could not hold it beside its own seed
    cancelled: bool = False
    failure: tuple[str, str] | None = None  # (code, reason): its records could not be kept
    over: bool = False  # its end is on its way
    told: bool = False  # its caller has the end, and its lane is yet to be retired
    parked: bool = False  # a lane of it was
    given_up: bool = False  # the engine did not take a kept state of it
    warm_prefix: int | None = None
    shares: dict[int, int] = attrs.Factory(dict)  # lane tag: ids its prompt has in common with this stream
    channel: int = 0
    open_call: OpenCall | None = attrs.Factory(lambda ticket: ticket.job.open_call, takes_self=True)  # not yet read
    tool_text: list[str] = attrs.Factory(list)
    tool_lease_ms: int = 0  # of the calls it makes; 0: none
    shown: int = 0  # tokens that went through the provisional splitter
    uncounted: int = 0  # tokens since the last piece of provisional text
    admitted_at: float = 0.0
    first_token_at: float | None = None
    ttft: float | None = None
    first_tick_end: float = 0.0
    first_tick_tokens: int = 0
    last_tick_end: float = 0.0
    _ids: npt.NDArray[np.uint32] | None = None

    @property
    def klass(self) -> Class:
        return self.job.klass

    @property
    def client(self) -> str:
        return self.job.client

    @property
    def exclusive(self) -> bool:
        return self.job.batch_invariant

    @property
    def stream_len(self) -> int:
        return len(self.job.stream) + len(self.produced)

    @property
    def made(self) -> int:
        """Tokens of this generation so far."""
        return self.made_before + len(self.produced)

    @property
    def left(self) -> int:
        """Tokens the caller still wants."""
        return self.job.max_tokens - len(self.produced)

    def stream(self) -> list[int]:
        """The whole model input so far: the prompt and everything produced."""
        return self.job.stream + self.produced if self.produced else self.job.stream

    def past_deadline(self, now: float) -> bool:
        return self.job.deadline is not None and now >= self.job.deadline

    @property
    def ids(self) -> npt.NDArray[np.uint32]:
        """The prompt as submitted, as an array made once."""
        if self._ids is None:
            self._ids = np.array(self.job.stream, np.uint32)
        return self._ids

    # ---- routing: tokens to provisional text and to records

    def text_out(self) -> TextOut | None:
        """Where the next tokens may go as they come: all before them were shown, and the first one was timed."""
        shown = self.first_token_at is not None and self.job.want_provisional and self.shown == len(self.produced)
        return self.generation.text_out() if shown and self.generation.text_out is not None else None

    def stream_out(self, tokens: list[int], written: bool = False) -> list[tuple[int, str]]:
        """Show tokens ahead of their commit, unless they are `written`; the pieces of text and reasoning they made."""
        router = self.job.router
        if self.shown < len(self.produced):  # made while nobody watched
            router.provisional(self.produced[self.shown :])
            self.shown = len(self.produced)
        self.shown += len(tokens)
        self.uncounted += len(tokens)
        pieces = router.provisional(tokens)
        if self.job.want_provisional:
            shown = [piece for piece in pieces if piece[0] != TOOL_CALL or self.job.want_calls]
            for behind, (channel, text, closes) in zip(range(len(shown) - 1, -1, -1), shown, strict=True):
                count = 0 if behind else self.uncounted  # a piece counts no token that is behind it
                self.generation.put_provisional(channel, text, count, closes, written)
                self.uncounted -= count
        return [(channel, text) for channel, text, _ in pieces if channel != TOOL_CALL]

    def records(self, tokens: list[int], finish: int, last: bool, codec: CodecLike) -> list[Body]:
        """The records of a tick's tokens: one Generated per run of a channel, tool calls where a run closes.

        With `last`, the last Generated carries `finish`, pending text is completed and an open call is tried.
        """
        bodies: list[Body] = []
        if self.open_call is not None and self.open_call.closed:
            bodies += self._calls([], codec)
        ending: Generated | None = None
        for run in self.job.router.commit(tokens, last):
            ending = Generated(run.span, run.text, run.channel, Finish.NONE)
            bodies.append(ending)
            self.channel = run.channel
            if run.channel == Channel.REASONING:
                self.reasoned += len(run.span)
            if run.channel == TOOL_CALL:
                self.tool_text.append(run.text)
                if run.closes:
                    bodies[-1:] = self._calls([ending], codec)
        if last:
            if ending is None:
                return [*bodies, *self.ending_record(finish, codec)]
            ending.finish = finish
            if self.tool_text:  # of the run that ends with it, or of one before it that nothing closed
                bodies[-1:] = self._last_call(ending, finish, codec)
        return bodies

    def ending_record(self, finish: int, codec: CodecLike) -> list[Body]:
        """The records of a lane that is stopped: an empty span with the text that was pending."""
        record = Generated([], self.job.router.flush(), self.channel, finish)
        if self.channel == TOOL_CALL and record.text:
            self.tool_text.append(record.text)
        return self._last_call(record, finish, codec)

    @property
    def thought_spent(self) -> bool:
        """A thought is open, and took all the tokens it may; it is ended once."""
        job = self.job
        return (
            job.thinking_budget is not None
            and self.reasoned >= job.thinking_budget
            and job.router.channel == Channel.REASONING
            and bool(job.thought_end)
        )

    def end_thought(self) -> list[Body]:
        """End the open thought: its records. The generation goes on behind them once its lane is gone."""
        router, end = self.job.router, self.job.thought_end
        pending = router.flush()
        bodies: list[Body] = [Generated([], pending, self.channel, Finish.NONE)] if pending else []
        router.provisional([*self.produced[self.shown :], *end])  # the end is the server's: nobody is shown it
        router.commit(end)
        self.channel = router.channel
        self.thought_ended = True
        return [*bodies, GenerationPrompt(end)]

    def go_on(self) -> None:
        """Behind an ended thought: a job of what is left, whose input is all that was."""
        end = self.job.thought_end
        self.made_before += len(self.produced)
        self.held_before += len(self.produced) + len(end)
        self.job = attrs.evolve(self.job, stream=[*self.stream(), *end], max_tokens=self.left, turn_point=None)
        self.produced, self.shown, self.uncounted, self._ids = [], 0, 0, None
        self.thought_ended = False

    def _last_call(self, ending: Generated, finish: int, codec: CodecLike) -> list[Body]:
        """The last record, and the call that is open at the end; one that a cancel or a fault cut is dropped."""
        if finish in (Finish.CANCELLED, Finish.ERROR):
            self.tool_text.clear()
            return [ending]
        return self._calls([ending], codec, cut=finish not in (Finish.EOS, Finish.GRAMMAR))

    def _calls(self, generated: list[Body], codec: CodecLike, cut: bool = False) -> list[Body]:
        """A run's last record, and behind it what the run reads as.

        What was read of it where a limit cut it is read again: all but the last were whole and stay, the last one
        expires. It does so ahead of the record, so that a log which ends between any two of these has one call open
        at most, and none only where the next generation reads it.
        """
        before, self.open_call = self.open_call, None
        more = "".join(self.tool_text)
        self.tool_text.clear()
        if cut and not more and before is not None and before.stands:
            return generated
        raw = before.text + more if before else more
        if not (raw if cut else raw.strip()):  # blanks between markers are no call; those that a limit cut are text
            return generated
        calls = codec.read_call(raw, self.job.tools, cut=cut)
        same = before.unchanged(calls or ()) if before else 0
        expired = [ToolExpired(call, CONTINUED) for call in before.expired(same)] if before else []
        if calls is None:
            return [*expired, *generated, ToolParseFailure(raw)]
        lease = [Leasing(self.tool_lease_ms)] if self.tool_lease_ms and self.job.logged else []
        read = [body for call in calls[same:] for body in (ToolUse(call.name, call.arguments_json), *lease)]
        return [*expired, *generated, *read]

    # ---- the end

    def ended(
        self,
        finish: int,
        code: str | None = None,
        reason: str | None = None,
        *,
        expired: bool = False,
        fault: int | None = None,
    ) -> Ended:
        """The end this ticket's caller gets, with what was counted on the way."""
        made = self.made
        later = made - self.first_tick_tokens
        spent = self.last_tick_end - self.first_tick_end
        return Ended(
            finish,
            tokens_generated=made,
            warm_prefix=self.warm_prefix or 0,
            reason=reason,
            error_code=code,
            expired=expired,
            ttft=self.ttft,
            decode_rate=later / spent if later > 0 and spent >= LEAST_TOKEN_SECONDS * later else None,
            fault=fault,
        )


@attrs.define(eq=False)
class Lane(PlannedLane):
    """A ticket's lane. New until the plan that admits it was accepted."""

    ticket: Ticket = attrs.field(kw_only=True)
    prompt: TokenRef = attrs.Factory(TokenRef)
    seed: int = 0
    seeded: int = 0
    grammar: int = 0
    bias: int = 0
    new: bool = True
    placed_at: float = 0.0
    finish: int = Finish.NONE
    expired: bool = False
    fault: int | None = None
    code: str | None = None
    reason: str | None = None
    published: int = 0  # prompt tokens a copy of this lane was published under
    unshared: bool = False  # a copy of it failed
    kept: bool = False  # what becomes of its state beside the engine's cache is decided
    publish: bool = True  # its retire leaves the state in the engine's cache
    restored: Source | None = None
    streamed: list[int] = attrs.Factory(list)  # shown in the tick under way, not yet in its result

    def stop(self, finish: int, code: str | None = None, reason: str | None = None) -> None:
        """No more tokens: the next plan retires the lane."""
        self.finishing = True
        self.finish, self.code, self.reason = finish, code, reason


def raw_events(bodies: list[Body]) -> list[Event]:
    """Records of a job that has no log, in the shape of events."""
    return [Event(0, 0, 0, body) for body in bodies]
