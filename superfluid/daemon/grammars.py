"""Which grammars a model's worker compiles, asked before an answer starts."""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import trio

from superfluid.codec.toolcalls.constraints import Attempt, Constraint, ConstraintUnsatisfiable
from superfluid.daemon.objections import objection
from superfluid.daemon.supervisor import ModelFailed
from superfluid.link import linkw
from superfluid.link.codes import Status
from superfluid.scheduler.admission import create_grammar
from superfluid.scheduler.link import EngineLink, EngineRefused, LinkFault, WorkerGone
from superfluid.scheduler.loop import Scheduler

REMEMBERED = 512  # verdicts; agents send the same tools with every request
TRIES = 3  # workers that are asked before one lives long enough to begin
FATAL = 0  # the verdict on a grammar that a worker died over: never compiled again


class Grammars:
    """Tries grammars on the worker, while its ticks run. A lane's own is made at its admission, when the worker has it
    ready; what is tried here is freed at once, so that nothing is held for a request that waits or leaves."""

    def __init__(self, scheduler: Scheduler, ensure_serving: Callable[[], Awaitable[None]]) -> None:
        self._scheduler = scheduler
        self._ensure_serving = ensure_serving
        self._threads = trio.CapacityLimiter(1)  # what is said of refusals takes no more than one core
        self._verdicts: OrderedDict[bytes, int | None] = OrderedDict()

    async def choose(self, constraint: Constraint) -> Attempt | None:
        """The first attempt of a constraint that compiles; none where the lane may run free.

        Raises ConstraintUnsatisfiable when what is demanded cannot be held, ModelFailed without a worker to ask.
        """
        refused: int | None = None
        for attempt in constraint.attempts:
            refused = await self._refused(attempt)
            if refused is None:
                return attempt
            if refused == FATAL:
                break  # the other attempts are of the same schemas
        if constraint.refusal is None:
            return None
        if refused == FATAL:
            why = "the model's worker died while it was compiled, so it is not compiled again; simplify the schema"
        elif refused == Status.Unsupported:
            why = "its engine has no grammar of this kind"
        else:
            why = await trio.to_thread.run_sync(objection, constraint.schemas, limiter=self._threads)
        raise ConstraintUnsatisfiable(f"{constraint.refusal}: {why}", constraint.param)

    async def _refused(self, attempt: Attempt) -> int | None:
        """The status with which the worker refuses a grammar, or FATAL; none when it compiles."""
        key = hashlib.blake2b(f"{attempt.kind}:{attempt.text}".encode(), digest_size=16).digest()
        if key not in self._verdicts:
            self._verdicts[key] = await self._try(attempt)
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        return self._verdicts[key]

    async def _try(self, attempt: Attempt) -> int | None:
        async def begin(link: EngineLink) -> tuple[EngineLink, Callable[[], Awaitable[linkw.StateSyncOk]]]:
            return link, await link.begin(create_grammar(attempt.kind, attempt.text))

        why = ""
        for _ in range(TRIES):
            await self._ensure_serving()
            begun = False
            try:
                with trio.CancelScope(shield=True):  # what is made is freed, whoever leaves meanwhile
                    link, answer = await self._scheduler.side(begin)
                    begun = True
                    made = await answer()  # ticks run meanwhile
                    assert isinstance(made, linkw.CreateGrammarOk)
                    link.grammar_free(made.grammar_handle)
                return None
            except EngineRefused as refusal:
                return refusal.status
            except LinkFault:
                return Status.RejectBadStruct
            except WorkerGone as gone:
                if begun and not gone.unread:
                    return FATAL
                why = gone.reason
        raise ModelFailed(f"the model's worker died before a grammar was compiled: {why}")
