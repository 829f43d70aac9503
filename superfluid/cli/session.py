"""`superfluid session`: a session of a running server as text, JSON, JSON lines or OTLP."""

import json
import os
import urllib.error
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import click

from superfluid import __version__
from superfluid.cli.command import HELP_FLAGS, Choice, CommandError, Option, Program, say
from superfluid.cli.session_socket import SessionId, reached, socket_option
from superfluid.daemon.start import ServeLock, ServeLocked
from superfluid.link import postcard
from superfluid.link.events import Event, Finish
from superfluid.link.session_api import Inspection, Parked
from superfluid.llama.search import home_directory
from superfluid.sessions.compact import compact_sessions
from superfluid.sessions.errors import StoreError
from superfluid.sessions.export import json_lines
from superfluid.sessions.otlp import trace_request

OTLP_FORMAT = "otlp-jsonl"
PUSH_SECONDS = 10.0
PRIVATE = 0o600


@click.group("session", cls=Program, context_settings=HELP_FLAGS)
def command() -> None:
    """Look at the sessions of a running server; compact those of a stopped one."""


@command.command("inspect", context_settings=HELP_FLAGS)
@click.argument("session", type=SessionId())
@click.option("--json", "as_json", is_flag=True, cls=Option, group="Output", help="The whole of it as JSON.")
@socket_option
def inspect(session: int, as_json: bool, socket: Path | None) -> None:
    """Show session SESSION: what it is, and a line per event, without content."""
    with reached(socket) as client:
        inspection = client.get(session).inspect()
    if as_json:
        click.echo(json.dumps(postcard.to_json(inspection), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join([*summary(inspection), *map(event_line, inspection.events)]))


@command.command("compact", context_settings=HELP_FLAGS)
@click.option(
    "--sessions", type=click.Path(path_type=Path), cls=Option, group="Sessions", metavar="DIR",
    help="Where sessions are kept (<home>/sessions).",
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
    "--include-content", is_flag=True, cls=Option, group="Output", help="Texts too, with keys and tokens taken out."
)
@click.option("--model", default="", cls=Option, group="Output", metavar="NAME", help="The model's name for OTLP.")
@click.option("--endpoint", cls=Option, group="Output", metavar="URL", help="Push the OTLP trace there instead.")
@click.option(
    "--allow-content-egress", is_flag=True, cls=Option, group="Output", help="Let content leave with --endpoint."
)
@socket_option
def export(
    session: int, form: str, out: Path | None, include_content: bool, model: str, endpoint: str | None,
    allow_content_egress: bool, socket: Path | None,
) -> None:  # fmt: skip
    """Write session SESSION as JSON lines or OTLP."""
    with reached(socket) as client:
        inspection = client.get(session).inspect()
    if (endpoint is not None or form == OTLP_FORMAT) and inspection.store_id is None:
        say("the server names no store: the trace's ids are not unique to it")
    if endpoint is not None:
        if include_content and not allow_content_egress:
            say("--include-content needs --allow-content-egress with --endpoint: only ids and counts are pushed")
            include_content = False
        push(endpoint, trace(inspection, model, include_content))
        return
    if form == OTLP_FORMAT:
        name, lines = f"session-{session}.traces.otlp.jsonl", [trace(inspection, model, include_content)]
    else:
        name, lines = f"session-{session}.jsonl", list(json_lines(inspection, include_content))
    if out is None:
        click.echo("\n".join(lines))
        return
    try:
        write_private(out, name, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}") from None


def trace(inspection: Inspection, model: str, include_content: bool) -> str:
    request = trace_request(inspection, model, include_content, __version__)
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
    url = endpoint.rstrip("/") + "/v1/traces"
    try:
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PUSH_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        raise CommandError(f"{url} answered {error.code}") from None
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        raise CommandError(f"{url}: {getattr(error, 'reason', error)}") from None


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
        "class": f"{inspection.qos_class}{', batch invariant' if inspection.batch_invariant else ''}",
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


def event_line(event: Event) -> str:
    kind = type(event.body).variant_name
    return f"{event.event_id:>6}  epoch {event.epoch}  {timestamp(event.ts_unix_ms)}  {kind}"


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
