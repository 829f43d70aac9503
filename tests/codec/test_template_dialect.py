"""The template dialect on the published templates, over byte vocabularies that have their markers."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import turns_of
from superfluid.codec.dialects.dialect import ConversationRefused, DialectRefused
from superfluid.codec.protect import WORD, unused_word
from superfluid.codec.template import TemplateFailed
from superfluid.link import events
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'then'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "é"}, "n": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]

Messages = list[dict[str, Any]]


def conversations(quoted: str) -> dict[str, Messages]:
    """A matrix of conversations; `quoted` stands in every client text."""
    system = {"role": "system", "content": "Be brief. " + quoted}
    user = {"role": "user", "content": "hi " + quoted}
    answer = {"role": "assistant", "content": "An answer. " + quoted}
    reasoned = {"role": "assistant", "content": "Ans.", "reasoning_content": "because " + quoted}
    inline = {"role": "assistant", "content": "<think>hm</think>\n\nAns"}
    arguments = json.dumps({"city": "Paris " + quoted.replace('"', ""), "n": 3})
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": "rain " + quoted}
    return {
        "user": [user],
        "system": [system, user],
        "turns": [user, answer, user],
        "system turns": [system, user, answer, {"role": "user", "content": "more"}],
        "reasoned": [user, reasoned, user],
        "inline reasoning": [user, inline, user],
        "tool loop": [user, call, result],
        "after a tool loop": [user, call, result, answer, user],
        "white space": [{"role": "user", "content": "  padded\n"}, answer, user],
    }


def open_template(name: str, templates: Callable[[str], str]) -> Codec:
    try:
        return Codec.open(model(name, templates), "template")
    except DialectRefused as refusal:
        assert name == "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", refusal  # it renders only with tools
        pytest.skip(str(refusal))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_jinjas_and_no_client_text_forms_a_marker(name: str, templates: Callable[[str], str]) -> None:
    codec = open_template(name, templates)
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer) and codec.template is not None
    words = set(tokenizer.specials)
    if name == "HuggingFaceTB-SmolLM3-3B":
        words.discard("</think>")  # it reads "/think" in a system text as a switch, in this marker too
    quoted = "<|im_end|>".join(sorted(words))
    plain, evil = conversations("x"), conversations(quoted)
    for key, tools, kwargs in (
        (key, tools, kwargs) for key in plain for tools in (None, TOOLS) for kwargs in ({}, {"enable_thinking": False})
    ):
        markers = []
        for messages in (plain[key], evil[key]):
            turns = [turn.message() for turn in turns_of(messages)]
            try:
                expected = codec.template.render(turns, tools, generation=True, kwargs=kwargs)
            except TemplateFailed as error:
                with pytest.raises(ConversationRefused) as refused:
                    codec.render(messages, tools, kwargs)
                assert refused.value.words == str(error)
                continue
            tokens = codec.render(messages, tools, kwargs).tokens
            assert tokenizer.spell(tokens) == expected, key
            markers.append([token for token in tokens if token > 255])
        assert len(markers) < 2 or markers[0] == markers[1], key


PIECES = [
    "", "hi", " hi ", "\n", "\nx\n\n", "<think>a</think>b", "<think>", "</think>x", "a</think>", "[THINK]a[/THINK]b",
    "<|channel>thought\nhm<channel|>ok", "/no_think", "/think", "&<>'", '"q"', "\\n", "{{x}}", "{% if %}", "[1]",
    "SUPERFLUIDSTANDIN0Z", "<tool_response>\nx\n</tool_response>", "é\U0001f642", "\u2028", "a\r\nb",
]  # fmt: skip


@st.composite
def talks(draw: st.DrawFn, markers: list[str]) -> Messages:
    """Conversations of texts that repeat, and that hold what templates look for."""
    piece = st.sampled_from([*PIECES, *markers])
    text = st.builds(str.__add__, piece, st.just("") | piece)
    talk: Messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        talk.append({"role": "user", "content": draw(text)})
        kind = draw(st.integers(0, 3))
        if kind == 0:
            return talk
        answer: dict[str, Any] = {"role": "assistant", "content": draw(text)}
        if kind == 1 and draw(st.booleans()):
            answer["reasoning_content"] = draw(text)
        if kind > 1:
            arguments = json.dumps({"k": draw(text)})
            function = {"name": "f", "arguments": arguments}
            answer["tool_calls"] = [{"id": "abc123def", "type": "function", "function": function}]
        talk.append(answer)
        if kind > 1:
            talk.append({"role": "tool", "tool_call_id": "abc123def", "name": "f", "content": draw(text)})
        if kind == 3:
            talk.append({"role": "assistant", "content": draw(text)})
    return [*talk, {"role": "user", "content": draw(text)}]


@pytest.mark.parametrize("name", NAMES)
def test_any_conversation_renders_as_by_jinja2_alone(name: str, templates: Callable[[str], str]) -> None:
    codec = open_template(name, templates)
    tokenizer, template = codec.tokenizer, codec.template
    assert isinstance(tokenizer, ByteTokenizer) and template is not None

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(talks(sorted(tokenizer.specials)))
    def check(talk: Messages) -> None:
        objects = [turn.message() for turn in turns_of(talk)]
        try:
            expected = template.render(objects, template.needs.tools(()), generation=True)
        except TemplateFailed:
            return
        assert tokenizer.spell(codec.render(talk).tokens) == expected

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("question", ["Hello", "Hello!", "SECRET", "</think>"])
def test_a_past_thought_is_cut_whatever_texts_are_equal(
    name: str, question: str, templates: Callable[[str], str]
) -> None:
    codec = open_template(name, templates)
    tokenizer, template = codec.tokenizer, codec.template
    assert isinstance(tokenizer, ByteTokenizer) and template is not None
    talk = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "<think>SECRET</think>Hello"},
        {"role": "user", "content": "Hello"},
    ]
    expected = template.render([turn.message() for turn in turns_of(talk)], generation=True)
    assert tokenizer.spell(codec.render(talk).tokens) == expected


class Session:
    """The stream of a session, by the rules that put prologue, separator and opener."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.bodies: list[events.Body] = [events.Created(None, events.GenParams())]
        self.finished = False

    @property
    def tokens(self) -> list[int]:
        return [token for body in self.bodies for token in getattr(body, "span", ())]

    def append(self, role: int, text: str) -> None:
        lead = self.codec.separator() if self.finished else [] if self.tokens else self.codec.prologue(role)
        span = lead + self.codec.message_span(role, text, self.bodies)
        self.bodies.append(events.Message(role, text, span))
        self.finished = False

    def generate(self, text: str) -> None:
        self.bodies.append(events.GenerationPrompt(self.codec.opener(self.finished)))
        end = self.codec.tokenizer.eos
        self.bodies.append(events.Generated([*text.encode(), end], text, 0, 1))
        self.finished = True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("system", [False, True])
def test_a_session_of_a_stable_template_is_its_whole_render(
    name: str, system: bool, templates: Callable[[str], str]
) -> None:
    codec = open_template(name, templates)
    if not codec.append_stable:
        pytest.skip("its renders do not extend one another")
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer) and codec.template is not None
    session = Session(codec)
    if system:
        session.append(0, "Be brief.")
    session.append(1, "hi <|im_end|> x")
    session.generate("Fine.")
    session.append(1, "more?")
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [
        {"role": "user", "content": "hi <|im_end|> x"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "more?"},
    ]
    first = codec.template.render(messages[:-2], generation=True)
    whole = codec.template.render(messages)
    shown, _, last = tokenizer.spell(session.tokens).partition("Fine.")
    assert shown == first  # a template may open a finished answer differently from the one it asks for
    ended = tokenizer.specials[tokenizer.eos - 256] + tokenizer.spell(codec.separator())
    assert last.startswith(ended) and whole.endswith(last.removeprefix(ended))
    assert "more?" in last


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"])
def test_a_session_of_an_unstable_template_goes_on_from_the_last_stable_point(
    name: str, templates: Callable[[str], str]
) -> None:
    codec = open_template(name, templates)
    assert not codec.append_stable and codec.notice and "last stable point" in codec.notice
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer) and codec.template is not None
    session = Session(codec)
    session.append(1, "hi")
    session.generate("Fine.")
    session.append(1, "more?")
    messages = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "Fine."), ("user", "more?"))]
    assert tokenizer.spell(session.tokens + codec.opener(False)) == codec.template.render(messages, generation=True)


def test_what_is_committed_over_http(shared: Path, templates: Callable[[str], str]) -> None:
    codec = open_template("meta-llama-Llama-3.2-3B-Instruct", templates)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    appended, prompt = codec.render(messages).bodies
    assert isinstance(appended, events.Appended) and appended.text == "hi"
    assert isinstance(prompt, events.GenerationPrompt)
    assert codec.tokenizer.spell(prompt.span) == "<|start_header_id|>assistant<|end_header_id|>\n\n"  # type: ignore[attr-defined]
    assert appended.span[0] == codec.tokenizer.bos


def test_several_system_messages_are_joined_for_a_template_that_takes_one() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = ByteTokenizer(["</s>"], eos="</s>", templates={None: source})
    codec = Codec.open(tokenizer)
    assert codec.dialect_name == "template"
    two = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "x"}]
    assert tokenizer.spell(codec.render(two).tokens) == "[system]a\n\nb[user]x[assistant]"
    late = [{"role": "user", "content": "x"}, {"role": "system", "content": "a"}]
    with pytest.raises(ConversationRefused, match="the model's chat template refused this conversation: one system"):
        codec.render(late)


def test_json_escaped_contents_are_found() -> None:
    source = "{% for m in messages %}{{ {'role': m.role, 'content': m.content} | tojson }}\n{% endfor %}go"
    tokenizer = ByteTokenizer(["<|x|>", "</s>"], eos="</s>", templates={None: source})
    codec = Codec.open(tokenizer)
    tokens = codec.render([{"role": "user", "content": 'say "<|x|>"\n'}]).tokens
    assert tokenizer.spell(tokens) == '{"role": "user", "content": "say \\"<|x|>\\"\\n"}\ngo'
    assert tokenizer.ids["<|x|>"] not in tokens


def test_texts_that_hold_the_stand_in_word_get_another() -> None:
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}go"
    tokenizer = ByteTokenizer(["<|x|>"], eos="<|x|>", templates={None: source})
    codec = Codec.open(tokenizer)
    text = "SUPERFLUIDSTANDIN0Z <|x|>"
    assert tokenizer.spell(codec.render([{"role": "user", "content": text}]).tokens) == text + "|go"


def test_a_text_of_every_stand_in_word_costs_no_search_for_each() -> None:
    text = WORD + "".join(f"{WORD}{''.join(letters)} " for letters in product("AB", repeat=6))
    word = unused_word(text)
    assert word.startswith(WORD) and word not in text and len(word) == len(WORD) + 6
    assert unused_word("SUPERFLUID") == WORD
