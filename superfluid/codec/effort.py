"""Reasoning effort: which levels a template knows, learned at the load for every shape of conversation."""

import re
from collections.abc import Mapping
from typing import Any

import attrs

from superfluid.codec.template import ChatTemplate, TemplateFailed

SCALE = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
UNKNOWN = "superfluidprobe"  # a value that is no level of any template

_SYSTEM = {"role": "system", "content": "probe"}
_USER = {"role": "user", "content": "probe"}
_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


@attrs.frozen
class Shape:
    """What of a conversation may change the levels."""

    generation: bool
    tools: bool
    system: bool
    thinking: bool | None

    def distance(self, other: "Shape") -> tuple[bool, bool, bool, bool]:
        """Which parts differ, the weightiest first."""
        return (
            self.generation != other.generation,
            self.tools != other.tools,
            self.system != other.system,
            self.thinking is not other.thinking,
        )


SHAPES = [
    Shape(generation, tools, system, thinking)
    for system, tools in ((False, False), (True, False), (True, True), (False, True))
    for generation in (True, False)
    for thinking in (None, True, False)
]


@attrs.frozen
class Effort:
    """The ladders of a template, one per shape; a ladder is None where the shape takes no effort at all."""

    ladders: tuple[tuple[str, ...] | None, ...] = ()

    @classmethod
    def learn(cls, template: ChatTemplate) -> "Effort":
        """Renders every shape with every level, where the template looks at reasoning_effort."""
        if "reasoning_effort" not in template.sources and not _notices(template):
            return cls()
        return cls(tuple(_ladder(template, shape) for shape in SHAPES))

    @property
    def supported(self) -> bool:
        return any(self.ladders)

    @property
    def levels(self) -> list[str]:
        """The levels that every shape has."""
        if None in self.ladders:
            return []
        known = [set(ladder) for ladder in self.ladders if ladder]
        return [level for level in SCALE if known and all(level in ladder for ladder in known)]

    @property
    def identity(self) -> str:
        """The part of the codec id that names the ladders; empty when there are none."""
        if not any(ladder or ladder is None for ladder in self.ladders):
            return ""
        spelled: list[str] = []
        for ladder in self.ladders:
            text = "!" if ladder is None else ",".join(ladder)
            if not spelled or spelled[-1] != text:
                spelled.append(text)
        return "/effort1:" + "|".join(spelled)

    def native(self, value: Any, shape: Shape) -> Any:
        """A request's value as the template spells it: the nearest level, ties up; other words pass untouched."""
        if not isinstance(value, str) or not self.ladders:
            return value
        nearest = min(range(len(SHAPES)), key=lambda i: SHAPES[i].distance(shape))
        ladder = self.ladders[nearest]
        word = value.strip().lower()
        if not ladder or word not in SCALE:
            return value
        wanted = SCALE.index(word)
        return min(ladder, key=lambda level: (abs(SCALE.index(level) - wanted), -SCALE.index(level)))


def _render(template: ChatTemplate, shape: Shape, effort: str | None) -> str | None:
    kwargs: Mapping[str, Any] = {
        **({} if shape.thinking is None else {"enable_thinking": shape.thinking}),
        **({} if effort is None else {"reasoning_effort": effort}),
    }
    messages = [*([_SYSTEM] if shape.system else []), _USER]
    try:
        return template.render(messages, [_TOOL] if shape.tools else None, generation=shape.generation, kwargs=kwargs)
    except TemplateFailed:
        return None


def _notices(template: ChatTemplate) -> bool:
    """Whether a value that no template knows changes a render."""
    shape = Shape(True, False, False, None)
    return _render(template, shape, UNKNOWN) != _render(template, shape, None)


def _ladder(template: ChatTemplate, shape: Shape) -> tuple[str, ...] | None:
    groups: dict[str, list[str]] = {}
    refused = 0
    for level in SCALE:
        rendered = _render(template, shape, level)
        if rendered is None:
            refused += 1
        else:
            groups.setdefault(rendered, []).append(level)
    if not groups:
        return None if _render(template, shape, None) is not None else ()
    if len(groups) == 1:
        return tuple(next(iter(groups.values()))) if refused else ()
    spelled = {rendered: _spelled(rendered) for rendered in groups}
    names: list[str] = []
    for rendered, group in groups.items():
        others: set[str] = set().union(*(words for text, words in spelled.items() if text != rendered))
        own = [name for name in group if name in spelled[rendered] and name not in others]
        names += own if len(own) == 1 else group
    return tuple(sorted(names, key=SCALE.index))


def _spelled(rendered: str) -> set[str]:
    """The level names that stand in a render as whole words."""
    words = set(re.findall(r"[^\W_]+", rendered.lower()))
    return words & set(SCALE)
