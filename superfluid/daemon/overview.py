"""What a server does right now, for people: a few lines about each model, above the tree of its tasks."""

from collections.abc import Iterator

import trio

from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Model
from superfluid.daemon.satellite import Satellite
from superfluid.observe import tasks
from superfluid.scheduler.lanes import Lane, Ticket

LISTED = 20  # waiting jobs of a model that are shown one by one
CONNECTION = "trio._highlevel_serve_listeners._run_handler"  # the task that trio starts for a connection


def task_page(daemon: Daemon, root: trio.lowlevel.Task | None) -> str:
    """What the models run and who waits, then every task. Ids, counts and times only."""
    tree = tasks.dump_json(root)
    return "\n".join([*overview(daemon, tree), "", tasks.text(tree)])


def overview(daemon: Daemon, tree: tasks.TaskDump) -> Iterator[str]:
    """A line about all, a line per model, and below it one per lane and per waiting job."""
    names = [task["name"] for task in tasks.walk(tree)]

    def number(prefix: str, one: str, many: str) -> str:
        return counted(sum(name.startswith(prefix) for name in names), one, many)

    yield ", ".join(
        [
            counted(len(daemon.everything), "model", "models") + (", draining" if daemon.draining else ""),
            number("request:", "request", "requests"),
            number("batch:", "batch line", "batch lines"),
            number(CONNECTION, "HTTP connection", "HTTP connections"),
            number("session-connection:", "session connection", "session connections"),
            number("web-connection:", "WebSocket", "WebSockets"),
            number("subscription:", "subscription", "subscriptions"),
        ]
    )
    for model in daemon.everything:
        yield from _model(model)


def _model(model: Model) -> Iterator[str]:
    if model.supervisor.retired is not None:
        yield f"{model.name}: not loaded: {model.supervisor.retired}"
        return
    if not model.loaded:
        yield f"{model.name}: its worker starts"
        return
    scheduler = model.scheduler
    waiting = scheduler.waiting
    facts = [
        f"{len(scheduler.lanes)} of {counted(scheduler.max_lanes, 'lane', 'lanes')}",
        f"{len(waiting)} waiting",
        "fills in middles"
        if isinstance(model, Satellite)
        else counted(len(model.sessions.session_ids()), "session", "sessions"),
        f"window {model.window}",
        _tick(model),
    ]
    yield f"{model.name}: {', '.join(facts)}"
    for lane in scheduler.lanes:
        yield f"  {_who(lane.ticket)}: {_progress(lane)}"
    for ticket in waiting[:LISTED]:
        yield f"  {_who(ticket)}: waits, with {counted(ticket.stream_len, 'token', 'tokens')} to read"
    if len(waiting) > LISTED:
        yield f"  and {len(waiting) - LISTED} more that wait"


def _tick(model: Model) -> str:
    scheduler = model.scheduler
    if (running := scheduler.in_flight) is not None:
        return f"tick {scheduler.ticks} for {trio.current_time() - running.started:.3f} s"
    return f"idle after {counted(scheduler.ticks, 'tick', 'ticks')}"


def _who(ticket: Ticket) -> str:
    session = f", session {ticket.job.session}" if ticket.job.session is not None else ""
    return f"{ticket.generation.asked_by or 'a generation'} ({ticket.klass.name.lower()}{session})"


def _progress(lane: Lane) -> str:
    ticket = lane.ticket
    if lane.finishing:
        return f"ends after {counted(ticket.made, 'token', 'tokens')}"
    if lane.prefilling:
        return f"reads its prompt, {lane.prefilled} of {lane.prefill_end} tokens"
    most = ticket.made + lane.left
    return f"{ticket.made} of at most {counted(most, 'token', 'tokens')} made"


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
