"""Grammars and logit biases of the mock: handles only, they change no more than a counter in the hash."""

from superfluid.engines.engine import EngineError
from superfluid.link.codes import Status

BIAS_HANDLE = 1


class Constraints:
    def __init__(self) -> None:
        self._grammars: dict[int, int | None] = {}  # handle: the lane it serves
        self._freed: set[int] = set()  # freed while in use
        self._next = 1
        self._bias = False

    def create_grammar(self, text: str) -> int:
        """Raises EngineError -114 for text that is no balanced object."""
        if not balanced_object(text):
            raise EngineError(Status.RejectBadStruct, f"not a JSON object: {text[:80]!r}")
        handle = self._next
        self._next += 1
        self._grammars[handle] = None
        return handle

    def free_grammar(self, handle: int) -> None:
        if handle not in self._grammars or handle in self._freed:
            raise EngineError(Status.UnknownHandle, f"no grammar {handle}")
        if self._grammars[handle] is None:
            del self._grammars[handle]
        else:
            self._freed.add(handle)

    def grammar_free_for_use(self, handle: int) -> bool:
        return handle in self._grammars and self._grammars[handle] is None

    def bind(self, handle: int, lane_tag: int) -> None:
        if handle:
            self._grammars[handle] = lane_tag

    def give_back(self, handle: int) -> None:
        """The lane it served has ended."""
        if handle in self._freed:
            self._freed.discard(handle)
            del self._grammars[handle]
        elif handle in self._grammars:
            self._grammars[handle] = None

    def create_bias(self, count: int) -> int:
        if not count:
            raise EngineError(Status.Unsupported, "an empty logit bias")
        self._bias = True
        return BIAS_HANDLE

    def free_bias(self, handle: int) -> None:
        if not self.has_bias(handle):
            raise EngineError(Status.UnknownHandle, f"no logit bias {handle}")
        self._bias = False

    def has_bias(self, handle: int) -> bool:
        return handle == BIAS_HANDLE and self._bias


def balanced_object(text: str) -> bool:
    """Whether trimmed text starts with `{`, ends with `}` and has balanced braces outside strings."""
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return False
    depth, in_string, escaped = 0, False, False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0 and not in_string
