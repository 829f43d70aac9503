"""Structural tags on a real vocabulary: those of every wire compile on SmolLM2's 49 152 tokens, hold, and let the
model's own spelling of a call through; and atem's, on the byte vocabulary."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from superfluid.codec import harmony
from superfluid.codec.codec import Codec
from superfluid.codec.dialects import atem
from superfluid.codec.toolcalls.constraints import ConstraintUnsatisfiable, Lane, ToolChoice, plan
from superfluid.codec.toolcalls.tags import ATEM_FRAME, HarmonyTags
from superfluid.codec.toolcalls.typed import ToolSchemas
from superfluid.engines.engine import EngineError, Status
from superfluid.engines.executor.grammar import GrammarCompiler, Matcher
from superfluid.engines.executor.structural import MARKER_PREFIX
from superfluid.engines.primitives import Vocabulary
from superfluid.llama.vocab import Vocab
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model
from tests.codec.test_tags import TOOLS, UNFORCED, compiler, walk

REQUIRED, FREE = ToolChoice("required"), ToolChoice()
ARGUMENTS = {"city": "Paris, or so", "days": 3}
HARMONY = [
    harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.RETURN, harmony.CALL, harmony.CONSTRAIN
]  # fmt: skip
SPELLED = {
    "Qwen-Qwen3-0.6B": '\n{"name": "get_weather", "arguments": {"city": "Paris, or so", "days": 3}}\n',
    "GLM-4.6": "get_weather<arg_key>city</arg_key><arg_value>Paris, or so</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value>",
    "Qwen3-Coder": "\n<function=get_weather>\n<parameter=city>\nParis, or so\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n",
    "atem": '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris, or so</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n',
}


class Real:
    """SmolLM2's vocabulary with markers of our choice in the place of its special tokens."""

    def __init__(self, vocab: Vocab, markers: list[str]) -> None:
        self.vocab = vocab
        self.tokens = vocab.pieces(special=False)
        spare = [i for i, data in enumerate(self.tokens) if not data and not vocab.is_eog(i)]
        self.ids = dict(zip(markers, spare, strict=False))
        assert len(self.ids) == len(markers)
        for text, token in self.ids.items():
            self.tokens[token] = MARKER_PREFIX + text.encode()
        self.stops = frozenset(i for i in range(vocab.n_tokens) if vocab.is_eog(i))
        self.compiler = GrammarCompiler(
            Vocabulary(self.tokens, frozenset(self.ids.values()), self.stops, encode=self.encode)
        )

    def encode(self, text: str) -> list[int]:
        return self.vocab.encode(text, add_special=False, parse_special=False)

    def spell(self, text: str) -> list[int]:
        """As the model spells it: markers for themselves, the rest by its tokenizer."""
        out: list[int] = []
        while text:
            found = [(at, -len(marker), marker) for marker in self.ids if (at := text.find(marker)) >= 0]
            at, _, marker = min(found, default=(len(text), 0, ""))
            out += self.encode(text[:at]) if at else []
            out += [self.ids[marker]] if marker else []
            text = text[at + len(marker) :]
        return out


@pytest.fixture(scope="module")
def vocab(smollm2: Path) -> Vocab:
    return Vocab.open(smollm2)


def allowed(matcher: Matcher) -> set[int]:
    return set(np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))[0].tolist())


def atem_tokenizer(*more: str) -> ByteTokenizer:
    specials = ["<s>", *atem.MARKERS, *more]
    return ByteTokenizer(specials, silent=specials, bos="<s>", eos="<|eot|>")


def codec_of(name: str, templates: Callable[[str], str]) -> Codec:
    return Codec.open(atem_tokenizer(*ATEM_FRAME), "atem") if name == "atem" else Codec.open(model(name, templates))


@pytest.mark.parametrize("name", [*NAMES, "atem"])
def test_every_wire_is_held_on_a_real_vocabulary(name: str, templates: Callable[[str], str], vocab: Vocab) -> None:
    codec = codec_of(name, templates)
    wire, frame = codec.wire, ATEM_FRAME if name == "atem" else codec._frame()
    if wire.name in UNFORCED:  # it has nothing that a grammar could hold: a demanded call is refused, none is planned
        lane = Lane(wire, frame, None, None)
        with pytest.raises(ConstraintUnsatisfiable, match=f"on the wire {wire.name}|no tool-call grammar"):
            plan(lane, TOOLS, REQUIRED, True, None)
        assert plan(lane, TOOLS, FREE, True, None).attempts == ()
        return
    markers = HARMONY if wire.name == "harmony" else [marker for marker in frame or () if marker]
    if wire.name == "glm":
        markers += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    real = Real(vocab, markers)
    tags = HarmonyTags(real.ids) if wire.name == "harmony" else None
    for choice in (REQUIRED, FREE) if wire.auto_held else (REQUIRED,):
        attempts = plan(Lane(wire, frame, tags, None), TOOLS, choice, True, None).attempts
        assert attempts
        for attempt in attempts:
            make = real.compiler.structural if attempt.kind == "structural" else real.compiler.schema
            grammar = make(attempt.text)
            for seed in range(2):
                matcher, rng = grammar.matcher(), random.Random(seed)
                for _ in range(25):
                    choices = sorted(allowed(matcher))
                    assert choices
                    token = rng.choice(choices)
                    if token in real.stops:
                        break
                    assert matcher.consume(token)


@pytest.mark.parametrize("name", SPELLED)
def test_a_call_as_the_model_spells_it_passes(name: str, templates: Callable[[str], str], vocab: Vocab) -> None:
    codec = codec_of(name, templates)
    wire, frame, spelled = codec.wire, ATEM_FRAME if name == "atem" else codec._frame(), SPELLED[name]
    assert frame is not None
    real = Real(vocab, [*frame, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    attempt = plan(Lane(wire, frame, None, None), TOOLS, REQUIRED, True, None).attempts[0]
    matcher = real.compiler.structural(attempt.text).matcher()
    for token in real.spell(frame[0] + spelled + frame[1]):
        assert token in allowed(matcher), real.tokens[token]
        assert matcher.consume(token)
    assert matcher.accepting
    (call,) = wire.read(spelled, ToolSchemas(TOOLS)) or []
    assert (call.name, json.loads(call.arguments_json)) == ("get_weather", ARGUMENTS)


# ---- atem

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"enum": ["x", 1]}, "c": {"type": ["null", "integer"]}},
    "required": ["a"],
}
ONE = [{"type": "function", "function": {"name": "files.read", "parameters": PARAMETERS}}]


def test_the_atem_tag_is_exact() -> None:
    codec = Codec.open(atem_tokenizer(*ATEM_FRAME), "atem")

    def const(text: str) -> Any:
        return {"type": "const_string", "value": text}

    def parameter(key: str, value: Any) -> Any:
        opening, closing = const(f'<atem:parameter name="{key}">'), const("</atem:parameter>\n")
        return {"type": "sequence", "elements": [opening, value, closing]}

    text = r"[A-Za-z0-9_.:/=@+,(){}\[\]!?'-][A-Za-z0-9 _.:/=@+,(){}\[\]!?'-]*"
    content = {
        "type": "sequence",
        "elements": [
            const('\n<atem:invoke name="files.read">\n'),
            parameter("a", {"type": "regex", "pattern": text}),
            {"type": "optional", "content": parameter("b", {"type": "or", "elements": [const("x"), const("1")]})},
            {"type": "optional", "content": parameter("c", {"type": "regex", "pattern": "-?[0-9]+"})},
            const("</atem:invoke>\n"),
        ],
    }
    for choice, forced in ((REQUIRED, True), (FREE, False)):
        (attempt,) = codec.constraint(ONE, choice).attempts  # no schema of a call: its calls are not JSON
        assert json.loads(attempt.text) == {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": [ATEM_FRAME[0]],
                "tags": [{"type": "tag", "begin": ATEM_FRAME[0], "content": content, "end": ATEM_FRAME[1]}],
                "at_least_one": forced,
                "stop_after_first": forced,
            },
        }


def test_atem_calls_hold_and_read_back() -> None:
    tokenizer = atem_tokenizer(*ATEM_FRAME)
    codec = Codec.open(tokenizer, "atem")
    (attempt,) = codec.constraint(TOOLS, REQUIRED).attempts
    grammar = compiler(tokenizer).structural(attempt.text)
    read = 0
    for seed in range(12):
        tokens = walk(grammar.matcher(), tokenizer.stop_ids, random.Random(seed), "</atem:parameter>\n")
        if tokens is None:
            continue
        runs = codec.forced_router().commit(tokens, True)
        raw = "".join(run.text for run in runs)
        (call,) = codec.read_call(raw, TOOLS) or []
        assert call.name in ("get_weather", "clock")
        arguments = json.loads(call.arguments_json)
        if call.name == "get_weather":
            assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
        else:
            assert arguments == {}
        read += 1
    assert read >= 4


def test_atem_without_its_markers_as_tokens_is_not_held() -> None:
    """A trigger that is plain text holds nothing: a free choice runs free, a demanded call is refused."""
    tokenizer = atem_tokenizer()
    codec = Codec.open(tokenizer, "atem")
    for choice in (REQUIRED, FREE):
        constraint = codec.constraint(TOOLS, choice)
        assert (constraint.refusal is not None) == choice.forced
        with pytest.raises(EngineError) as caught:
            compiler(tokenizer).structural(constraint.attempts[0].text)
        assert caught.value.status == Status.Unsupported
