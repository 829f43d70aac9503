"""Sessions of one model, as every API sees them: the rules of the store, the codec's tokens, the scheduler's lanes."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
import trio

from superfluid.codec.blocks import UnknownBlockKind, block_text
from superfluid.codec.codec import Codec
from superfluid.codec.dialects.dialect import NoChatDialect
from superfluid.codec.json_text import read_json
from superfluid.codec.past import Past, Pasts
from superfluid.daemon.media import MediaPool
from superfluid.daemon.purging import Purges
from superfluid.link import events as ev, session_api as api
from superfluid.link.ids import AT_ONCE, packed
from superfluid.link.linkw import SamplingParams
from superfluid.scheduler.admission import ContextExceeded
from superfluid.scheduler.classes import Class
from superfluid.scheduler.generation import Generation, Job, OpenCall
from superfluid.sessions import errors, rebase, records, rules
from superfluid.sessions.session import Session
from superfluid.sessions.store import Record, now_unix_ms
from superfluid.sessions.subscriptions import Subscription

if TYPE_CHECKING:
    from superfluid.daemon.model import Model

R = TypeVar("R")
T = TypeVar("T")

READ_AT_ONCE = 256  # events that are decoded without a break: a few milliseconds
LONG = 1 << 20  # bytes of records: to decode more takes milliseconds
TOOLS_KEPT = 1024  # sessions whose tools are not read from the log again
PER_MESSAGE = frozenset({"chatml", "atem", "raw"})  # dialects whose turns do not depend on what came before them


class Busy:
    """The sessions on which a generation is being started, is queued, or runs."""

    def __init__(self, generating: Callable[[int], bool]) -> None:
        self.starting: dict[int, bool] = {}  # and whether it is cancelled before it was queued
        self._generating = generating

    def __contains__(self, session: object) -> bool:
        return session in self.starting or (isinstance(session, int) and self._generating(session))


class Sessions:
    """Made by its model. Refusals are the SessionError classes; a log that cannot be written raises LogIOError."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._store = model.store
        self._codec = model.codec
        self._busy = Busy(model.scheduler.generating)
        self._store.activity.busy = self._busy
        self._tools: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()  # of AppendSystem, as last asked for
        self._previews: dict[int, tuple[int, Callable[[], None]]] = {}
        self._subscription_ids = itertools.count(1)
        self._pasts = Pasts()
        self._media = MediaPool(self._store.directory)
        self.purges = Purges(self._store, model.scheduler, model.keeper, self._busy.starting, self._forget)

    def check_not_purged(self, session: int) -> None:
        """Raises PurgedSession, which answers every request for such a session, whatever else is wrong with it."""
        found = self._store.any_session(session)
        if found is not None and found.durable.purged is not None:
            raise errors.PurgedSession(session)

    # ---- making and reading sessions

    async def create(self, parent: int | None, params: ev.GenParams) -> int:
        session, records = rules.create(self._store, parent, params)
        await self._store.commit(records)
        return session

    async def create_filled(self, bodies: Sequence[ev.Body], params: Sequence[ev.GenParams]) -> list[int]:
        """A session per set of params, each with `bodies` as its prompt, all in one sync; marked as made by HTTP.

        The caller submits their generations in the same step, before anyone else can know their ids.
        """
        fingerprint = ev.GenerationFingerprint(self._codec.fingerprint())
        at = len(bodies) - isinstance(bodies[-1], ev.GenerationPrompt)
        filled = [*bodies[:at], fingerprint, *bodies[at:]]
        records: list[Record] = []
        made: list[int] = []
        for one in params:
            session, created = rules.create(self._store, None, one)
            made.append(session)
            records += [*created, *((session, body) for body in filled)]
        await self._store.commit(records)
        for session in made:
            self._store.http.add(session)
        return made

    async def fork(self, session: int, at_event: int, params: ev.GenParams | None) -> int:
        child, records = rules.fork(self._store, session, at_event, params)
        await self._store.commit(records)
        return child

    async def rebase(self, session: int, edits: list[ev.Edit], params: ev.GenParams | None) -> int:
        """A branch with `edits`; the replacements are rendered as turns (plain text without a chat dialect)."""
        turns = await self._replacements(session, edits)
        child, records = rebase.rebase(
            self._store, session, edits, params, lambda edit, _: turns[edit.from_], self._codec
        )
        await self._store.commit(records)
        return child

    async def _replacements(self, session: int, edits: list[ev.Edit]) -> dict[int, list[int]]:
        """The newly rendered turns of a rebase, by the events that they begin at. What comes before them is committed,
        and stays as it is while they are rendered."""
        rebase.editable(self._store, session, edits)
        replacing = [edit for edit in edits if isinstance(edit, ev.Replace)]
        if self._codec.dialect_name in PER_MESSAGE:
            turns = {edit.from_: await self._model.in_thread(_replacement, self._codec, edit) for edit in replacing}
        elif replacing:
            events = await self.read(session, 0)
            turns = await self._model.in_thread(_replacements, self._codec, events, edits)
        else:
            turns = {}
        return turns

    async def trim(self, session: int, to_event: int) -> int:
        child, records = rebase.trim(self._store, session, to_event)
        await self._store.commit(records)
        return child

    def _declared(self, found: Session) -> list[dict[str, Any]]:
        """The tools of a session with tokens, which are what they are for good."""
        tools = self._tools.pop(found.id, None)
        if tools is None:
            tools = [read_tool(index, tool) for index, tool in enumerate(found.declared()[1])]
        self._tools[found.id] = tools
        if len(self._tools) > TOOLS_KEPT:
            self._tools.popitem(last=False)
        return tools

    async def read(self, session: int, cursor: int) -> list[ev.Event]:
        """Events from `cursor` on, to the last; other tasks have their turns while a long session is read."""
        events: list[ev.Event] = []
        version = self._store.version
        while (found := self._store.session(session)).n_events > (at := cursor + len(events)):
            payloads = found.payloads(at, READ_AT_ONCE)
            if payloads is None:
                part = found.events(at, READ_AT_ONCE)
            elif sum(map(len, payloads)) > LONG:
                part = await trio.to_thread.run_sync(records.events, payloads, version)
            else:
                part = records.events(payloads, version)
            events += part
            if len(part) == READ_AT_ONCE:
                await trio.lowlevel.checkpoint()
        return events

    def session_ids(self) -> list[int]:
        """Live sessions, ascending, archived ones too."""
        return self._store.session_ids()

    def tree(self) -> list[tuple[int, int | None, int]]:
        """(id, parent, fork point) of the sessions that are not archived, ascending."""
        live = sorted(self._store.live(), key=lambda session: session.id)
        return [(session.id, session.parent, session.fork_at) for session in live if not session.archived]

    def summaries(self, include_archived: bool) -> list[api.Summary]:
        live = sorted(self._store.live(), key=lambda session: session.id)
        return [session.summary() for session in live if include_archived or not session.archived]

    async def inspect(self, session: int) -> api.Inspection:
        events = await self.read(session, 0)  # all there are now: nothing waits from here on
        found = self._store.session(session)
        return api.Inspection(
            summary=found.summary(),
            params=found.params,
            epoch=found.epoch,
            last_finish=found.last_finish,
            qos_class=found.qos_class,
            batch_invariant=found.batch_invariant,
            pin_deadline_unix_ms=found.pin_deadline,
            behavior_fingerprint=found.fingerprint,
            open_tool_calls=self.open_tool_calls(session),
            tier=self._tier(session),
            tokens=found.tokens().tolist(),
            events=events,
            wal_version=self._store.version,
            store_id=self._store.store_id,
        )

    def _tier(self, session: int) -> api.Tier:
        if session in self._busy:
            return api.Resident()
        parked = self._model.keeper.tier(session)
        return api.Cold() if parked is None else api.Parked(*parked)

    def open_tool_calls(self, session: int) -> list[tuple[int, str, str]]:
        return rules.open_tool_calls(self._store.session(session).ledger)

    def ledger(self, session: int) -> list[tuple[int, api.LedgerEntry]]:
        return list(self._store.session(session).ledger.items())

    # ---- appending

    async def append(self, session: int, text: str | None, span: list[int]) -> ev.Event:
        if not span and text:
            span = await self._model.in_thread(self._codec.tokenizer.encode, text)
        vocabulary = self._codec.tokenizer.vocab_size
        if (largest := max(span, default=0)) >= vocabulary:
            raise errors.ProtocolMisuse(f"token {largest} is not in the vocabulary of {vocabulary}")
        return await self._commit(lambda: rules.append(self._store, session, text, span))

    async def append_message(self, session: int, role: int, text: str) -> ev.Event:
        return await self._append_turn(
            session,
            lambda past: self._codec.message_span(role, text, past) if role in rules.CHAT_ROLES else [],
            lambda turn: rules.append_message(self._store, session, role, text, turn, self._codec),
        )

    async def append_system(self, session: int, text: str | None, tools: list[str]) -> ev.Event:
        declared = [strict_tool(index, tool) for index, tool in enumerate(tools)]
        self._model.note_tools(declared)
        return await self._append_turn(
            session,
            lambda _: self._codec.system_span(text, declared),
            lambda turn: rules.append_system(self._store, session, text, tools, turn, self._codec),
        )

    async def append_block(self, session: int, role: int, kind: int, payload: str) -> ev.Event:
        """A block; what the model sees of it is a turn of its role."""

        def render(past: Past | None) -> list[int]:
            try:
                text = block_text(kind, payload)
            except UnknownBlockKind:
                return []  # the rule refuses it
            shown = text and role in rules.BLOCK_ROLES
            return self._codec.message_span(role, text, past) if shown else []

        return await self._append_turn(
            session,
            render,
            lambda turn: rules.append_block(self._store, session, role, kind, payload, turn, self._codec),
        )

    async def put_media(self, data: bytes) -> str:
        """Store a blob in the media pool; its SHA-256 in hex."""
        return await self._in_pool(self._media.put, data)

    async def collect_media(self) -> tuple[int, int]:
        """Delete the blobs that no image block of a live session names; how many stayed, and how many went."""
        return await self._in_pool(self._media.collect, await self._store.named_blobs())

    async def _in_pool(self, function: Callable[[T], R], argument: T) -> R:
        try:
            return await self._model.in_thread(function, argument)
        except OSError as error:
            raise errors.LogIOError(self._media.directory, str(error)) from error

    async def append_image(self, session: int, role: int, blob: str, pre_text: str, post_text: str) -> ev.Event:
        """An image as a turn. No runtime takes one yet: refused in the model's words when all else is right."""
        self._store.activity.check_quiet(session)
        self._store.session(session)
        if role not in rules.CHAT_ROLES:
            raise errors.UnknownRole(role)
        if self._media.path(blob) is None:
            raise errors.UnknownMedia(blob)
        said = self._model.record.get("modalities", {}).get("image_encode")
        reason = said if isinstance(said, str) else "media reach no model yet"
        raise errors.ProtocolMisuse(
            f"model '{self._model.name}' on runtime {self._model.runtime_id} does not accept images: {reason}"
        )

    async def append_tool_result(self, session: int, call: int, content: str) -> ev.Event:
        entry = self._store.session(session).ledger.get(call)
        name = entry.name if entry is not None else ""
        return await self._append_turn(
            session,
            lambda past: self._codec.tool_result_span(content, name, past, call),
            lambda turn: rules.tool_result(self._store, session, call, content, turn, self._codec, now_unix_ms()),
        )

    async def _append_turn(
        self,
        session: int,
        render: Callable[[Past | None], list[int]],
        plan: Callable[[list[int] | None], list[Record]],
    ) -> ev.Event:
        """Render a turn off the event loop, then commit what the rule makes of it.

        A dialect whose turns depend on the conversation renders again when that moved meanwhile.
        """
        self._store.session(session)
        if self._codec.dialect_name in PER_MESSAGE:
            turn = await self._render_turn(render, None)
            return await self._commit(partial(plan, turn))
        past = self._pasts.take(session)
        try:
            while True:
                past.add([event.body for event in await self.read(session, past.n_events)])
                turn = await self._render_turn(render, past)
                if self._store.session(session).n_events == past.n_events:
                    return await self._commit(partial(plan, turn))
        finally:
            found = self._store.any_session(session)
            if found is not None and found.durable.purged is None:
                self._pasts.give(session, past)

    async def _render_turn(self, render: Callable[[Past | None], list[int]], past: Past | None) -> list[int] | None:
        try:
            return await self._model.in_thread(_rendered, render, past)
        except NoChatDialect:
            return None

    async def _commit(self, plan: Callable[[], Sequence[Record]]) -> ev.Event:
        return (await self._store.perform(plan))[-1]

    # ---- what a session says of itself, and what people say of its calls

    async def set_meta(self, session: int, expected: int, title: str | None, archived: bool | None) -> int:
        event = await self._commit(lambda: rules.set_meta(self._store, session, expected, title, archived))
        assert isinstance(event.body, ev.MetaUpdated)
        return event.body.version

    async def set_qos(self, session: int, qos_class: int, batch_invariant: bool) -> ev.Event:
        return await self._commit(lambda: rules.set_qos(self._store, session, qos_class, batch_invariant))

    async def pin(self, session: int, ttl_ms: int) -> int:
        event = await self._commit(lambda: rules.pin(self._store, session, ttl_ms, now_unix_ms()))
        assert isinstance(event.body, ev.Pinned)
        self._enforce_pin(session)
        return event.body.deadline_unix_ms

    def enforce_pins(self) -> None:
        """Ask for the pins that the log has, as after a restart."""
        now = now_unix_ms()
        for found in list(self._store.live()):
            if found.pin_deadline > now:
                self._enforce_pin(found.id)

    def _enforce_pin(self, session: int) -> None:
        try:
            found = self._store.session(session)
        except errors.SessionError:
            return  # purged meanwhile
        self._model.scheduler.pins.pin_session(session, found.tokens(), found.pin_deadline)

    async def request_permission(self, session: int, call: int, text: str) -> ev.Event:
        return await self._commit(lambda: rules.request_permission(self._store, session, call, text))

    async def respond_permission(self, session: int, request: int, granted: bool) -> ev.Event:
        return await self._commit(lambda: rules.respond_permission(self._store, session, request, granted))

    async def request_tool_cancel(self, session: int, call: int) -> ev.Event:
        return await self._commit(lambda: rules.request_tool_cancel(self._store, session, call))

    async def append_tool_outcome(self, session: int, call: int, outcome: int, note: str) -> ev.Event:
        return await self._commit(lambda: rules.tool_outcome(self._store, session, call, outcome, note))

    async def purge(self, session: int, expected: int, mode: ev.Descendants) -> list[int]:
        """End a session, and with Cascade its descendants; the sessions that ended, itself the last."""
        return await self.purges.purge(session, expected, mode)

    def _forget(self, session: int) -> None:
        self._tools.pop(session, None)
        self._pasts.forget(session)
        self._model.scheduler.pins.purged(session)

    # ---- generating

    async def generate(self, session: int, max_tokens: int, provisional: bool = False) -> Generation:
        """Check, commit what starts the turn, and queue it. Raises SessionError, ModelFailed, LogIOError."""
        self.check_not_purged(session)  # no model is loaded for it
        await self._model.ensure_serving()
        try:
            prologue = rules.begin_generation(
                self._store,
                session,
                max_tokens,
                self._model.window,
                self._codec,
                self._codec.fingerprint(),
                now_unix_ms(),
                leases=self._model.config.tool_lease_ms > 0,
            )
        except errors.SessionError as refusal:
            if refusal.records:
                await self._store.commit(refusal.records)
            raise
        if max_tokens == 0:
            await self._store.commit(prologue.records)
            return self._submit(self._store.session(session), max_tokens, [], provisional)
        starting = self._busy.starting
        starting[session] = False
        try:
            await self._store.commit(prologue.records)  # with none: waits for what is staged ahead of it
            generation = self._submit(self._store.session(session), max_tokens, prologue.opener, provisional)
        except ContextExceeded as error:
            raise errors.StreamTooLong(error.length, error.limit) from None
        finally:
            cancelled = starting.pop(session)
        if cancelled:
            generation.cancel()
        return generation

    def _submit(self, found: Session, max_tokens: int, opener: list[int], provisional: bool) -> Generation:
        params = found.params
        open_turn = opener or found.turn_tokens().tolist()
        channel = self._codec.start_channel(open_turn) if open_turn else ev.Channel.TEXT
        job = Job(
            session=found.id,
            stream=found.tokens().tolist(),
            max_tokens=max_tokens,
            router=self._codec.router(0, open_turn),
            params=SamplingParams(params.temperature, params.top_p, params.min_p, params.top_k),
            seed=params.seed,
            native=True,
            seed_chosen=params.seed != 0,
            klass=Class(found.qos_class),
            client=f"session:{self._root(found)}",
            start_channel=channel,
            open_call=None if opener else open_call(self._codec, found, open_turn),
            batch_invariant=found.batch_invariant,
            tools=self._declared(found),
            want_provisional=provisional,
            turn_point=found.n_tokens - len(opener) if opener else None,
            continued=0 if opener else found.made_tokens(),
        )
        return self._model.submit(job)

    def _root(self, found: Session) -> int:
        """The session at the root of the tree: whose turn it is among native clients of a class."""
        while found.parent is not None:
            parent = self._store.any_session(found.parent)
            if parent is None:
                break
            found = parent
        return found.id

    def cancel(self, session: int) -> None:
        """Stop the generation of a session. Raises NothingInFlight."""
        self._store.session(session)
        if session in self._busy.starting:
            self._busy.starting[session] = True
        elif session not in self._busy or not self._model.scheduler.cancel(session):
            raise errors.NothingInFlight(session)

    # ---- following

    def subscribe(self, session: int, cursor: int, provisional: bool) -> tuple[int, Subscription]:
        """Follow a session; the id counts up in the whole server. The caller gives it to `unfollow` when it is done."""
        subscription = self._store.subscribe(session, cursor, provisional)
        if provisional:
            if session not in self._previews:
                unwatch = self._model.scheduler.watch(
                    session, lambda channel, text: self._store.subscriptions.preview(session, channel, text)
                )
                self._previews[session] = 0, unwatch
            count, unwatch = self._previews[session]
            self._previews[session] = count + 1, unwatch
        return next(self._subscription_ids), subscription

    def unfollow(self, subscription: Subscription) -> None:
        """End a subscription (nothing more comes) and what ran for it."""
        subscription.close()
        if subscription.previews:
            count, unwatch = self._previews[subscription.session]
            if count == 1:
                del self._previews[subscription.session]
                unwatch()
            else:
                self._previews[subscription.session] = count - 1, unwatch


def open_call(codec: Codec, found: Session, open_turn: list[int]) -> OpenCall | None:
    """The tool call that a continued turn ends in: a limit cut it, or a crash came before it was read."""
    torn = codec.start_channel(open_turn) != ev.Channel.TOOL_CALL
    if torn and not rules.torn_call(found):
        return None
    run = codec.last_call(open_turn)
    if run is None or run.closed != torn:
        return None
    calls = rules.cut_calls(found.state, found.n_tokens - len(open_turn) + run.start)
    stands = bool(calls) and not calls[-1].again and calls[-1].place == found.n_tokens
    return OpenCall(run.text, calls, partial(rules.may_expire, found), stands, closed=torn)


def _replacement(codec: Codec, edit: ev.Replace, past: Past | None = None) -> list[int]:
    """A replacement's own tokens: a turn, or plain text without a chat dialect."""
    if codec.can_chat:
        return codec.message_span(edit.role, edit.text, past)
    if not (span := codec.tokenizer.encode(edit.text)):
        raise errors.ProtocolMisuse("the replacement's text has no tokens")
    return span


def _replacements(codec: Codec, events: Sequence[ev.Event], edits: Sequence[ev.Edit]) -> dict[int, list[int]]:
    """The replacements of a branch of `events`, each as a turn behind what is then before it, by where they begin."""
    turns: dict[int, list[int]] = {}
    past = Past()

    def render(edit: ev.Replace, before: Sequence[ev.Body]) -> list[int]:
        past.add(before[past.n_events :])
        turns[edit.from_] = turn = _replacement(codec, edit, past)
        return turn

    rebase.replayed(events, edits, render, codec)
    return turns


def _rendered(render: Callable[[Past | None], list[int]], past: Past | None) -> list[int]:
    """A turn; a long one is packed here, in the codec's thread: to pass over millions of numbers takes longer than
    others on the event loop can wait."""
    turn = render(past)
    return turn if len(turn) <= AT_ONCE else cast("list[int]", packed(turn))


def strict_tool(index: int, text: str) -> dict[str, Any]:
    """`read_tool` of what a client sends now: without NaN, infinite numbers and half surrogate pairs, as HTTP takes it.
    Logs may hold such."""
    try:
        orjson.loads(text)
    except ValueError as error:
        raise errors.InvalidTool(index, f"not JSON: {error}") from None
    return read_tool(index, text)


def read_tool(index: int, text: str) -> dict[str, Any]:
    """A tool of AppendSystem, in any of its shapes, as {"type": "function", "function": {...}}. Raises InvalidTool."""
    try:
        tool = read_json(text)
    except ValueError as error:
        raise errors.InvalidTool(index, f"not JSON: {error}") from None
    if not isinstance(tool, dict):
        raise errors.InvalidTool(index, f"not an object: {text[:80]}")
    if tool.get("type", "function") != "function":
        raise errors.InvalidTool(index, f"its type is {tool['type']!r}")
    if "function" in tool:
        function, wrapped = tool["function"], tool
    elif "input_schema" in tool:
        function = {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        wrapped = {"type": "function", "function": function}
    else:
        function = {key: value for key, value in tool.items() if key != "type"}
        wrapped = {"type": "function", "function": function}
    if not isinstance(function, dict):
        raise errors.InvalidTool(index, "its function is not an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise errors.InvalidTool(index, "it has no name")
    if not isinstance(function.get("parameters", {}), dict):
        raise errors.InvalidTool(index, "its parameters are not an object")
    return wrapped
