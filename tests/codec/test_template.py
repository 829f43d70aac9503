from datetime import UTC, datetime

import pytest

from superfluid.codec import template as module
from superfluid.codec.template import ChatTemplate, TemplateFailed

USER = [{"role": "user", "content": "hi"}]


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>", today=datetime(2026, 3, 4, tzinfo=UTC)).render(
        USER, kwargs=kwargs
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a<': 'é', 'b': [1, {}]} | tojson }}", '{"a<": "é", "b": [1, {}]}'),
        ("{{ 'é😀' | tojson(ensure_ascii=True) }}", '"\\u00e9\\ud83d\\ude00"'),
        ("{{ {'a': 1} | tojson(2) }}", '{\n  "a": 1\n}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", "hi"),
        ("{{ messages.append(1) or messages.pop() }}", "1"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ messages[0].tool_calls is defined }}", "False"),
        ("{% if x is defined %}{{ x }}{% endif %}", "1"),
        ("  {% if true %}\n  y\n  {% endif %}\n", "  y\n"),
        ("{% set ns = namespace(s='a') %}{% for i in range(3) %}{% set ns.s = ns.s ~ i ~ '-' %}{% endfor %}{{ ns.s }}",
         "a0-1-2-"),
    ],
)  # fmt: skip
def test_environment(source: str, expected: str) -> None:
    assert render(source, x=1) == expected


def test_kwargs_do_not_override_what_the_server_says() -> None:
    assert render("{{ bos_token }}{{ messages | length }}", bos_token="no", messages=[]) == "<s>1"


def test_the_template_gets_copies() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = ChatTemplate("{{ tools.pop().function.update({'name': 'g'}) }}")
    made.render(USER, tools)
    assert tools == [{"type": "function", "function": {"name": "f"}}]


def test_the_tool_use_template_renders_requests_with_tools() -> None:
    made = ChatTemplate("plain", "with {{ tools | length }}")
    assert made.render(USER) == "plain"
    assert made.render(USER, [{"function": {"name": "f"}}]) == "with 1"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "64 MiB"),
        ("{{ 'a' * 10 ** 10 }}", "64 MiB"),
        ("{{ 'a' | center(10 ** 10) }}", "64 MiB"),
        ("{{ '%99999999999d' % 3 }}", "64 MiB"),
        ("{{ 'a'.center(10 ** 10) }}", "64 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_may_not_do(source: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words):
        render(source)


def test_an_endless_template_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock) / 100)
    with pytest.raises(TemplateFailed, match="longer than 10 s"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(TemplateFailed, match="endfor"):
        ChatTemplate("{% for x in y %}")
