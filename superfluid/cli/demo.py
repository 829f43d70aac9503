"""The demo model with a progress bar, for every command that serves or fetches it."""

from pathlib import Path

import rich.console
import rich.progress

from superfluid.cli.command import CommandError
from superfluid.llama.demo import DemoError, demo_model


def fetch_demo(home: Path, offline: bool) -> Path:
    """The demo model, fetched on first use with a progress bar on stderr."""
    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        bar: rich.progress.TaskID | None = None

        def show(had: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = progress.add_task("demo model", total=total)
            progress.update(bar, completed=had, total=total)

        try:
            return demo_model(home, offline, show)
        except DemoError as error:
            raise CommandError(str(error), 2 if offline else 1) from None
