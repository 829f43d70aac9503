"""Compiled grammars are kept for the next lane."""

from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor import grammar as module
from superfluid.engines.executor.grammar import GrammarCompiler
from superfluid.engines.primitives import Vocabulary

TOKENS = [*(bytes([i]) for i in range(256)), b"\xff<end>"]


def test_the_same_text_is_compiled_once() -> None:
    compiler = GrammarCompiler(Vocabulary(TOKENS, frozenset([256]), frozenset([256])))
    schema = '{"type":"integer"}'
    grammar = compiler.schema(schema)
    one, other = grammar.matcher(), compiler.schema(schema).matcher()
    assert compiler.schema(schema) is grammar
    assert one.consume(ord("7"))
    assert one.accepting
    assert not other.accepting  # lanes go their own ways
    tag = '{"type":"const_string","value":"x"}'
    assert compiler.structural(tag) is compiler.structural(tag)
    for n in range(module.KEPT):
        compiler.schema(f'{{"const":{n}}}')
    assert compiler.schema(schema) is not grammar
    assert len(compiler._kept) == module.KEPT


def test_no_schema_brings_the_worker_down() -> None:
    compiler = GrammarCompiler(Vocabulary(TOKENS, frozenset([256]), frozenset([256])))
    deep = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
    odd = ['{"properties":7}', '{"type":{"a":[]}}', '{"enum":{}}', '{"$ref":7}', '{"const":"\\ud800"}', "[]", '"x"', ""]
    for text in [deep, '{"properties":{"a":' * 400 + "{}" + "}}" * 400, *odd]:
        try:
            compiler.schema(text)
        except EngineError as error:
            assert error.status == Status.RejectBadStruct
        tag = f'{{"type":"json_schema","json_schema":{text}}}'
        try:
            compiler.structural(tag)
        except EngineError as error:
            assert error.status in (Status.RejectBadStruct, Status.Unsupported)
