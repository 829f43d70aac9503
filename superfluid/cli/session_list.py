"""A session as a line of a list."""

from superfluid.cli.screen import CONTROLS
from superfluid.link.session_api import Summary


def session_line(summary: Summary) -> str:
    """Number, tokens and title."""
    return f"{summary.id:>5}  {summary.tokens:>7} tokens  {CONTROLS.sub('', summary.title or '-')}"
