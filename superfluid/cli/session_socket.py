"""The running server that a command asks over its session socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from superfluid.cli.command import CommandError, Option
from superfluid.cli.server_address import start_one
from superfluid.client import Client, ClientError

U64_END = 1 << 64


class SessionId(click.ParamType[int]):
    """A session's number."""

    name = "n"
    when_missing = " The sessions of a running server: superfluid session list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit()) or int(text) >= U64_END:
            self.fail(f'a session\'s number, got "{value}"', param, ctx)
        return int(text)


def socket_option(function: Any) -> Any:
    """`--socket` of a command that asks a running server."""
    return click.option(
        "--socket", type=click.Path(path_type=Path), cls=Option, group="Server", metavar="PATH",
        show_default="<home>/superfluid.sock", help="Its session socket.",
    )(function)  # fmt: skip


@contextmanager
def reached(path: Path | None) -> Iterator[Client]:
    """A client of the server at `path`. What it is refused, or cannot reach, is the command's failure (exit 1)."""
    try:
        with Client(path) as client:
            yield client
    except ClientError as error:
        raise CommandError(f"{error}{start_one(error.__context__)}") from None
