"""`superfluid media`: the media pool of a running server."""

import re
from pathlib import Path

import click

from superfluid.cli.command import HELP_FLAGS, CommandError, Program, say
from superfluid.cli.session_socket import reached, socket_option

IMAGES = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|BM|RIFF....WEBP", re.DOTALL)  # how their files begin
MOST_BYTES = (64 << 20) - 64  # what one message of the session socket holds


@click.group("media", cls=Program, context_settings=HELP_FLAGS)
def command() -> None:
    """Put media into a running server's pool, or clear it of what no session names."""


@command.command("put", context_settings=HELP_FLAGS)
@click.argument("file", type=click.Path(path_type=Path))
@socket_option
def put(file: Path, socket: Path | None) -> None:
    """Store FILE, an image; prints the hash that names it."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise CommandError(f"{file} has {len(data)} bytes; the server takes {MOST_BYTES} at once")
    with reached(socket) as client:
        click.echo(client.put_media(data))
    if IMAGES.match(data) is None:
        say(f"{file} does not begin like a PNG, JPEG, GIF, BMP or WebP image; it is stored as it is")


@command.command("gc", context_settings=HELP_FLAGS)
@socket_option
def gc(socket: Path | None) -> None:
    """Delete what no image of a live session names."""
    with reached(socket) as client:
        kept, removed = client.gc_media()
    click.echo(f"kept {kept}, removed {removed}")
