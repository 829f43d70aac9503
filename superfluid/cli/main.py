"""`superfluid`: the commands, each in a module of its own that is imported when it runs."""

import importlib
import sys
from collections.abc import Sequence

import click

from superfluid import __version__
from superfluid.cli.command import HELP_FLAGS, Command, CommandError, Program, did_you_mean, run
from superfluid.cli.stop_signals import FAILED, StoppedBeforeReady, stop_signals

COMMANDS = {
    "serve": "Serve models over HTTP and the session socket",
    "chat": "Chat with a running server in the terminal",
    "session": "List, inspect and export sessions of a running server, compact those of a stopped one",
    "media": "Put media into a running server's pool, or clear it",
    "runtimes": "List the runtimes of this machine, or what serves a model",
    "runtime": "List the options of a runtime",
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Superfluid, context_settings=HELP_FLAGS)
@click.version_option(__version__, "-V", "--version", message="superfluid %(version)s")
def program() -> None:
    """One serving daemon for local LLM inference."""


@program.command("help", cls=Command, context_settings=HELP_FLAGS)
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command."""
    shown = ctx.find_root()
    for name in names:
        group = shown.command
        command = group.get_command(shown, name) if isinstance(group, click.Group) else None
        if command is None:
            known = group.list_commands(shown) if isinstance(group, click.Group) else []
            raise CommandError(f'no command "{name}"{did_you_mean(name, known)}', 2)
        shown = command.context_class(command, info_name=name, parent=shown, **command.context_settings)
    click.echo(shown.get_help())


@program.command("version", cls=Command, context_settings=HELP_FLAGS)
def show_version() -> None:
    """Print the version."""
    click.echo(f"superfluid {__version__}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["serve"]:
        stop_signals.install()  # before its imports: a signal that comes this early ends the start too
    try:
        code = stop_signals.leave(run(program, words))
    except StoppedBeforeReady:
        code = stop_signals.leave(FAILED)
    sys.exit(code)
