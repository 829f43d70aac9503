"""One client of the session API, whatever carries it: each request becomes a call of the facade and its replies."""

import logging
from collections.abc import Awaitable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from superfluid.codec.dialects.dialect import ConversationRefused
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.fim import GREEDY, FimRequest, Throttled
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import ModelFailed
from superfluid.daemon.sessions import Sessions
from superfluid.link import session_api as api
from superfluid.link.events import Event, Generated
from superfluid.observe.log import set_log_filter
from superfluid.scheduler.generation import Committed, Ended, Failure
from superfluid.sessions.errors import SessionError, StoreError
from superfluid.sessions.subscriptions import PUBLISHER_CLOSED, Message, Subscription

DRAINING = "generation failed: the server is stopping"

log = logging.getLogger(__name__)


class Send(Protocol):
    """Sends responses in order, together where that is cheaper."""

    def __call__(self, *responses: api.Response) -> Awaitable[None]: ...


class Carry(Protocol):
    """Sends, from now on, what a subscription of that number waits for."""

    def __call__(self, number: int, subscription: Subscription) -> None: ...


class Connection:
    """Answers one client's requests, one at a time and in order; subscriptions run beside them in `nursery`.

    `client` is whose completions are counted together; by default the connection's own. `carry` is told of every
    subscription once it is answered.
    """

    def __init__(
        self, daemon: Daemon, nursery: trio.Nursery, send: Send, client: Hashable = None, carry: Carry | None = None
    ) -> None:
        self._daemon = daemon
        self._carry = carry
        self._client = object() if client is None else client
        self._sessions: Sessions = daemon.default.sessions
        self._nursery = nursery
        self._send = send
        self._subscriptions: dict[int, Subscription] = {}
        self._stopping = False
        self._open = 0  # the request that is being answered, and the subscriptions whose end is not told
        self._none_open = trio.Event()

    async def handle(self, request: api.Request) -> None:
        """Answer one request; a drain waits for the answer. Once the connection stops, none is answered."""
        if self._stopping:
            await trio.sleep_forever()
        with self._daemon.answering(), self._counted():
            await self._handle(request)

    async def stop(self) -> None:
        """The server stops: end what is followed, and let the request that is being answered end by itself.

        Returns when all of it was sent; how long that may take is the caller's to limit.
        """
        self._stopping = True
        for subscription in list(self._subscriptions.values()):
            subscription.end(PUBLISHER_CLOSED)
        while self._open:
            self._none_open = trio.Event()
            await self._none_open.wait()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    async def _handle(self, request: api.Request) -> None:
        """Answer one request. Refusals are Err responses, and so is what goes wrong in here; `send` raises nothing."""
        try:
            named = getattr(request, "session", getattr(request, "parent", None))
            if named is not None:
                self._sessions.check_not_purged(named)
            if isinstance(request, api.GenerateRequest):
                await self._generate(request)
            elif isinstance(request, api.CompleteRequest):
                await self._complete(request)
            elif isinstance(request, api.SubscribeRequest):
                await self._subscribe(request)
            elif isinstance(request, api.UnsubscribeRequest):
                await self._unsubscribe(request)
            else:
                await self._send(await self._answer(request))
        except Exception as error:  # one request's bug is not every client's end
            await self._send(api.ErrResponse(refusal(type(request).variant_name, error)))

    async def _answer(self, request: api.Request) -> api.Response:
        sessions = self._sessions
        if (fault := api.out_of_range(request)) is not None:
            return api.ErrResponse(f"protocol: {fault}")
        match request:
            case api.CreateRequest(parent, params):
                return api.CreatedResponse(await sessions.create(parent, params))
            case api.AppendRequest(session, text, span):
                return api.CommittedResponse(await sessions.append(session, text, span))
            case api.AppendMessageRequest(session, role, text):
                return api.CommittedResponse(await sessions.append_message(session, role, text))
            case api.AppendSystemRequest(session, text, tools):
                return api.CommittedResponse(await sessions.append_system(session, text, tools))
            case api.AppendToolResultRequest(session, call_id, content):
                return api.CommittedResponse(await sessions.append_tool_result(session, call_id, content))
            case api.ReadRequest(session, cursor):
                return api.EventsResponse(await sessions.read(session, cursor))
            case api.ListRequest():
                return api.SessionsResponse(sessions.session_ids())
            case api.CancelRequest(session):
                sessions.cancel(session)
                return api.CancellingResponse()
            case api.ForkRequest(session, at_event, params):
                return api.CreatedResponse(await sessions.fork(session, at_event, params))
            case api.RebaseRequest(session, edits, params):
                return api.CreatedResponse(await sessions.rebase(session, edits, params))
            case api.TrimRequest(session, to_event):
                return api.CreatedResponse(await sessions.trim(session, to_event))
            case api.TreeRequest():
                return api.TreeResponse(sessions.tree())
            case api.SessionsRequest(include_archived):
                return api.SessionListResponse(sessions.summaries(include_archived))
            case api.SetMetaRequest(session, expected, title, archived):
                return api.MetaResponse(await sessions.set_meta(session, expected, title, archived))
            case api.SetQosRequest(session, class_, invariant):
                return api.CommittedResponse(await sessions.set_qos(session, class_, invariant))
            case api.InspectRequest(session):
                return api.InspectionResponse(await sessions.inspect(session))
            case api.OpenToolCallsRequest(session):
                return api.ToolCallsResponse(sessions.open_tool_calls(session))
            case api.LedgerRequest(session):
                return api.LedgerResponse(sessions.ledger(session))
            case api.RequestPermissionRequest(session, call_id, text):
                return api.CommittedResponse(await sessions.request_permission(session, call_id, text))
            case api.RespondPermissionRequest(session, request_id, granted):
                return api.CommittedResponse(await sessions.respond_permission(session, request_id, granted))
            case api.RequestToolCancelRequest(session, call_id):
                return api.CommittedResponse(await sessions.request_tool_cancel(session, call_id))
            case api.AppendToolOutcomeRequest(session, call_id, outcome, note):
                return api.CommittedResponse(await sessions.append_tool_outcome(session, call_id, outcome, note))
            case api.AppendBlockRequest(session, role, kind, payload):
                return api.CommittedResponse(await sessions.append_block(session, role, kind, payload))
            case api.PutMediaRequest(data):
                return api.MediaResponse(await sessions.put_media(data))
            case api.AppendImageRequest(session, role, blob, pre_text, post_text):
                return api.CommittedResponse(await sessions.append_image(session, role, blob, pre_text, post_text))
            case api.GcMediaRequest():
                return api.GcResponse(*await sessions.collect_media())
            case api.PinRequest(session, ttl_ms):
                return api.PinnedResponse(await sessions.pin(session, ttl_ms))
            case api.PurgeRequest(session, expected, mode):
                return api.PurgedResponse(await sessions.purge(session, expected, mode))
            case api.SetBackgroundRateRequest(divisor):
                self._daemon.default.scheduler.set_background_rate(divisor)
                return api.AckResponse()
            case api.SetLogLevelRequest(directive):
                try:
                    set_log_filter(directive)
                except ValueError as error:
                    return api.ErrResponse(f"protocol: {error}")
                return api.AckResponse()
            case api.MetricsRequest():
                return api.TextResponse(self._daemon.metrics_page())
            case _:
                name = type(request).variant_name
                return api.ErrResponse(f"protocol: {name} is not served by this server")

    async def _generate(self, request: api.GenerateRequest) -> None:
        """Deltas as their events commit, then the whole; a client that goes away cancels."""
        if self._daemon.draining:
            await self._send(api.ErrResponse(DRAINING))
            return
        events: list[Event] = []
        async with await self._sessions.generate(request.session, request.max_tokens) as generation:
            async for item in generation:
                if isinstance(item, Committed):
                    events += item.events
                    for event in item.events:
                        await self._send(api.DeltaResponse(event))
                elif isinstance(item, Ended):
                    await self._send(ended(item, events))

    async def _complete(self, request: api.CompleteRequest) -> None:
        """Fill in a middle; a client that goes away cancels."""
        if self._daemon.draining:
            await self._send(api.ErrResponse(DRAINING))
            return
        fim = self._daemon.fim
        try:
            fim.admit(self._client)
        except Throttled as throttled:
            await self._send(api.ThrottledResponse(throttled.retry_after_ms))
            return
        options = GenerateOptions(GREEDY, request.max_tokens, client=f"connection:{id(self._client)}")
        fill = await fim.begin(self._daemon.default, FimRequest(request.prefix, request.suffix, request.mode, options))
        events, _, end = await fill.started.generation.collect()
        if end.reason is not None:
            await self._send(ended(end, events))
            return
        runs = [] if end.expired else [event.body for event in events if isinstance(event.body, Generated)]
        tokens = [token for run in runs for token in run.span]
        await self._send(api.CompletionResponse("".join(run.text for run in runs), tokens, fill.cached, end.expired))

    async def _subscribe(self, request: api.SubscribeRequest) -> None:
        number, subscription = self._sessions.subscribe(request.session, request.cursor, request.provisional)
        self._subscriptions[number] = subscription

        async def follow(task_status: trio.TaskStatus[None]) -> None:
            try:
                with self._counted():
                    await self._send(api.SubscribedResponse(number))
                    task_status.started()
                    if self._carry is not None:
                        self._carry(number, subscription)
                    async for batch in subscription.batches():
                        await self._send(*(followed(number, message) for message in batch))
                    await self._send(api.SubEndedResponse(number, subscription.reason or ""))
            finally:
                self._sessions.unfollow(subscription)
                self._subscriptions.pop(number, None)

        await self._nursery.start(follow, name=f"subscription:{number}")

    async def _unsubscribe(self, request: api.UnsubscribeRequest) -> None:
        subscription = self._subscriptions.pop(request.sub, None)
        if subscription is None:
            await self._send(api.ErrResponse(f"no subscription {request.sub} on this connection"))
            return
        subscription.close()
        await self._send(api.UnsubscribedResponse())


def followed(number: int, message: Message) -> api.Response:
    """How a subscription is told of what it follows."""
    if isinstance(message, Event):
        return api.SubEventResponse(number, message)
    return api.SubProvisionalResponse(number, message.channel, message.text)


def refusal(name: str, error: Exception) -> str:
    """What a client is told of what went wrong in its request of that name; what was not foreseen is logged."""
    if isinstance(error, SessionError | StoreError):
        return str(error)
    if isinstance(error, ModelFailed):
        return f"generation failed: {error}"
    if isinstance(error, ConversationRefused):
        return f"protocol: {error}"
    log.error("%s failed", name, exc_info=error)
    return f"internal error in {name}: {type(error).__name__}: {error}"


def ended(end: Ended, events: list[Event]) -> api.Response:
    """The last answer of a Generate whose events these are."""
    if end.reason is not None:
        told = end.error_code == Failure.LOG or end.reason.startswith("generation failed")
        return api.ErrResponse(end.reason if told else f"generation failed: {end.reason}")
    return api.GeneratedResponse(events, end.tokens_generated, end.finish, end.warm_prefix)
