"""Large patterns, tried: some that compile take more than a reply may cost at their first characters, which shows only
when they are matched."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from superfluid.codec.panics import is_panic
from superfluid.codec.schema_tree import SchemaRefused

Json = Any

COMPILER_LIMITS = {"max_items_in_row": 50_000, "step_max_items": 500_000, "step_lexer_fuel": 2_000_000}
"""What one mask may cost, as llguidance counts: its own limits end a lane at an object of some 500 optional properties.
"""
LARGE = 100  # states from which a pattern is tried
MOST_LARGE = 50  # in one schema: each may take some milliseconds
STEPS = 8
_STRINGS = ("pattern", "minLength", "maxLength", "format")  # keywords that are matched together
_EOS = 256


def try_string(schema: Mapping[str, Json], pattern: str) -> None:
    """Match the first characters of a string schema; `pattern` is its pattern as the client wrote it. Raises
    SchemaRefused."""
    asked = {"type": "string", **{key: schema[key] for key in _STRINGS if key in schema}}
    try:
        failed = _fails(json.dumps(asked))
    except BaseException as error:
        if not is_panic(error):
            raise
        failed = True
    if failed:
        raise SchemaRefused(f"the pattern {pattern[:80]!r} takes too much to be held: fewer counts within counts help")


def _fails(schema: str) -> bool:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**COMPILER_LIMITS)
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_json_schema(schema), log_level=0, limits=limits)
    if matcher.is_error() or not matcher.consume_token(ord('"')):
        return False  # that is told with the rest of the schema
    for _ in range(STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return True
        first = next((byte for byte in range(0x20, _EOS) if mask >> byte & 1 and byte != ord('"')), None)
        if first is None:
            break
        matcher.consume_token(first)
    return bool(matcher.is_error())


class _Bytes:
    """A tokenizer of single bytes."""

    eos_token_id, bos_token_id, special_token_ids = _EOS, None, [_EOS]
    tokens = [*(bytes([byte]) for byte in range(_EOS)), b"\xff<eos>"]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")
        return list(text.encode())


@cache
def _tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper  # 10 MB that a daemon without refusals never loads

    return LLTokenizer(TokenizerWrapper(_Bytes()), _EOS + 1, [_EOS], None)
