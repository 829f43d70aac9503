"""What the codec makes of every published template: `tests/data/templates.json`.

Run `python -m tests.codec.template_golden` to write it anew, and review what changed before committing it: a difference
in the template dialect is a bug, one in ChatML needs the rule of the codec's specification that makes it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import SandboxedEnvironment

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import Turn, normalized_tools, turns_of
from superfluid.codec.dialects.chatml import ChatMl
from superfluid.codec.dialects.dialect import ConversationRefused, DialectRefused
from superfluid.codec.dialects.template import PROBE, TemplateDialect, merged_systems
from superfluid.codec.past import Past
from superfluid.codec.tails import render_tails
from superfluid.codec.template import TemplateFailed
from superfluid.codec.toolcalls import learn as learning
from superfluid.link import events
from tests.codec.byte_tokenizer import ByteTokenizer
from tests.codec.template_models import NAMES, model

GOLDEN = Path(__file__).resolve().parents[1] / "data/templates.json"
CHANNELS = ("text", "reasoning", "tool call")
EXCERPT = 100  # characters of a difference that are shown

Json = Any

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
    },
    {
        "type": "function",
        "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def _message(role: str, content: Json, **more: Json) -> dict[str, Json]:
    return {"role": role, "content": content, **more}


def _calls(content: Json, *calls: tuple[str, str], **more: Json) -> dict[str, Json]:
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return _message("assistant", content, tool_calls=made, **more)


def _result(content: str, call: int = 0, name: str = "get_weather") -> dict[str, Json]:
    return _message("tool", content, tool_call_id=f"call0000{call}", name=name)


def conversations() -> dict[str, list[dict[str, Json]]]:
    """Of every kind that a template may treat in its own way."""
    system = _message("system", "Be brief.")
    user, more = _message("user", "Is it raining?"), _message("user", "And later?")
    answer = _message("assistant", "It is.")
    reasoned = _message("assistant", "It is.", reasoning_content="I know it.")
    weather = ("get_weather", '{"city": "Paris, \\"Île\\"", "n": 3}')
    call, both = _calls("", weather), _calls(None, weather, ("clock", "{}"))
    loop = [user, call, _result("rain")]
    return {
        "user": [user],
        "system": [system, user],
        "developer": [_message("developer", "Be brief."), user],
        "two systems": [system, _message("developer", "Be kind."), user],
        "turns": [user, answer, more],
        "system, turns": [system, user, answer, more, answer, user],
        "answer last": [user, answer],
        "empty answer": [user, _message("assistant", ""), more],
        "white space": [_message("user", "  padded\n"), _message("assistant", "\n answer \n"), more],
        "text parts": [_message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        "reasoned": [user, reasoned, more],
        "reasoned, last": [user, reasoned],
        "inline reasoning": [user, _message("assistant", "<think>\nhm\n</think>\n\nIt is."), more],
        "call": [user, call],
        "tool loop": loop,
        "system, tool loop": [system, *loop],
        "two steps": [*loop, call, _result("sun")],
        "text and call": [user, _calls("Let me see.", weather), _result("rain")],
        "reasoned call": [user, _calls("", weather, reasoning_content="I ask."), _result("rain")],
        "parallel calls": [user, both, _result("rain"), _result("noon", 1, "clock")],
        "after a loop": [*loop, answer, more],
        "loop again": [*loop, answer, more, call, _result("sun")],
    }


def cells() -> Iterator[tuple[str, list[dict[str, Json]], list[dict[str, Json]] | None, dict[str, Json]]]:
    """(name, messages, tools, kwargs) of the matrix."""
    for name, messages in conversations().items():
        for tools in (None, TOOLS):
            for thinking in (None, True, False):
                kwargs = {} if thinking is None else {"enable_thinking": thinking}
                said = [name, *(["tools"] if tools else []), *([f"thinking {thinking}".lower()] if kwargs else [])]
                yield " | ".join(said), messages, tools, kwargs


# -- jinja2 as the ecosystem's applications set it up, and nothing else


class _Generation(Extension):
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Refused(Exception):
    pass


def plain_jinja(source: str, bos: str, eos: str, today: datetime) -> Callable[..., str]:
    """`render(messages, tools, generation, kwargs)` by jinja2 alone; raises Refused with its words."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def tojson(value: Json, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def raise_exception(words: str) -> None:
        raise Refused(words)

    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=today.strftime)
    template = environment.from_string(source)

    def render(messages: Json, tools: Json, generation: bool, kwargs: Mapping[str, Json]) -> str:
        try:
            return template.render(
                **kwargs,
                messages=messages,
                tools=tools,
                add_generation_prompt=generation,
                bos_token=bos,
                eos_token=eos,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(str(error)) from error

    return render


# -- what a template gives


# Published with tokens for tool calls that its template leaves to the words of the system turn.
MORE_TOKENS = {"HuggingFaceTB-SmolLM3-3B": ["<tool_call>", "</tool_call>"]}


def describe(tokenizer: ByteTokenizer) -> dict[str, Json]:
    """The golden entry of one template."""
    codec = Codec.open(tokenizer)
    made: dict[str, Json] = {"dialect": codec.dialect_name}
    if not isinstance(codec.dialect, ChatMl):
        made["why not chatml"] = _refusal(lambda: Codec.open(tokenizer, "chatml"))
    if codec.template is None:
        made["without its template"] = _refusal(lambda: Codec.open(tokenizer, "template"))
    made["codec id"] = codec.codec_id
    made["append stable"] = codec.append_stable or _instability(codec)
    made["thinking"] = {
        "switch": codec.supports_thinking,
        **{
            f"opener, {said}": tokenizer.spell(codec.opener(False, thinking))
            for said, thinking in (("unset", None), ("on", True), ("off", False))
        },
    }
    made["effort"] = {"supported": codec.effort.supported, "levels": codec.effort.levels, "id": codec.effort.identity}
    made["tool wire"] = _wire(codec)
    made["channels"] = [
        [_text(codec, pair.open), _text(codec, pair.close), CHANNELS[pair.channel]]
        for pair in getattr(codec.dialect, "pairs", ())
    ]
    made["terminators"] = sorted(_text(codec, token) for token in codec.terminators)
    if isinstance(codec.dialect, ChatMl):
        made["openers in history"] = [codec.dialect.past_opener, codec.dialect.loop_opener]
        made["prologue"] = tokenizer.spell(codec.prologue(1))
    if isinstance(codec.dialect, TemplateDialect):
        made["turns rendered for one more"] = _appended(codec)
    if codec.template is not None:
        made["conversations"] = _compare(codec, tokenizer)
    return made


ROUNDS = 40  # of the session that turns are appended to


def _appended(codec: Codec) -> dict[str, Json]:
    """How many turns of a long session are rendered when one more is appended."""
    question, answer = events.Message(1, "Is it raining?", [1]), events.Generated([1], "It is.", 0, 1)
    prompt, thought = events.GenerationPrompt([1]), events.Generated([1], "I ask.", 1, 0)
    chat = [question, prompt, answer]

    def loop(at: int) -> list[events.Body]:
        use = at + 2
        return [prompt, thought, events.ToolUse("get_weather", "{}"), events.ToolResult(use, "rain", [1])]

    loops: list[events.Body] = []
    while len(loops) < 5 * ROUNDS:
        loops += [question, *loop(len(loops) + 1), prompt, answer]
    long_loop: list[events.Body] = [question]
    while len(long_loop) < 5 * ROUNDS:
        long_loop += loop(len(long_loop))
    asked, told = Turn("user", "Is it raining?"), Turn("tool", "rain", call_id="3", name="get_weather")
    return {
        "chat": _turns_rendered(codec, chat * ROUNDS, asked, chat),
        "chat with tools": _turns_rendered(codec, loops, asked, loops[:7]),
        "tool loop, a result": _turns_rendered(codec, long_loop[:-1], told, long_loop[-1:] + loop(0)[:3]),
        "tool loop, a question": _turns_rendered(codec, long_loop[:-1], told, [long_loop[-1], prompt, answer], asked),
    }


def _turns_rendered(
    codec: Codec, bodies: Sequence[events.Body], turn: Turn, more: Sequence[events.Body], last: Turn | None = None
) -> Json:
    """Of a session with `bodies`, a turn, `more` that begins with it, and the `last` turn, by default the same."""
    assert codec.template is not None
    past = Past(bodies)
    for appended, fresh in ((turn, more), (last or turn, ())):
        tails = render_tails(codec.template, codec.encoder, past, appended, None, not codec.append_stable)
        past.add(fresh)
    return tails.turns if tails is not None else f"all {len(past.turns) + 1}"


def _refusal(opening: Callable[[], object]) -> str:
    try:
        opening()
    except DialectRefused as refusal:
        return str(refusal).partition("refused: ")[2]
    raise AssertionError("the dialect is not refused")


def _text(codec: Codec, token: int | None) -> str:
    return "" if token is None else codec.encoder.literal(token)


def _instability(codec: Codec) -> dict[str, Json]:
    """Where the renders of a growing conversation part."""
    assert codec.template is not None
    before = ""
    for n in range(1, len(PROBE) + 1):
        try:
            text = codec.template.render([turn.message() for turn in PROBE[:n]])
        except TemplateFailed as error:
            return {"messages": n, "refused": str(error)}
        if not text.startswith(before):
            at = next(i for i, (a, b) in enumerate(zip(before + "\0", text, strict=False)) if a != b)
            lead = max(0, at - 20)
            return {"messages": n, "before": before[lead : at + 30], "after": text[lead : at + 30]}
        before = text
    raise AssertionError("its texts extend one another")


def _wire(codec: Codec) -> dict[str, Json]:
    wire = codec.wire
    made: dict[str, Json] = {"name": wire.name}
    if codec.template is None:
        return made
    learned = learning.learn(codec.encoder, codec.template)
    made |= {"begins": learned.opener or "", "ends": learned.closer or ""}
    if learned.separators:
        made["inside"] = list(learned.separators)
    if wire.name == "raw":
        shown = learning._renders(codec.template)
        made["why"] = "the template renders no call" if shown is None else "its way of writing a call is not known"
    for field in ("name_open", "name_close", "key_open", "key_close", "val_close", "before", "separator", "after"):
        if isinstance(value := getattr(wire, field, None), str):
            made[field] = value
    return made


def _compare(codec: Codec, tokenizer: ByteTokenizer) -> dict[str, Json]:
    """Every cell of the matrix against plain jinja2."""
    template = codec.template
    assert template is not None
    texts = dict(tokenizer.special_tokens())
    bos = texts.get(tokenizer.bos, "") if tokenizer.bos is not None else ""
    plain = plain_jinja(template.source, bos, texts.get(tokenizer.eos, ""), template.today)
    made: dict[str, Json] = {"equal": 0}
    refusals: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    differences: dict[tuple[str, str, str], list[str]] = {}
    for cell, messages, tools, kwargs in cells():
        objects = [turn.message() for turn in turns_of(messages)]
        declared = normalized_tools(tools) or None
        try:
            expected = plain(objects, declared, True, kwargs)
        except Refused as refused:
            expected = str(refused)
            try:
                shown = tokenizer.spell(codec.render(messages, tools, kwargs).tokens)
            except ConversationRefused as error:
                assert error.words == expected, cell
                refusals.setdefault(error.words, []).append(cell)
                continue
            if isinstance(codec.dialect, TemplateDialect):
                merged = merged_systems(turns_of(messages))
                assert merged is not None, cell
                assert shown == plain([turn.message() for turn in merged], declared, True, kwargs), cell
                rule = "leading system messages that the template refuses apart are joined"
            else:
                rule = "a per-message dialect renders what the template refuses"
            others.setdefault(rule, []).append(cell)
            continue
        rendered = codec.render(messages, tools, kwargs)
        shown = tokenizer.spell(rendered.tokens)
        if isinstance(codec.dialect, TemplateDialect):
            assert shown == expected, f"{cell}: not what the template renders"
            before = tokenizer.spell(rendered.tokens[: len(rendered.tokens) - len(rendered.opener)])
            unprompted = plain(objects, declared, False, kwargs)
            if not rendered.opener:
                assert not expected.startswith(unprompted) or expected == unprompted, cell
                others.setdefault("no generation prompt to split off", []).append(cell)
            else:
                assert before == unprompted, f"{cell}: not what the template renders without a generation prompt"
        found = list(turn_differences(expected, shown, bool(tools), kwargs))
        made["equal"] += not found
        for difference in found:
            differences.setdefault(difference, []).append(cell)
    if refusals:
        made["refused"] = {words: _summary(where) for words, where in refusals.items()}
    made |= {said: _summary(where) for said, where in others.items()}
    if differences:
        made["different"] = [
            {"rule": rule, "template": theirs, "ours": ours, "cells": _summary(where)}
            for (rule, theirs, ours), where in differences.items()
        ]
    return made


def _summary(cells: list[str]) -> str:
    """Conversations, with how many of their cells are meant."""
    names = [cell.partition(" | ")[0] for cell in cells]
    return "; ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names))


# -- differences of ChatML, and the rule of the specification that makes each

BLANK_SYSTEM = "a system turn with a blank body is none"
LATER_SYSTEM = "system messages after the first are system turns of their own"
SWITCH = "enable_thinking is for the opener, the other arguments for the system turn"
OWN_TOOLS = "a template whose system turn is the same with the tools as without: the text and Qwen2.5's tool block"
REASONING = "reasoning of past turns is not rendered"
AS_IS = "contents are the client's, with their white space"
INLINE = "an answer's text is one content piece, whatever the template cuts out of it"
OPENER = "the opener of a past answer is learned once, of a conversation with defaults"
RESULTS = "a tool result is a user turn of its own, framed by tool_response"
CALLS = "calls in history: the template's block trimmed, or ChatML's own form on the JSON wire"
CALL_LOOP = "a turn with calls after the last user message has the opener of the tool loop"

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def turn_differences(theirs: str, ours: str, tools: bool, kwargs: Mapping[str, Json]) -> Iterator[tuple[str, str, str]]:
    """(rule, the template's text, ours) of the turns that differ."""
    if theirs == ours:
        return
    parts = [re.split(r"(?=<\|im_start\|>)", text) for text in (theirs, ours)]
    for tag, a, b, c, d in SequenceMatcher(None, *parts, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        mine, own = parts[0][a:b], parts[1][c:d]
        for one, other in _paired(mine, own):
            if one != other:
                yield _rule(one, other, tools, kwargs), *_excerpts(one, other)


def _paired(mine: list[str], own: list[str]) -> Iterator[tuple[str, str]]:
    """Turns side by side; the last of the shorter side stands beside the rest of the other."""
    n = min(len(mine), len(own))
    yield from zip(mine[: n - 1], own[: n - 1], strict=True)
    yield "".join(mine[max(0, n - 1) :]), "".join(own[max(0, n - 1) :])


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """The two texts from shortly before they part to shortly after they meet again."""
    limit = min(len(one), len(other))
    start = next((i for i in range(limit) if one[i] != other[i]), limit)
    end = next((i for i in range(limit - start) if one[-1 - i] != other[-1 - i]), limit - start)
    lead = max(0, start - 25)

    def cut(text: str) -> str:
        shown = text[lead : len(text) - end + min(end, 15)]
        return shown if len(shown) <= EXCERPT else f"{shown[: EXCERPT // 2]}...{shown[-EXCERPT // 2 :]}"

    return cut(one), cut(other)


def _rule(theirs: str, ours: str, tools: bool, kwargs: Mapping[str, Json]) -> str:
    role = re.match(r"<\|im_start\|>(\w+)\n", theirs or ours)
    assert role is not None, (theirs, ours)
    if role[1] == "system":
        if not ours and theirs == "<|im_start|>system\n<|im_end|>\n":
            return BLANK_SYSTEM
        if "Be kind." in ours and "Be kind." not in theirs and "Be brief." not in ours:
            return LATER_SYSTEM
        if tools and "# Tools\n\nYou may call one or more functions" in ours and "get_weather" not in theirs:
            return OWN_TOOLS
        if kwargs:
            return SWITCH
    if role[1] == "assistant":
        bare = [_THOUGHT.sub("", text) for text in (theirs, ours)]
        dense = ["".join(text.split()) for text in bare]
        if "I know it." in theirs or "I ask." in theirs:
            return REASONING
        if "hm" in theirs + ours:
            return INLINE
        if bare[0] != bare[1] and dense[0] == dense[1] and "<tool_call>" not in ours:
            return AS_IS
        if bare[0] == bare[1]:
            return CALL_LOOP if "<tool_call>" in ours else OPENER
        if "<tool_call>" in ours:
            return CALLS
    if "<tool_response>" in ours or "<tool_response>" in theirs:
        return RESULTS
    raise AssertionError(f"no rule makes {theirs!r} into {ours!r}")


def build(templates: Callable[[str], str]) -> dict[str, Json]:
    """The whole golden file."""
    made = {name: describe(model(name, templates)) for name in NAMES}
    for name, more in MORE_TOKENS.items():
        made[f"{name}, with {' '.join(more)}"] = describe(model(name, templates, more))
    return made


def written(golden: Mapping[str, Json]) -> str:
    return json.dumps(golden, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[3] / "shared/data/chat_templates"
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(written(build(lambda name: (folder / f"{name}.jinja").read_text())))
