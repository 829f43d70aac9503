"""Stop strings over streamed text."""

from collections import deque
from collections.abc import Iterable

PIECE = 256  # characters held back that may be copied for each that goes out


class StopStrings:
    """Finds the first stop string to be completed, whatever the slices; holds back a tail that could begin one.

    Each string is followed by its Knuth-Morris-Pratt automaton, built as far as the text has followed it, so a
    character costs the same however long the strings and whatever the text repeats. `end`, once one is found: how many
    characters of the text lead up to its end.
    """

    __slots__ = ("_automata", "_held", "_holds", "_read", "_states", "end", "hit")

    def __init__(self, stops: Iterable[str]) -> None:
        self._automata: list[tuple[str, list[int]]] = [(stop, [0]) for stop in dict.fromkeys(stops) if stop]
        self._states = [0] * len(self._automata)
        self._held: deque[str] = deque()
        self._holds = 0  # characters held back
        self._read = 0  # characters so far
        self.hit = False
        self.end: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._automata)

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string has been found). After a hit nothing more is shown."""
        if self.hit:
            return "", True
        if not self._automata:
            return text, False
        states = self._states
        for at, char in enumerate(text):
            found = 0
            for i, (stop, failure) in enumerate(self._automata):
                state = states[i]
                while state and stop[state] != char:
                    if state > len(failure):
                        _extend(failure, stop, state)
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found = max(found, state)
                states[i] = state
            if found:
                self.hit = True
                self.end = self._read + at + 1
                shown = self._shown(text[: at + 1], found)
                self._held.clear()
                return shown, True
        self._read += len(text)
        return self._shown(text, max(states)), False

    def _shown(self, text: str, hold: int) -> str:
        """What of the text held back and `text` goes out when `hold` characters stay."""
        held = self._held
        if hold >= len(text):
            left = self._holds + len(text) - hold
            out: list[str] = []
            while left:
                piece = held.popleft()
                if len(piece) > left:
                    held.appendleft(piece[left:])
                    piece = piece[:left]
                out.append(piece)
                left -= len(piece)
            held.extend(_pieces(text))
        else:
            out = [*held, text[: len(text) - hold]]
            held.clear()
            held.extend(_pieces(text[len(text) - hold :]))
        self._holds = hold
        return "".join(out)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held = "".join(self._held)
        self._held.clear()
        self._holds = 0
        return held


def _pieces(text: str) -> Iterable[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _extend(failure: list[int], pattern: str, length: int) -> None:
    """Lengthen the table of the longest proper prefix that is a suffix, for each prefix of `pattern`."""
    state = failure[-1]
    for i in range(len(failure), length):
        while state and pattern[state] != pattern[i]:
            state = failure[state - 1]
        if pattern[state] == pattern[i]:
            state += 1
        failure.append(state)
