"""`superfluid tasks`: the task tree of a running server."""

import click
import orjson

from superfluid.cli.command import HELP_FLAGS, Command, Option
from superfluid.cli.server_address import get, server_options


@click.command(cls=Command, context_settings=HELP_FLAGS)
@click.option("--json", "as_json", is_flag=True, cls=Option, group="Output", help="Nested JSON instead of text.")
@server_options
def command(as_json: bool, http: str | None, api_key: str | None) -> None:
    """Print what each model of a running server does and who waits, then every task of it: what it is, what it waits
    for, whose child it is."""
    page = get("/v1/tasks", http, api_key, "application/json" if as_json else "text/plain")
    if as_json:
        page = orjson.dumps(orjson.loads(page), option=orjson.OPT_INDENT_2)
    click.echo(page.decode().rstrip("\n"))
