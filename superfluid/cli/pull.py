"""`superfluid pull`: fetch a model without serving it; its path on stdout, progress on stderr."""

import click

from superfluid.cli.command import HELP_FLAGS, Command, CommandError, Option
from superfluid.cli.demo import fetch_demo
from superfluid.llama.search import home_directory


@click.command(cls=Command, context_settings=HELP_FLAGS)
@click.argument("model")
@click.option("--offline", is_flag=True, cls=Option, group="Model", help="Only look at what is already here.")
def command(model: str, offline: bool) -> None:
    """Fetch MODEL (demo: the demo model) and print its path."""
    if model != "demo":
        raise CommandError(f'"{model}" is no model that can be fetched yet (demo is); a file is served by its path', 2)
    click.echo(fetch_demo(home_directory(), offline))
