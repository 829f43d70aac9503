import json
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.codec.blocks import block_text
from superfluid.codec.codec import Codec, ConstraintUnsatisfiable, UnknownDialect
from superfluid.codec.dialects.dialect import DialectRefused, NoChatDialect
from superfluid.link import events
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def spelled(codec: Codec, messages: list[dict[str, object]], tools: object = None, **kwargs: object) -> str:
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    return tokenizer.spell(codec.render(messages, tools, kwargs).tokens)  # type: ignore[arg-type]


def test_spans_of_a_recorded_conversation(shared: Path, scripted: Callable[[str], Codec]) -> None:
    codec = scripted("text_tool")
    checked = 0
    finished: set[int] = set()
    for line in (shared / "data/golden/session_conversation.jsonl").read_text().splitlines():
        exchange = json.loads(line)
        request, reply = exchange["request"], exchange["response"]
        if exchange["path"] == "/web/stream":
            finished.add(request["session"])
        name, fields = next(iter(request.items())) if isinstance(request, dict) else (request, {})
        if name not in ("AppendSystem", "AppendMessage", "AppendToolResult", "AppendBlock") or "Committed" not in reply:
            continue
        expected = next(iter(reply["Committed"]["event"]["body"].values()))["span"]
        if name == "AppendSystem":
            span = codec.system_span(fields["text"], [json.loads(tool) for tool in fields["tools"]])
        elif name == "AppendMessage":
            span = codec.message_span(fields["role"], fields["text"])
        elif name == "AppendToolResult":
            span = codec.tool_result_span(fields["content"])
        else:
            span = codec.message_span(fields["role"], block_text(fields["kind"], fields["payload"]))
        assert expected in (span, codec.separator() + span), request
        checked += 1
    assert checked == 9
    assert codec.opener(False) == [257, *b"assistant\n"]
    assert codec.opener(True) == [10, 257, *b"assistant\n"]


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"])
def test_tokens_are_those_of_the_models_own_template(templates: Callable[[str], str], name: str) -> None:
    source = templates(name)
    codec = Codec.open(chatml_tokenizer(source))
    assert codec.dialect_name == "chatml" and codec.template is not None
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "hi <|im_end|> there"}
    answer = {"role": "assistant", "content": "yes"}
    for messages in ([user], [system, user], [system, user, answer, user], [user, answer, system, user]):
        for tools in (None, [TOOL]):
            plain = codec.template.render(messages, tools, generation=True)
            assert spelled(codec, messages, tools) == plain
    rendered = codec.render([system, user])
    marker = codec.tokenizer.ids["<|im_end|>"]  # type: ignore[attr-defined]
    assert rendered.tokens.count(marker) == 2
    assert [type(body).__name__ for body in rendered.bodies] == ["Message", "Message", "GenerationPrompt"]


def test_the_system_message_comes_first_even_when_it_renders_nothing() -> None:
    codec = Codec.open(chatml_tokenizer())
    bodies = codec.render([{"role": "user", "content": "hi"}]).bodies
    assert bodies[0] == events.Message(0, "", [])
    assert codec.codec_id == "chatml"


def test_without_a_template_the_tools_block_is_qwens(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = spelled(codec, messages, [TOOL])
    own = spelled(Codec.open(chatml_tokenizer(templates("Qwen-Qwen2.5-7B-Instruct"))), messages, [TOOL])
    compact = json.dumps(TOOL, separators=(",", ":"))
    assert shown == own.replace(json.dumps(TOOL), compact)
    assert "system\n# Tools" in spelled(codec, messages[1:], [TOOL])


def test_past_calls_and_results() -> None:
    codec = Codec.open(chatml_tokenizer())
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  "<|im_end|>"}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"b": 1}}},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert spelled(codec, messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nLook.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a":  "<|im_end|>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b":1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = codec.render(messages).tokens
    ids = codec.tokenizer.ids  # type: ignore[attr-defined]
    assert tokens.count(ids["<|im_end|>"]) == 3 and tokens.count(ids["<tool_call>"]) == 2
    assert [body.role for body in codec.render(messages).bodies[:-1]] == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_steps_of_a_tool_loop_open_as_the_template_has_them(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer(templates("Qwen-Qwen3-0.6B")))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert "assistant\n<think>\n\n</think>\n\n<tool_call>" in spelled(codec, loop)
    assert "assistant\n<tool_call>" in spelled(codec, [*loop, {"role": "user", "content": "and?"}])


def test_thinking_is_switched_by_the_opener(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer(templates("Qwen-Qwen3-0.6B")))
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    openers = [tokenizer.spell(codec.opener(False, thinking)) for thinking in (None, True, False)]
    assert openers == ["<|im_start|>assistant\n"] * 2 + ["<|im_start|>assistant\n<think>\n\n</think>\n\n"]
    assert spelled(codec, [{"role": "user", "content": "x"}], enable_thinking=False).endswith(openers[2])
    assert codec.start_channel(tokenizer.encode("<|im_start|>assistant\n<think>\n")) == 1
    assert codec.start_channel(codec.opener(False, False)) == 0


def test_a_template_with_a_default_prompt_gives_the_prologue(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer(templates("Qwen-Qwen2.5-7B-Instruct")))
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.spell(codec.prologue(1)).startswith("<|im_start|>system\nYou are Qwen")
    assert codec.prologue(0) == []
    assert spelled(codec, [{"role": "user", "content": "x"}]).startswith(tokenizer.spell(codec.prologue()))


def test_markers_in_tools_and_system_text_stay_text(templates: Callable[[str], str]) -> None:
    codec = Codec.open(chatml_tokenizer(templates("Qwen-Qwen3-0.6B")))
    tool = {"type": "function", "function": {"name": "f", "description": "ends <|im_end|> here", "parameters": {}}}
    messages = [{"role": "system", "content": "a <|im_end|> b <|im_start|>"}, {"role": "user", "content": "x"}]
    assert codec.template is not None
    assert spelled(codec, messages, [tool]) == codec.template.render(messages, [tool], generation=True)
    tokens = codec.render(messages, [tool]).tokens
    assert tokens.count(codec.tokenizer.ids["<|im_end|>"]) == 2  # type: ignore[attr-defined]


def test_what_is_refused() -> None:
    with pytest.raises(UnknownDialect, match=r"unknown dialect 'x' \(chatml\|atem\|raw\|template\|auto\)"):
        Codec.open(chatml_tokenizer(), "x")
    with pytest.raises(DialectRefused, match=r"--dialect chatml refused: .*without <.im_start.>"):
        Codec.open(chatml_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"), "chatml")
    with pytest.raises(DialectRefused, match=r"--dialect chatml refused: .*im_start"):
        Codec.open(ByteTokenizer(), "chatml")
    with pytest.raises(DialectRefused, match="--dialect template refused: the model has no chat template"):
        Codec.open(ByteTokenizer(), "template")
    raw = Codec.open(ByteTokenizer())
    assert raw.dialect_name == raw.codec_id == "raw" and not raw.can_chat and raw.notice
    with pytest.raises(NoChatDialect, match="protocol: codec has no chat dialect"):
        raw.render([{"role": "user", "content": "x"}])
    picky = Codec.open(
        chatml_tokenizer(
            "{% if effort is defined %}{{ raise_exception('no effort') }}{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        )
    )
    with pytest.raises(ConstraintUnsatisfiable, match="constraint unsatisfiable: no effort"):
        picky.render([{"role": "user", "content": "x"}], None, {"effort": "high"})
