"""Learning from a chat template how its model writes a tool call."""

import re
from collections.abc import Sequence
from typing import Any

import attrs

from superfluid.codec.framing import Encoder
from superfluid.codec.harmony import NEEDED as HARMONY_MARKERS
from superfluid.codec.template import ChatTemplate, TemplateFailed
from superfluid.codec.toolcalls import gemma
from superfluid.codec.toolcalls.repair import NotJson, strict_loads
from superfluid.codec.toolcalls.typed import ToolSchemas
from superfluid.codec.toolcalls.wires import (
    PROBE_ID,
    DelimitedWire,
    GemmaWire,
    GlmWire,
    HarmonyWire,
    JsonWire,
    Llama3Wire,
    MistralWire,
    NamedWire,
    PythonicWire,
    RawWire,
    Wire,
    json_calls,
)

NAME = "N1nfx"
PAIRS = {"K1kax": "V1vax", "J2kbx": "U2vbx"}
PROBE_USER = "hi"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
_GLM = f"{NAME}<arg_key>K1kax</arg_key><arg_value>V1vax</arg_value>"


@attrs.frozen
class Learned:
    """A wire and the special tokens around its calls; `closer` None: a call runs to the turn's end. No opener: calls
    have no channel. `separators` are special tokens inside a call that belong to its text."""

    wire: Wire
    opener: str | None = None
    closer: str | None = None
    separators: tuple[str, ...] = ()


def learn(encoder: Encoder, template: ChatTemplate) -> Learned:
    """The wire of a template's model."""
    ids = encoder.specials
    if all(marker in ids for marker in HARMONY_MARKERS) and "<|channel|>" in template.sources:
        return Learned(HarmonyWire())
    fixed: tuple[str, str] | None = None
    if "<tool_call>" in ids and "</tool_call>" in ids:
        fixed = "<tool_call>", "</tool_call>"
    elif "<|tool_call>" in ids and "<tool_call|>" in ids:
        quotes = (gemma.QUOTE,) if gemma.QUOTE in ids else ()
        return Learned(GemmaWire(), "<|tool_call>", "<tool_call|>", quotes)
    renders = _renders(template)
    if renders is None:
        if fixed is None and "<|tool_call_start|>" in ids and "<|tool_call_end|>" in ids:
            return Learned(PythonicWire(), "<|tool_call_start|>", "<|tool_call_end|>")
        return Learned(RawWire(), *(fixed or (None, None)))
    with_call, bare_call, without = renders
    return _from_render(encoder, with_call, bare_call, without, fixed)


def _renders(template: ChatTemplate) -> tuple[str, str | None, str] | None:
    """(T, Z, the render without the call); None when no way of asking shows the call."""
    for call_id, tools in (("", None), (PROBE_ID, None), ("", [PROBE_TOOL]), (PROBE_ID, [PROBE_TOOL])):

        def render(arguments: dict[str, str] | None, call_id: str = call_id, tools: Any = tools) -> str:
            answer: dict[str, Any] = {"role": "assistant", "content": ""}
            if arguments is not None:
                function = {"name": NAME, "arguments": arguments}
                answer["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            return template.render([{"role": "user", "content": PROBE_USER}, answer], tools)

        try:
            whole = render(PAIRS)
        except TemplateFailed:
            continue
        if not all(word in whole for word in (NAME, *PAIRS, *PAIRS.values())):
            return None
        try:
            bare = render({})
        except TemplateFailed:
            bare = None
        try:
            without = render(None)
        except TemplateFailed:
            without = ""
        return whole, bare, without
    return None


def _from_render(
    encoder: Encoder, whole: str, bare: str | None, without: str, fixed: tuple[str, str] | None
) -> Learned:
    name_at = whole.rfind(NAME)
    last_value = max(whole.rfind(value) + len(value) for value in PAIRS.values())
    marks = [(m.start(), m.end(), m[0]) for m in encoder.marker_pattern.finditer(whole)]
    earlier = set(encoder.marker_pattern.findall(without))
    if fixed is not None:
        opener: str | None = fixed[0]
        closer: str | None = fixed[1]
    else:
        opener = _opener(whole, [mark for mark in marks if mark[1] <= name_at and mark[2] not in earlier])
        closer = next((text for start, _, text in marks if start >= last_value and text not in earlier), None)
        if opener is None:
            closer = None
    start = whole.rfind(opener, 0, name_at) + len(opener) if opener and whole.rfind(opener, 0, name_at) >= 0 else -1
    if start < 0:
        start = max((end for _, end, _ in marks if end <= name_at), default=0)
    stop = whole.find(closer, last_value) if closer else -1
    if stop < 0:
        stop = min((begin for begin, _, _ in marks if begin >= last_value), default=len(whole))
    separators = tuple(
        dict.fromkeys(text for begin, end, text in marks if start <= begin and end <= stop and text not in earlier)
    )
    call = whole[start:stop]
    wire = _wire(encoder, call, whole, bare, opener, closer)
    return Learned(wire, opener, closer, separators)


def _opener(whole: str, marks: Sequence[tuple[int, int, str]]) -> str | None:
    """The last new marker before the name; one with plain text right before it continues what the one before opened."""
    index = len(marks) - 1
    while index > 0 and whole[marks[index - 1][1] : marks[index][0]].strip():
        index -= 1
    return marks[index][2] if index >= 0 else None


def _wire(encoder: Encoder, call: str, whole: str, bare: str | None, opener: str | None, closer: str | None) -> Wire:
    if (kind := _json_kind(call)) is not None:
        if opener is None:
            return Llama3Wire()
        return MistralWire() if kind == "array" and closer is None else JsonWire()
    if _GLM in re.sub(r"\s", "", call):
        return GlmWire()
    if (named := _named(encoder, call)) is not None:
        return named
    return _delimited(whole, bare, opener) or RawWire()


def _json_kind(call: str) -> str | None:
    """`object` or `array` when the call is JSON with the name as a string or as the one key."""
    text = call.strip()
    try:
        value = strict_loads(text)
    except NotJson:
        return None
    calls = json_calls(text, ToolSchemas([{"name": NAME}]))
    if not calls or calls[0].name != NAME or "K1kax" not in calls[0].arguments_json:
        return None
    return "array" if isinstance(value, list) else "object"


def _named(encoder: Encoder, call: str) -> NamedWire | None:
    name_at = call.rfind(NAME)
    if name_at < 0:
        return None
    after_name = name_at + len(NAME)
    brace = call.find("{", after_name)
    if brace < 0:
        return None
    body = call[brace:]
    end = body.rfind("}") + 1
    try:
        value = strict_loads(body[:end])
    except NotJson:
        return None
    if value != PAIRS:
        return None
    before, separator = call[:name_at], call[after_name:brace]
    if (mark := encoder.marker_pattern.search(separator)) is not None:
        name_end = mark[0]
    elif separator[:1].isspace():
        name_end = separator[:1]
    else:
        name_end = separator.strip()
    kimi = before.endswith("functions.") and re.match(r":\d", separator) is not None
    return NamedWire(before, separator, name_end, body[end:], kimi)


def _delimited(whole: str, bare: str | None, opener: str | None) -> DelimitedWire | None:
    name_at = whole.rfind(NAME)
    after_name = name_at + len(NAME)
    spots = sorted((whole.find(word, after_name), word) for word in (*PAIRS, *PAIRS.values()))
    words = [word for _, word in spots]
    if spots[0][0] < 0 or words[0] not in PAIRS or words[2] not in PAIRS:
        return None
    if [PAIRS[words[0]], PAIRS[words[2]]] != [words[1], words[3]]:
        return None
    (k1, _), (v1, _), (k2, _), (v2, _) = spots
    size = len(words[0])
    opened = whole.rfind(opener, 0, name_at) if opener else -1
    begin = opened + len(opener) if opener and opened >= 0 else whole.rfind("\n", 0, name_at) + 1
    name_open = whole[begin:name_at].strip()
    if bare is not None and NAME in bare:
        name_close = _common_prefix(whole[after_name:], bare[bare.rfind(NAME) + len(NAME) :])
    else:
        name_close = whole[after_name:k1]
    before_key = whole[after_name + len(name_close) : k1]
    key_open = _common_prefix(before_key[::-1], whole[v1 + size : k2][::-1])[::-1]
    key_close = _common_prefix(whole[k1 + size : v1], whole[k2 + size : v2])
    val_close = _common_prefix(whole[v1 + size : k2], whole[v2 + size :])
    while name_close and key_open.startswith(name_close):
        key_open = key_open[len(name_close) :]
    if not (name_open and name_close and key_open and key_close) or PROBE_USER in name_open.split():
        return None
    return DelimitedWire(name_open, name_close, key_open, key_close, val_close)


def _common_prefix(one: str, other: str) -> str:
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]
