"""Fill-in-the-middle as every API serves it: who may ask, the prompt, the answer cache, and the model that answers."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from superfluid.codec.fim import Fim, FimMode
from superfluid.daemon.generation import GenerateOptions, Sampling, SamplingRequest
from superfluid.daemon.model import Model, Started, wire_params
from superfluid.link.digests import fim_key
from superfluid.link.events import Event, Finish, Generated
from superfluid.observe.metrics import Metrics
from superfluid.scheduler.classes import Class
from superfluid.scheduler.fim import Answer, Answers, Buckets, Rate
from superfluid.scheduler.generation import Ended, Generation, Job
from superfluid.sessions.errors import NoFimDialect, StreamTooLong

DEFAULT_TOKENS = 128  # of an answer, for requests and servers that set no limit
GREEDY = SamplingRequest(temperature=0.0, top_p=1.0, repeat_penalty=1.0)  # whatever the server's defaults are


class Throttled(Exception):
    """A client asked too often; after `retry_after_ms` it may ask again."""

    def __init__(self, retry_after_ms: int) -> None:
        super().__init__(f"completion rate limit exceeded; retry in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


@attrs.frozen
class FimRequest:
    """A middle that is asked for. Of the options the class and the session's are not looked at."""

    prefix: str
    suffix: str
    mode: int = FimMode.PSM
    options: GenerateOptions = attrs.Factory(lambda: GenerateOptions(GREEDY))


@attrs.frozen
class Fill:
    """A middle that is being made, or is there already (`cached`), by the model `served_by`."""

    started: Started
    cached: bool
    served_by: str


class FimService:
    """One per daemon. `satellite` is the model of `--fim-model`; without one a request's own model answers.

    `deadline_ms` is how long a completion may take from its submission; 0 is any time.
    """

    def __init__(self, metrics: Metrics, rate: Rate | None = None, deadline_ms: int = 0) -> None:
        self.satellite: Model | None = None
        self._counts = metrics.fim_completions_total
        self._buckets = Buckets(rate or Rate())
        self._deadline_ms = deadline_ms
        self._answers: dict[Model, Answers] = {}  # by the model that made them

    def admit(self, client: Hashable) -> None:
        """Before anything else of a request. Raises Throttled."""
        wait = self._buckets.take(client, trio.current_time())
        if wait:
            self._counts["throttled"] += 1
            raise Throttled(wait)

    def deadline(self) -> float | None:
        """When a completion that is submitted now expires, on the trio clock."""
        return trio.current_time() + self._deadline_ms / 1000 if self._deadline_ms else None

    def serves(self, model: Model) -> Model:
        """The model that answers for `model`."""
        return self.satellite or model

    def capabilities(self, model: Model) -> dict[str, Any]:
        """Of a capability record's `dialect`: whether middles are filled in for `model`, and by which satellite."""
        satellite = None if self.satellite is None else self.satellite.name
        return {"fim": self.serves(model).codec.fim is not None, "fim_model": satellite}

    async def begin(self, model: Model, request: FimRequest) -> Fill:
        """Answer from the cache, or queue the lane that makes the answer; its class is completion, and it has no log.

        Raises NoFimDialect, StreamTooLong, ModelFailed.
        """
        deadline = self.deadline()
        served = self.serves(model)
        fim = served.codec.fim
        if fim is None:
            raise NoFimDialect
        await served.ensure_serving()
        options = request.options
        sampling = served.settle(options)
        limit = options.max_tokens
        if limit is None:
            limit = served.config.max_tokens or DEFAULT_TOKENS
        prompt, key = await served.in_thread(prepare, served, fim, request, sampling, limit)
        if len(prompt) > served.window:
            raise StreamTooLong(len(prompt), served.window)
        answers = self._answers.setdefault(served, Answers())
        keep = Keep(answers, key) if sampling.temperature <= 0 and not options.logit_bias else None
        job = Job(
            session=None,
            stream=prompt,
            max_tokens=limit,
            router=fim.router(() if options.ignore_eos else served.codec.terminators),
            params=wire_params(sampling, options.ignore_eos),
            seed=sampling.seed,
            klass=Class.COMPLETION,
            client=options.client,
            ignore_eos=options.ignore_eos,
            logit_bias=options.logit_bias or None,
            want_provisional=options.provisional,
            deadline=deadline,
            raw=True,
            fim=True,
            observer=partial(self._observe, keep),
        )
        answer = answers.get(key) if keep is not None else None
        generation = served.submit(job) if answer is None else replay(job, answer)
        self._counts["cached"] += answer is not None
        return Fill(Started(generation, None, len(prompt), limit), answer is not None, served.name)

    def _observe(self, keep: "Keep | None", news: Sequence[Event] | Ended) -> None:
        """Count what ended, and keep the answer that is whole."""
        if not isinstance(news, Ended):
            if keep is not None:
                keep.add(news)
        elif news.expired:
            self._counts["expired"] += 1
        elif news.reason is None and (news.tokens_generated or news.finish != Finish.CANCELLED):
            self._counts["generated"] += 1
            if keep is not None:
                keep.end(news)


@attrs.define
class Keep:
    """Gathers an answer for the cache."""

    answers: Answers
    key: int
    tokens: list[int] = attrs.Factory(list)
    text: list[str] = attrs.Factory(list)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event.body, Generated):
                self.tokens += event.body.span
                self.text.append(event.body.text)

    def end(self, ended: Ended) -> None:
        """Keep it, unless the client stopped it or no longer read along."""
        if ended.finish != Finish.CANCELLED and len(self.tokens) == ended.tokens_generated:
            self.answers.put(self.key, Answer(self.tokens, "".join(self.text), ended.finish))


def prepare(model: Model, fim: Fim, request: FimRequest, sampling: Sampling, limit: int) -> tuple[list[int], int]:
    """The prompt of a request and the key of its answer."""
    mode = FimMode.SPM if request.mode == FimMode.SPM else FimMode.PSM
    prompt = fim.prompt(request.prefix, request.suffix, mode)
    key = fim_key(
        prompt,
        mode,
        limit,
        model.codec.fingerprint(),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repeat_penalty=sampling.repeat_penalty,
        ignore_eos=request.options.ignore_eos,
    )
    return prompt, key


def replay(job: Job, answer: Answer) -> Generation:
    """A generation that has brought a kept answer already."""
    generation = Generation(attrs.evolve(job, observer=None), lambda _: None)
    generation.put_committed([Event(0, 0, 0, Generated(answer.tokens, answer.text, 0, answer.finish))], [])
    generation.put_end(Ended(answer.finish, tokens_generated=len(answer.tokens)))
    return generation
