"""A turn's tokens wherever it stands: a stream's prologue is at its beginning alone, and an edit to the same text is
the same tokens."""

from collections.abc import Callable, Sequence

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.dialects.dialect import ConversationRefused, DialectRefused
from superfluid.link import events as ev
from superfluid.sessions import rules
from superfluid.sessions.rebase import replayed
from superfluid.sessions.state import new_state
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model

SYSTEM, USER, ASSISTANT, TOOL = ev.Role
Templates = Callable[[str], str]


class Session:
    """A session's bodies, by the rules that put prologue, separator and opener."""

    def __init__(self, codec: Codec, bodies: Sequence[ev.Body] = (ev.Created(None, ev.GenParams()),)) -> None:
        self.codec = codec
        self.state = new_state()
        self.bodies: list[ev.Body] = []
        for body in bodies:
            self.commit(body)

    def commit(self, body: ev.Body) -> None:
        self.state = self.state.after(ev.Event(len(self.bodies), 1, 0, body))
        self.bodies.append(body)

    def say(self, role: int, text: str) -> str:
        """A message; its tokens, spelled."""
        own = self.codec.message_span(role, text, self.bodies)
        span = [*rules.lead(self.state, self.codec, role), *own]
        self.commit(ev.Message(role, text, span))
        return self.spelled(span)

    def reply(self, text: str) -> None:
        self.commit(ev.GenerationPrompt(self.codec.opener(self.state.tail is rules.Tail.FINISHED_TURN)))
        self.commit(ev.Generated([*text.encode(), self.codec.tokenizer.eos], text, 0, 1))

    def raw(self, text: str = "raw text ") -> None:
        self.commit(ev.Appended(text, list(text.encode())))

    def edited(self, *edits: ev.Replace) -> "Session":
        events = [ev.Event(number, 1, 0, body) for number, body in enumerate(self.bodies)]

        def render(edit: ev.Replace, before: Sequence[ev.Body]) -> list[int]:
            return self.codec.message_span(edit.role, edit.text, before)

        first = edits[0].from_
        head = ev.Rebased(1, first, ev.GenParams(), list(edits))
        return Session(self.codec, [*self.bodies[:first], head, *replayed(events, edits, render, self.codec)])

    @property
    def tokens(self) -> list[int]:
        return [token for body in self.bodies for token in getattr(body, "span", ())]

    def spelled(self, tokens: Sequence[int]) -> str:
        assert isinstance(self.codec.tokenizer, ByteTokenizer)
        return self.codec.tokenizer.spell(tokens)


def opened(name: str, templates: Templates, dialect: str = "template") -> Codec:
    try:
        return Codec.open(model(name, templates), dialect)
    except DialectRefused as refusal:
        pytest.skip(str(refusal))


def talk(codec: Codec, *, system: bool) -> Session:
    session = Session(codec)
    if system:
        session.say(SYSTEM, "Be brief.")
    for role, text in [
        (USER, "A"),
        (ASSISTANT, "B"),
        (USER, "C"),
        (None, "D"),
        (USER, "E"),
        (SYSTEM, "F"),
        (USER, "G"),
    ]:
        try:
            session.reply(text) if role is None else session.say(role, text)
        except ConversationRefused:
            assert role == SYSTEM
    return session


def same_text(number: int, body: ev.Body) -> ev.Replace:
    assert isinstance(body, ev.Message)
    return ev.Replace(number, number + 1, body.role, body.text)


@pytest.mark.parametrize("system", [False, True], ids=["user first", "system first"])
@pytest.mark.parametrize("name", NAMES)
def test_an_edit_to_the_same_text_is_the_same_tokens(name: str, system: bool, templates: Templates) -> None:
    codec = opened(name, templates)
    try:
        session = talk(codec, system=system)
    except ConversationRefused as refusal:
        pytest.skip(str(refusal))
    messages = [(number, body) for number, body in enumerate(session.bodies) if isinstance(body, ev.Message)]
    assert len(messages) >= 5 + system
    for number, body in messages:
        assert session.edited(same_text(number, body)).tokens == session.tokens
    assert session.edited(*(same_text(number, body) for number, body in messages)).tokens == session.tokens


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_turn_is_as_if_it_had_been_said(name: str, templates: Templates) -> None:
    codec = opened(name, templates)
    for role, at in [(USER, 1), (ASSISTANT, 2), (USER, 3), (USER, 6)]:
        asked, said = (Session(codec) for _ in range(2))
        for one in (asked, said):
            for number, turn in enumerate([(USER, "A"), (ASSISTANT, "B"), (USER, "C"), None, (USER, "E")], 1):
                if turn is None:
                    one.reply("D")  # two events
                elif number + (number > 4) > at:
                    break
                else:
                    now = len(one.bodies) == at and one is said
                    one.say(turn[0], "Another <|im_end|> text" if now else turn[1])
        edited = asked.edited(ev.Replace(at, at + 1, role, "Another <|im_end|> text"))
        for one in (edited, said):
            one.reply("And so?")
            one.say(USER, "more")
        assert edited.tokens == said.tokens


def test_a_reply_is_edited(templates: Templates) -> None:
    codec = opened("Qwen-Qwen2.5-7B-Instruct", templates)
    session = Session(codec)
    session.say(USER, "A")
    session.reply("B")
    edited = session.edited(ev.Replace(2, 4, ASSISTANT, "C"))
    edited.reply("D")
    assert edited.spelled(edited.tokens) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n<|im_start|>assistant\nD<|im_end|>"
    )


def test_an_edited_first_turn_has_the_prologue_of_its_role(templates: Templates) -> None:
    for dialect in ("chatml", "template"):
        tokenizer = model("Qwen-Qwen2.5-7B-Instruct", templates)
        codec = Codec.open(tokenizer, dialect)
        said = {role: Session(codec) for role in (SYSTEM, USER)}
        for role in said:
            said[role].say(role, "A")
        for role, other in [(SYSTEM, USER), (USER, SYSTEM), (SYSTEM, SYSTEM), (USER, USER)]:
            session = Session(codec)
            session.say(role, "B")
            assert session.edited(ev.Replace(1, 2, other, "A")).tokens == said[other].tokens


# -- behind raw tokens

OWN = {  # of a user's turn and an assistant's
    "Apertus-8B-Instruct": ("<|user_start|>hi<|user_end|>", "<|assistant_start|>hi"),
    "GLM-4.6": ("<|user|>\nhi", "<|assistant|>\n<think></think>\nhi"),
    "Kimi-K2-Instruct": (
        "<|im_user|>user<|im_middle|>hi<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>hi<|im_end|>",
    ),
    "MiniMax-M2": ("]~b]user\nhi[e~[\n", "]~b]ai\nhi[e~[\n"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[INST]hi[/INST]", "hi</s>"),
    "Qwen-Qwen2.5-7B-Instruct": ("<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\nhi<|im_end|>\n"),
    "deepseek-ai-DeepSeek-V3.1": ("<｜User｜>hi", "<｜Assistant｜><think></think>hi<｜end▁of▁sentence｜>"),
    "google-gemma-2-2b-it": ("<start_of_turn>user\nhi<end_of_turn>\n", "<start_of_turn>model\nhi<end_of_turn>\n"),
    "meta-llama-Llama-3.1-8B-Instruct": (
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\nhi<|eot_id|>",
    ),
    "openai-gpt-oss-120b": (
        "<|start|>user<|message|>hi<|end|>",
        "<|start|>assistant<|channel|>final<|message|>hi",
    ),
    "poolside-Laguna-S-2.1": ("<user>hi</user>\n", "<assistant><think></think>hi</assistant>\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_turn_behind_raw_tokens_has_no_prologue(name: str, templates: Templates) -> None:
    codec = opened(name, templates)
    for role, own in zip((USER, ASSISTANT), OWN[name], strict=True):
        session = Session(codec)
        session.raw()
        assert session.say(role, "hi") == own


@pytest.mark.parametrize("name", NAMES)
def test_only_the_beginning_of_a_session_has_the_prologue(name: str, templates: Templates) -> None:
    codec = opened(name, templates)
    first = Session(codec)
    begun = first.say(USER, "hi")
    assert first.spelled(first.tokens) == begun

    def behind(*bodies: ev.Body) -> str:
        """The turn behind these."""
        session = Session(codec, [ev.Created(None, ev.GenParams()), *bodies])
        return session.say(USER, "hi")

    raw = ev.Appended("x", [120])
    own = behind(raw)
    assert own and begun.endswith(own)
    prologue = begun.removesuffix(own)
    assert codec.tokenizer.bos not in codec.tokenizer.encode(own)
    assert behind(raw, ev.Forked(1, 2, ev.GenParams())) == own  # in a branch
    assert behind(raw, ev.Block(USER, 4, "{}", [])) == own
    assert behind(ev.Block(USER, 4, "{}", [])) == begun
    reply = [ev.GenerationPrompt([121]), ev.Generated([122], "there", 0, 0)]
    for bodies in ([raw, *reply], [raw, reply[1]]):  # as HTTP leaves a session
        turn = behind(*bodies)
        assert turn.endswith(own) and not (prologue and prologue in turn)

    block = Session(codec)
    block.commit(ev.Block(USER, 6, '{"path": "p"}', codec.message_span(USER, "@p", block.bodies)))
    assert block.spelled(block.tokens) == prologue + own.replace("hi", "@p")

    session = Session(codec)
    session.raw()
    for role, text in [(USER, "hi"), (ASSISTANT, "there"), (USER, "and?")]:
        assert not (prologue and session.say(role, text).startswith(prologue))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "<|im_start|>system\nhi<|im_end|>\n"),
        ("HuggingFaceTB-SmolLM3-3B", None),  # knows a first one only
        ("meta-llama-Llama-3.2-3B-Instruct", "<|start_header_id|>system<|end_header_id|>\n\nhi<|eot_id|>"),
        ("deepseek-ai-DeepSeek-V3.1", "hi"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "[SYSTEM_PROMPT]hi[/SYSTEM_PROMPT]"),
        ("openai-gpt-oss-120b", "<|start|>developer<|message|># Instructions\n\nhi\n\n<|end|>"),
    ],
)
def test_a_system_turn_behind_raw_tokens(name: str, own: str | None, templates: Templates) -> None:
    codec = opened(name, templates)
    first, session = Session(codec), Session(codec)
    session.raw()
    turn = session.say(SYSTEM, "hi")
    assert turn == (first.say(SYSTEM, "hi") if own is None else own)


def test_a_result_behind_raw_tokens(templates: Templates) -> None:
    for name in ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"):
        codec = opened(name, templates)
        session = Session(codec)
        session.raw()
        turn = session.spelled(codec.message_span(TOOL, "IT RAINS", session.bodies))
        assert (
            turn
            == {
                "Qwen-Qwen2.5-7B-Instruct": "<|im_start|>user\n<tool_response>\nIT RAINS\n</tool_response><|im_end|>\n",
                "meta-llama-Llama-3.1-8B-Instruct": (
                    '<|start_header_id|>ipython<|end_header_id|>\n\n"IT RAINS"<|eot_id|>'
                ),
            }[name]
        )


def test_what_a_template_refuses_of_a_session_stays_refused(templates: Templates) -> None:
    codec = opened("google-gemma-2-2b-it", templates)
    session = Session(codec)
    session.say(USER, "hi")
    session.say(ASSISTANT, "there")
    with pytest.raises(ConversationRefused, match="must alternate"):
        session.say(ASSISTANT, "more")
    session = Session(codec)
    session.raw()
    with pytest.raises(ConversationRefused, match="System role not supported"):
        session.say(SYSTEM, "hi")
    session = Session(codec)
    session.say(USER, "hi")
    assert session.say(USER, "there") == "<start_of_turn>user\nthere<end_of_turn>\n"  # no second BOS


def test_a_template_that_wants_a_question_first() -> None:
    """The render of the session so far is refused, that of it with the turn is not."""
    source = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('ask') }}{% endif %}"
        "<|im_start|>system\nDefault.</s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = ByteTokenizer(["</s>", "<|im_start|>"], eos="</s>", templates={None: source})
    codec = Codec.open(tokenizer, "template")
    session = Session(codec)
    session.raw()
    session.commit(ev.Generated([122], "there", 0, 0))
    assert session.say(USER, "hi") == "<|im_start|>user\nhi</s>"
