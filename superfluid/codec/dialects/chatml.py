"""ChatML, message by message: every turn extends the cached prefix."""

import json
import re
from collections.abc import Mapping, Sequence

from superfluid.codec.channels import REASONING, TOOL_CALL, Pair
from superfluid.codec.conversation import Call, Json, Turn, compact, map_strings, strings_of
from superfluid.codec.dialects.dialect import (
    ASSISTANT,
    ROLE_NAMES,
    ROLE_NUMBERS,
    SYSTEM,
    TOOL,
    Dialect,
    DialectRefused,
    History,
)
from superfluid.codec.framing import Encoder, Piece, content, framing, joined
from superfluid.codec.media import Medium, between
from superfluid.codec.protect import Conversation, StandIns, common_prefix
from superfluid.codec.template import ChatTemplate, TemplateFailed
from superfluid.codec.thinking import has_thinking_switch
from superfluid.codec.tokenizer import single_token
from superfluid.codec.toolcalls.learn import Learned, learn
from superfluid.codec.toolcalls.wires import JsonWire, RawWire, Wire
from superfluid.link import events

START, END = "<|im_start|>", "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
NO_THOUGHT = "<think>\n\n</think>\n\n"

# The block that Qwen2.5's template writes; for models whose own template has none.
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class ChatMl(Dialect):
    """Raises DialectRefused when the vocabulary or the template frames turns otherwise."""

    name = "chatml"
    wire: Wire = JsonWire()

    def __init__(self, encoder: Encoder, template: ChatTemplate | None) -> None:
        super().__init__(encoder)
        self.template = template
        tokenizer = encoder.tokenizer
        ids: dict[str, int] = {}
        for marker in (START, END, "\n", CALL_OPEN, CALL_CLOSE):
            token = single_token(tokenizer, marker)
            if token is None:
                raise DialectRefused(f"the vocabulary does not encode {marker!r} to one token")
            ids[marker] = token
        if template is not None:
            _require_chatml(template)
        think = single_token(tokenizer, THINK_OPEN), single_token(tokenizer, THINK_CLOSE)
        learned = learn(encoder, template) if template is not None else Learned(self.wire)
        literals = tuple((encoder.specials[text], text.encode()) for text in learned.separators)
        pairs = [Pair(ids[CALL_OPEN], ids[CALL_CLOSE], TOOL_CALL, literals=literals)]
        if think[0] is not None and think[1] is not None:
            pairs.insert(0, Pair(think[0], think[1], REASONING))
        self.pairs = tuple(pairs)
        self._newline = [ids["\n"]]
        if template is not None:
            if not isinstance(learned.wire, (JsonWire, RawWire)):
                self.wire = learned.wire
            self.thinking_switch = has_thinking_switch(template)
        self.past_opener, self.loop_opener = self._learn_openers()
        self._suffixes = self._learn_suffixes(len(pairs) == 2)
        unset, _, off = self._suffixes[None], self._suffixes[True], self._suffixes[False]
        self.codec_id = "chatml" if not unset else "chatml/nothink" if unset == off else "chatml/think"
        self._openers = {
            thinking: self._encode([framing(f"{START}assistant\n{suffix}")])
            for thinking, suffix in self._suffixes.items()
        }
        self._prologue = self._encode(self._system_turn(None, [], {}))

    # -- learning from the template

    def _learn_openers(self) -> tuple[str, str]:
        """What stands before an assistant's text: in history, and after the last user message."""
        if self.template is None:
            return "", ""
        word = StandIns(self.encoder, [self.template.sources]).word
        past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": word}]
        openers = []
        for messages in ([*past, {"role": "user", "content": "w"}], past):
            try:
                before, found, _ = self.template.render(messages).partition(word)
            except TemplateFailed:
                found = ""
            turn = f"{START}assistant\n"
            at = before.rfind("assistant\n") if found else -1
            openers.append(before[at + len("assistant\n") :] if at >= 0 and turn in before else "")
        return openers[0], openers[1]

    def _learn_suffixes(self, thinks: bool) -> dict[bool | None, str]:
        """What the generation opener ends in, for thinking unset, on and off."""
        if self.template is not None:
            learned = {thinking: self._template_suffix(thinking) for thinking in (None, True, False)}
            if all(s is not None and re.fullmatch(r"(?:<think>|</think>|\s)*", s) for s in learned.values()):
                return {thinking: suffix or "" for thinking, suffix in learned.items()}
        return {None: "", True: "", False: NO_THOUGHT if thinks else ""}

    def _template_suffix(self, thinking: bool | None) -> str | None:
        assert self.template is not None
        probe = [{"role": "user", "content": "probe"}]
        kwargs = {} if thinking is None else {"enable_thinking": thinking}
        try:
            without = self.template.render(probe, kwargs=kwargs)
            prompted = self.template.render(probe, generation=True, kwargs=kwargs)
        except TemplateFailed:
            return None
        opener = f"{START}assistant\n"
        if not prompted.startswith(without) or not prompted.startswith(opener, len(without)):
            return None
        return prompted[len(without) + len(opener) :]

    # -- turns

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        return self.encoder.encode(pieces, at_start=False)

    def _turn(self, role: str, pieces: Sequence[Piece]) -> list[int]:
        return self._encode([framing(f"{START}{role}\n"), *pieces, framing(f"{END}\n")])

    def prologue(self) -> list[int]:
        return list(self._prologue)

    def separator(self) -> list[int]:
        return list(self._newline)

    def message_span(self, role: int, text: str, history: History) -> list[int]:
        if role == ASSISTANT:
            return self._assistant(Turn("assistant", text), self.past_opener)
        return self._turn("system" if role == SYSTEM else "user", [content(text)])

    def system_span(self, text: str | None, tools: Sequence[Json]) -> list[int]:
        return self._encode(self._system_turn(text, tools, {}))

    def tool_result_span(self, content_text: str, name: str, call: int | None, history: History) -> list[int]:
        return self._tool_result(content_text)

    def _tool_result(self, text: str) -> list[int]:
        return self._turn("user", [framing("<tool_response>\n"), content(text), framing("\n</tool_response>")])

    def media_span(self, role: int, pre: str, medium: Medium, post: str, history: History) -> tuple[list[int], int]:
        head = self._encode([framing(f"{START}{ROLE_NAMES[role] if role < TOOL else 'user'}\n"), content(pre)])
        return between(head, medium, self._encode([content(post), framing(f"{END}\n")]))

    def opener(self, after_finished: bool, thinking: bool | None) -> list[int]:
        return [*(self._newline if after_finished else ()), *self._openers[thinking]]

    def _assistant(self, turn: Turn, opener: str) -> list[int]:
        return self._turn("assistant", [framing(opener), content(turn.text), *self._call_pieces(turn)])

    def _call_pieces(self, turn: Turn) -> list[Piece]:
        """The calls of a past turn: on the JSON wire, or as the template writes them."""
        if turn.calls and not isinstance(self.wire, JsonWire):
            block = self._template_calls(turn.calls)
            if block:
                return [framing("\n" if turn.text else ""), *block]
        pieces: list[Piece] = []
        for i, call in enumerate(turn.calls):
            lead = "\n" if i or turn.text else ""
            pieces += [framing(lead + CALL_OPEN), content(_json_call(call)), framing(CALL_CLOSE)]
        return pieces

    def _template_calls(self, calls: Sequence[Call]) -> list[Piece]:
        """The block that the template adds to an assistant's turn for its calls; string arguments are content."""
        assert self.template is not None
        values = [call.arguments_object() for call in calls]
        stand = StandIns(self.encoder, [self.template.sources, *(c.name for c in calls), *strings_of(values)])
        stood = [
            Call(
                stand.markers(call.name),
                compact({stand.markers(key): _stood(value, stand) for key, value in arguments.items()}),
                call.id,
            )
            for call, arguments in zip(calls, values, strict=True)
        ]
        turns = [Turn("user", "x"), Turn("assistant", calls=tuple(stood))]
        try:
            whole = Conversation(turns).render(self.template)
            without = Conversation([turns[0], Turn("assistant")]).render(self.template)
        except TemplateFailed:
            return []
        head = without[: len(without) - common_prefix(whole[::-1], without[::-1])]
        if not whole.startswith(head):
            return []
        return stand.restore(whole[len(head) : len(whole) - (len(without) - len(head))].strip())

    # -- the system turn

    def _system_turn(self, text: str | None, tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[Piece]:
        """The whole turn, or nothing for a blank body. `text` None: the conversation has no system text."""
        body = self._system_body(text, tools, kwargs)
        if not joined(body).strip():
            return []
        return [framing(f"{START}system\n"), *body, framing(f"{END}\n")]

    def _system_body(self, text: str | None, tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[Piece]:
        if self.template is not None:
            try:
                own = self._template_body(text, tools, kwargs)
                if not tools or joined(own) != joined(self._template_body(text, [], kwargs)):
                    return own
            except TemplateFailed:
                pass
        body = [content(text or "")]
        if tools:
            body.append(framing(("\n\n" if text else "") + TOOLS_BEFORE))
            body += [piece for tool in tools for piece in (framing("\n"), content(compact(tool)))]
            body.append(framing(TOOLS_AFTER))
        return body

    def _template_body(self, text: str | None, tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[Piece]:
        """The body of the system turn that the template writes; empty when it begins with another turn."""
        assert self.template is not None
        stand = StandIns(
            self.encoder, [text or "", self.template.sources, *strings_of(list(tools)), *strings_of(kwargs)]
        )
        tools = map_strings(self.template.needs.tools(tools), stand.markers)
        kwargs = map_strings(kwargs, stand.markers)
        user = {"role": "user", "content": "x"}

        def render(system: str | None) -> str:
            assert self.template is not None
            first = [] if system is None else [{"role": "system", "content": system}]
            return self.template.render([*first, user], tools, kwargs=kwargs)

        if text is None:
            turn = _first_turn(render(None))
            return stand.restore(turn) if turn is not None else []
        word = f"{stand.word}S"
        before, found, after = render(word).partition(word)
        if found and word not in after:
            real = render(text)
            for form in (text, text.strip()):
                if real == before + form + after and (turn := _first_turn(before + word + after)) is not None:
                    head, carried, tail = turn.partition(word)
                    if carried:
                        return [*stand.restore(head), content(form), *stand.restore(tail)]
                    break
        turn = _first_turn(render(stand.markers(text)))
        return stand.restore(turn) if turn is not None else []

    # -- HTTP

    def render(self, turns: Sequence[Turn], tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[events.Body]:
        rest = list(turns)
        text: str | None = None
        if rest and rest[0].role == "system" and not rest[0].parts:
            text = rest.pop(0).text
        body_kwargs = {key: value for key, value in kwargs.items() if key != "enable_thinking"}
        system = self._encode(self._system_turn(text, tools, body_kwargs))
        bodies: list[events.Body] = [events.Message(SYSTEM, text or "", system)]
        last_user = max((i for i, turn in enumerate(rest) if turn.role == "user"), default=-1)
        length = len(system)
        for i, turn in enumerate(rest):
            role = ROLE_NUMBERS[turn.role]
            if media := turn.media_turns():
                for pre, medium, post in media:
                    span, first = self.media_span(role, pre, medium, post, History())
                    bodies.append(medium.block(role, length + first, pre, post, span))
                    length += len(span)
                continue
            if turn.role == "tool":
                span = self._tool_result(turn.text)
            elif turn.role == "assistant":
                span = self._assistant(turn, self.loop_opener if turn.calls and i > last_user else self.past_opener)
            else:
                span = self._turn(turn.role, [content(turn.text)])
            bodies.append(events.Message(role, turn.text, span))
            length += len(span)
        thinking = kwargs.get("enable_thinking")
        opener = self.opener(False, thinking if isinstance(thinking, bool) else None)
        bodies.append(events.GenerationPrompt(opener))
        return bodies


def _require_chatml(template: ChatTemplate) -> None:
    """Refuse a usable template that frames turns otherwise."""
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        rendered = template.render(probe)
    except TemplateFailed as error:
        raise DialectRefused(f"the model's template does not render an assistant turn: {error}") from error
    if START not in rendered or END not in rendered:
        raise DialectRefused(f"the model's template frames turns without {START} and {END}")


def _first_turn(rendered: str) -> str | None:
    """The body of the first turn when it is a system one."""
    _, found, rest = rendered.partition(START)
    if not found or not rest.startswith("system\n"):
        return None
    return rest[len("system\n") :].partition(END)[0]


def _stood(value: Json, stand: StandIns) -> Json:
    """An argument with its text, when it is one, replaced whole, and the markers in it otherwise."""
    return stand.text(value) if isinstance(value, str) else map_strings(value, stand.markers)


def _json_call(call: Call) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'\n{{"name": {name}, "arguments": {call.arguments.strip() or "{}"}}}\n'
