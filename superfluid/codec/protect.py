"""Rendering with content protection: which parts of a template's output are the clients' own words.

The conversation is rendered as it is and once more with stand-ins for the client texts; where the text between the
stand-ins is the same in both, what stands in their places is content, and content never forms a marker.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from string import ascii_uppercase

import attrs

from superfluid.codec.conversation import Call, Json, Turn, map_strings, strings_of
from superfluid.codec.framing import Encoder, Piece, content, framing
from superfluid.codec.template import ChatTemplate, TemplateFailed

WORD = "SUPERFLUIDSTANDIN"
# What templates cut reasoning out of assistant texts by: (opener, closer).
REASONING_CUTS = (("<think>", "</think>"), ("<|channel>", "<channel|>"), ("[THINK]", "[/THINK]"))
_CUT_MARKERS = re.compile("(" + "|".join(re.escape(marker) for cut in REASONING_CUTS for marker in cut) + ")")
_SWITCHES = re.compile("(/no_think|/think)")  # what templates look for in a system's text, and take out of it


class StandIns:
    """Numbered words that no text of the request holds, and what each stands for."""

    def __init__(self, encoder: Encoder, texts: Iterable[str]) -> None:
        self.word = unused_word("\0".join(texts).upper())
        self._markers = encoder.marker_pattern
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}  # equal texts share a stand-in: templates compare messages
        self.joints: set[tuple[str, str, str]] = set()  # client text between two stand-ins: content where it survives
        self.due: Counter[int] = Counter()  # how often the stand-ins of whole texts must be rendered
        self._loose: set[int] = set()  # those that stand for parts too, which may be rendered as well

    def text(self, original: str) -> str:
        """A stand-in for a whole client text; a blank one stands for itself."""
        if not original.strip():
            return original
        number = self._number(original)
        self.due[number] += 1
        return self._spelt(number)

    def markers(self, original: str) -> str:
        """`original` with a stand-in for every marker in it."""
        return self._markers.sub(lambda match: self._add(match[0]), original)

    def cut_text(self, original: str) -> str:
        """An assistant's text with only the last closer of its reasoning, and the opener before it, left in place."""
        for opener, closer in REASONING_CUTS:
            head, found, answer = original.rpartition(closer)
            if found:
                before, opened, thought = head.partition(opener)
                if not opened:
                    before, thought = "", head
                return "".join([self._core(before), opened, self._core(thought), closer, self._core(answer)])
        return self._core(original)

    def segments(self, original: str) -> str:
        """An assistant's text with every marker that reasoning is cut by left in place, stand-ins between them."""
        return self._between(_CUT_MARKERS, original)

    def switched(self, original: str) -> str:
        """A system's text with the switches of thinking left in place, stand-ins between them."""
        return self._between(_SWITCHES, original)

    def _between(self, left: re.Pattern[str], original: str) -> str:
        stood = "".join([p if i % 2 else self._core(p) for i, p in enumerate(left.split(original))])
        parts = self.split(stood)
        self.joints.update(zip(parts[1:-2:2], parts[2:-1:2], parts[3::2], strict=True))
        return stood

    def _core(self, original: str) -> str:
        """A stand-in for a text that need not be rendered, the white space around it left in place."""
        core = original.strip()
        return original.replace(core, self._add(core), 1) if core else original

    def _add(self, original: str) -> str:
        """A stand-in for a part of a text."""
        number = self._number(original)
        self._loose.add(number)
        return self._spelt(number)

    def _number(self, original: str) -> int:
        number = self._numbers.get(original)
        if number is None:
            number = self._numbers[original] = len(self.texts)
            self.texts.append(original)
        return number

    def _spelt(self, number: int) -> str:
        return f"{self.word}{number}Z"

    def _complete(self, rendered: Mapping[int, int]) -> bool:
        """Whether every whole text was rendered as often as it stands in the conversation."""
        return all(
            rendered[number] == due or (number in self._loose and rendered[number] > due)
            for number, due in self.due.items()
        )

    def split(self, rendered: str) -> list[str]:
        """The text before the first stand-in, its number, the text up to the next, and so on."""
        return re.split(rf"{self.word}(\d+)Z", rendered)

    def align(self, stood: str, real: str) -> list[Piece] | None:
        """The pieces of `real`, guided by the same render with stand-ins; None when they do not fit."""
        parts = self.split(stood)
        numbers = [int(n) for n in parts[1::2]]
        rendered = Counter(numbers)
        if not self._complete(rendered) or not real.startswith(parts[0]):
            return None
        pieces = [framing(parts[0])]
        at = len(parts[0])
        for i, (number, after) in enumerate(zip(numbers, parts[2::2], strict=True)):
            last = i == len(numbers) - 1
            for form in forms(self.texts[number]):
                end = at + len(form)
                fits = real.startswith(form, at) and real.startswith(after, end)
                if fits and (not last or end + len(after) == len(real)):
                    break
            else:
                return None
            joint = not last and (parts[2 * i + 1], after, parts[2 * i + 3]) in self.joints
            pieces += [content(form), Piece(after, joint)]
            at = end + len(after)
        return pieces if at == len(real) else None

    def restore(self, stood: str) -> list[Piece]:
        """The pieces of a render whose stand-ins are put back as content."""
        parts = self.split(stood)
        return [content(self.texts[int(part)]) if i % 2 else framing(part) for i, part in enumerate(parts)]


def unused_word(held: str) -> str:
    """A word of capitals that a text does not hold, in time linear in the text whatever it holds."""
    if WORD not in held:
        return WORD
    taken = {match[1] for match in re.finditer(f"(?={WORD}([A-Z]{{6}}))", held)}
    names = ("".join(letters) for letters in product(ascii_uppercase, repeat=6))
    return WORD + next(name for name in names if name not in taken)


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginning, by bisection over native comparisons."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def forms(text: str) -> Iterator[str]:
    """The ways in which a template may spell a client text."""
    yield text
    if (trimmed := text.strip()) != text:
        yield trimmed
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    yield escaped.translate(_HTML_SAFE)
    yield escaped


_HTML_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})


@attrs.frozen
class Conversation:
    """What one render takes."""

    turns: Sequence[Turn]
    tools: Sequence[Json] | None = None
    generation: bool = False
    kwargs: Mapping[str, Json] = attrs.field(factory=dict)

    def render(self, template: ChatTemplate) -> str:
        """The plain text, unprotected."""
        needs = template.needs
        return template.render(
            needs.messages([turn.message() for turn in self.turns]),
            needs.tools(self.tools or ()),
            generation=self.generation,
            kwargs=self.kwargs,
        )

    def texts(self) -> Iterator[str]:
        """Every string of the request."""
        for turn in self.turns:
            yield from turn.texts()
        yield from strings_of(self.tools or [])
        yield from strings_of(self.kwargs)

    def replaced(self, stand: StandIns, text_of: Callable[[Turn, str], str]) -> "Conversation":
        """The conversation with client texts replaced by `text_of`, and markers elsewhere by stand-ins."""
        turns = []
        for turn in self.turns:
            made = turn.with_texts([text_of(turn, text) for text in turn.client_texts()])
            turns.append(
                attrs.evolve(
                    made,
                    reasoning=stand.markers(turn.reasoning),
                    calls=tuple(_replaced_call(call, stand) for call in turn.calls),
                    call_id=stand.markers(turn.call_id),
                    name=stand.markers(turn.name),
                )
            )
        return attrs.evolve(
            self,
            turns=turns,
            tools=map_strings(self.tools, stand.markers) if self.tools else self.tools,
            kwargs=map_strings(self.kwargs, stand.markers),
        )


def _replaced_call(call: Call, stand: StandIns) -> Call:
    plain = call.arguments_object()
    stood = map_strings(plain, stand.markers)
    arguments = call.arguments if stood == plain else json.dumps(stood, ensure_ascii=False)
    return Call(stand.markers(call.name), arguments, stand.markers(call.id))


def _in_parts(stand: StandIns, turn: Turn, text: str) -> str:
    return stand.segments(text) if turn.role == "assistant" else stand.text(text)


ATTEMPTS: Sequence[Callable[[StandIns], Callable[[Turn, str], str]]] = (
    lambda stand: lambda turn, text: stand.text(text),
    lambda stand: lambda turn, text: stand.cut_text(text) if turn.role == "assistant" else stand.text(text),
    lambda stand: lambda turn, text: _in_parts(stand, turn, text),
    lambda stand: lambda turn, text: stand.switched(text) if turn.role == "system" else _in_parts(stand, turn, text),
)
"""What stands for a client's text, tried in turn: templates cut reasoning out of the assistant's, and switches of
thinking out of the system's."""


def render_protected(template: ChatTemplate, encoder: Encoder, conversation: Conversation) -> list[Piece]:
    """The pieces of a conversation's render. Raises TemplateFailed with the template's words.

    In order: stand-ins for all client texts; for parts of those that templates cut something out of; for the marker
    strings in them only.
    """
    real = conversation.render(template)
    texts = list(conversation.texts())
    if not encoder.could_form_marker(texts):
        return [framing(real)]
    sources = [*texts, template.sources]
    for attempt in ATTEMPTS:
        stand = StandIns(encoder, sources)
        replaced = conversation.replaced(stand, attempt(stand))
        try:
            stood = replaced.render(template)
        except TemplateFailed:
            continue
        if (pieces := stand.align(stood, real)) is not None:
            return pieces
    stand = StandIns(encoder, sources)
    replaced = conversation.replaced(stand, lambda turn, text: stand.markers(text))
    return stand.restore(replaced.render(template))
