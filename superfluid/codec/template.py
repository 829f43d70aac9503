"""Chat templates: jinja2's sandbox as the ecosystem's applications set it up, with a budget of time and text."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from superfluid.codec import resuming
from superfluid.codec.needs import Needs

RENDER_SECONDS = 10.0  # a template is untrusted: longer than this is an endless loop
RENDER_CHARACTERS = 64 << 20  # and more text than this fits no window

Json = Any


class TemplateFailed(Exception):
    """A template that does not compile, refuses a conversation, or takes too much; the text is the template's words."""


class _Refusal(JinjaError):
    """raise_exception of a template."""


class _Budget(threading.local):
    """The deadline of the render that runs in this thread."""

    deadline: float = float("inf")


_budget = _Budget()


def _check_time() -> None:
    if time.monotonic() > _budget.deadline:
        raise TemplateFailed(f"the template ran longer than {RENDER_SECONDS:g} s")


def _bounded(value: Any) -> Any:
    """Pass a value on unless it is more text than a render may hold."""
    if isinstance(value, (str, list, tuple)) and len(value) > RENDER_CHARACTERS:
        raise TemplateFailed(f"the template made more than {RENDER_CHARACTERS >> 20} MiB of text")
    return value


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is a plain block."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(SandboxedEnvironment):
    """The sandbox with in-place list and dict methods, a clock in every loop, and a bound on every text it builds."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    @property
    def checkpoint(self) -> None:
        _check_time()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("checkpoint"), lineno=loop.lineno))
        for macro in list(tree.find_all(nodes.Macro)):
            macro.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("checkpoint"), lineno=macro.lineno))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [nodes.Filter(nodes.Concat(concat.nodes), "superfluid_bounded", [], [], None, None)]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                sized = isinstance(text, (str, list, tuple)) and isinstance(times, int)
                if sized and len(text) * times > RENDER_CHARACTERS:
                    _too_much()
        elif (operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 4096) or (
            operator == "%" and isinstance(left, str) and _wide(left)
        ):
            _too_much()
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str) and any(
            isinstance(a, int) and a > RENDER_CHARACTERS for a in args
        ):
            _too_much()
        return _bounded(super().call(context, obj, *args, **kwargs))


def _too_much() -> None:
    raise TemplateFailed(f"the template made more than {RENDER_CHARACTERS >> 20} MiB of text")


def _wide(pattern: str) -> bool:
    """Whether a printf pattern asks for a field of millions of characters."""
    digits = 0
    for char in pattern:
        digits = digits + 1 if char.isdigit() else 0
        if digits > 7:
            return True
    return "*" in pattern


def _raise_exception(message: Any = "") -> None:
    raise _Refusal(str(message))


def template_json(
    value: Any,
    indent: int | str | bool | None = None,
    ensure_ascii: bool = False,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter: no HTML escaping, non-ASCII raw, key order kept. A bool in first place is ensure_ascii."""
    if isinstance(indent, bool):
        ensure_ascii, indent = indent, None
    pair = (str(separators[0]), str(separators[1])) if separators else ((", " if indent is None else ","), ": ")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


class _FollowingEnvironment(_Environment):
    """The same for renders that go on from earlier ones."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        resuming.follow(tree)
        tree.set_environment(self)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        if resuming.refuse_attribute(obj, attribute):
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if resuming.refuse_attribute(obj, argument):
            return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        resuming.note_mutation(context, obj)
        return super().call(context, obj, *args, **kwargs)


def _make_environment(kind: type[_Environment]) -> _Environment:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], cache_size=0
    )
    environment.filters["tojson"] = template_json
    environment.filters["superfluid_bounded"] = _bounded
    for name in ("center", "indent", "wordwrap", "join", "replace", "format"):
        environment.filters[name] = _bounded_filter(environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _bounded_filter(plain: Any) -> Any:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, int)]
        if any(n > RENDER_CHARACTERS for n in numbers):
            _too_much()
        return _bounded(plain(*args, **kwargs))

    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(plain, attribute):
            setattr(bounded, attribute, getattr(plain, attribute))
    return bounded


_environment = _make_environment(_Environment)
_following = _make_environment(_FollowingEnvironment)
_following.filters.update(resuming.FILTERS)


def plain_json(value: Json) -> Json:
    """A copy of a JSON value that a template may change."""
    if isinstance(value, Mapping):
        return {key: plain_json(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(member) for member in value]
    return value


class ChatTemplate:
    """A model's chat template, and its `tool_use` variant, compiled once; renders from any thread.

    `today` freezes strftime_now. Raises TemplateFailed when the source does not compile.
    """

    def __init__(
        self, source: str, tool_use: str | None = None, *, bos: str = "", eos: str = "", today: datetime | None = None
    ) -> None:
        self.source = source
        self.tool_use_source = tool_use
        self.today = today or datetime.now(UTC)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._compiled = self._compile(source)
        self._compiled_tool_use = self._compile(tool_use) if tool_use else None

    def _compile(self, source: str, environment: _Environment = _environment) -> Any:
        try:
            return environment.from_string(source, globals={"strftime_now": self.strftime})
        except (JinjaError, RecursionError, ValueError, TypeError, SyntaxError) as error:
            raise TemplateFailed(str(error) or type(error).__name__) from error

    @property
    def sources(self) -> str:
        """Both sources in one text, to look for words in."""
        return self.source + (self.tool_use_source or "")

    @cached_property
    def needs(self) -> Needs:
        """What it insists on that clients may leave out; `render` fills in nothing itself."""
        return Needs.learn(self._accepts)

    def _accepts(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> bool:
        try:
            self.render(messages, tools)
        except TemplateFailed:
            return False
        return True

    def strftime(self, form: str) -> str:
        """The date of the load, in UTC."""
        return self.today.strftime(form)

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None = None,
        *,
        generation: bool = False,
        kwargs: Mapping[str, Json] | None = None,
    ) -> str:
        """The text of a conversation of message objects. Raises TemplateFailed with the template's words."""
        template = self._compiled_tool_use if tools and self._compiled_tool_use is not None else self._compiled
        variables = {**plain_json(kwargs or {}), "messages": plain_json(messages)}
        out: list[str] = []
        self._generate(template, variables, tools, generation, out)
        return "".join(out)

    @cached_property
    def _following(self) -> tuple[Any, Any]:
        """The same two templates for renders that go on from earlier ones."""
        tool_use = self.tool_use_source
        return self._compile(self.source, _following), self._compile(tool_use, _following) if tool_use else None

    def render_on(
        self, tracker: resuming.Tracker, tools: Sequence[Json] | None = None, *, generation: bool = False
    ) -> resuming.Render:
        """The render of a tracker's messages, which the template does not change. Raises TemplateFailed with the
        template's words, or where it cannot be followed."""
        plain, tool_use = self._following
        template = tool_use if tools and tool_use is not None else plain
        self._generate(template, tracker.variables(), tools, generation, tracker.out)
        return tracker.result()

    def _generate(
        self, template: Any, variables: dict[str, Json], tools: Sequence[Json] | None, generation: bool, out: list[str]
    ) -> None:
        variables |= {
            "tools": plain_json(tools) if tools else None,
            "add_generation_prompt": generation,
            **self._tokens,
        }
        _budget.deadline = time.monotonic() + RENDER_SECONDS
        size = 0
        try:
            for chunk in template.generate(variables):
                size += len(chunk)
                if size > RENDER_CHARACTERS:
                    _too_much()
                _check_time()
                out.append(chunk)
        except TemplateFailed:
            raise
        except Exception as error:  # whatever untrusted template code raises is its refusal
            raise TemplateFailed(str(error) or type(error).__name__) from error
        finally:
            _budget.deadline = float("inf")
