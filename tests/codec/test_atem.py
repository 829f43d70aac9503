"""The atem dialect, to the byte; its definitions by what they must convey."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from superfluid.codec.channels import REASONING, TEXT, TOOL_CALL
from superfluid.codec.codec import Codec
from superfluid.codec.dialects import atem
from superfluid.codec.dialects.dialect import ConversationRefused, DialectRefused
from superfluid.link import digests, events
from tests.codec.byte_tokenizer import ByteTokenizer

SPECIALS = ["<s>", *atem.MARKERS, "<|im_end|>"]


def tokenizer(**kwargs: Any) -> ByteTokenizer:
    return ByteTokenizer(SPECIALS, silent=SPECIALS, eos="<|eot|>", **kwargs)


@pytest.fixture
def codec() -> Codec:
    return Codec.open(tokenizer(bos="<s>", auto_bos=True), "atem")


def spell(codec: Codec, tokens: Sequence[int]) -> str:
    assert isinstance(codec.tokenizer, ByteTokenizer)
    return codec.tokenizer.spell(tokens)


def function(name: str, description: str | None = None, parameters: Any = None) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name}
    if description is not None:
        made["description"] = description
    if parameters is not None:
        made["parameters"] = parameters
    return {"type": "function", "function": made}


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "files.read", "arguments": '{"path": "/a <b>", "n": [1, 2]}'}},
    {"id": "2", "type": "function", "function": {"name": "clock", "arguments": ""}},
]


def test_a_conversation_over_http(codec: Codec) -> None:
    messages = [
        {"role": "developer", "content": "Be <|eot|> brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "beside the calls", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "name": "other", "content": "x"},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": "It is noon."},
    ]
    rendered = codec.render(messages)
    assert spell(codec, rendered.tokens) == (
        '<s><|start|>system<|message|>Be <|eot|> brief.\n\nReasoning strength: high.\n\n# Valid recipients: "self", '
        '"user".<|eot|>'
        "<|start|>user<|message|>hi<|eot|>"
        '<|start|>assistant to=files.read<|message|><atem:function_calls>\n<atem:invoke name="files.read">\n'
        '<atem:parameter name="path">/a <b></atem:parameter>\n<atem:parameter name="n">[1,2]</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|>"
        '<|start|>assistant to=clock<|message|><atem:function_calls>\n<atem:invoke name="clock">\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
        '<|start|>tool clock<|message|><tool_output name="clock">\nnoon\n</tool_output><|eot|>'
        '<|start|>tool other<|message|><tool_output name="other">\nx\n</tool_output><|eot|>'
        '<|start|>tool <|message|><tool_output name="">\ny\n</tool_output><|eot|>'
        "<|start|>assistant to=user<|message|>It is noon.<|eot|>"
        "<|start|>assistant"
    )
    assert [type(body) for body in rendered.bodies] == [events.Message] * 7 + [events.GenerationPrompt]
    end = codec.encoder.specials["<|eot|>"]
    assert rendered.tokens.count(end) == 7  # the quoted one is text


@pytest.mark.parametrize("with_bos", [True, False])
def test_the_first_span_begins_with_bos_on_every_route(with_bos: bool) -> None:
    codec = Codec.open(tokenizer(bos="<s>" if with_bos else None), "atem")
    bos = "<s>" if with_bos else ""
    assert spell(codec, codec.render([{"role": "user", "content": "x"}]).bodies[1].span) == (  # type: ignore[union-attr]
        bos + "<|start|>user<|message|>x<|eot|>"
    )
    assert spell(codec, codec.render([]).tokens) == bos + "<|start|>assistant"
    for role in (0, 1):
        assert spell(codec, codec.prologue(role)) == bos
    assert codec.message_span(1, "x")[:1] == [codec.encoder.specials["<|start|>"]]
    assert codec.separator() == []
    assert codec.opener(True) == codec.opener(False, True) and spell(codec, codec.opener(False)) == "<|start|>assistant"


def test_session_turns_are_the_turns_over_http(codec: Codec) -> None:
    tools = [function("a.b", "d")]
    session = [
        *codec.prologue(0),
        *codec.system_span("S", tools),
        *codec.message_span(1, "q"),
        *codec.message_span(2, "a"),
        *codec.tool_result_span("r", "a.b"),
        *codec.opener(False),
    ]
    messages = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "tool", "name": "a.b", "content": "r"},
    ]  # fmt: skip
    assert codec.render(messages, tools).tokens == session
    with pytest.raises(ConversationRefused):
        codec.message_span(3, "r")


def test_the_system_turn_without_text(codec: Codec) -> None:
    assert codec.render([{"role": "user", "content": "x"}]).bodies[0] == events.Message(0, "", [])
    shown = spell(codec, codec.system_span(None, [function("f")]))
    assert shown.startswith(f"<|start|>system<|message|>{atem.DEFAULT_SYSTEM}\n\nReasoning strength: high.\n\n#")


def test_definitions_convey_what_they_must(codec: Codec) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    tools = [
        function("web.search", 'Finds "it" <|im_end|>', schema),
        function("clock"),
        function("web.open", ""),
        function("fs.read"),
    ]
    tokens = codec.system_span("S", tools)
    text = spell(codec, tokens)
    in_order = [
        "S\n\nReasoning strength: high.\n\n",
        "<atem:function_calls>\n<atem:invoke name=",
        "white space is kept",
        "lists and objects as JSON",
        "need not be valid XML",
        '// Tool metadata\n{"name": "web", "description": ""}\n{"name": "fs", "description": ""}\n',
        "// Function schemas\n",
        '{"name": "web.search", "description": "Finds \\"it\\" <|im_end|>", "parameters": '
        + json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        + '}\n{"name": "clock", "description": "", "parameters": {}}\n'
        '{"name": "web.open", "description": "", "parameters": {}}\n',
        "to=notes.save",
        "</atem:parameter>\n<atem:parameter name=",
        "bread\nmilk",
        "bare name",
        '\n\n# Valid recipients: "self", "web.*", "fs.*", "user".<|eot|>',
    ]
    at = -1
    for part in in_order:
        at = text.index(part, at + 1)
    assert codec.encoder.specials["<|im_end|>"] not in tokens
    assert (
        digests.fnv1a((atem.CALLING + atem.EXAMPLE).encode()) == 3987852998293545015
    )  # a change of wording changes prompts


def test_the_worked_example_reads_back(codec: Codec) -> None:
    calls = codec.read_call(atem.EXAMPLE.split("two lines:")[1])
    assert calls is not None
    assert [(call.name, json.loads(call.arguments_json)) for call in calls] == [
        ("notes.save", {"title": "Shopping", "text": "bread\nmilk"})
    ]


def ids(codec: Codec, text: str) -> list[int]:
    return codec.encoder.encode_framing(text)


REPLY = (
    " to=self<|message|>hm<|eom|><|start|>assistant to=files.read<|message|><atem:function_calls>\n"
    '<atem:invoke name="files.read">\n<atem:parameter name="path">/a</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done é<|start|>assistant<|message|>!<|eot|>"
)


def test_reading(codec: Codec) -> None:
    router = codec.router(open_tokens=codec.opener(False))
    stream = ids(codec, REPLY)
    runs = router.commit(stream, last=True)
    call = REPLY[REPLY.index("<atem:function") : REPLY.index("</atem:function_calls>") + 22]
    assert [(run.channel, run.text, run.closes) for run in runs] == [
        (REASONING, "hm", True), (TOOL_CALL, call, True), (TEXT, "Done é", False), (TEXT, "!", True)
    ]  # fmt: skip
    assert [token for run in runs for token in run.span] == stream
    assert codec.read_call(call) is not None and not router.ended


@given(st.lists(st.integers(1, 12), max_size=40))
def test_reading_does_not_depend_on_slices(cuts: list[int]) -> None:
    codec = Codec.open(tokenizer(), "atem")
    stream = ids(codec, REPLY)
    router = codec.router(open_tokens=codec.opener(False))
    texts: list[tuple[int, str]] = []
    ahead: list[tuple[Any, ...]] = []
    at = 0
    for size in [*cuts, len(stream)]:
        part = stream[at : at + size]
        at += size
        ahead += router.provisional(part)
        texts += [(run.channel, run.text) for run in router.commit(part)]
    for channel in (TEXT, REASONING, TOOL_CALL):
        said = "".join(text for where, text in texts if where == channel)
        whole = codec.router(open_tokens=codec.opener(False)).commit(stream)
        assert said == "".join(run.text for run in whole if run.channel == channel)
        if channel != TOOL_CALL:
            assert said == "".join(text for where, text, *_ in ahead if where == channel)


def test_where_an_open_turn_stands(codec: Codec) -> None:
    assert codec.start_channel(codec.opener(False)) == TEXT
    opened = [*codec.opener(False), *ids(codec, " to=self<|message|>thinking")]
    assert codec.start_channel(opened) == REASONING
    closed = codec.close_reasoning()
    assert closed is not None
    assert codec.start_channel([*opened, *closed]) == TEXT
    runs = codec.router(open_tokens=[*opened, *closed]).commit(ids(codec, "So"))
    assert [(run.channel, run.text) for run in runs] == [(TEXT, "So")]


def test_identity_and_refusal(codec: Codec) -> None:
    ids_of = codec.encoder.specials
    assert codec.codec_id == "atem" and codec.dialect_name == "atem"
    assert codec.dialect.markers() == [
        (ids_of["<|start|>"], ids_of["<|message|>"], 0), (ids_of["<|eom|>"], ids_of["<|eot|>"], 0)
    ]  # fmt: skip
    with pytest.raises(DialectRefused, match=r"--dialect atem refused: the vocabulary does not encode '<\|eom\|>'"):
        Codec.open(ByteTokenizer(["<|start|>", "<|message|>", "<|eot|>"]), "atem")
    named = Codec.open(tokenizer(templates={None: "{{ messages[0].content }}"}), "atem")
    assert named.codec_id == "atem" and named.effort.levels == [] and not named.supports_thinking
