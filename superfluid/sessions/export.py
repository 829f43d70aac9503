"""Sessions as JSON lines: one line per event, without content unless it is asked for, and then without secrets."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from superfluid.link import events as ev
from superfluid.link.session_api import Inspection

LONGEST_FIELD = 65_536  # bytes of a content field
TRUNCATED = "…[truncated]"
REDACTED = "[REDACTED]"

WORD = re.compile(r"[^\s\"'`\[\](){}<>,:;=]+")
CORE = re.compile(r"[A-Za-z0-9_-](?:.*[A-Za-z0-9_-])?", re.DOTALL)
SECRET = re.compile(
    r"sk-.{21,}|AKIA[A-Z0-9]{16}|ghp_.{32,}|xox.-.{19,}|AIza.{35}",
    re.DOTALL,
)
PEM = re.compile(r"(-----BEGIN[^\n]*?-----)(?:(?!-----BEGIN).)*?(-----END|\Z)", re.DOTALL)


def redact(text: str) -> str:
    """`text` without keys and tokens, and no longer than an export's field may be."""
    text = PEM.sub(rf"\1\n{REDACTED}\n\2", text)
    text = WORD.sub(_redact_word, text)
    data = text.encode()
    if len(data) > LONGEST_FIELD:
        text = data[:LONGEST_FIELD].decode(errors="ignore") + TRUNCATED
    return text


def _redact_word(word: re.Match[str]) -> str:
    core = CORE.search(word[0])
    if core is None or not SECRET.fullmatch(core[0]):
        return word[0]
    return word[0][: core.start()] + REDACTED + word[0][core.end() :]


def json_lines(inspection: Inspection, include_content: bool = False) -> Iterator[str]:
    """One line per event, without newline."""
    content: Content = redact if include_content else _size
    for event in inspection.events:
        line = {
            "session": inspection.summary.id,
            "event_id": event.event_id,
            "epoch": event.epoch,
            "ts_unix_ms": event.ts_unix_ms,
            "event": fields(event.body, content),
        }
        yield json.dumps(line, ensure_ascii=False, separators=(",", ":"))


Content = Callable[[str], Any]


def _size(text: str) -> dict[str, int]:
    return {"bytes": len(text.encode())}


def fields(body: ev.Body, content: Content) -> dict[str, Any]:
    """An event's fields in their order; `content` says what is shown of a text."""
    match body:
        case ev.Created(parent, params):
            return {"type": "created", "parent": parent, "params": _params(params)}
        case ev.Appended(text, span):
            return {"type": "appended", "text": None if text is None else content(text), "tokens": len(span)}
        case ev.Message(role, text, span):
            return {"type": "message", "role": role, "text": content(text), "tokens": len(span)}
        case ev.GenerationPrompt(span):
            return {"type": "generation_prompt", "tokens": len(span)}
        case ev.Generated(span, text, channel, finish):
            said = {"tokens": len(span), "text": content(text), "channel": channel, "finish": finish}
            return {"type": "generated", **said}
        case ev.ToolUse(name, arguments):
            return {"type": "tool_use", "name": name, "arguments": content(arguments)}
        case ev.ToolResult(call_id, text, span):
            return {"type": "tool_result", "call_id": call_id, "content": content(text), "tokens": len(span)}
        case ev.EpochBump():
            return {"type": "epoch_bump"}
        case ev.GenerationFingerprint(digest):
            return {"type": "generation_fingerprint", "digest": f"{digest:016x}"}
        case ev.ToolParseFailure(raw):
            return {"type": "tool_parse_failure", "raw": content(raw)}
        case ev.Forked(parent, fork_at, params):
            return {"type": "forked", "parent": parent, "fork_at": fork_at, "params": _params(params)}
        case ev.MetaUpdated(version, title, archived):
            shown = None if title is None else content(title)
            return {"type": "meta_updated", "version": version, "title": shown, "archived": archived}
        case ev.Rebased(parent, fork_at, params, edits):
            place = {"parent": parent, "fork_at": fork_at}
            return {"type": "rebased", **place, "params": _params(params), "edits": len(edits)}
        case ev.ToolExpired(call_id, reason):
            return {"type": "tool_expired", "call_id": call_id, "reason": reason}
        case ev.Purged(generation, descendants):
            return {"type": "purged", "generation": generation, "descendants": descendants.name}
        case ev.Rerooted(purged_parent, prefix):
            return {"type": "rerooted", "purged_parent": purged_parent, "prefix_events": len(prefix)}
        case ev.QosSet(class_, batch_invariant):
            return {"type": "qos_set", "class": class_, "batch_invariant": batch_invariant}
        case ev.Block(role, kind, payload, span, visibility_version):
            shown = {"payload": content(payload), "tokens": len(span), "visibility_version": visibility_version}
            return {"type": "block", "role": role, "kind": kind, **shown}
        case ev.PermissionRequest(call_id, text):
            return {"type": "permission_request", "call_id": call_id, "text": content(text)}
        case ev.PermissionResponse(request_id, granted):
            return {"type": "permission_response", "request_id": request_id, "granted": granted}
        case ev.ToolCancelRequested(call_id):
            return {"type": "tool_cancel_requested", "call_id": call_id}
        case ev.ToolOutcome(call_id, outcome, note):
            return {"type": "tool_outcome", "call_id": call_id, "outcome": outcome, "note": content(note)}
        case ev.ToolReconciliation(call_id, note):
            return {"type": "tool_reconciliation", "call_id": call_id, "note": content(note)}
        case ev.ToolLease(call_id, deadline_unix_ms):
            return {"type": "tool_lease", "call_id": call_id, "deadline_unix_ms": deadline_unix_ms}
        case ev.Pinned(deadline_unix_ms):
            return {"type": "pinned", "deadline_unix_ms": deadline_unix_ms}
    raise TypeError(f"no export form for {type(body).__name__}")


def _params(params: ev.GenParams) -> dict[str, Any]:
    return {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "top_k": params.top_k,
        "seed": params.seed,
    }
