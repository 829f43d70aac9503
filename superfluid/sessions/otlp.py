"""Sessions as OTLP/JSON traces: spans of generations and tool calls, names and counts only."""

from typing import Any

import attrs

from superfluid.link import events as ev
from superfluid.link.session_api import Inspection
from superfluid.link.trace_ids import ROOT_EVENT, TraceIds

INTERNAL, CLIENT = 1, 3  # span kinds
SEMCONV_VERSION = "1.36.0"
OUTCOMES = {1: "failed", 2: "cancelled"}
INT64_END = 1 << 63  # an OTLP integer is an int64: a collector refuses the whole request for one that is not
LATEST_NANO = (1 << 64) - 1  # a span's times are fixed64


@attrs.define
class _Open:
    """A span that has begun: the event that began it, and its parent's (ROOT_EVENT: the session)."""

    event: ev.Event
    parent: int
    name: str = ""
    tokens: int = 0


def trace_request(inspection: Inspection, model: str, version: str) -> dict[str, Any]:
    """The export request of one session; `version` is the package's. It never holds content, and says so."""
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        attribute("service.name", "superfluid"),
                        attribute("superfluid.semconv_version", SEMCONV_VERSION),
                        attribute("superfluid.content_included", False),
                    ]
                },
                "scopeSpans": [
                    {
                        "scope": {"name": "superfluid.session", "version": version},
                        "spans": _Spans(inspection, model).all(),
                    }
                ],
            }
        ]
    }


def attribute(key: str, value: str | int | bool) -> dict[str, Any]:
    """An attribute; a u64 past int64, such as ROOT_EVENT, is the int64 of the same bits (-1)."""
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        signed = value if value < INT64_END else value - 2 * INT64_END
        return {"key": key, "value": {"intValue": str(signed)}}
    return {"key": key, "value": {"stringValue": value}}


class _Spans:
    def __init__(self, inspection: Inspection, model: str) -> None:
        self.session = inspection.summary.id
        self.events = inspection.events
        self.model = model
        self.ids = TraceIds.of_store(inspection.store_id)
        self.generation: _Open | None = None
        self.calls: dict[int, _Open] = {}

    def all(self) -> list[dict[str, Any]]:
        spans = [self._root()]
        for event in self.events:
            ended = self._step(event)
            if ended is not None:
                spans.append(ended)
        return [*spans, *(self._call(call, call.event, "open") for call in self.calls.values())]

    def _step(self, event: ev.Event) -> dict[str, Any] | None:
        body = event.body
        match body:
            case ev.GenerationPrompt():
                self.generation = _Open(event, ROOT_EVENT)
            case ev.Generated(span=span, finish=finish):
                generation = self.generation = self.generation or _Open(event, ROOT_EVENT)
                generation.tokens += len(span)
                if finish:
                    self.generation = None
                    return self._generate(generation, event, finish)
            case ev.ToolUse(name):
                parent = self.generation.event.event_id if self.generation else ROOT_EVENT
                self.calls[event.event_id] = _Open(event, parent, name)
            case ev.ToolResult() | ev.ToolOutcome() | ev.ToolExpired():
                call = self.calls.pop(body.call_id, None)
                if call is not None:
                    return self._call(call, event, _outcome(body))
        return None

    def _root(self) -> dict[str, Any]:
        times = [event.ts_unix_ms for event in self.events if event.ts_unix_ms]
        attributes: list[tuple[str, str | int]] = [
            ("superfluid.session_id", self.session),
            ("superfluid.event_id", ROOT_EVENT),
            ("superfluid.timing", "wall_clock_ms" if times else "unavailable"),
        ]
        return self._span(
            "session", ROOT_EVENT, None, INTERNAL, times[0] if times else 0, max(times, default=0), attributes
        )

    def _generate(self, generation: _Open, end: ev.Event, finish: int) -> dict[str, Any]:
        begin = generation.event
        attributes: list[tuple[str, str | int]] = [
            ("superfluid.session_id", self.session),
            ("superfluid.event_id", begin.event_id),
            ("superfluid.parent_event_id", ROOT_EVENT),
            ("superfluid.epoch", begin.epoch),
            ("superfluid.finish", finish),
            ("gen_ai.system", "superfluid"),
            ("gen_ai.request.model", self.model),
            ("gen_ai.usage.output_tokens", generation.tokens),
        ]
        return self._span(
            "generate", begin.event_id, ROOT_EVENT, INTERNAL, begin.ts_unix_ms, end.ts_unix_ms, attributes
        )

    def _call(self, call: _Open, end: ev.Event, outcome: str) -> dict[str, Any]:
        begin = call.event
        parent: list[tuple[str, str | int]] = [("superfluid.parent_event_id", call.parent)]
        attributes: list[tuple[str, str | int]] = [
            ("superfluid.session_id", self.session),
            ("superfluid.event_id", begin.event_id),
            *(parent if outcome != "open" else []),
            ("superfluid.epoch", begin.epoch),
            ("gen_ai.tool.name", call.name),
            ("gen_ai.tool.call.id", str(begin.event_id)),
            ("superfluid.tool.outcome", outcome),
        ]
        return self._span("tool_use", begin.event_id, call.parent, CLIENT, begin.ts_unix_ms, end.ts_unix_ms, attributes)

    def _span(
        self,
        name: str,
        event_id: int,
        parent: int | None,
        kind: int,
        start_ms: int,
        end_ms: int,
        attributes: list[tuple[str, str | int]],
    ) -> dict[str, Any]:
        above = {} if parent is None else {"parentSpanId": self.ids.span(self.session, parent)}
        return {
            "traceId": self.ids.trace(self.session),
            "spanId": self.ids.span(self.session, event_id),
            **above,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": _nanoseconds(start_ms),
            "endTimeUnixNano": _nanoseconds(end_ms),
            "attributes": [attribute(key, value) for key, value in attributes],
        }


def _nanoseconds(ms: int) -> str:
    return str(min(ms * 1_000_000, LATEST_NANO))


def _outcome(body: ev.ToolResult | ev.ToolOutcome | ev.ToolExpired) -> str:
    if isinstance(body, ev.ToolOutcome):
        return OUTCOMES.get(body.outcome, "cancelled")
    return "result" if isinstance(body, ev.ToolResult) else "expired"
