"""Log lines on stderr: UTC time, level, message, fields; which of them by a directive (spec: observability, logs)."""

import logging
import re
import sys
import time

import attrs

TRACE = 5
OFF = logging.CRITICAL + 10
LEVELS = {
    "off": OFF,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
NAMES = {logging.CRITICAL: "ERROR", logging.WARNING: "WARN", TRACE: "TRACE"}
TARGET = re.compile(r"[A-Za-z0-9_.]+\Z")


@attrs.frozen
class LogFilter:
    """Levels by target; the longest target that is a prefix of a logger's name decides."""

    default: int
    targets: dict[str, int]

    @classmethod
    def parse(cls, directive: str) -> "LogFilter":
        """`info`, or `warn,superfluid.scheduler=debug`. Raises ValueError for what is neither."""
        default, targets = logging.INFO, {}
        for part in filter(None, (piece.strip() for piece in directive.split(","))):
            target, equals, level = part.rpartition("=")
            number = LEVELS.get(level.strip().lower())
            if number is None or (equals and not TARGET.match(target.strip())):
                raise ValueError(
                    f"{part!r} is no log directive (a level, or target=level; levels: {', '.join(LEVELS)})"
                )
            if equals:
                targets[target.strip()] = number
            else:
                default = number
        return cls(default, targets)

    def level(self, name: str) -> int:
        """The least level shown of a logger."""
        best = ""
        for target in self.targets:
            if (name == target or name.startswith(f"{target}.")) and len(target) > len(best):
                best = target
        return self.targets.get(best, self.default)


class Lines(logging.Formatter):
    """`2026-01-31T09:08:07.123456Z INFO message key=value`; fields are a record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        level = NAMES.get(record.levelno, record.levelname)
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        micros = int(record.created % 1 * 1_000_000)
        line = f"{seconds}.{micros:06d}Z {level} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Shown(logging.Filter):
    """Lets through what the directive in force asks for."""

    def __init__(self, directive: LogFilter) -> None:
        super().__init__()
        self.directive = directive

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.directive.level(record.name)


_shown = Shown(LogFilter(logging.INFO, {}))


def configure_logging(directive: str) -> None:
    """Send log lines to stderr. Raises ValueError for a directive that does not parse."""
    _shown.directive = LogFilter.parse(directive)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    handler.addFilter(_shown)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(TRACE)
    for quiet in ("hypercorn", "quart", "asyncio"):
        logging.getLogger(quiet).setLevel(logging.WARNING)


def set_directive(directive: str) -> None:
    """Change what is shown from now on. Raises ValueError for a directive that does not parse, changing nothing."""
    _shown.directive = LogFilter.parse(directive)
