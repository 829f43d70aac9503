"""Stop strings over streamed text."""

from collections.abc import Iterable


class StopStrings:
    """Finds the first stop string to be completed, whatever the slices; holds back a tail that could begin one.

    Each string is followed by its Knuth-Morris-Pratt automaton, so a character costs the same however long the
    strings and whatever the text repeats. `end`, once one is found: how many characters of the text lead up to its end.
    """

    __slots__ = ("_automata", "_held", "_read", "_states", "end", "hit")

    def __init__(self, stops: Iterable[str]) -> None:
        self._automata = [(stop, _failure(stop)) for stop in dict.fromkeys(stops) if stop]
        self._states = [0] * len(self._automata)
        self._held = ""
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
        start = len(self._held)
        text = self._held + text
        states = self._states
        for at in range(start, len(text)):
            char = text[at]
            found = 0
            for i, (stop, failure) in enumerate(self._automata):
                state = states[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found = max(found, state)
                    state = failure[state - 1]
                states[i] = state
            if found:
                self.hit = True
                self.end = self._read + at + 1 - start
                self._held = ""
                return text[: at + 1 - found], True
        self._read += len(text) - start
        hold = max(states)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _failure(pattern: str) -> list[int]:
    """Length of the longest proper prefix that is a suffix, for each prefix of `pattern`."""
    table = [0] * len(pattern)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[state] != pattern[i]:
            state = table[state - 1]
        if pattern[state] == pattern[i]:
            state += 1
        table[i] = state
    return table
