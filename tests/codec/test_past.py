"""A turn appended to a session is what whole renders make of it, though only the last turns are rendered."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import Turn
from superfluid.codec.dialects import template as dialect
from superfluid.codec.dialects.dialect import ConversationRefused, DialectRefused
from superfluid.codec.framing import joined
from superfluid.codec.past import TURN, Past, Pasts, role_name
from superfluid.codec.protect import Conversation, render_protected
from superfluid.codec.resuming import Tracker
from superfluid.codec.template import ChatTemplate, TemplateFailed
from superfluid.link import events
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model

TEMPLATES = Path(__file__).resolve().parents[3] / "shared/data/chat_templates"
TEXTS = [
    "hi", "A longer text, of two sentences. It ends.", "", "  padded\n", "same", "same", "<think>hm</think>\n\nAnswer",
    "<think>cut", "</think>", "<|im_end|>", "ends in <", "> begins", "<tool_response>\nrain\n</tool_response>",
    "/no_think", "/nothink", "x <|eot_id|> y", "[INST]", "<|end|><|start|>assistant", "SUPERFLUIDSTANDIN0Z", "é\n\n",
]  # fmt: skip

Step = tuple[Any, ...]


@cache
def opened(name: str) -> Codec:
    if not TEMPLATES.exists():
        pytest.skip(f"no {TEMPLATES}")
    try:
        return Codec.open(model(name, lambda n: (TEMPLATES / f"{n}.jinja").read_text()), "template")
    except DialectRefused as refusal:
        pytest.skip(str(refusal))


texts = st.sampled_from(TEXTS)
calls = st.lists(
    st.sampled_from([("f", "{}"), ("clock", '{"tz": "<|im_end|>"}'), ("g", '{"a": 1, "b": [2]}')]), max_size=2
)
steps = st.one_of(
    st.tuples(st.just("message"), st.sampled_from([1, 1, 1, 0, 2, 3]), texts),
    st.tuples(st.just("reply"), texts, st.sampled_from(["", "", "I know.", "<|im_end|>"]), calls),
    st.tuples(st.just("result"), texts),
    st.tuples(st.just("chat"), st.integers(1, 6)),
    st.tuples(st.just("loop"), st.integers(1, 3)),
    st.tuples(st.just("dropped"), texts),
)


class Session:
    """A session that keeps its past, and whose appends are checked against those of one that keeps none."""

    def __init__(self, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codec = codec
        self.bodies: list[events.Body] = [events.Created(None, events.GenParams())]
        self.past = Past()
        self.monkeypatch = monkeypatch
        self.calls: list[int] = []
        self.compared = 0  # appends

    def _span(self, role: int, text: str) -> list[int] | str:
        def rendered(history: Any) -> list[int] | str:
            try:
                if role == 3:
                    return self.codec.tool_result_span(text, "f", history)
                return self.codec.message_span(role, text, history)
            except ConversationRefused as refusal:
                return str(refusal)

        self.past.add(self.bodies[self.past.n_events :])
        span = rendered(self.past)
        with self.monkeypatch.context() as patch:
            patch.setattr(dialect, "render_tails", lambda *_: None)
            whole = rendered(self.bodies)
        assert span == whole or (isinstance(span, list) and self._is_jinjas(span, Turn(role_name(role), text)))
        self.compared += 1
        return span

    def _is_jinjas(self, span: list[int], turn: Turn) -> bool:
        """Where protecting a whole conversation changes its text (stand-ins that do not fit), jinja2 has the word."""
        template, encoder, tokenizer = self.codec.template, self.codec.encoder, self.codec.tokenizer
        assert template is not None and isinstance(tokenizer, ByteTokenizer)
        grown = Conversation([*self.past.turns, turn])
        text, earlier = grown.render(template), Conversation(self.past.turns).render(template)
        protected = joined(render_protected(template, encoder, grown))
        anew = not text.startswith(earlier)
        return protected != text and (anew or text == earlier + tokenizer.spell(span))

    def step(self, kind: str, *values: Any) -> None:
        match kind, values:
            case "message", (role, text):
                if not isinstance(span := self._span(role, text), str):
                    self.bodies.append(events.Message(role, text, span))
            case "result", (text,):
                if self.calls and not isinstance(span := self._span(3, text), str):
                    self.bodies.append(events.ToolResult(self.calls.pop(0), text, span))
            case "dropped", (text,):  # refused by a rule after it was rendered
                self._span(1, text)
            case "reply", (text, reasoning, called):
                self.bodies.append(events.GenerationPrompt([1]))
                if reasoning:
                    self.bodies.append(events.Generated([2], reasoning, 1, 0))
                self.bodies.append(events.Generated([2], text, 0, 1))
                for name, arguments in called:
                    self.calls.append(len(self.bodies))
                    self.bodies.append(events.ToolUse(name, arguments))
            case "chat", (turns,):
                for turn in range(turns):
                    self.step("message", 1, f"Question {turn}?")
                    self.step("reply", f"Answer {turn}.", "", [])
            case "loop", (turns,):
                self.step("message", 1, "Find out.")
                for turn in range(turns):
                    self.step("reply", "", f"I think {turn}.", [("f", '{"n": 1}')])
                    self.step("result", f"result {turn}")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=2, max_size=10))
def test_a_turn_is_what_whole_renders_make_of_it(name: str, script: list[Step]) -> None:
    codec = opened(name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        session = Session(codec, monkeypatch)
        for step in script:
            session.step(*step)
        assert session.compared >= sum(step[0] in ("message", "dropped", "chat", "loop") for step in script)


# -- templates that look further than to their last turn


LOOK, SAY = "{% for m in messages %}[{{ m.role }}]", "{{ m.content }}{% endfor %}"
TWISTS = {
    "counts": LOOK + "{{ messages | length }}" + SAY,
    "counts late": LOOK + "{% if loop.index0 == 9 %}{{ messages | length }}{% endif %}" + SAY,
    "from the end": LOOK + "{{ loop.revindex }}" + SAY,
    "last": LOOK + "{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}",
    "looks ahead": LOOK + "{{ loop.nextitem.role if not loop.last }}{{ loop.previtem.role if not loop.first }}" + SAY,
    "two ahead": LOOK + "{% set t = messages[loop.index0 + 2] %}{{ t.role if t }}" + SAY,
    "the last one's text": LOOK + "{{ messages[-1].content if m.role == 'system' }}" + SAY,
    "every seventh": "{% set ns = namespace(n=0) %}" + LOOK
    + "{% set ns.n = ns.n + 1 %}{% if ns.n % 7 == 0 %}seven {{ ns.n }}{% endif %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "remembers a text": "{% set ns = namespace(t='') %}" + LOOK
    + "{% if m.role == 'system' %}{% set ns.t = m.content %}{% endif %}{{ ns.t }}" + SAY + "<{{ ns.t }}>",
    "remembers texts": "{% set ns = namespace(l=[]) %}" + LOOK
    + "{% set ns.l = ns.l + [m.role] %}{{ ns.l | join if m.role == 'tool' }}" + SAY,
    "appends": "{% set ns = namespace(l=[]) %}" + LOOK + "{% set _ = ns.l.append(m.role) %}" + SAY
    + "{{ ns.l | join }}",
    "appends outside": "{% set l = [] %}" + LOOK + "{% set _ = l.append(m.role) %}{{ l | join }}" + SAY,
    "two of one list": "{% set l = [] %}{% set ns = namespace(l=l) %}" + LOOK
    + "{% set _ = ns.l.append(m.role) %}{{ l | join }}" + SAY,
    "changes a message": LOOK + "{% set _ = m.update({'role': 'x'}) %}{{ m.role }}" + SAY,
    "keeps a namespace": "{% set ns = namespace(n=none) %}" + LOOK
    + "{% set ns.n = namespace(r=m.role) %}{{ ns.n.r }}" + SAY,
    "a name that grows": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}" + LOOK
    + "{% if m.role == 'tool' %}{{ users | length }}{% endif %}" + SAY,
    "a macro that looks": "{% set last = messages[-1].role %}{% macro f(m) %}{{ last }}{{ m.content }}{% endmacro %}"
    + LOOK     + "{{ f(m) }}{% endfor %}",
    "a macro that sets": "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{% endmacro %}" + LOOK
    + "{{ f() }}{{ ns.n % 5 }}" + SAY,
    "which namespace": "{% if messages[-1].role == 'user' %}"
    "{% set a = namespace(v='a') %}{% set b = namespace(v='b') %}"
    "{% else %}{% set b = namespace(v='b') %}{% set a = namespace(v='a') %}{% endif %}" + LOOK
    + "{{ a.v }}{% set b.v = b.v ~ '.' %}{{ b.v }}" + SAY,
    "compares": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + LOOK
    + "{% if loop.index0 >= ns.last %}new{% endif %}{% if ns.last == 4 %}four{% endif %}" + SAY,
    "compares in odd ways": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + LOOK
    + "{% if ns.last != 6 and 3 < ns.last %}b{% endif %}{% if ns.last > loop.index0 - 4 %}c{% endif %}"
    "{% if ns.last <= 3.5 %}d{% endif %}" + SAY,
    "stops": LOOK + "{{ m.content }}{% if m.content == 'same' %}{% break %}{% endif %}{% endfor %}",
    "skips": LOOK + "{% if m.content == 'same' %}{% continue %}{% endif %}" + SAY,
    "changed": LOOK + "{% if loop.changed(m.role) %}!{% endif %}" + SAY,
    "cycles": LOOK + "{{ loop.cycle('a', 'b', 'c') }}" + SAY,
    "its own loop": LOOK + "{% for c in m.content %}{{ loop.index }}{{ 'x' if loop.last }}{% endfor %}{% endfor %}",
    "scans ahead": LOOK + "{% for n in messages[loop.index:] %}"
    "{% if n.role == 'tool' %}{{ n.role }}{% break %}{% endif %}{% endfor %}" + SAY,
    "a set of its own": "{% set t = 'outer' %}" + LOOK
    + "{{ t }}{% if m.role == 'user' %}{% set t = 'inner' %}{% endif %}{{ t }}{{ m.content }}{% endfor %}{{ t }}",
    "captured": "{% set all %}" + LOOK + "{{ m.content }}{% endfor %}{% endset %}{{ all | length }}{{ all }}",
    "twice": LOOK + "{{ m.content }}{% endfor %}--" + LOOK + SAY,
    "quotes the first": LOOK + "{{ m.content }}{% endfor %}({{ messages[0].content }})",
    "as one value": "{{ messages | tojson }}",
    "compared as one": LOOK + "{{ m.content }}{% endfor %}{{ messages == [] }}",
    "contains": LOOK + "{{ messages[0] in messages }}" + SAY,
    "odd attributes": LOOK + "{{ messages.size }}{{ loop.number }}{{ loop.tracker }}" + SAY,
    "slices": LOOK + "{{ messages[1:3] | length }}{{ messages[:-1] | length }}" + SAY,
    "filtered": "{% for m in messages if m.role != 'tool' %}[{{ loop.index }}{{ m.role }}]" + SAY,
    "backwards": "{% for m in messages[::-1] %}[{{ m.role }}]" + SAY,
    "the prompt changes it": LOOK + "{{ 'p' if add_generation_prompt }}" + SAY,
}  # fmt: skip


@cache
def twisted(source: str) -> Codec:
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer = ByteTokenizer(["</s>", "<|im_end|>", "<think>", "</think>"], eos="</s>", templates={None: source})
    return Codec.open(tokenizer, "template")


@pytest.mark.parametrize("twist", TWISTS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=4, max_size=10))
def test_whatever_a_template_looks_at(twist: str, script: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        session = Session(twisted(TWISTS[twist]), monkeypatch)
        for step in script:
            session.step(*step)
        assert session.compared >= sum(step[0] in ("message", "dropped", "chat", "loop") for step in script)


@pytest.mark.parametrize("twist", TWISTS)
def test_what_is_left_out_is_the_same_text(twist: str) -> None:
    """Renders of a growing conversation, each from what the one before it left."""
    template = ChatTemplate(TWISTS[twist])
    roles = ["system", *["user", "assistant", "tool"] * 7]
    messages = [{"role": role, "content": "same" if n == 17 else f"text {n}"} for n, role in enumerate(roles)]
    states: Any = ()
    before: list[dict[str, Any]] = []
    for n in (9, 10, 14, 15, 17, 18, 19, 22):
        grown = [dict(message) for message in messages[:n]]
        whole = template.render(grown)
        try:
            render = template.render_on(Tracker(grown, states, len(before)))
        except TemplateFailed:
            assert grown == messages[:n] and twist in {
                "appends outside", "two of one list", "changes a message", "keeps a namespace", "changed",
                "as one value", "compared as one", "contains", "odd attributes",
            }  # fmt: skip
            return
        assert whole.startswith(render.parts[0]) and whole.endswith(render.tail)
        if states:
            full = template.render_on(Tracker(grown))
            assert full.parts == (whole,)
            earlier = template.render_on(Tracker(before, states, len(before), dict(render.skipped)))
            if render.continues(earlier):
                left_out = len(whole) - len("".join(render.parts))
                assert left_out == len(template.render(before)) - len("".join(earlier.parts))
        states, before = render.states, grown


def test_pasts_are_kept_up_to_a_size() -> None:
    pasts = Pasts(most=4 * TURN + 10)
    for session in (1, 2, 3):
        past = pasts.take(session)
        past.add([events.Message(1, "four", [1])])
        pasts.give(session, past)
    assert [pasts.take(session).n_events for session in (1, 2, 3)] == [0, 1, 1]
    assert pasts.take(2).n_events == 0  # a past that was taken is another's
    pasts.give(4, Past([events.Message(1, "x", [1])]))
    pasts.forget(4)
    assert pasts.take(4).n_events == 0


# -- results of calls made at once


REFUSES = {  # calls at once, or any
    "google-gemma-2-2b-it": "roles must alternate",
    "meta-llama-Llama-3.1-8B-Instruct": "single tool-calls",
    "meta-llama-Llama-3.2-3B-Instruct": "single tool-calls",
    "microsoft-Phi-3.5-mini-instruct": "knows no results",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "asks for an answer at every end",
}


ANEW = {  # the calls' turn is opened differently once a result follows
    "Qwen-Qwen3-0.6B": "<|im_start|>user\n<tool_response>\nIT RAINS\n</tool_response><|im_end|>\n",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSES])
def test_each_result_stands_under_its_own_call(name: str) -> None:
    codec = opened(name)
    tokenizer, template = codec.tokenizer, codec.template
    assert isinstance(tokenizer, ByteTokenizer) and template is not None
    bodies: list[events.Body] = [
        events.Message(1, "hi", codec.message_span(1, "hi")),
        events.GenerationPrompt([1]),
        events.Generated([2], "", 2, 1),
        events.ToolUse("rain", '{"c": "A"}'),
        events.ToolUse("sun", '{"c": "B"}'),
    ]

    def spoken(call: int, tool: str, text: str) -> str:
        span = codec.tool_result_span(text, tool, bodies, call)
        bodies.append(events.ToolResult(call, text, span))
        return tokenizer.spell(span)

    def added(before: list[Turn], turn: Turn) -> str | None:
        """What a whole render has more; None where it begins differently."""
        earlier, grown = (Conversation(turns).render(template) for turns in (before, [*before, turn]))
        if not codec.append_stable:  # what it ends with goes again
            asked = Conversation([*before, turn], generation=True).render(template)
            grown = grown[: next((i for i, (a, b) in enumerate(zip(grown, asked, strict=False)) if a != b), len(grown))]
        return grown.removeprefix(earlier) if grown.startswith(earlier) else None

    calling = Past(bodies).turns
    of_rain = Turn("tool", "IT RAINS", call_id="3", name="rain")
    of_sun = Turn("tool", "IT SHINES", call_id="4", name="sun")
    assert spoken(3, "rain", "IT RAINS") == (added(calling, of_rain) or ANEW[name])
    second = added([*calling, of_rain], of_sun)
    if second is None:  # results are one block to the template, and the stream has closed it: another one
        second = added(calling, of_sun) or ANEW[name].replace("RAINS", "SHINES")
    assert spoken(4, "sun", "IT SHINES") == second
