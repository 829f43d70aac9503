"""A session's turns so far, kept from one append to the next: what a new turn adds is found from the last of them."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import attrs

from superfluid.codec.blocks import IMAGE, UnknownBlockKind, block_text, image_texts
from superfluid.codec.channels import REASONING, TEXT
from superfluid.codec.conversation import Call, Json, Part, Turn
from superfluid.codec.framing import Encoder
from superfluid.codec.resuming import State
from superfluid.link import events

ROLE_NAMES = ("system", "user", "assistant", "tool")
KEPT = 16 << 20  # characters of the turns that are kept between appends; others are read from the log again
TURN = 1000  # characters that a turn counts beside its texts: objects, and the states of the last render


@attrs.frozen
class Rendered:
    """The last render of a session: of which messages and tools, and the states that it left."""

    messages: Sequence[Json] = ()
    tools: Sequence[Json] | None = None
    states: tuple[tuple[State, ...], ...] = ()


class Past:
    """One session's events as turns. A generation's runs, and the calls in it, are one assistant turn.

    Used by one thread at a time; `add` takes the events in order from the first on.
    """

    def __init__(self, bodies: Iterable[events.Body] = ()) -> None:
        self.n_events = 0
        self.size = 0  # characters
        self.has_tokens = False
        self.raw = False  # tokens that are no turn's: the template is not told of them
        self.rendered = Rendered()
        self._closed: list[Turn] = []
        self._messages: list[Json] = []  # of the closed turns
        self._touchy: list[bool] = []  # the same, of an encoder
        self._encoder: Encoder | None = None
        self._open: _Reply | None = None
        self._names: dict[int, str] = {}  # of calls
        self.add(bodies)

    @property
    def weight(self) -> int:
        """What it counts in memory, in characters."""
        return self.size + TURN * (len(self._closed) + 1)

    @property
    def turns(self) -> list[Turn]:
        return [*self._closed, *([self._open.turn] if self._open else [])]

    def messages(self) -> list[Json]:
        """The objects that templates read; those of closed turns are the same ones every time."""
        self._messages += [turn.message() for turn in self._closed[len(self._messages) :]]
        return [*self._messages, *([self._open.turn.message()] if self._open else [])]

    def touchy(self, encoder: Encoder, index: int) -> bool:
        """Whether a text of a turn could form a marker."""
        if encoder is not self._encoder:
            self._encoder, self._touchy = encoder, []
        if index >= len(self._closed):
            return encoder.could_form_marker(self.turns[index].texts())
        for turn in self._closed[len(self._touchy) : index + 1]:
            self._touchy.append(encoder.could_form_marker(turn.texts()))
        return self._touchy[index]

    def add(self, bodies: Iterable[events.Body]) -> None:
        """What came since."""
        for event_id, body in enumerate(bodies, self.n_events):
            self.n_events = event_id + 1
            if len(getattr(body, "span", None) or ()):
                self.has_tokens = True
                self.raw = self.raw or isinstance(body, events.Appended)
            self._add(event_id, body)

    def _add(self, event_id: int, body: events.Body) -> None:
        match body:
            case events.Generated(text=text, channel=channel):
                if self._open is None:
                    self._open = _Reply()
                self._open.add(text, channel)
            case events.ToolUse(name=name, arguments=arguments) if self._open is not None:
                self._names[event_id] = name
                self._open.calls.append(Call(name, arguments, str(event_id)))
            case events.ToolExpired(call_id=call, reason=events.CONTINUED) if self._open is not None:
                self._open.calls = [one for one in self._open.calls if one.id != str(call)]
            case events.Message(role=role, text=text):
                self._close(Turn(role_name(role), text))
            case events.ToolResult(call_id=call_id, content=content):
                self._close(Turn("tool", content, call_id=str(call_id), name=self._names.get(call_id, "")))
            case events.Block(role=role, kind=kind, payload=payload, span=span) if span:
                try:
                    shown = image_texts(payload) if kind == IMAGE else block_text(kind, payload)
                except UnknownBlockKind:
                    return
                name = role_name(role)
                self._close(Turn(name, shown) if isinstance(shown, str) else image_turn(name, *shown))
            case events.GenerationPrompt():
                self._close()
                self._open = _Reply()

    def _close(self, *turns: Turn) -> None:
        """End an open reply; `turns` come behind it."""
        closed = [*([self._open.turn] if self._open else []), *turns]
        self._open = None
        self._closed += closed
        self.size += sum(len(text) for turn in closed for text in turn.texts())


class _Reply:
    """An assistant's turn while its runs are gathered."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []

    def add(self, text: str, channel: int) -> None:
        if channel == TEXT:
            self.texts.append(text)
        elif channel == REASONING:
            self.reasoning.append(text)

    @property
    def turn(self) -> Turn:
        reasoning = "".join(self.reasoning).strip()
        return Turn("assistant", "".join(self.texts), reasoning=reasoning, calls=tuple(self.calls))


class Pasts:
    """The pasts of a model's sessions, the least recently used forgotten first. A past that is taken is its taker's
    until it is given back."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._size = 0
        self._held: OrderedDict[int, Past] = OrderedDict()
        self._lock = Lock()

    def take(self, session: int) -> Past:
        """A session's past as far as it is known, or an empty one."""
        with self._lock:
            found = self._held.pop(session, None)
            self._size -= found.weight if found else 0
        return found or Past()

    def give(self, session: int, past: Past) -> None:
        self.forget(session)
        with self._lock:
            self._held[session] = past
            self._size += past.weight
            while self._size > self._most and self._held:
                self._size -= self._held.popitem(last=False)[1].weight

    def forget(self, session: int) -> None:
        self.take(session)


def role_name(role: int) -> str:
    """A role's name in templates."""
    return ROLE_NAMES[role] if role < len(ROLE_NAMES) else "user"


def image_turn(role: str, pre: str, post: str) -> Turn:
    """An image of a session as the template sees it: one part, and the texts around it."""
    texts = [Part("text", text) if text else None for text in (pre, post)]
    parts = tuple(part for part in (texts[0], Part("image"), texts[1]) if part is not None)
    return Turn(role, pre + post, parts)
