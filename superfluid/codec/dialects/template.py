"""A model's own chat template: whole renders over HTTP, and message by message where it is append-stable."""

from collections.abc import Iterator, Mapping, Sequence

import attrs

from superfluid.codec import harmony
from superfluid.codec.channels import REASONING, TOOL_CALL, Pair, Splitter
from superfluid.codec.conversation import Call, Json, Turn
from superfluid.codec.dialects.dialect import ROLE_NUMBERS, ConversationRefused, Dialect, History
from superfluid.codec.framing import Encoder, Piece, framing, joined
from superfluid.codec.media import Medium, place
from superfluid.codec.past import Past, image_turn, role_name
from superfluid.codec.protect import Conversation, StandIns, common_prefix, render_protected
from superfluid.codec.tails import render_tails
from superfluid.codec.template import ChatTemplate, TemplateFailed
from superfluid.codec.thinking import has_thinking_switch
from superfluid.codec.tokenizer import is_prefix
from superfluid.codec.toolcalls.learn import Learned, learn
from superfluid.codec.toolcalls.wires import HarmonyWire
from superfluid.link import events

PROBE = (
    Turn("system", "You are a helpful assistant."),
    Turn("user", "First question about geography."),
    Turn("assistant", "A helpful answer."),
    Turn("user", "A follow-up question."),
)


class TemplateDialect(Dialect):
    """Serves whatever the template frames; what depends on its habits is learned by probes at the load."""

    name = "template"
    codec_id = "template"

    def __init__(self, encoder: Encoder, template: ChatTemplate) -> None:
        super().__init__(encoder)
        self.template = template
        learned = learn(encoder, template)
        self.wire = learned.wire
        self.pairs, terminators = wired_pairs(encoder, template, learned)
        self.thinking_switch = has_thinking_switch(template)
        self._harmony = isinstance(self.wire, HarmonyWire)
        if self._harmony:
            terminators += [encoder.specials[harmony.RETURN], encoder.specials[harmony.CALL]]
        self.terminators = frozenset(terminators)
        self.append_stable = self._is_append_stable()
        self._openers = {thinking: self._learn_opener(thinking) for thinking in (None, True, False)}
        self._separator = self._learn_separator()
        self.notice = "its own chat template renders the prompts" + (
            ""
            if self.append_stable
            else "; it renders earlier turns anew as a conversation grows, so cached prefixes are not guaranteed and "
            "a session's turns continue from the last stable point"
        )

    def splitter(self, *, terminate: bool = True) -> Splitter:
        if self._harmony:
            return harmony.HarmonySplitter(self.encoder.table, self.encoder.specials, terminate=terminate)
        return super().splitter(terminate=terminate)

    def close_reasoning(self) -> list[int] | None:
        if self._harmony:
            text = f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}final{harmony.MESSAGE}"
            return self.encoder.encode_framing(text)
        return super().close_reasoning()

    # -- learning

    def _is_append_stable(self) -> bool:
        before: list[int] = []
        for n in range(1, len(PROBE) + 1):
            try:
                ids = self._encode_whole(Conversation(PROBE[:n]))
            except TemplateFailed:
                return False
            if not is_prefix(before, ids):
                return False
            before = ids
        return True

    def _learn_opener(self, thinking: bool | None) -> list[int]:
        """The tokens of a session's generation prompt: what the render with it has beyond the one without."""
        kwargs = {} if thinking is None else {"enable_thinking": thinking}
        conversation = Conversation([Turn("user", "probe")], kwargs=kwargs)
        try:
            plain = conversation.render(self.template)
            prompted = attrs.evolve(conversation, generation=True).render(self.template)
        except TemplateFailed:
            return []
        return self.encoder.encode_framing(prompted[self._shared(plain, prompted) :])

    def _learn_separator(self) -> list[int]:
        """What the template writes between the token that ends an assistant's turn and the next turn."""
        word = StandIns(self.encoder, [self.template.sources]).word
        before = [Turn("user", "x"), Turn("assistant", word)]
        question = Turn("user", "w")
        try:
            whole = Conversation([*before, question]).render(self.template)
            earlier = _rendered(self.template, Conversation(before)) or ""
            past = self._past([framing(whole)], earlier, before[-1], question)
            added = joined(self._anywhere(question, None, None) if past is None else past)
        except (TemplateFailed, ConversationRefused):
            return []
        _, found, tail = whole.removesuffix(added).partition(word)
        ids = self.encoder.encode_framing(tail) if found and whole.endswith(added) else []
        ends = self.encoder.tokenizer.stop_ids | self.terminators
        at = next((i for i, token in enumerate(ids) if token in ends), None)
        return ids[at + 1 :] if at is not None else []

    def _shared(self, one: str, other: str) -> int:
        """Length of the common beginning of two renders; it never ends inside a marker."""
        length = common_prefix(one, other)
        for text in (one, other):
            for match in self.encoder.marker_pattern.finditer(text, max(0, length - 256)):
                if match.start() >= length:
                    break
                if match.end() > length:
                    length = match.start()
                    break
        return length

    # -- whole renders

    def _encode_whole(self, conversation: Conversation) -> list[int]:
        return self.encoder.encode(render_protected(self.template, self.encoder, conversation))

    def _prompt(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """(the conversation's tokens, the generation prompt's): a token suffix where it can be, else split by bytes."""
        prompted = render_protected(self.template, self.encoder, attrs.evolve(conversation, generation=True))
        text = joined(prompted)
        plain = conversation.render(self.template)
        ids = self.encoder.encode(prompted)
        if not text.startswith(plain):
            return ids, []
        cut = self._suffix_length(prompted, len(plain))
        if cut is None:
            cut = len(ids) - self._first_past(ids, text, len(plain.encode()))
        return ids[: len(ids) - cut], ids[len(ids) - cut :]

    def _suffix_length(self, pieces: Sequence[Piece], boundary: int) -> int | None:
        """How many tokens the text past `boundary` (characters) adds, when the rest is a token prefix of the whole.

        Only a window from a late marker on is encoded twice: a marker is a token of its own, whatever precedes it.
        """
        window, boundary, at_start = self.encoder.tail_window(pieces, boundary)
        whole = self.encoder.encode(window, at_start)
        before = self.encoder.encode(split_pieces(window, boundary)[0], at_start)
        return len(whole) - len(before) if is_prefix(before, whole) else None

    def _first_past(self, ids: Sequence[int], text: str, boundary: int) -> int:
        """Index of the first token that starts at or past a byte offset of the text they encode."""
        encoder = self.encoder
        at = 0
        if encoder.auto_bos and not text.startswith(encoder.bos_text):
            at = -len(encoder.bos_text.encode())  # a BOS that the text does not spell
        for index, token in enumerate(ids):
            if at >= boundary:
                return index
            at += len(encoder.table.of(token)) or len(encoder.special_texts.get(token, "").encode())
        return len(ids)

    def render(self, turns: Sequence[Turn], tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[events.Body]:
        conversation = Conversation(turns, tools or None, kwargs=kwargs)
        try:
            prompt, opener = self._prompt(conversation)
        except TemplateFailed as error:
            merged = merged_systems(turns)
            if merged is None:
                raise ConversationRefused(str(error)) from error
            try:
                prompt, opener = self._prompt(attrs.evolve(conversation, turns=merged))
            except TemplateFailed:
                raise ConversationRefused(str(error)) from error
        text = turns[-1].text if turns else ""
        blocks: list[events.Body] = []
        placed = [(turn.role, medium) for turn in turns for _, medium, _ in turn.media_turns()]
        if placed:
            prompt, offsets = place(prompt, [medium for _, medium in placed])
            blocks += [
                medium.block(ROLE_NUMBERS[role], offset) for (role, medium), offset in zip(placed, offsets, strict=True)
            ]
        return [events.Appended(text, prompt), *blocks, events.GenerationPrompt(opener)]

    # -- sessions

    def prologue(self) -> list[int]:
        return []  # the first turn's render has it

    def separator(self) -> list[int]:
        return list(self._separator)

    def opener(self, after_finished: bool, thinking: bool | None) -> list[int]:
        return [*(self._separator if after_finished else ()), *self._openers[thinking]]

    def message_span(self, role: int, text: str, history: History) -> list[int]:
        return self._added(Turn(role_name(role), text), history)

    def system_span(self, text: str | None, tools: Sequence[Json]) -> list[int]:
        return self._added(Turn("system", text or ""), History(tools=tools))

    def tool_result_span(self, content: str, name: str, call: int | None, history: History) -> list[int]:
        last = history.past.turns[-1:] if call is None else []
        call_id = last[0].calls[-1].id if last and last[0].calls else "" if call is None else str(call)
        return self._added(Turn("tool", content, call_id=call_id, name=name), history)

    def media_span(self, role: int, pre: str, medium: Medium, post: str, history: History) -> tuple[list[int], int]:
        turn = image_turn(role_name(role), pre, post)
        ids, offsets = place(self._added(turn, history), [medium])
        return ids, offsets[0]

    def _added(self, turn: Turn, history: History) -> list[int]:
        """The tokens that one more turn adds to a session; the first tokens of all are its render from the start."""
        past, tools = history.past, history.tools or None
        before = past.turns
        if not past.has_tokens:
            try:
                return self.encoder.encode(self._grown([*before, turn], tools))
            except TemplateFailed as error:
                raise ConversationRefused(str(error)) from error
        added = self._added_to_tail(turn, past, tools) if before else None
        refusal = None
        if before and added is None:
            try:
                added = self._added_to(before, turn, tools)
            except TemplateFailed as error:
                refusal = None if past.raw else error
        if added is None:
            added = self._anywhere(turn, tools, refusal)
        return self.encoder.encode(added, at_start=False)

    def _grown(self, turns: Sequence[Turn], tools: Sequence[Json] | None) -> list[Piece]:
        """The part of a conversation's render that lasts when it goes on."""
        pieces = render_protected(self.template, self.encoder, Conversation(turns, tools))
        if self.append_stable:
            return pieces
        return self._lasting(pieces, _rendered(self.template, Conversation(turns, tools, generation=True)))

    def _added_to(self, before: Sequence[Turn], turn: Turn, tools: Sequence[Json] | None) -> list[Piece] | None:
        """What a turn adds to the render of the turns before it; None where that is not found."""
        pieces = self._grown([*before, turn], tools)
        earlier = _rendered(self.template, Conversation(before, tools))
        if earlier is None:
            return None
        if _another_result(before[-1], turn) and not joined(pieces).startswith(earlier):
            added = self._first_result(turn, before, tools)
            if added is not None:
                return added
        return self._past(pieces, earlier, before[-1], turn)

    def _added_to_tail(self, turn: Turn, past: Past, tools: Sequence[Json] | None) -> list[Piece] | None:
        """What a turn adds, by the end of the conversation's render alone; None where that does not tell."""
        tails = render_tails(self.template, self.encoder, past, turn, tools, not self.append_stable)
        if tails is None:
            return None
        if not tails.whole and tails.prompted is not None and self._cuts_early(joined(tails.grown), tails.prompted):
            return None
        pieces = self._lasting(tails.grown, tails.prompted)
        text = joined(pieces)
        extends = text.startswith(tails.earlier)
        if not extends and _another_result(past.turns[-1], turn):
            return None
        anew = not (tails.whole or extends)
        if anew and (self._cuts_early(text, tails.earlier) or turn.text.strip() not in text):
            return None
        return self._past(pieces, tails.earlier, past.turns[-1], turn)

    def _first_result(self, turn: Turn, before: Sequence[Turn], tools: Sequence[Json] | None) -> list[Piece] | None:
        """What a result adds as if it were the first behind its calls: several of them are one block to the template,
        which the stream has closed already. None where that does not tell."""
        n = len(before)
        while n and before[n - 1].role == "tool":
            n -= 1
        try:
            pieces = render_protected(self.template, self.encoder, Conversation([*before[:n], turn], tools))
            earlier = Conversation(before[:n], tools).render(self.template)
        except TemplateFailed:
            return None
        return self._past(pieces, earlier, before[n - 1], turn) if n else None

    def _cuts_early(self, one: str, other: str) -> bool:
        """Whether two tails part so early that a marker which began before them may be there."""
        return common_prefix(one, other) < self.encoder.longest_marker

    def _lasting(self, pieces: list[Piece], prompted: str | None) -> list[Piece]:
        """The part of a render that is there with a generation prompt too: what the next turn takes away again is not
        the turn's."""
        return pieces if prompted is None else split_pieces(pieces, self._shared(joined(pieces), prompted))[0]

    def _past(self, pieces: list[Piece], earlier: str, before: Turn, turn: Turn) -> list[Piece] | None:
        """The part of a render that lies past the turns that are in the stream already, the last of them `before`;
        None when that is not found."""
        text = joined(pieces)
        if text.startswith(earlier):
            return split_pieces(pieces, len(earlier))[1]
        # rendered anew: continue behind the last turn that is in both
        last = before.text.strip() or (before.calls[-1].name if before.calls else "")
        at = earlier.rfind(last) if last else -1
        if at >= 0:
            shared = self._shared(earlier, text)
            if shared >= at + len(last):
                return split_pieces(pieces, shared)[1]
            tail = earlier[at:]
            own = text.rfind(turn.text.strip()) if turn.text.strip() else len(text)
            if (found := text.rfind(tail, 0, own)) >= 0:
                return split_pieces(pieces, found + len(tail))[1]
        return None

    def _anywhere(self, turn: Turn, tools: Sequence[Json] | None, refusal: TemplateFailed | None) -> list[Piece]:
        """What a turn adds behind tokens that say nothing to the template (raw ones, turns that it does not take in
        that order): what it adds to a conversation of our own, best to one whose last turn it does not close. `refusal`
        is what the template said of the session's own turns."""
        alone: list[Piece] | None = None
        try:
            alone = self._grown([turn], tools)
        except TemplateFailed as error:
            if refusal is not None or turn.role == "system":
                raise ConversationRefused(str(refusal or error)) from error
            refusal = error
        word = StandIns(self.encoder, [*turn.texts(), self.template.sources]).word
        found: list[Piece] | None = None
        for before in _contexts(turn, word):
            try:
                added = self._added_to(before, turn, tools)
            except TemplateFailed:
                continue
            if added is None or (turn.role == "system" and turn.text.strip() not in joined(added)):
                continue
            if alone is None or joined(alone).endswith(joined(added)):
                return added
            found = found or added
        if found is not None:
            return found
        if alone is None:
            raise ConversationRefused(str(refusal)) from refusal
        return split_pieces(alone, self._beginning(joined(alone), word, tools))[1]

    def _beginning(self, alone: str, word: str, tools: Sequence[Json] | None) -> int:
        """The length of what only a stream's first turn has before it, in the render of a turn that the template
        writes nowhere else."""
        question = Turn("user", word)
        try:
            first = joined(self._grown([question], tools))
            added = joined(self._added_to([question], question, tools) or ())
        except TemplateFailed:
            first = added = ""
        prologue = first.removesuffix(added) if added and first.endswith(added) else ""
        return len(next((text for text in (prologue, self.encoder.bos_text) if text and alone.startswith(text)), ""))


def _contexts(turn: Turn, word: str) -> Iterator[list[Turn]]:
    """Conversations that a turn may follow, of texts that are all `word`."""
    asked = Turn("user", word)
    if turn.role == "tool":
        yield [asked, Turn("assistant", calls=(Call(turn.name or word, "{}", turn.call_id),))]
    yield [asked]
    if turn.role != "assistant":
        yield [asked, Turn("assistant", word)]


def _rendered(template: ChatTemplate, conversation: Conversation) -> str | None:
    """A conversation's plain text; None for one that the template refuses."""
    try:
        return conversation.render(template)
    except TemplateFailed:
        return None


def _another_result(before: Turn, turn: Turn) -> bool:
    """Whether a turn is a result behind another one."""
    return before.role == turn.role == "tool"


def wired_pairs(encoder: Encoder, template: ChatTemplate, learned: Learned) -> tuple[tuple[Pair, ...], list[int]]:
    """The channel markers of a vocabulary, by special-token text, and the openers that end a turn."""
    ids = encoder.specials
    source = template.sources
    pairs: list[Pair] = []
    terminators: list[int] = []

    def wire(opener: str, closer: str, channel: int, name: str = "") -> bool:
        if opener not in ids or closer not in ids:
            return False
        tokens = tuple(encoder.encode_framing(name)) if name else ()
        pairs.append(Pair(ids[opener], ids[closer], channel, tokens))
        return True

    wire("<think>", "</think>", REASONING)
    if "<|channel>thought" in source:
        wire("<|channel>", "<channel|>", REASONING, "thought\n")
    if learned.opener is not None:
        literals = tuple((ids[text], text.encode()) for text in learned.separators)
        closer = ids[learned.closer] if learned.closer is not None else None
        pairs.append(Pair(ids[learned.opener], closer, TOOL_CALL, literals=literals))
    if wire("<|tool_response>", "<tool_response|>", REASONING):
        terminators.append(ids["<|tool_response>"])
    return tuple(pairs), terminators


def split_pieces(pieces: Sequence[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces before and past an offset in characters."""
    head: list[Piece] = []
    tail: list[Piece] = []
    for piece in pieces:
        size = len(piece.text)
        if size <= at:
            head.append(piece)
        elif at <= 0:
            tail.append(piece)
        else:
            head.append(Piece(piece.text[:at], piece.content))
            tail.append(Piece(piece.text[at:], piece.content))
        at -= size
    return head, tail


def merged_systems(turns: Sequence[Turn]) -> list[Turn] | None:
    """The conversation with its leading system messages joined into one; None when it has no more than one."""
    n = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if n < 2:
        return None
    return [Turn("system", "\n\n".join(turn.text for turn in turns[:n])), *turns[n:]]
