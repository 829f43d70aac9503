"""A job as the facade submits it, and its generation: the bounded stream of what a lane makes for one caller."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import attrs
import trio
import trio.lowlevel

from superfluid.codec.channels import Plain
from superfluid.link.events import Event, Finish, Generated
from superfluid.link.linkw import SamplingParams
from superfluid.link.relay import TextOut
from superfluid.scheduler.classes import Class

LAG_ITEMS = 64
"""Undelivered items after which a slow consumer's deltas are merged across commits."""

LAG_TOKENS = 32_768
"""Undelivered committed tokens after which a consumer is dropped as lagged: it reads nothing, for a whole answer."""


class RunLike(Protocol):
    """A run of one channel: every token of it, its text without markers, and whether its closer ended it."""

    @property
    def span(self) -> list[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def channel(self) -> int: ...
    @property
    def closes(self) -> bool: ...


class RouterLike(Protocol):
    """Routes one lane's tokens to channels and text (`superfluid.codec.codec.Router`)."""

    @property
    def channel(self) -> int:
        """The channel that the committed tokens leave open."""
        ...

    @property
    def plain(self) -> Plain | None:
        """What the next tokens mean ahead of their commit, where that is plain."""
        ...

    def provisional(self, tokens: list[int]) -> Sequence[tuple[int, str, bool]]:
        """(channel, text, whether a tool call ends with it), ahead of the commit."""
        ...

    def commit(self, tokens: list[int], last: bool = False) -> Sequence[RunLike]: ...
    def flush(self) -> str: ...
    def fresh(self) -> "RouterLike":
        """A router of the same lane that has seen no token yet."""
        ...


class ToolCallLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def arguments_json(self) -> str: ...


class ReadCallLike(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...
    @property
    def again(self) -> bool:
        """Its text was read once more, and it expired."""
        ...


@attrs.frozen
class OpenCall:
    """The tool-call run that a continued turn ends in: its text, and the calls that were read of it where a limit cut
    it, of which those that are read again expire if they `may_expire` by then. `stands`: the last is what all of the
    text was read as. `closed`: the run is over, but a crash came before it was read."""

    text: str
    calls: Sequence[ReadCallLike]
    may_expire: Callable[[int], bool]
    stands: bool = False
    closed: bool = False

    def unchanged(self, calls: Sequence[ToolCallLike]) -> int:
        """How many of `calls`, what the run reads as now, were read before and stay: not the last, which was cut."""
        same = 0
        for before, call in zip(self.calls[:-1], calls, strict=False):
            if before.again or (before.name, before.arguments) != (call.name, call.arguments_json):
                break
            same += 1
        return same

    def expired(self, same: int) -> list[int]:
        """The calls from the `same`th on that expire now."""
        return [call.id for call in self.calls[same:] if not call.again and self.may_expire(call.id)]


class CodecLike(Protocol):
    """What the scheduler asks of a codec."""

    @property
    def terminators(self) -> frozenset[int]: ...
    def read_call(
        self, raw: str, tools: Sequence[dict[str, Any]], *, cut: bool = False
    ) -> Sequence[ToolCallLike] | None: ...


@attrs.define(eq=False)
class Job:
    """One generation to run. `stream` is the whole model input, the assistant opener included, in tokens.

    `deadline` is absolute, in seconds of the trio clock. `grammar` is ("schema" | "structural", text). `logprobs` is
    the number of alternatives per token, none for no logprobs. `want_calls`: provisional text of tool calls too.
    `open_call` is the tool call that the turn left open. `turn_point` is where a chat's input ends in the
    stream, before the opener. `continued` tokens at the end of the stream are the open turn's own, made by an earlier
    generation. A job without a session, or a raw one, writes nothing to the log. `native`: its session
    is one of the session API's, which are resumed by id; `early_end`: its caller is told the end as soon as that is
    durable, and does not wait for the lane to be retired; `seed_chosen`: the client chose the seed. `fim`: a raw job
    that fills in a middle, whose state is kept nowhere. `observer` is told of all that commits while the caller reads
    on, and of the end. A thought of `thinking_budget` tokens is ended by `thought_end`, the tokens that close it and
    begin the answer.
    """

    session: int | None
    stream: list[int]
    max_tokens: int
    router: RouterLike
    params: SamplingParams = attrs.Factory(SamplingParams)
    seed: int = 0
    klass: Class = Class.AGENT
    client: str = ""
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: tuple[str, str] | None = None
    logit_bias: dict[int, float] | None = None
    want_provisional: bool = False
    want_calls: bool = False
    start_channel: int = 0
    open_call: OpenCall | None = None
    turn_point: int | None = None
    continued: int = 0
    deadline: float | None = None
    batch_invariant: bool = False
    raw: bool = False
    native: bool = False
    early_end: bool = False
    seed_chosen: bool = False
    fim: bool = False
    thinking_budget: int | None = None
    thought_end: list[int] = attrs.Factory(list)
    observer: Callable[["Sequence[Event] | Ended"], None] | None = None
    tools: list[dict[str, Any]] = attrs.Factory(list)

    @property
    def logged(self) -> bool:
        return self.session is not None and not self.raw


@attrs.define
class TokenLogprob:
    """A generated token's log probability (nats) and its alternatives, most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@attrs.define
class Provisional:
    """Text ahead of its commit; joined per channel, a prefix of what is committed. `n_tokens` it stands for.

    `closes`: a tool call ends with it. `written`: it went to the client already, through the generation's text out.
    """

    channel: int
    text: str
    n_tokens: int
    closes: bool = False
    written: bool = False


@attrs.define
class Committed:
    """Events that are durable, in log order (of a raw job: the same shapes, never logged, event id 0)."""

    events: list[Event]
    logprobs: list[TokenLogprob]


@attrs.define
class Ended:
    """The end of a generation. With an error, `error_code` is one of `Failure` and `reason` says what happened.

    `ttft` is in seconds from admission to the first token; `decode_rate` in tokens per second from the end of the
    first tick; either is none when there was nothing to measure. `expired`: a raw job ran past its deadline.
    """

    finish: int
    tokens_generated: int = 0
    warm_prefix: int = 0
    reason: str | None = None
    error_code: str | None = None
    expired: bool = False
    ttft: float | None = None
    decode_rate: float | None = None
    fault: int | None = None


Item = Provisional | Committed | Ended


class Generation:
    """What one caller sees of its lane: iterate it with `async for` to `Ended`, inside `async with`.

    Made by `Scheduler.submit`. One task reads it. Leaving the `async with` before the end, `aclose` and `cancel`
    stop the lane within a step; after `cancel` the iteration goes on to its end. `asked_by` names the task that
    asked for it. A reader that lags gets its deltas
    merged; one that leaves `LAG_TOKENS` unread is dropped, its last item `Ended` with the error `lagged`.
    """

    def __init__(self, job: Job, cancel: Callable[["Generation"], None], asked_by: str = "") -> None:
        self.job = job
        self.session = job.session
        self.asked_by = asked_by
        self._cancel = cancel
        self._items: deque[Item] = deque()
        self._unread = 0
        self._reader: trio.lowlevel.Task | None = None
        self.notify: Callable[[], None] | None = None  # called at each new item, for one who reads several with `take`
        self.text_out: Callable[[], TextOut | None] | None = None  # where text may go without waiting, if it may now
        self._over = False  # Ended was put in
        self._closed = False  # nobody reads any more
        self.ttft: float | None = None  # seconds from admission to the first token, as soon as there is one

    @property
    def ended(self) -> bool:
        """Whether the lane is done with this generation (its end may still wait to be read)."""
        return self._over

    def cancel(self) -> None:
        """Stop the lane; the end follows with finish 4 unless the lane was already finishing."""
        if not self._over:
            self._cancel(self)

    async def aclose(self) -> None:
        self._closed = True
        self._items.clear()
        self.cancel()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._items.clear()
        self.cancel()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Item:
        if not self._items:
            if self._closed or self._over:
                raise StopAsyncIteration
            if self._reader is not None:
                raise trio.BusyResourceError("another task reads this generation")
            self._reader = trio.lowlevel.current_task()
            try:
                await trio.lowlevel.wait_task_rescheduled(self._abort)
            finally:
                self._reader = None
        else:
            await trio.lowlevel.checkpoint()
        item = self._items.popleft()
        if isinstance(item, Committed):
            self._unread -= _tokens(item.events)
        return item

    @property
    def waiting(self) -> bool:
        """Whether there is an item to take."""
        return bool(self._items)

    def take(self) -> list[Item]:
        """Every item that is there, without waiting."""
        items = list(self._items)
        self._items.clear()
        self._unread = 0
        return items

    async def collect(self) -> tuple[list[Event], list[TokenLogprob], Ended]:
        """Read to the end: every committed event, every logprob, and the end."""
        events: list[Event] = []
        logprobs: list[TokenLogprob] = []
        async with self:
            async for item in self:
                if isinstance(item, Committed):
                    events += item.events
                    logprobs += item.logprobs
                elif isinstance(item, Ended):
                    return events, logprobs, item
        raise RuntimeError("the generation was closed while it was collected")

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    # ---- the scheduler's side

    def put_provisional(
        self, channel: int, text: str, n_tokens: int, closes: bool = False, written: bool = False
    ) -> None:
        """Hand on text ahead of its commit, merged with what the reader has not taken yet."""
        if self._closed or self._over:
            return
        if self._items:
            last = self._items[-1]
            if _continues(last, channel, written):
                last.text += text
                last.n_tokens += n_tokens
                last.closes = closes
                return
        self._put(Provisional(channel, text, n_tokens, closes, written))

    def put_committed(self, events: list[Event], logprobs: list[TokenLogprob]) -> None:
        """Hand on durable events; a reader that is too far behind is dropped."""
        if self._closed or self._over:
            return
        self._unread += _tokens(events)
        if self._unread > LAG_TOKENS:
            self._items.clear()
            self._cancel(self)
            self.put_end(Ended(Finish.CANCELLED, reason="the client reads too slowly", error_code=Failure.LAGGED))
            return
        if self.job.observer is not None:
            self.job.observer(events)
        if self._items:
            last = self._items[-1]
            if isinstance(last, Committed):
                last.events += events
                last.logprobs += logprobs
                return
        self._put(Committed(events, logprobs))

    def put_end(self, ended: Ended) -> None:
        if self._over:
            return
        self._over = True
        if self.job.observer is not None:
            self.job.observer(ended)
        if not self._closed:
            self._put(ended)

    def _put(self, item: Item) -> None:
        self._items.append(item)
        if len(self._items) > LAG_ITEMS:
            self._merge()
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)
        if self.notify is not None:
            self.notify()

    def _merge(self) -> None:
        """Join previews over the commits between them: previews may run ahead, never behind."""
        previews: deque[Provisional] = deque()
        committed = Committed([], [])
        end: Ended | None = None
        for item in self._items:
            if isinstance(item, Committed):
                committed.events += item.events
                committed.logprobs += item.logprobs
            elif isinstance(item, Ended):
                end = item
            elif previews and _continues(last := previews[-1], item.channel, item.written):
                last.text += item.text
                last.n_tokens += item.n_tokens
                last.closes = item.closes
            else:
                previews.append(item)
        self._items = deque(previews)
        if committed.events:
            self._items.append(committed)
        if end is not None:
            self._items.append(end)


class Failure:
    """Error codes of an end: why a generation failed."""

    WORKER_DIED = "worker_died"
    TICK_FAILED = "tick_failed"
    ADMIT_REFUSED = "admit_refused"
    FAULT = "lane_fault"
    CONTEXT = "context_length_exceeded"
    CONSTRAINT = "constraint_refused"
    EMPTY = "empty_prompt"
    TOO_LARGE = "engine_full"
    LOG = "log_failed"
    LAGGED = "lagged"
    RETIRED = "model_retired"
    STOPPED = "stopped"


def _continues(item: Item, channel: int, written: bool) -> TypeGuard[Provisional]:
    """Whether text of a channel belongs to the same preview as an item."""
    return isinstance(item, Provisional) and item.channel == channel and item.written == written and not item.closes


def _tokens(events: Sequence[Event]) -> int:
    return sum(len(event.body.span) for event in events if isinstance(event.body, Generated))
