"""Constraints over primitive runtimes: JSON schemas and structural tags, compiled and matched by llguidance.

Schemas are closed first (see `schemas`); structural tags are written out as a Lark grammar whose special tokens are ids
(see `structural`). Every stop id is allowed where the grammar may end.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from superfluid.codec.held_schemas import on_deep_stack
from superfluid.codec.panics import is_panic
from superfluid.codec.tried_patterns import COMPILER_LIMITS
from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.schemas import close_schema
from superfluid.engines.executor.structural import MARKER_PREFIX, StructuralWriter
from superfluid.engines.primitives import Vocabulary

LIMITS = LLParserLimits(**COMPILER_LIMITS)
KEPT = 32  # compiled grammars that wait for the next lane
LONGEST_TOKEN = 1000  # bytes; at 1024 and some llguidance's index panics
SPELLED = 1024
"""Characters of a forced text that are spelled for one mask, which needs the first token of them: more than a token
has, and few, for all that follows is asked for again at the next token."""

Mask = npt.NDArray[np.uint32]


class Matcher:
    """Where one lane stands in a grammar. One whose native side panicked allows nothing any more."""

    def __init__(self, native: Any, stop_bits: Mask, stop_ids: frozenset[int], ends_itself: bool) -> None:
        self._native = native
        self._stop_bits = stop_bits
        self._stop_ids = stop_ids
        self._ends_itself = ends_itself
        self._ended = False
        self._mask = np.zeros_like(stop_bits)

    def mask(self) -> Mask:
        """Bit i: id i may come next. The same array each time; all zero when nothing may, or after an error."""
        native, mask = self._native, self._mask
        try:
            if self._ended or native.is_error():
                mask.fill(0)
            elif native.is_stopped():
                mask[:] = self._stop_bits
            else:
                native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if native.is_error():
                    mask.fill(0)
                elif native.is_accepting():
                    mask |= self._stop_bits
        except BaseException as error:
            self._fail(error)
            mask.fill(0)
        return mask

    def consume(self, token: int) -> bool:
        """Move on by a token; false when the grammar refuses it, and then it allows nothing any more."""
        if self._ended:
            return False
        if token in self._stop_ids and self.accepting:
            self._ended = True
            return True
        return self._ask(lambda native: native.consume_token(token))

    @property
    def error(self) -> str:
        """What went wrong; empty while nothing did."""
        if self._native is _PANICKED:
            return "the compiler panicked"
        return str(self._native.get_error()).partition("\n")[0] if self._native.is_error() else ""

    @property
    def accepting(self) -> bool:
        """The grammar may end here."""
        return self._ask(lambda native: not native.is_error() and native.is_accepting())

    @property
    def finished(self) -> bool:
        """A schema's grammar of which nothing but the end is left; a structural one never ends by itself."""
        return self._ends_itself and self._ask(lambda native: native.is_stopped() and not native.is_error())

    def fork(self) -> "Matcher":
        """A matcher at the same point that goes its own way."""
        try:
            native = self._native.deep_copy()
        except BaseException as error:
            self._fail(error)
            native = _PANICKED
        forked = Matcher(native, self._stop_bits, self._stop_ids, self._ends_itself)
        forked._ended = self._ended
        return forked

    def _ask(self, question: Callable[[Any], bool]) -> bool:
        try:
            return bool(question(self._native))
        except BaseException as error:
            self._fail(error)
            return False

    def _fail(self, error: BaseException) -> None:
        if not is_panic(error):
            raise error
        self._native = _PANICKED


class _Panicked:
    """Stands for a native matcher that panicked: its locks may be held for ever."""

    def is_error(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        return False

    def deep_copy(self) -> "_Panicked":
        return self


_PANICKED = _Panicked()


class Grammar:
    """A compiled constraint; `matcher` starts a lane at its beginning."""

    def __init__(self, start: Matcher) -> None:
        self._start = start

    def matcher(self) -> Matcher:
        return self._start.fork()


class GrammarCompiler:
    """Compiles constraints over one vocabulary. Several threads may.

    The index of its tokens is built by `prepare`, else for the first grammar, which then waits for it. The last `KEPT`
    grammars are kept, and refusals too: agents send the same tools with every request.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[tuple[str, str], Grammar | EngineError] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept

    def prepare(self) -> None:
        """Build the index now, if there can be grammars: a fifth of a second for 49 000 tokens, which no lane should
        wait for. A vocabulary that has none is told of by the first grammar."""
        if self._vocabulary is not None and self._vocabulary.eos:
            with contextlib.suppress(EngineError):
                self._tokenizer  # noqa: B018

    def schema(self, json_text: str) -> Grammar:
        """A JSON document of a schema. Raises EngineError -127 without a vocabulary or stop token, -114."""
        return self._keep("schema", json_text, self._schema)

    def structural(self, tag_json: str) -> Grammar:
        """A structural tag. Raises EngineError -127 (also for a format there is none of), -114."""
        return self._keep("structural", tag_json, self._structural)

    def draft(self, kind: str, text: str) -> Callable[[], None] | None:
        """Work behind which `kind` of this text is kept; None when it is."""
        with self._lock:
            if (kind, text) in self._kept:
                return None

        def compile_ahead() -> None:
            with contextlib.suppress(EngineError):  # told again to who asks for it
                (self.structural if kind == "structural" else self.schema)(text)

        return compile_ahead

    def _keep(self, kind: str, text: str, make: Callable[[str], Grammar]) -> Grammar:
        with self._lock:
            kept = self._kept.get((kind, text))
        if kept is None:
            kept = on_deep_stack(lambda: _made(make, text))
        with self._lock:
            self._kept[kind, text] = kept
            self._kept.move_to_end((kind, text))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if isinstance(kept, EngineError):
            raise EngineError(kept.status, kept.reason)
        return kept

    def _schema(self, json_text: str) -> Grammar:
        vocabulary = self._usable()
        schema = _parse(json_text)
        if not isinstance(schema, dict | bool):
            raise EngineError(Status.RejectBadStruct, f"a schema is an object, not {json_text[:80]}")
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(close_schema(schema)))
        return self._compile(vocabulary, grammar, ends_itself=True)

    def _structural(self, tag_json: str) -> Grammar:
        vocabulary = self._usable()
        tag = _parse(tag_json)
        if isinstance(tag, dict) and tag.get("type") == "structural_tag":
            tag = tag.get("format")
        return self._compile(vocabulary, self._writer.write(tag), ends_itself=False)

    def _usable(self) -> Vocabulary:
        if self._vocabulary is None or not self._vocabulary.eos:
            raise EngineError(Status.Unsupported, "grammars need a vocabulary with a stop token")
        return self._vocabulary

    def _compile(self, vocabulary: Vocabulary, grammar: str, ends_itself: bool) -> Grammar:
        native = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if native.is_error():
            raise EngineError(Status.RejectBadStruct, f"the grammar does not compile: {native.get_error()}")
        start = Matcher(native, self._stop_bits, vocabulary.eos, ends_itself)
        probe = start.fork()
        if not probe.mask().any():  # else the reply would find out
            raise EngineError(Status.RejectBadStruct, f"the grammar allows nothing: {probe.error or 'not one token'}")
        return Grammar(start)

    @cached_property
    def _stop_bits(self) -> Mask:
        vocabulary = self._usable()
        bits = np.zeros((len(vocabulary.token_bytes) + 31) // 32, np.uint32)
        for token in vocabulary.eos:
            bits[token >> 5] |= np.uint32(1 << (token & 31))
        return bits

    @cached_property
    def _writer(self) -> StructuralWriter:
        vocabulary = self._usable()
        return StructuralWriter(_markers(vocabulary.token_bytes), vocabulary.eos)

    @property
    def _tokenizer(self) -> Any:
        """The index. Raises EngineError -127 when there can be none."""
        made = self._index
        if isinstance(made, EngineError):
            raise EngineError(made.status, made.reason)
        return made

    @cached_property
    def _index(self) -> Any:
        vocabulary = self._usable()
        speller = _Speller(vocabulary)
        try:
            made = LLTokenizer(TokenizerWrapper(speller), len(speller.tokens), sorted(vocabulary.eos), None)
        except BaseException as error:
            if not (is_panic(error) or isinstance(error, TypeError | ValueError)):
                raise
            return EngineError(Status.Unsupported, f"grammars cannot be held over this vocabulary: {error}")
        speller.greedy = made.greedy_tokenize
        return made


def _made(make: Callable[[str], Grammar], text: str) -> Grammar | EngineError:
    try:
        return make(text)
    except EngineError as error:
        return error.with_traceback(None)
    except BaseException as error:  # whatever a client sent, the worker goes on
        if not (is_panic(error) or isinstance(error, RecursionError | TypeError | ValueError)):
            raise
        return EngineError(Status.RejectBadStruct, f"the grammar does not compile: {error}")


class _Speller:
    """What llguidance asks of a tokenizer. Where a text is forced it allows only the tokens this spells it with."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [
            _short(i, data) if len(data) > LONGEST_TOKEN else data for i, data in enumerate(vocabulary.token_bytes)
        ]
        self.eos_token_id = min(vocabulary.eos)
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if data.startswith(MARKER_PREFIX)]
        self.greedy: Callable[[str], list[int]] | None = None  # none yet: it tries a text when it is made
        self._encode = vocabulary.encode
        self._left_out = {i for i, data in enumerate(vocabulary.token_bytes) if data and not self.tokens[i]}

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # how llguidance finds out what it may pass
        if self.greedy is None:
            return []
        if self._encode is not None:
            with contextlib.suppress(Exception):  # it would come out as a panic
                spelled = self._encode(text[:SPELLED])
                if self._left_out.isdisjoint(spelled):
                    return spelled
        return self.greedy(text[:SPELLED])


def _short(token: int, data: bytes) -> bytes:
    """What stands for a token that is too long for the index: nothing, so that grammars never allow it; a marker, which
    they know by its id, has a name."""
    return MARKER_PREFIX + str(token).encode() if data.startswith(MARKER_PREFIX) else b""


def _markers(token_bytes: Iterable[bytes]) -> dict[str, int]:
    return {
        data[1:].decode("utf-8", "replace"): i
        for i, data in enumerate(token_bytes)
        if data.startswith(MARKER_PREFIX) and len(data) > 1
    }


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(Status.RejectBadStruct, f"not JSON: {error}") from None
