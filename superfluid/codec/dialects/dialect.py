"""What the codec asks of a dialect."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from superfluid.codec.channels import REASONING, Pair, PairSplitter, Splitter
from superfluid.codec.conversation import Json, Turn
from superfluid.codec.framing import Encoder
from superfluid.codec.media import Medium
from superfluid.codec.past import ROLE_NAMES as ROLE_NAMES, Past
from superfluid.codec.toolcalls.wires import RawWire, Wire
from superfluid.link import events

SYSTEM, USER, ASSISTANT, TOOL = (int(role) for role in events.Role)
ROLE_NUMBERS = {name: number for number, name in enumerate(ROLE_NAMES)}


class DialectRefused(Exception):
    """The model cannot serve this dialect; the text says why."""


class NoChatDialect(Exception):
    """The codec renders no conversations: completions only."""

    def __init__(self) -> None:
        super().__init__("protocol: codec has no chat dialect")


class ConversationRefused(Exception):
    """The model's template refuses a conversation (400)."""

    def __init__(self, words: str) -> None:
        super().__init__(f"the model's chat template refused this conversation: {words}")
        self.words = words


@attrs.frozen
class History:
    """A session so far, for dialects whose spans depend on it."""

    past: Past = attrs.Factory(Past)
    tools: Sequence[Json] | None = None


class Dialect(ABC):
    """Renders conversations message by message (sessions) and whole (HTTP). Immutable once made."""

    name: str
    codec_id: str
    can_chat: bool = True
    append_stable: bool = True
    thinking_switch: bool = False
    pairs: tuple[Pair, ...] = ()
    marker_pairs: tuple[tuple[int, int, int], ...] | None = None  # for the marker digest, when not those of `pairs`
    terminators: frozenset[int] = frozenset()
    wire: Wire = RawWire()

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def splitter(self, *, terminate: bool = True) -> Splitter:
        """A fresh splitter of one lane."""
        return PairSplitter(self.encoder.table, self.pairs, self.terminators if terminate else ())

    def markers(self) -> list[tuple[int, int, int]]:
        """(open, close, channel) in the order of the marker digest."""
        return [(p.open, p.close or 0, p.channel) for p in self.pairs]

    @abstractmethod
    def prologue(self) -> list[int]:
        """What a session begins with when its first turn is not a system one."""

    def system_prologue(self) -> list[int]:
        """What a session begins with when its first turn is a system one."""
        return []

    def close_reasoning(self) -> list[int] | None:
        """What ends an open thought and goes on in text, for a reasoning budget; None where nothing ends one."""
        pair = next((pair for pair in self.pairs if pair.channel == REASONING), None)
        if pair is None or pair.close is None:
            return None
        return self.encoder.encode_framing(self.encoder.literal(pair.close) + "\n\n")

    @abstractmethod
    def separator(self) -> list[int]:
        """What stands between a finished turn and the next one."""

    @abstractmethod
    def message_span(self, role: int, text: str, history: History) -> list[int]: ...
    @abstractmethod
    def system_span(self, text: str | None, tools: Sequence[Json]) -> list[int]: ...
    @abstractmethod
    def tool_result_span(self, content: str, name: str, call: int | None, history: History) -> list[int]:
        """The result of the call with that event id; none: of the last one."""

    @abstractmethod
    def media_span(self, role: int, pre: str, medium: Medium, post: str, history: History) -> tuple[list[int], int]:
        """A medium's turn, `pre` and `post` the text around it, and the index of its first placeholder.

        Raises MediaRefused."""

    @abstractmethod
    def opener(self, after_finished: bool, thinking: bool | None) -> list[int]: ...
    @abstractmethod
    def render(self, turns: Sequence[Turn], tools: Sequence[Json], kwargs: Mapping[str, Json]) -> list[events.Body]:
        """What an HTTP request commits, in order; the generation prompt is last.

        Raises ConversationRefused, MediaRefused."""


class Raw(Dialect):
    """No chat format: completions only."""

    name = "raw"
    codec_id = "raw"
    can_chat = False

    def prologue(self) -> list[int]:
        return []

    def separator(self) -> list[int]:
        return []

    def message_span(self, role: int, text: str, history: History) -> list[int]:
        raise NoChatDialect

    def system_span(self, text: str | None, tools: Sequence[Json]) -> list[int]:
        raise NoChatDialect

    def tool_result_span(self, content: str, name: str, call: int | None, history: History) -> list[int]:
        return self.encoder.tokenizer.encode(content)

    def media_span(self, role: int, pre: str, medium: Medium, post: str, history: History) -> tuple[list[int], int]:
        raise NoChatDialect

    def opener(self, after_finished: bool, thinking: bool | None) -> list[int]:
        return []

    def render(self, turns: Sequence[Turn], tools: Sequence[Json], kwargs: Mapping[str, Any]) -> list[events.Body]:
        raise NoChatDialect
