"""Scheduling classes: their names, aliases and lane caps (pure)."""

from collections.abc import Mapping
from enum import IntEnum


class Class(IntEnum):
    """A request's class; lower is better."""

    INTERACTIVE = 0
    COMPLETION = 1
    AGENT = 2
    BACKGROUND = 3

    @property
    def urgent(self) -> bool:
        """Whether someone waits for the first token: such a job cuts a running tick short."""
        return self <= Class.COMPLETION


METRIC_LABELS = ("interactive_chat", "inline_completion", "foreground_agent", "background_agent")
"""Label of each class on the metrics page."""

NAMES: Mapping[str, Class] = {
    "interactive": Class.INTERACTIVE,
    "interactive-chat": Class.INTERACTIVE,
    "interactive_chat": Class.INTERACTIVE,
    "0": Class.INTERACTIVE,
    "completion": Class.COMPLETION,
    "inline-completion": Class.COMPLETION,
    "inline_completion": Class.COMPLETION,
    "1": Class.COMPLETION,
    "agent": Class.AGENT,
    "foreground": Class.AGENT,
    "foreground-agent": Class.AGENT,
    "foreground_agent": Class.AGENT,
    "2": Class.AGENT,
    "background": Class.BACKGROUND,
    "background-agent": Class.BACKGROUND,
    "background_agent": Class.BACKGROUND,
    "3": Class.BACKGROUND,
}


def parse_class(text: str) -> Class:
    """The class of a name or alias, trimmed and case-insensitive. Raises ValueError for anything else."""
    found = NAMES.get(text.strip().lower())
    if found is None:
        raise ValueError(f"unknown class {text!r} (interactive, completion, agent, background)")
    return found


def parse_class_lanes(text: str, max_batch: int) -> dict[Class, int]:
    """`--class-lanes`: lane caps per class from `background=2, agent=6`. Raises ValueError saying what is wrong."""
    caps: dict[Class, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, count = part.partition("=")
        if not equals:
            raise ValueError(f"--class-lanes: {part!r} has no '=' (write <class>=<lanes>)")
        try:
            klass = parse_class(name)
        except ValueError as error:
            raise ValueError(f"--class-lanes: {error}") from None
        if klass in caps:
            raise ValueError(f"--class-lanes: class {klass.name.lower()} is given twice")
        count = count.strip()
        if not (count.isascii() and count.isdigit()):
            raise ValueError(f"--class-lanes: {name.strip()} expects a whole number of lanes, got {count!r}")
        lanes = int(count)
        if lanes == 0:
            raise ValueError(
                f"--class-lanes: {name.strip()}=0 would never run; leave the class out to leave it uncapped"
            )
        if lanes > max_batch:
            raise ValueError(f"--class-lanes: {name.strip()}={lanes} is more than --max-batch {max_batch}")
        caps[klass] = lanes
    return caps
