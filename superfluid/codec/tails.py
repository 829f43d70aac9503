"""The end of a session's render, from the last turns on: what a new turn adds, at the cost of the turn."""

from collections.abc import Callable, Sequence

import attrs

from superfluid.codec.conversation import Json, Turn, strings_of
from superfluid.codec.framing import Encoder, Piece, framing
from superfluid.codec.past import Past, Rendered
from superfluid.codec.protect import ATTEMPTS, Conversation, StandIns
from superfluid.codec.resuming import Render, Tracker
from superfluid.codec.template import ChatTemplate, TemplateFailed

ROUNDS = 3  # tries to have two renders skip the same passes


@attrs.frozen
class Tails:
    """The ends of three renders, whose beginnings are the same text: of the conversation with the new turn, of the one
    before it, and of the one with the new turn and a generation prompt (where asked for). `turns` of the conversation
    were rendered for them; `whole`: all."""

    grown: list[Piece]
    earlier: str
    prompted: str | None
    turns: int
    whole: bool


def render_tails(
    template: ChatTemplate, encoder: Encoder, past: Past, turn: Turn, tools: Sequence[Json] | None, prompt: bool
) -> Tails | None:
    """The tails of a session's render with one more turn; None where only a whole render tells."""
    try:
        return _Growing(template, encoder, past, turn, tools).tails(prompt)
    except TemplateFailed:
        return None


class _Growing:
    def __init__(
        self, template: ChatTemplate, encoder: Encoder, past: Past, turn: Turn, tools: Sequence[Json] | None
    ) -> None:
        self.template = template
        self.encoder = encoder
        self.past = past
        self.turn = turn
        self.declared = tools
        self.tools = template.needs.tools(tools or ())
        self.messages = template.needs.messages([*past.messages(), turn.message()])
        self.states = past.rendered.states if past.rendered.tools == tools else ()
        self.common = _common(past.rendered.messages, self.messages)

    def tails(self, prompt: bool) -> Tails | None:
        if not self.states:
            self.states = self._render(self.messages, None).states
            self.common = len(self.messages)
        grown = self._render(self.messages, None)
        for _ in range(ROUNDS):
            most = dict(grown.skipped)
            earlier = self._render(self.messages[:-1], most)
            prompted = self._render(self.messages, most, generation=True) if prompt else grown
            if earlier.skipped == prompted.skipped == grown.skipped:
                break
            most = {
                loop: min(n, *(dict(r.skipped).get(loop, 0) for r in (earlier, prompted))) for loop, n in most.items()
            }
            grown = self._render(self.messages, most)
        self.past.rendered = Rendered(self.messages, self.declared, grown.states)
        if not (grown.continues(earlier) and grown.continues(prompted)):
            return None
        pieces = self._pieces(grown)
        if pieces is None:
            return None
        turns = len(self.messages) - grown.first
        return Tails(pieces, earlier.tail, prompted.tail if prompt else None, turns, not grown.skipped)

    def _render(self, messages: Sequence[Json], most: dict[int, int] | None, *, generation: bool = False) -> Render:
        tracker = Tracker(messages, self.states, self.common, most)
        return self.template.render_on(tracker, self.tools, generation=generation)

    def _pieces(self, grown: Render) -> list[Piece] | None:
        """The tail with the clients' words as content, where any could form a marker; None when they are not found."""
        touchy = [i for i in grown.touched if i < grown.first and self._touchy(i)]
        carried = [text for text in grown.carried if self.encoder.could_form_marker([text])]
        after = range(grown.first, len(self.messages))
        named = list(strings_of(list(self.declared or ())))
        if (
            not touchy
            and not carried
            and not any(map(self._touchy, after))
            and not self.encoder.could_form_marker(named)
        ):
            return [framing(grown.tail)]
        turns = [*self.past.turns, self.turn]
        texts = [text for i in (*touchy, *after) for text in turns[i].texts()]
        sources = [*texts, *carried, *named, self.template.sources, grown.tail]
        for attempt in ATTEMPTS:
            stand = StandIns(self.encoder, sources)
            stood = self._stood(grown, stand, turns, touchy, attempt(stand), frozenset(carried))
            if stood is not None and (pieces := stand.align(stood, grown.tail)) is not None:
                return pieces
        return None

    def _touchy(self, index: int) -> bool:
        if index == len(self.messages) - 1:
            return self.encoder.could_form_marker(self.turn.texts())
        return self.past.touchy(self.encoder, index)

    def _stood(
        self,
        grown: Render,
        stand: StandIns,
        turns: Sequence[Turn],
        touchy: Sequence[int],
        text_of: Callable[[Turn, str], str],
        carried: frozenset[str],
    ) -> str | None:
        """The tail with stand-ins: for the turns in it, and, wherever they may come up, for texts from before it."""
        messages = self.past.messages()[: grown.first]
        for index in touchy:
            messages[index] = Conversation([turns[index]]).replaced(stand, _optional(stand)).turns[0].message()
        replaced = Conversation(turns[grown.first :], self.declared).replaced(stand, text_of)
        messages += [turn.message() for turn in replaced.turns]
        needs = self.template.needs
        tracker = Tracker(
            needs.messages(messages),
            self.states,
            len(messages),
            dict(grown.skipped),
            lambda text: stand.cut_text(text) if text in carried else text,
        )
        try:
            render = self.template.render_on(tracker, needs.tools(replaced.tools or ()))
        except TemplateFailed:
            return None
        return render.tail if render.skipped == grown.skipped else None


def _optional(stand: StandIns) -> Callable[[Turn, str], str]:
    return lambda turn, text: stand.cut_text(text)


def _common(one: Sequence[Json], other: Sequence[Json]) -> int:
    """How many messages two conversations begin with alike."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] is not other[i] and one[i] != other[i]), n)
