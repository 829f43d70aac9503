"""The codec of one model: everything between text and token ids that depends on its vocabulary and template."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import attrs

from superfluid.codec.channels import REASONING, TOOL_CALL, PairSplitter, Router, Splitter
from superfluid.codec.conversation import Json, normalized_tools, require_shallow, turns_of, with_media
from superfluid.codec.dialects.atem import Atem
from superfluid.codec.dialects.chatml import ChatMl
from superfluid.codec.dialects.dialect import Dialect, DialectRefused, History, Raw
from superfluid.codec.dialects.template import TemplateDialect
from superfluid.codec.effort import Effort, Shape
from superfluid.codec.fim import Fim
from superfluid.codec.framing import Encoder
from superfluid.codec.media import Medium, guarded
from superfluid.codec.past import Past
from superfluid.codec.template import ChatTemplate, TemplateFailed
from superfluid.codec.tokenizer import Tokenizer
from superfluid.codec.toolcalls import constraints, fragments
from superfluid.codec.toolcalls.constraints import (
    FREE,
    Constraint,
    ConstraintUnsatisfiable as ConstraintUnsatisfiable,
    ToolChoice,
)
from superfluid.codec.toolcalls.parsers import parser_wire
from superfluid.codec.toolcalls.tags import HarmonyTags
from superfluid.codec.toolcalls.typed import ToolSchemas
from superfluid.codec.toolcalls.wires import HarmonyWire, ToolCall, Wire
from superfluid.link import digests, events

DIALECTS = ("auto", "chatml", "atem", "raw", "template")


class UnknownDialect(ValueError):
    """`--dialect` names none (exit 2)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown dialect {name!r} (chatml|atem|raw|template|auto)")


@attrs.frozen
class Rendered:
    """An HTTP conversation as the records to commit, in order; the generation prompt is last."""

    bodies: list[events.Body]

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        return [token for body in self.bodies for token in getattr(body, "span", ())]

    @property
    def opener(self) -> list[int]:
        """The generation prompt's tokens: what decides the channel that the lane starts in."""
        last = self.bodies[-1]
        return last.span if isinstance(last, events.GenerationPrompt) else []


@attrs.frozen
class CallRun:
    """A tool-call run: its text, the index of its first token, and whether its closer ended it."""

    text: str
    start: int
    closed: bool


class Codec:
    """One model's codec. Immutable once open: any thread may use it, several at once."""

    def __init__(
        self,
        encoder: Encoder,
        dialect: Dialect,
        template: ChatTemplate | None,
        notice: str | None,
        wire: Wire | None = None,
    ) -> None:
        self.encoder = encoder
        self.wire = wire or dialect.wire
        harmony = isinstance(self.wire, HarmonyWire) and dialect.can_chat
        self._harmony_tags = HarmonyTags(encoder.specials) if harmony else None
        self.tokenizer: Tokenizer = encoder.tokenizer
        self.dialect = dialect
        self.template = template
        self.notice = notice  # a line for the operator: which dialect serves the model, and at what cost
        self.dialect_name = dialect.name
        self.can_chat = dialect.can_chat
        self.append_stable = dialect.append_stable
        self.terminators = dialect.terminators
        self.supports_thinking = dialect.thinking_switch
        self.effort = Effort.learn(template) if template is not None and dialect.can_chat else Effort()
        self.fim = Fim.discover(encoder)  # fill-in-the-middle prompts, where the vocabulary has markers for them
        self.codec_id = _codec_id(dialect, template, self.effort)
        self._fingerprint: int | None = None
        self._guarding_dialects: dict[frozenset[int], Dialect] = {}  # by the tokens of the media they take

    @classmethod
    def open(cls, tokenizer: Tokenizer, dialect: str = "auto", parser: str = "auto") -> "Codec":
        """The codec of a model by its tokenizer and template; `parser` is `--tool-call-parser`.

        Raises UnknownDialect and UnknownParser for a value that is none, DialectRefused (`--dialect <d> refused:
        <why>`, the parser alike) for one that this model cannot serve.
        """
        if dialect not in DIALECTS:
            raise UnknownDialect(dialect)
        template, why = _usable_template(tokenizer)
        encoder = Encoder(tokenizer, template.sources if template else "")
        chosen, notice = _dialect(encoder, template, dialect, why)
        if isinstance(chosen, (Raw, Atem)):
            template = None
        wire = parser_wire(parser, chosen.wire, template.sources if template else "")
        return cls(encoder, chosen, template, notice, wire)

    # -- sessions, message by message

    def prologue(self, role: int | None = None) -> list[int]:
        """What a session without tokens begins with before a turn of `role`."""
        return self.dialect.system_prologue() if role == events.Role.SYSTEM else self.dialect.prologue()

    def separator(self) -> list[int]:
        """What stands between a finished turn and the next."""
        return self.dialect.separator()

    def message_span(
        self,
        role: int,
        text: str,
        history: Sequence[events.Body] | Past | None = None,
        tools: Sequence[Json] | None = None,
    ) -> list[int]:
        """A turn's own tokens (no prologue, no separator). `history` is the session's bodies from event 0, or
        its past: with one that is kept, a turn costs the turn.

        Raises NoChatDialect, ConversationRefused.
        """
        return self.dialect.message_span(role, text, History(_past(history), tools))

    def system_span(self, text: str | None, tools: Iterable[Json] = ()) -> list[int]:
        """The system turn of AppendSystem; `tools` as parsed JSON."""
        return self.dialect.system_span(text, _declared(tools))

    def tool_result_span(
        self,
        content: str,
        name: str = "",
        history: Sequence[events.Body] | Past | None = None,
        call: int | None = None,
    ) -> list[int]:
        """A tool result's own tokens; `name` is the tool's, `call` the event id of the call (none: the last one)."""
        return self.dialect.tool_result_span(content, name, call, History(_past(history)))

    def media_span(
        self,
        role: int,
        medium: Medium,
        pre_text: str = "",
        post_text: str = "",
        history: Sequence[events.Body] | Past | None = None,
    ) -> tuple[list[int], int]:
        """A medium's turn, its own tokens, and the index of its first placeholder in them.

        Raises NoChatDialect, MediaRefused, ConversationRefused.
        """
        return self._guarding([medium]).media_span(role, pre_text, medium, post_text, History(_past(history)))

    def opener(self, after_finished: bool, thinking: bool | None = None) -> list[int]:
        """The assistant-turn opener; after a finished turn its separator leads."""
        return self.dialect.opener(after_finished, thinking)

    def close_reasoning(self) -> list[int] | None:
        """The generation prompt that ends a thought whose budget is spent, and goes on in text; None where the dialect
        has no reasoning channel that something closes."""
        return self.dialect.close_reasoning()

    # -- HTTP

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Iterable[Json] | None = None,
        kwargs: Mapping[str, Json] | None = None,
        media: Sequence[Medium] = (),
    ) -> Rendered:
        """A conversation of OpenAI message objects. `kwargs` are chat_template_kwargs with the request's
        enable_thinking and reasoning_effort under them; `media` is what its image and audio parts became, in order.

        Raises InvalidMessage, NoChatDialect, ConstraintUnsatisfiable (the template refuses a kwarg), MediaRefused and
        ConversationRefused, each a 400.
        """
        turns = with_media(turns_of(messages), media)
        tools = _declared(tools)
        kwargs = dict(kwargs or {})
        require_shallow(kwargs, "chat_template_kwargs")
        if "reasoning_effort" in kwargs:
            thinking = kwargs.get("enable_thinking")
            system = bool(turns) and turns[0].role == "system"
            shape = Shape(True, bool(tools), system, thinking if isinstance(thinking, bool) else None)
            kwargs["reasoning_effort"] = self.effort.native(kwargs["reasoning_effort"], shape)
        self._check_kwargs(kwargs)
        return Rendered(self._guarding(media).render(turns, tools, kwargs))

    def _guarding(self, media: Sequence[Medium]) -> Dialect:
        """The dialect, with an encoder that makes no placeholder of what a client wrote."""
        tokens = frozenset(token for medium in media for token in medium.tokens)
        if not tokens or self.encoder.guards(tokens):
            return self.dialect
        guarding = self._guarding_dialects.get(tokens)
        if guarding is None:
            guarding = copy(self.dialect)
            guarding.encoder = guarded(self.encoder, media)
            self._guarding_dialects[tokens] = guarding
        return guarding

    def _check_kwargs(self, kwargs: Mapping[str, Json]) -> None:
        """Try the arguments on a conversation that the template takes without them."""
        if not kwargs or self.template is None:
            return
        probe = [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]
        try:
            self.template.render(probe)
        except TemplateFailed:
            return
        try:
            self.template.render(probe, kwargs=kwargs)
        except TemplateFailed as error:
            raise ConstraintUnsatisfiable(str(error)) from error

    # -- lanes

    def router(
        self,
        start_channel: int = 0,
        open_tokens: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
        plain: bool = False,
    ) -> Router:
        """A lane's router. It starts where `open_tokens` (the open turn: its opener and what was generated since)
        leave off, else in `start_channel`. `ignore_eos` lets the turn go on past a terminator; `plain` keeps
        everything in the text channel (raw completions)."""

        def make() -> Splitter:
            if plain:
                return PairSplitter(self.encoder.table, ())
            splitter = self.dialect.splitter(terminate=not ignore_eos)
            if open_tokens:
                splitter.feed(open_tokens)
                splitter.flush()
            if start_channel:
                splitter.open_channel(start_channel)
            return splitter

        return Router(make)

    def start_channel(self, open_tokens: Sequence[int]) -> int:
        """The channel that an open turn's tokens leave open."""
        splitter = self.dialect.splitter(terminate=False)
        splitter.feed(open_tokens)
        return splitter.channel

    def last_call(self, open_tokens: Sequence[int]) -> CallRun | None:
        """The tool-call run that an open turn's tokens end in, if they do."""
        found: CallRun | None = None
        at = 0
        for run in self.router().commit(open_tokens):
            if run.channel != TOOL_CALL:
                found = None
            elif found is None or found.closed:
                found = CallRun(run.text, at, run.closes)
            else:
                found = CallRun(found.text + run.text, found.start, run.closes)
            at += len(run.span)
        return found

    def forced_router(self, *, ignore_eos: bool = False) -> Router:
        """The router of a lane whose call is demanded: it starts in the call, whatever the opener leaves open."""
        return self.router(TOOL_CALL, ignore_eos=ignore_eos)

    # -- tool calls

    def read_call(self, raw: str, tools: Iterable[Json] | None = None, *, cut: bool = False) -> list[ToolCall] | None:
        """The calls of a tool-call run's text, or None when it is none; `tools` type the arguments. `cut`: a limit
        ended it."""
        read = self.wire.read_cut if cut else self.wire.read
        return read(raw, ToolSchemas(normalized_tools(tools)))

    def call_reader(self, tools: Iterable[Json] | None = None) -> fragments.CallReader:
        """A reader of one tool-call run while it is written."""
        return fragments.reader(self.wire, ToolSchemas(normalized_tools(tools)))

    def constraint(
        self,
        tools: Iterable[Json] | None = None,
        choice: ToolChoice = FREE,
        *,
        parallel: bool = True,
        response_format: Json = None,
        opener: Sequence[int] = (),
    ) -> Constraint:
        """The grammars of a chat request whose lane begins after `opener`. Raises ConstraintUnsatisfiable."""
        try:
            return constraints.plan(self._lane(opener), normalized_tools(tools), choice, parallel, response_format)
        except RecursionError:
            raise ConstraintUnsatisfiable("a schema is nested too deep") from None

    @property
    def calls_tools(self) -> bool:
        """Whether the model has a way of writing tool calls; without one, calls are not read from free replies."""
        return self._lane().calls

    def _lane(self, opener: Sequence[int] = ()) -> constraints.Lane:
        return constraints.Lane(self.wire, self._frame(), self._harmony_tags, self._reasoning_close(opener))

    def _frame(self) -> tuple[str, str] | None:
        """The texts of the markers around a call, the second empty when it runs to the turn's end."""
        pair = next((pair for pair in self.dialect.pairs if pair.channel == TOOL_CALL), None)
        if pair is None:
            return None
        return self.encoder.literal(pair.open), self.encoder.literal(pair.close) if pair.close is not None else ""

    def _reasoning_close(self, opener: Sequence[int]) -> int | None:
        """The marker that ends the reasoning which an opener leaves open."""
        splitter = self.dialect.splitter(terminate=False)
        splitter.feed(opener)
        return splitter.closer if splitter.channel == REASONING else None

    # -- identity

    def fingerprint(self) -> int:
        """The behaviour fingerprint, without speculation."""
        if self._fingerprint is None:
            table = self.encoder.table
            vocabulary = digests.tokenizer_hash(table.of(i) for i in range(self.tokenizer.vocab_size))
            markers = digests.marker_digest(self.dialect.markers())
            self._fingerprint = digests.behaviour_fingerprint(self.codec_id, vocabulary, markers)
        return self._fingerprint


def _dialect(encoder: Encoder, template: ChatTemplate | None, name: str, why: str) -> tuple[Dialect, str | None]:
    """The dialect that serves a model, and a line for the operator; `why` there is no template."""
    if name == "auto":
        try:
            return ChatMl(encoder, template), None
        except DialectRefused:
            pass
        if template is not None:
            made = TemplateDialect(encoder, template)
            return made, made.notice
        return Raw(encoder), f"no chat dialect ({why}): completions only"
    try:
        if name == "chatml":
            return ChatMl(encoder, template), None
        if name == "template":
            if template is None:
                raise DialectRefused(why)
            made = TemplateDialect(encoder, template)
            return made, None if made.append_stable else made.notice
        if name == "atem":
            return Atem(encoder), None
    except DialectRefused as refusal:
        raise DialectRefused(f"--dialect {name} refused: {refusal}") from None
    return Raw(encoder), None


def _past(history: Sequence[events.Body] | Past | None) -> Past:
    return history if isinstance(history, Past) else Past(history or ())


def _declared(tools: Iterable[Json] | None) -> list[dict[str, Json]]:
    """Tools as templates read them. Raises InvalidMessage for one that nests too deep."""
    tools = list(tools or ())
    for i, tool in enumerate(tools):
        require_shallow(tool, f"tools[{i}]")
    return normalized_tools(tools)


def _usable_template(tokenizer: Tokenizer) -> tuple[ChatTemplate | None, str]:
    """The model's template when it compiles and renders a user's turn, else why not."""
    source = tokenizer.template()
    if source is None or not source.strip():
        return None, "the model has no chat template"
    texts = dict(tokenizer.special_tokens())
    bos = texts.get(tokenizer.bos, "") if tokenizer.bos is not None else ""
    try:
        template = ChatTemplate(source, tokenizer.template("tool_use"), bos=bos, eos=texts.get(tokenizer.eos, ""))
        rendered = template.render([{"role": "user", "content": "probe"}], generation=True)
    except TemplateFailed as error:
        return None, f"the model's chat template does not serve a user's turn: {error}"
    return (template, "") if rendered.strip() else (None, "the model's chat template renders nothing")


def _codec_id(dialect: Dialect, template: ChatTemplate | None, effort: Effort) -> str:
    if dialect.name in ("raw", "atem"):
        return dialect.name
    if template is None:
        return dialect.codec_id
    digest: Any = digests.fnv1a(template.source.encode())
    if template.tool_use_source:
        digest = digests.fnv1a(template.tool_use_source.encode(), digest)
    mark = "/tmpl:" if dialect.name == "chatml" else "/"
    return f"{dialect.codec_id}{mark}{digest:016x}{effort.identity}"
