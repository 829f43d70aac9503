"""The demo model with a progress bar, for every command that serves or fetches it."""

from collections.abc import Callable
from pathlib import Path

import rich.console
import rich.progress

from superfluid.cli.command import CommandError, say
from superfluid.llama.demo import MODEL_BYTES, DemoError, demo_is_here, demo_model


def fetch_demo(home: Path, offline: bool) -> Path:
    """The demo model, fetched on first use: with a progress bar where stderr is a terminal, else a line at its begin
    and one at its end."""
    fetched = not offline and not demo_is_here(home)
    console = rich.console.Console(stderr=True)
    if not fetched or not console.is_terminal:
        if fetched:
            say(f"fetching the demo model ({MODEL_BYTES / 1e6:.0f} MB)")
        path = had(lambda: demo_model(home, offline), offline)
        if fetched:
            say(f"the demo model is here: {path}")
        return path
    columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        bar: rich.progress.TaskID | None = None

        def show(had: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = progress.add_task("demo model", total=total)
            progress.update(bar, completed=had, total=total)

        return had(lambda: demo_model(home, offline, show), offline)


def had(get: Callable[[], Path], offline: bool) -> Path:
    """What `get` gets. Raises CommandError: 2 when nothing may be fetched, 1 when it could not be."""
    try:
        return get()
    except DemoError as error:
        raise CommandError(str(error), 2 if offline else 1) from None
