"""`superfluid completion`: shell completion for bash, zsh or fish."""

import click
from click.shell_completion import get_completion_class

from superfluid.cli.command import HELP_FLAGS, PROGRAM, Choice, Command

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Command, context_settings=HELP_FLAGS)
@click.argument("shell", type=Choice(*SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL (bash, zsh or fish); evaluate it in the shell's start file."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    click.echo(kind(root, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
