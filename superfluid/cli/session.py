"""`superfluid session`: a session of a running server as text, JSON, JSON lines or OTLP."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import click

from superfluid import __version__
from superfluid.cli.command import HELP_FLAGS, Choice, CommandError, Option, Program, reason, say
from superfluid.cli.screen import CONTROLS
from superfluid.cli.server_address import cause
from superfluid.cli.session_list import session_line
from superfluid.cli.session_socket import SessionId, reached, socket_option
from superfluid.daemon.start import ServeLock, ServeLocked
from superfluid.link import postcard
from superfluid.link.events import Channel, Event, Finish, Role
from superfluid.link.session_api import Inspection, Parked
from superfluid.llama.search import home_directory
from superfluid.scheduler.classes import Class
from superfluid.sessions.compact import compact_sessions
from superfluid.sessions.errors import StoreError
from superfluid.sessions.export import fields, json_lines, redact
from superfluid.sessions.otlp import trace_request

OTLP_FORMAT = "otlp-jsonl"
TRACES = "/v1/traces"  # where a collector takes traces, below its URL
PUSH_SECONDS = 10.0
PRIVATE = 0o600
TEXTS = ("text", "title", "arguments", "content", "payload", "note", "raw")  # fields with content, in an export


@click.group("session", cls=Program, context_settings=HELP_FLAGS)
def command() -> None:
    """List, inspect and export the sessions of a running server; compact those of a stopped one."""


@command.command("list", context_settings=HELP_FLAGS)
@socket_option
def show_list(socket: Path | None) -> None:
    """List the sessions: number, tokens, title; the newest first."""
    with reached(socket) as client:
        sessions = client.sessions()[::-1]
    for summary in sessions:
        click.echo(session_line(summary))
    if not sessions:
        say("there are no sessions yet")


@command.command("inspect", context_settings=HELP_FLAGS)
@click.argument("session", type=SessionId())
@click.option("--json", "as_json", is_flag=True, cls=Option, group="Output", help="The whole of it as JSON.")
@click.option(
    "--include-content", is_flag=True, cls=Option, group="Output", help="Texts too, with keys and tokens taken out."
)
@socket_option
def inspect(session: int, as_json: bool, include_content: bool, socket: Path | None) -> None:
    """Show what session SESSION is, and a line per event; no content unless asked for."""
    with reached(socket) as client:
        inspection = client.get(session).inspect()
    if as_json:
        click.echo(json.dumps(postcard.to_json(inspection), indent=2, ensure_ascii=False, default=list))
    else:
        click.echo("\n".join([*summary(inspection), *event_lines(inspection.events, include_content)]))


@command.command("compact", context_settings=HELP_FLAGS)
@click.option(
    "--sessions", type=click.Path(path_type=Path), cls=Option, group="Sessions", metavar="DIR",
    show_default="<home>/sessions", help="Where sessions are kept.",
)  # fmt: skip
def compact(sessions: Path | None) -> None:
    """Erase what purged sessions left in the logs of a stopped server."""
    directory = home_directory() / "sessions" if sessions is None else sessions
    if not directory.is_dir():
        raise CommandError(f"--sessions {directory}: there is no such directory")
    try:
        with ServeLock(directory):
            for done in compact_sessions(directory):
                click.echo(f"{done.path}: {done.before} bytes, {done.before - done.after} of them erased")
    except (ServeLocked, StoreError) as error:
        raise CommandError(str(error)) from None


@command.command("export", context_settings=HELP_FLAGS)
@click.argument("session", type=SessionId())
@click.option(
    "--format", "form", type=Choice("jsonl", OTLP_FORMAT), default="jsonl", cls=Option, group="Output",
    metavar="jsonl|otlp-jsonl", help="A line per event, or one OTLP trace.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), cls=Option, group="Output", metavar="DIR", help="Write a file there."
)
@click.option(
    "--include-content", is_flag=True, cls=Option, group="Output",
    help="Texts too, with keys and tokens taken out; jsonl only: a trace never holds any.",
)  # fmt: skip
@click.option(
    "--model", default="", show_default="none", cls=Option, group="Output", metavar="NAME",
    help="The model's name for OTLP, which a session does not know: without it gen_ai.request.model is empty.",
)  # fmt: skip
@click.option(
    "--endpoint", cls=Option, group="Output", metavar="URL",
    help="Push the OTLP trace to a collector instead: to URL/v1/traces, or to URL when it ends so.",
)  # fmt: skip
@click.option(
    "--allow-content-egress", is_flag=True, cls=Option, group="Output",
    help="Let content leave with --endpoint; a trace holds none, so it changes nothing today.",
)  # fmt: skip
@socket_option
def export(
    session: int, form: str, out: Path | None, include_content: bool, model: str, endpoint: str | None,
    allow_content_egress: bool, socket: Path | None,
) -> None:  # fmt: skip
    """Write session SESSION as JSON lines or OTLP."""
    if endpoint is not None and not endpoint.lower().startswith(("http://", "https://")):  # a file opens as a URL too
        raise CommandError(f"--endpoint is the http or https URL of a collector, got {endpoint!r}", 2)
    otlp = endpoint is not None or form == OTLP_FORMAT
    if include_content and otlp:
        say(
            "--include-content is ignored: a trace holds names and counts and never content, "
            "with --allow-content-egress or without; the texts are in --format jsonl"
        )
    elif allow_content_egress:
        why = "without --endpoint no content leaves" if endpoint is None else "a trace holds no content"
        say(f"--allow-content-egress is ignored: {why}")
    if out is not None and endpoint is not None:
        say("--out is ignored: with --endpoint the trace is pushed there, and no file is written")
    if model and not otlp:
        say("--model is ignored: only OTLP names the model")
    with reached(socket) as client:
        inspection = client.get(session).inspect()
    if otlp and inspection.store_id is None:
        say("the server names no store: the trace's ids are not unique to it")
    if endpoint is not None:
        push(endpoint, trace(inspection, model))
        return
    if form == OTLP_FORMAT:
        name, lines = f"session-{session}.traces.otlp.jsonl", [trace(inspection, model)]
    else:
        name, lines = f"session-{session}.jsonl", list(json_lines(inspection, include_content))
    if out is None:
        click.echo("\n".join(lines))
        return
    try:
        write_private(out, name, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}") from None
    say(f"wrote {out / name}")


def trace(inspection: Inspection, model: str) -> str:
    request = trace_request(inspection, model, __version__)
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"))


def write_private(folder: Path, name: str, text: str) -> None:
    """Write a file that its owner alone can read; the folder is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, PRIVATE)  # an older file may be open to others
        file.write(text)


def push(endpoint: str, body: str) -> None:
    """POST a trace to an OTLP collector. Raises CommandError."""
    url = endpoint.rstrip("/").removesuffix(TRACES) + TRACES
    try:
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PUSH_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        raise CommandError(f"{url} answered {error.code}") from None
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        raise CommandError(f"{url}: {reason(cause(error))}") from None


def summary(inspection: Inspection) -> list[str]:
    """What a session is, a line each."""
    about = inspection.summary
    params = postcard.to_json(inspection.params)
    fingerprint, store = inspection.behavior_fingerprint, inspection.store_id
    tier = inspection.tier
    where = type(tier).variant_name.lower()
    if isinstance(tier, Parked):
        where += f" ({tier.covered} tokens, encoding {tier.encoding})"
    rows = {
        "session": about.id,
        "title": about.title or "-",
        "parent": "none" if about.parent is None else f"{about.parent} at event {about.fork_at}",
        "epoch": inspection.epoch,
        "generation": about.generation,
        "meta version": about.meta_version,
        "archived": "yes" if about.archived else "no",
        "class": f"{inspection.qos_class} ({Class(inspection.qos_class).name.lower()})"
        + (", batch invariant" if inspection.batch_invariant else ""),
        "sampling": ", ".join(f"{key} {value}" for key, value in params.items()),
        "tier": where,
        "pinned until": timestamp(inspection.pin_deadline_unix_ms) if inspection.pin_deadline_unix_ms else "-",
        "events": about.events,
        "tokens": about.tokens,
        "last finish": f"{inspection.last_finish} ({finish_name(inspection.last_finish)})",
        "log version": inspection.wal_version,
        "fingerprint": "-" if fingerprint is None else f"{fingerprint:016x}",
        "store": "-" if store is None else store.hex(),
        "open calls": ", ".join(f"{call} {name}" for call, name, _ in inspection.open_tool_calls) or "none",
    }
    width = max(map(len, rows)) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]


def event_lines(events: Sequence[Event], include_content: bool = False) -> Iterator[str]:
    """A line per event: id, epoch, time, kind, and what it holds in counts and names; texts only when asked for."""
    epochs = max((len(str(event.epoch)) for event in events), default=0)
    kinds = max((len(type(event.body).variant_name) for event in events), default=0)
    for event in events:
        place = f"{event.event_id:>6}  epoch {event.epoch:>{epochs}}  {timestamp(event.ts_unix_ms)}"
        kind = f"{type(event.body).variant_name:<{kinds}}"
        yield "  ".join([place, kind, ", ".join(details(event, include_content))]).rstrip()


def details(event: Event, include_content: bool) -> Iterator[str]:
    """What an event holds, a few words each; texts last."""
    shown = fields(event.body, redact if include_content else str.encode)
    texts = [name for name in TEXTS if isinstance(shown.get(name), str | bytes)]
    for name, value in shown.items():
        if name in ("type", "params", *texts) or value is None:
            continue
        if name == "role" and value in set(Role):
            yield Role(value).name.lower()
        elif name == "channel" and value in set(Channel):
            yield Channel(value).name.lower().replace("_", " ")
        elif name == "finish":
            if value != Finish.NONE:
                yield f"finish {finish_name(value)}"
        elif name == "tokens":
            yield counted(value, "token")
        elif name == "deadline_unix_ms":
            yield f"until {timestamp(value)}"
        elif name == "name":
            yield str(value)
        else:
            yield f"{name.replace('_', ' ')} {str(value).lower()}"
    for name in texts:
        text = shown[name]
        said = (
            counted(len(text), "byte")
            if isinstance(text, bytes)
            else CONTROLS.sub("", json.dumps(text, ensure_ascii=False))
        )
        yield said if name == "text" else f"{name} {said}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def timestamp(unix_ms: int) -> str:
    """RFC 3339 in UTC; `-` for none, the number itself where no calendar reaches."""
    if unix_ms == 0:
        return "-"
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"{unix_ms} ms"


def finish_name(finish: int) -> str:
    return Finish(finish).name.lower() if finish in set(Finish) else "unknown"
