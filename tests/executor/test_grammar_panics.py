"""Where llguidance panics: a vocabulary it cannot index, a native call in the middle of a lane. The worker goes on."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from superfluid.codec.panics import is_panic
from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor import Executor, grammar
from superfluid.engines.executor.grammar import GrammarCompiler, Matcher
from superfluid.engines.executor.structural import MARKER_PREFIX
from superfluid.engines.primitives import Vocabulary
from tests.engines.fake_primitives import FakePrimitives
from tests.executor.test_grammar import allowed

LONG = b"a" * 3000
MARKER = "<" + "m" * 2000 + ">"
TOKENS = [*(bytes([i]) for i in range(256)), MARKER_PREFIX + b"<eos>", LONG, MARKER_PREFIX + MARKER.encode(), b"aa"]
EOS, LONG_ID, MARKER_ID, PAIR_ID = range(256, 260)


def vocabulary(encode: Any = None) -> Vocabulary:
    return Vocabulary(TOKENS, frozenset({EOS, MARKER_ID}), frozenset({EOS}), encode=encode)


class Spelled:
    """What llguidance is given when long tokens are not left out."""

    eos_token_id, bos_token_id, special_token_ids = EOS, None, [EOS, MARKER_ID]
    tokens = TOKENS

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError
        return list(text.encode())


def panic() -> BaseException:
    """A real one."""
    with pytest.raises(BaseException, match="num_parents") as caught:
        LLTokenizer(TokenizerWrapper(Spelled()), len(TOKENS), [EOS], None)
    return caught.value


def test_a_panic_is_told_from_other_exceptions() -> None:
    caught = panic()
    assert is_panic(caught) and not isinstance(caught, Exception)
    assert not any(map(is_panic, (ValueError("x"), KeyboardInterrupt(), SystemExit(1))))


def test_a_token_of_any_length_is_left_out_of_grammars() -> None:
    compiler = GrammarCompiler(vocabulary())
    compiler.prepare()
    matcher = compiler.schema('{"type": "string"}').matcher()
    assert matcher.consume(ord('"'))
    assert PAIR_ID in allowed(matcher) and LONG_ID not in allowed(matcher)


def test_a_long_marker_keeps_its_meaning() -> None:
    compiler = GrammarCompiler(vocabulary())
    for node in ({"type": "token", "token": MARKER}, {"type": "const_string", "value": MARKER + "!"}):
        matcher = compiler.structural(json.dumps({"type": "structural_tag", "format": node})).matcher()
        assert allowed(matcher) == {MARKER_ID}
        assert matcher.consume(MARKER_ID)
    assert allowed(matcher) == {ord("!")}
    free = {"type": "any_tokens", "exclude_tokens": [MARKER]}
    assert MARKER_ID not in allowed(compiler.structural(json.dumps(free)).matcher())


def test_a_forced_text_is_spelled_without_the_long_token() -> None:
    def longest(text: str) -> list[int]:
        return [LONG_ID] if text.startswith("a" * 100) else list(text.encode())

    def failing(text: str) -> list[int]:
        raise ValueError("no spelling")

    for encode in (longest, failing):
        matcher = GrammarCompiler(vocabulary(encode)).schema(json.dumps({"const": "a" * 200})).matcher()
        for _ in range(200):
            if not allowed(matcher) & {ord("a"), PAIR_ID, ord('"')}:
                break
            assert matcher.consume(min(allowed(matcher)))
        assert matcher.consume(EOS) or matcher.accepting


def test_a_vocabulary_without_an_index_serves_without_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LONGEST_TOKEN", 10_000)
    compiler = GrammarCompiler(vocabulary())
    compiler.prepare()  # where the worker used to end
    for make in (compiler.schema, compiler.structural):
        with pytest.raises(EngineError, match=r"grammars cannot be held over this vocabulary: .*num_parents") as caught:
            make('{"type": "any_text"}')
        assert caught.value.status == Status.Unsupported
    primitives = FakePrimitives()
    primitives._vocabulary = vocabulary()
    executor = Executor(primitives)
    executor.warm_up()
    with pytest.raises(EngineError, match="grammars cannot be held"):
        executor.grammar_create('{"type": "object"}')


class Panicking:
    """A native matcher one of whose calls panics."""

    def __init__(self, native: Any, call: str) -> None:
        self._native, self._call = native, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise panic()
        return getattr(self._native, name)


@pytest.mark.parametrize(
    "call", ["unsafe_compute_mask_ptr", "is_error", "is_stopped", "consume_token", "deep_copy", "is_accepting"]
)
def test_a_matcher_that_panicked_allows_nothing(call: str) -> None:
    matcher = GrammarCompiler(vocabulary()).schema('{"type": "null"}').matcher()
    matcher._native = Panicking(matcher._native, call)
    forked: Matcher = matcher.fork()
    matcher.mask()
    matcher.consume(ord("n"))
    assert not matcher.finished and not matcher.accepting
    assert matcher.error == "the compiler panicked"
    if call == "deep_copy":
        assert forked.error == matcher.error  # and else it has a native side of its own
    for one in (matcher, matcher.fork()):
        assert not allowed(one) and not one.consume(ord("n")) and not one.consume(EOS)


def test_what_is_no_panic_comes_out() -> None:
    matcher = GrammarCompiler(vocabulary()).schema('{"type": "null"}').matcher()

    class Interrupted:
        def is_error(self) -> bool:
            raise KeyboardInterrupt

    matcher._native = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        matcher.mask()
