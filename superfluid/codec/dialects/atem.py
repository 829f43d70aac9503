"""atem, message by message: every turn names its author and its recipient in a header.

A turn is `<|start|>` header `<|message|>` body `<|eot|>`; `<|eom|>` ends all but the last message of a turn.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from superfluid.codec.channels import REASONING, TEXT, TOOL_CALL, Segment
from superfluid.codec.conversation import Call, Json, Turn
from superfluid.codec.dialects.dialect import (
    ASSISTANT,
    ROLE_NUMBERS,
    SYSTEM,
    TOOL,
    USER,
    ConversationRefused,
    Dialect,
    DialectRefused,
    History,
)
from superfluid.codec.framing import Encoder, Piece, content, framing
from superfluid.codec.media import Medium, between
from superfluid.codec.tokenizer import TokenBytes
from superfluid.codec.toolcalls.wires import AtemWire
from superfluid.link import events

START, MESSAGE, EOM, EOT = MARKERS = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"

DEFAULT_SYSTEM = "You are a helpful assistant."
STRENGTH = "\n\nReasoning strength: high."

# The wording is our own: no token of it is read back.
CALLING = """\
# Calling tools

To call a tool, address a message to it and write one call block as its body:

<atem:function_calls>
<atem:invoke name="tool_name">
<atem:parameter name="parameter_name">value</atem:parameter>
</atem:invoke>
</atem:function_calls>

Write strings and other scalar values as they are; their white space is kept. Write lists and objects as JSON. The \
block is read by its tags and need not be valid XML.
"""
EXAMPLE = """
For example, a message to=notes.save with this body saves a note of two lines:

<atem:function_calls>
<atem:invoke name="notes.save">
<atem:parameter name="title">Shopping</atem:parameter>
<atem:parameter name="text">bread
milk</atem:parameter>
</atem:invoke>
</atem:function_calls>

A tool without a namespace is addressed by its bare name, as in to=search."""


class Atem(Dialect):
    """Raises DialectRefused when the vocabulary lacks a marker."""

    name = "atem"
    codec_id = "atem"
    wire = AtemWire()

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        self._ids: dict[str, int] = {}
        for marker in MARKERS:
            tokens = encoder.encode_framing(marker)
            if len(tokens) != 1:
                raise DialectRefused(f"the vocabulary does not encode {marker!r} to one token")
            self._ids[marker] = tokens[0]
        bos = encoder.tokenizer.bos
        self._bos = [] if bos is None else [bos]
        self._opener = self._encode([framing(f"{START}assistant")])

    def splitter(self, *, terminate: bool = True) -> "AtemSplitter":
        return AtemSplitter(self.encoder.table, self._ids)

    def markers(self) -> list[tuple[int, int, int]]:
        return [(self._ids[START], self._ids[MESSAGE], TEXT), (self._ids[EOM], self._ids[EOT], TEXT)]

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        return self.encoder.encode(pieces, at_start=False)

    def _turn(self, header: Sequence[Piece], body: Sequence[Piece], end: str = EOT) -> list[int]:
        return self._encode([framing(START), *header, framing(MESSAGE), *body, framing(end)])

    # -- sessions

    def prologue(self) -> list[int]:
        return list(self._bos)

    def system_prologue(self) -> list[int]:
        return list(self._bos)

    def separator(self) -> list[int]:
        return []

    def opener(self, after_finished: bool, thinking: bool | None) -> list[int]:
        return list(self._opener)

    def close_reasoning(self) -> list[int]:
        return self._encode([framing(f"{EOM}{START}assistant to=user{MESSAGE}")])

    def message_span(self, role: int, text: str, history: History) -> list[int]:
        if role == SYSTEM:
            return self.system_span(text, ())
        if role == USER:
            return self._turn([framing("user")], [content(text)])
        if role == ASSISTANT:
            return self._turn([framing("assistant to=user")], [content(text)])
        raise ConversationRefused("a tool's message is the result of a call, and names its tool")

    def system_span(self, text: str | None, tools: Sequence[Json]) -> list[int]:
        """The system turn; `text` None or empty: a sentence of our own."""
        return self._turn([framing("system")], [content(text) if text else framing(DEFAULT_SYSTEM), *_tail(tools)])

    def tool_result_span(self, content_text: str, name: str, call: int | None, history: History) -> list[int]:
        body = [framing('<tool_output name="'), content(name), framing('">\n'), content(content_text)]
        return self._turn([framing("tool "), content(name)], [*body, framing("\n</tool_output>")])

    def media_span(self, role: int, pre: str, medium: Medium, post: str, history: History) -> tuple[list[int], int]:
        header = ("system", "user", "assistant to=user")[role] if role < TOOL else "user"
        head = self._encode([framing(f"{START}{header}{MESSAGE}"), content(pre)])
        return between(head, medium, self._encode([content(post), framing(EOT)]))

    # -- HTTP

    def render(self, turns: Sequence[Turn], tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[events.Body]:
        rest = list(turns)
        text = ""
        if rest and rest[0].role == "system" and not rest[0].parts:
            text = rest.pop(0).text
        system = self.system_span(text, tools) if text or tools else []
        bodies: list[events.Message | events.Block] = [events.Message(SYSTEM, text, system)]
        length = len(self._bos) + len(system)
        names: dict[str, str] = {}
        for turn in rest:
            role = ROLE_NUMBERS[turn.role]
            if media := turn.media_turns():
                for pre, medium, post in media:
                    span, first = self.media_span(role, pre, medium, post, History())
                    bodies.append(medium.block(role, length + first, pre, post, span))
                    length += len(span)
                continue
            names.update({call.id: call.name for call in turn.calls})
            bodies.append(events.Message(role, turn.text, self._span(turn, names)))
            length += len(bodies[-1].span)
        opener = events.GenerationPrompt(list(self._opener))
        leading = next((body for body in bodies if body.span), opener)
        leading.span[:0] = self._bos
        return [*bodies, opener]

    def _span(self, turn: Turn, names: Mapping[str, str]) -> list[int]:
        if turn.role == "tool":
            return self.tool_result_span(turn.text, turn.name or names.get(turn.call_id, ""), None, History())
        if turn.calls:
            *others, last = turn.calls
            spans = [*(self._call(call, EOM) for call in others), self._call(last, EOT)]
            return [token for span in spans for token in span]
        return self.message_span(ROLE_NUMBERS[turn.role], turn.text, History())

    def _call(self, call: Call, end: str) -> list[int]:
        body = [framing('<atem:function_calls>\n<atem:invoke name="'), content(call.name), framing('">\n')]
        for key, value in call.arguments_object().items():
            written = value if isinstance(value, str) else _json(value)
            body += [framing('<atem:parameter name="'), content(key), framing('">'), content(written)]
            body.append(framing("</atem:parameter>\n"))
        body.append(framing("</atem:invoke>\n</atem:function_calls>"))
        return self._turn([framing("assistant to="), content(call.name)], body, end)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _tail(tools: Sequence[Json]) -> list[Piece]:
    """What follows the system text: how hard to reason, the tools, and whom messages may be addressed to."""
    functions = [tool["function"] for tool in tools]
    namespaces = list(dict.fromkeys(_namespaces(functions)))
    pieces = [framing(STRENGTH)]
    if functions:
        pieces += [framing("\n\n"), *definitions(functions, namespaces)]
    pieces.append(framing('\n\n# Valid recipients: "self"'))
    for namespace in namespaces:
        pieces += [framing(', "'), content(namespace), framing('.*"')]
    return [*pieces, framing(', "user".')]


def _namespaces(functions: Iterable[Mapping[str, Json]]) -> Iterable[str]:
    for function in functions:
        namespace, dot, _ = str(function.get("name", "")).partition(".")
        if dot:
            yield namespace


def definitions(functions: Sequence[Mapping[str, Json]], namespaces: Sequence[str]) -> list[Piece]:
    """The block that declares tools. Their names, descriptions and schemas are content."""
    pieces = [framing(CALLING + "\n// Tool metadata\n")]
    for namespace in namespaces:
        pieces += [framing('{"name": '), content(_json(namespace)), framing(', "description": ""}\n')]
    pieces.append(framing("// Function schemas\n"))
    for function in functions:
        for key, value, empty in (
            ('{"name": ', function.get("name"), ""),
            (', "description": ', function.get("description"), ""),
            (', "parameters": ', function.get("parameters"), {}),
        ):
            pieces += [framing(key), content(_json(empty if value is None else value))]
        pieces.append(framing("}\n"))
    return [*pieces, framing(EXAMPLE)]


class AtemSplitter:
    """Starts in a header, as the prompt ends with `<|start|>assistant`. Header tokens belong to the span of the body
    that follows, not to its text; where a slice ends inside a header they are a segment without text."""

    __slots__ = ("_body", "_header", "_ids", "_special", "ended", "table")

    def __init__(self, table: TokenBytes, ids: Mapping[str, int]) -> None:
        self.table = table
        self._ids = ids
        self._special = frozenset(ids[name] for name in (START, MESSAGE, EOM, EOT))
        self._body: int | None = None  # the channel of the open body; None: in a header
        self._header: list[bytes] = []
        self.ended = False

    @property
    def channel(self) -> int:
        return TEXT if self._body is None else self._body

    @property
    def closer(self) -> int | None:
        return None if self._body is None else self._ids[EOM]

    @property
    def special(self) -> frozenset[int] | None:
        return None if self._body is None else self._special

    def open_channel(self, channel: int) -> None:
        """A demanded call has no header: its block comes at once."""
        if self._body is None and not self._header:
            self._body = channel

    def flush(self) -> bytes:
        return b""

    def feed(self, tokens: Sequence[int]) -> list[Segment]:
        ids = self._ids
        segments: list[Segment] = []
        span: list[int] = []
        data: list[bytes] = []

        def cut(closes: bool) -> None:
            nonlocal span, data
            if span:
                segments.append(Segment(span, b"".join(data), self.channel, closes))
            span, data = [], []

        for token in tokens:
            if token == ids[START]:
                if self._body is not None:
                    cut(False)
                self._body, self._header = None, []
                span.append(token)
            elif token == ids[MESSAGE]:
                span.append(token)
                if self._body is None:
                    self._body = _channel(b"".join(self._header))
            elif token in (ids[EOM], ids[EOT]):
                span.append(token)
                if self._body is not None:
                    cut(True)
                self._body, self._header = None, []
            else:
                span.append(token)
                (self._header if self._body is None else data).append(self.table.of(token))
        cut(False)
        return segments


def _channel(header: bytes) -> int:
    """The channel that a header opens, by its recipient."""
    if b"=self" in header:
        return REASONING
    _, found, recipient = header.partition(b"to=")
    return TOOL_CALL if found and recipient.split()[:1] != [b"user"] else TEXT
