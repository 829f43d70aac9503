"""`superfluid`: the commands, each in a module of its own that is imported when it runs."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from superfluid import __version__
from superfluid.cli.command import HELP_FLAGS, CommandError, Program, did_you_mean, run

COMMANDS = {
    "serve": "Serve models over HTTP and the session socket",
    "chat": "Chat with a running server in the terminal",
    "session": "Inspect sessions of a running server",
    "runtimes": "List the runtimes of this machine, or what serves a model",
    "pull": "Fetch a model without serving it",
    "tasks": "Print the task tree of a running server",
    "bench": "Measure throughput and overhead",
    "completion": "Print shell completion",
    "help": "Show a command's help",
    "version": "Print the version",
}


class Superfluid(Program):
    """The program; a command's module is `superfluid.cli.<name>` and its command object `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"superfluid.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        command = self.get_command(ctx, args[0])
        if command is None:
            raise CommandError(f'no command "{args[0]}"{did_you_mean(args[0], COMMANDS)}', 2)
        return args[0], command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Superfluid, context_settings=HELP_FLAGS)
@click.version_option(__version__, "-V", "--version", message="superfluid %(version)s")
def program() -> None:
    """One serving daemon for local LLM inference."""


@program.command("help", context_settings=HELP_FLAGS)
@click.argument("name", required=False)
@click.pass_context
def show_help(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command."""
    parent = ctx.parent
    assert parent is not None
    if name is None:
        click.echo(parent.get_help())
        return
    command = program.get_command(parent, name)
    if command is None:
        raise CommandError(f'no command "{name}"{did_you_mean(name, COMMANDS)}', 2)
    with command.make_context(name, [], parent=parent, resilient_parsing=True) as child:
        click.echo(child.get_help())


@program.command("version", context_settings=HELP_FLAGS)
def show_version() -> None:
    """Print the version."""
    click.echo(f"superfluid {__version__}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    sys.exit(run(program, sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
