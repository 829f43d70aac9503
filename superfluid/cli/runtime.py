"""`superfluid runtime`: one runtime and its options."""

import click
import orjson

from superfluid.cli.command import HELP_FLAGS, Command, CommandError, Option, Program
from superfluid.cli.runtimes import table
from superfluid.daemon.runtimes import RuntimeCatalog, RuntimeUnusable
from superfluid.llama.search import home_directory

COLUMNS = ("OPTION", "TAKES", "DEFAULT", "")


@click.group(cls=Program, context_settings=HELP_FLAGS)
def command() -> None:
    """Look at one runtime."""


@command.command("options", cls=Command, context_settings=HELP_FLAGS)
@click.argument("name", metavar="ID")
@click.option("--json", "as_json", is_flag=True, cls=Option, group="Output", help="JSON instead of a table.")
def show_options(name: str, as_json: bool) -> None:
    """List the options of runtime ID, as `serve` takes them."""
    if "@" in name:
        raise CommandError(f"{name}: options are a runtime's, not an install's: {name.partition('@')[0]} was meant", 2)
    catalog = RuntimeCatalog(home_directory())
    try:
        runtime = catalog.check(catalog.resolve(name))
    except RuntimeUnusable as error:
        raise CommandError(str(error), 2 if error.exit_code == 2 else 1) from None
    if as_json:
        click.echo(orjson.dumps({"runtime": runtime.id, "options": runtime.options}, option=orjson.OPT_INDENT_2))
        return
    if not runtime.options:
        click.echo(f"{runtime.id} has no options of its own")
        return
    rows = [
        (f"--{runtime.id}-{entry['name']}", takes(entry), str(entry["default"]), entry["about"])
        for entry in runtime.options
    ]
    click.echo(table([COLUMNS, *rows]))


def takes(entry: dict[str, object]) -> str:
    """What an option takes, in a few characters."""
    choices = entry.get("choices")
    if isinstance(choices, list):
        return "|".join(map(str, choices))
    least, most = entry.get("least"), entry.get("most")
    if least is not None and most is not None:
        return f"{entry['kind']}, {least} to {most}"
    if least is not None:
        return f"{entry['kind']}, at least {least}"
    return "on|off" if entry["kind"] == "on-off" else str(entry["kind"])
