"""Exports: lines, ids, what is shown of content."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from superfluid.link import events as ev
from superfluid.link.session_api import Cold, Inspection, Summary
from superfluid.link.trace_ids import ROOT_EVENT, TraceIds
from superfluid.sessions.export import LONGEST_FIELD, fields, json_lines, redact
from superfluid.sessions.otlp import trace_request

STORE_ID = bytes(range(16))
PARAMS = ev.GenParams(0.5, 0.8999999761581421, 0.0, 40, 300)


def inspection(bodies: list[ev.Body], store_id: bytes | None = STORE_ID) -> Inspection:
    events = [ev.Event(event_id, 1, 1000 + event_id, body) for event_id, body in enumerate(bodies)]
    return Inspection(
        summary=Summary(1, None, 0, None, False, 0, 0, len(bodies), 0, 0),
        params=PARAMS,
        epoch=1,
        last_finish=0,
        qos_class=2,
        batch_invariant=False,
        pin_deadline_unix_ms=0,
        behavior_fingerprint=None,
        open_tool_calls=[],
        tier=Cold(),
        tokens=[],
        events=events,
        wal_version=2,
        store_id=store_id,
    )


def test_ids_of_the_vectors() -> None:
    ids = TraceIds.of_store(STORE_ID)
    assert ids.namespace == 9219343733942863053
    assert ids.trace(1) == "232f8e8cce9c39160e514d504889484f"
    assert ids.span(1, ROOT_EVENT) == ids.span(1) == "8cedc11d4dfe22a1"
    assert ids.span(1, 2) == "dbc38afe88072a9f"
    assert TraceIds.of_store(None).namespace == 0


def test_lines() -> None:
    found = inspection([ev.Created(None, PARAMS), ev.Message(1, "hé", [1, 2]), ev.MetaUpdated(1, None, True)])
    assert list(json_lines(found)) == [
        '{"session":1,"event_id":0,"epoch":1,"ts_unix_ms":1000,"event":{"type":"created","parent":null,'
        '"params":{"temperature":0.5,"top_p":0.8999999761581421,"min_p":0.0,"top_k":40,"seed":300}}}',
        '{"session":1,"event_id":1,"epoch":1,"ts_unix_ms":1001,"event":'
        '{"type":"message","role":1,"text":{"bytes":3},"tokens":2}}',
        '{"session":1,"event_id":2,"epoch":1,"ts_unix_ms":1002,"event":'
        '{"type":"meta_updated","version":1,"title":null,"archived":true}}',
    ]
    assert json.loads(list(json_lines(found, include_content=True))[1])["event"]["text"] == "hé"


def test_every_body_has_a_form() -> None:
    values = {"int": 1, "str": "x", "bool": True, "list": [], "none": None}
    for kind in ev.Body.variants:
        arguments = {
            field.name: PARAMS
            if field.name == "params"
            else ev.Descendants.Reroot
            if field.name == "descendants"
            else values["list"]
            if field.name in ("span", "edits", "prefix")
            else values["str"]
            if field.name in ("text", "name", "arguments", "content", "raw", "title", "reason", "payload", "note")
            else values["int"]
            for field in kind.__attrs_attrs__
        }
        shown = fields(kind(**arguments), redact)
        name = "".join(("_" + letter.lower()) if letter.isupper() else letter for letter in kind.variant_name)
        assert shown["type"] == name.strip("_")
        json.dumps(shown)


@pytest.mark.parametrize(
    "secret",
    [
        "sk-" + "a1_" * 7,
        "AKIA" + "ABCD1234" * 2,
        "ghp_" + "x" * 32,
        "xoxb-" + "1" * 19,
        "AIza" + "y" * 35,
    ],
)
@pytest.mark.parametrize("around", ["{}", "key: {}.", '{{"token":"{}"}}', "a {}, b", "({})\n"])
def test_secrets_are_redacted(secret: str, around: str) -> None:
    assert redact(around.format(secret)) == around.format("[REDACTED]")
    assert redact(around.format(secret[:-1])) == around.format(secret[:-1])


@pytest.mark.parametrize(
    "plain", ["sk-short", "AKIAABCD1234ABCD123", "AKIAabcd1234ABCD1234", "ghp_", "task-" + "a" * 40]
)
def test_other_words_stay(plain: str) -> None:
    assert redact(f"see {plain} there") == f"see {plain} there"


def test_a_key_block_loses_its_body() -> None:
    text = "before\n-----BEGIN RSA PRIVATE KEY-----\nMIIsecret\nlines\n-----END RSA PRIVATE KEY-----\nafter"
    shown = redact(text)
    assert "secret" not in shown
    assert "lines" not in shown
    assert shown.startswith("before\n-----BEGIN RSA PRIVATE KEY-----")
    assert shown.endswith("-----END RSA PRIVATE KEY-----\nafter")
    assert "secret" not in redact(text[:45])


@given(st.text(alphabet="é🙂a", min_size=1, max_size=5))
def test_a_long_field_is_cut_at_a_character(unit: str) -> None:
    shown = redact(unit * (LONGEST_FIELD // len(unit.encode()) + 1))
    assert shown.endswith("…[truncated]")
    body = shown.removesuffix("…[truncated]")
    assert LONGEST_FIELD - 4 < len(body.encode()) <= LONGEST_FIELD
    assert (unit * LONGEST_FIELD).startswith(body)


def test_spans_of_a_conversation() -> None:
    found = inspection(
        [
            ev.Created(None, PARAMS),
            ev.Message(1, "secret", [1]),
            ev.GenerationPrompt([2]),
            ev.Generated([3, 4], "secret", 2, 0),
            ev.ToolUse("weather", "secret"),
            ev.ToolUse("left", "secret"),
            ev.Generated([5], "", 0, 1),
            ev.ToolResult(4, "secret", [6]),
        ]
    )
    request = trace_request(found, "model", "1.2")
    text = json.dumps(request)
    assert "secret" not in text
    (resource,) = request["resourceSpans"]
    assert [a["key"] for a in resource["resource"]["attributes"]] == [
        "service.name",
        "superfluid.semconv_version",
        "superfluid.content_included",
    ]
    root, generate, call, left = resource["scopeSpans"][0]["spans"]
    ids = TraceIds.of_store(STORE_ID)
    assert list(generate) == [
        "traceId",
        "spanId",
        "parentSpanId",
        "name",
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "attributes",
    ]
    assert "parentSpanId" not in root
    assert (root["startTimeUnixNano"], root["endTimeUnixNano"]) == ("1000000000", "1007000000")
    assert (generate["spanId"], generate["parentSpanId"]) == (ids.span(1, 2), ids.span(1))
    assert generate["attributes"][-1] == {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "3"}}
    assert (call["parentSpanId"], call["kind"], call["endTimeUnixNano"]) == (ids.span(1, 2), 3, "1007000000")
    assert [a["value"] for a in call["attributes"][2:]] == [
        {"intValue": "2"},
        {"intValue": "1"},
        {"stringValue": "weather"},
        {"stringValue": "4"},
        {"stringValue": "result"},
    ]
    assert [a["key"] for a in left["attributes"]] == [a["key"] for a in call["attributes"] if "parent" not in a["key"]]
    assert left["attributes"][-1]["value"] == {"stringValue": "open"}
    assert left["startTimeUnixNano"] == left["endTimeUnixNano"] == "1005000000"


def integers(request: dict[str, Any]) -> list[tuple[str, int]]:
    """Every integer attribute of a trace's spans."""
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return [
        (attribute["key"], int(attribute["value"]["intValue"]))
        for span in spans
        for attribute in span["attributes"]
        if "intValue" in attribute["value"]
    ]


def test_integers_of_a_trace_are_int64_and_times_fixed64() -> None:
    """A collector refuses the whole request for one that is not; the root's event id is the int64 of its bits."""
    found = inspection([ev.Created(None, PARAMS), ev.GenerationPrompt([2]), ev.Generated([3], "", 0, 1)])
    numbers = integers(trace_request(found, "model", "1.2"))
    assert ("superfluid.event_id", -1) in numbers
    assert ("superfluid.parent_event_id", -1) in numbers
    last = (1 << 64) - 1
    found.summary.id = last - 1
    found.events = [
        ev.Event(last - 3, last, last, ev.GenerationPrompt([2])),
        ev.Event(5, last, 1, found.events[2].body),
    ]
    request = trace_request(found, "model", "1.2")
    assert all(-(1 << 63) <= number < 1 << 63 for _, number in integers(request))
    assert ("superfluid.session_id", -2) in integers(request)
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        assert 0 <= int(span["startTimeUnixNano"]) <= last
        assert 0 <= int(span["endTimeUnixNano"]) <= last


def test_a_trace_says_that_it_holds_no_content() -> None:
    attributes = trace_request(inspection([]), "", "1.2")["resourceSpans"][0]["resource"]["attributes"]
    assert attributes[2] == {"key": "superfluid.content_included", "value": {"boolValue": False}}
