"""What published templates insist on and clients may leave out or write in another form."""

from collections.abc import Callable
from typing import Any

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.needs import Needs, short_id
from superfluid.link import events
from tests.codec.template_models import NAMES, model

MISTRALS = ["Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"]
USER = {"role": "user", "content": "Is it raining?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
NO_LOOPS = "google-gemma-2-2b-it"  # its template takes no tool results

Templates = Callable[[str], str]


def calls(*identities: str | None) -> dict[str, Any]:
    made = []
    for n, identity in enumerate(identities):
        call: dict[str, Any] = {"type": "function", "function": {"name": f"get_{n}", "arguments": "{}"}}
        made.append(call if identity is None else {"id": identity, **call})
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(identity: str | None, content: str = "rain") -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if identity is None else {"tool_call_id": identity})}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_0", **more}}


def text(name: str, templates: Templates, messages: list[dict[str, Any]], tools: Any = None) -> str:
    tokenizer = model(name, templates)
    return tokenizer.spell(Codec.open(tokenizer).render(messages, tools).tokens)


def test_what_each_needs(templates: Templates) -> None:
    found = {name: codec.template.needs for name in NAMES if (codec := Codec.open(model(name, templates))).template}
    assert {name: needs for name, needs in found.items() if needs != Needs()} == {
        "Apertus-8B-Instruct": Needs(description=True),
        "ByteDance-Seed-OSS": Needs(parameters=True, properties=True),
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Needs(parameters=True),
        MISTRALS[0]: Needs(short_ids=True),
        MISTRALS[1]: Needs(short_ids=True),
        "google-gemma-4-31B-it": Needs(result_names=True),
        "openai-gpt-oss-120b": Needs(description=True),
    }


@pytest.mark.parametrize("name", MISTRALS)
def test_ids_are_mapped_alike_in_calls_and_results(name: str, templates: Templates) -> None:
    first, second = short_id("call_6"), short_id("call_6_1")
    assert first != second
    assert all(len(made) == 9 and made.isascii() and made.isalnum() for made in (first, second))
    loop = [USER, calls("call_6", "call_6_1"), result("call_6_1", "sun"), result("call_6")]
    whole = text(name, templates, loop)
    assert whole.count(first) == whole.count(second) == 2
    assert "call_6" not in whole
    fitting = [USER, calls(first, second), result(second, "sun"), result(first)]
    assert text(name, templates, fitting) == whole


@pytest.mark.parametrize("name", MISTRALS)
def test_ids_that_fit_stay(name: str, templates: Templates) -> None:
    assert text(name, templates, [USER, calls("abc123def"), result("abc123def")]).count("abc123def") == 2


@pytest.mark.parametrize("name", MISTRALS)
def test_results_without_ids_are_of_the_calls_in_order(name: str, templates: Templates) -> None:
    given = text(name, templates, [USER, calls("call00000", "call00001"), result("call00000"), result("call00001")])
    assert text(name, templates, [USER, calls("call00000", "call00001"), result(None), result(None)]) == given
    text(name, templates, [USER, calls(None, None), result(None), result(None)])


@pytest.mark.parametrize("name", MISTRALS)
def test_a_session_takes_results(name: str, templates: Templates) -> None:
    tokenizer = model(name, templates)
    codec = Codec.open(tokenizer)
    question = events.Message(1, "hi", codec.message_span(1, "hi"))
    called = events.Generated([5], "x", 2, 0)
    history = [question, events.GenerationPrompt([]), called, events.ToolUse("get_0", "{}")]
    span = tokenizer.spell(codec.tool_result_span("rain", "get_0", history))
    assert short_id("3") in span
    assert "rain" in span


@pytest.mark.parametrize("name", [name for name in NAMES if name != NO_LOOPS])
def test_what_openai_makes_optional_is_optional(name: str, templates: Templates) -> None:
    for messages in ([USER, calls(None), result(None)], [USER, calls("call_6"), result("call_6")]):
        for tools in (None, [tool()], [tool(description=None, parameters=None)]):
            assert "rain" in text(name, templates, messages, tools)


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_may_lack_all_but_its_name(name: str, templates: Templates) -> None:
    for more in ({"parameters": PARAMETERS}, {"description": "d"}, {}, {"parameters": {"type": "object"}}):
        assert USER["content"] in text(name, templates, [USER], [tool(**more)])


@pytest.mark.parametrize("name", ["Apertus-8B-Instruct", "openai-gpt-oss-120b"])
def test_a_missing_description_is_an_empty_one(name: str, templates: Templates) -> None:
    given = text(name, templates, [USER], [tool(description="", parameters=PARAMETERS)])
    assert text(name, templates, [USER], [tool(parameters=PARAMETERS)]) == given


def test_a_nameless_result_has_its_calls_name(templates: Templates) -> None:
    name = "google-gemma-4-31B-it"
    given = text(name, templates, [USER, calls("a", "b"), result("b", "sun"), result("a")])
    assert text(name, templates, [USER, calls(None, "b"), result("b", "sun"), result(None)]) == given
    assert "unknown" in text(name, templates, [USER, calls("a"), result("other")])
