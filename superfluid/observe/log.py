"""Logs: filters, and sinks that are bounded and lossy, so that no sink ever delays a tick.

Standard `logging` carries the lines; fields go in `extra={"fields": {...}}`, a span in `extra={"span": {...}}`.
"""

import atexit
import json
import logging
import os
import queue
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import attrs

TRACE = 5
OFF = 1000
LEVELS = {
    "off": OFF,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
NAMES = {logging.CRITICAL: "ERROR", logging.ERROR: "ERROR", logging.WARNING: "WARN", TRACE: "TRACE"}
COLOURS = {"ERROR": "31", "WARN": "33", "INFO": "32", "DEBUG": "34", "TRACE": "35"}

QUEUE_LINES = 8192
RING_LINES = 2000
FILE_BYTES = 64 * 1024 * 1024
FILES_KEPT = 8
FLUSH_SECONDS = 2.0


@attrs.frozen
class LogFilter:
    """Which targets log at which level; the longest target that is a prefix of a logger's name wins."""

    default: int = logging.INFO
    targets: tuple[tuple[str, int], ...] = ()  # longest first

    @classmethod
    def parse(cls, directive: str) -> "LogFilter":
        """A filter from `info,superfluid.scheduler=debug`. Raises ValueError saying which part does not parse."""
        default: int | None = None
        targets: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in directive.split(","))):
            target, equals, name = part.rpartition("=")
            level = LEVELS.get(name.strip().lower())
            if level is None:
                raise ValueError(f"{part!r} is no log directive: {name.strip()!r} is not one of {', '.join(LEVELS)}")
            if not equals:
                default = level
            elif re.fullmatch(r"[\w.:]+", target.strip()):
                targets[target.strip().replace("::", ".")] = level
            else:
                raise ValueError(f"{part!r} is no log directive: {target.strip()!r} is no target")
        if default is None:
            default = LEVELS["info"] if not targets else LEVELS["error"]
        return cls(default, tuple(sorted(targets.items(), key=lambda item: -len(item[0]))))

    @property
    def lowest(self) -> int:
        return min(self.default, *(level for _, level in self.targets)) if self.targets else self.default

    def level(self, target: str) -> int:
        """The least level that a target logs at."""
        for prefix, level in self.targets:
            if target.startswith(prefix) and target[len(prefix) : len(prefix) + 1] in ("", "."):
                return level
        return self.default


def level_name(record: logging.LogRecord) -> str:
    return NAMES.get(record.levelno, record.levelname)


def timestamp(seconds: float) -> str:
    """UTC, `2026-01-31T09:08:07.123456Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LineFormatter(logging.Formatter):
    """`<time> <LEVEL> <message> key=value ...`; colour only for terminals."""

    def __init__(self, colour: bool = False) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        name = level_name(record)
        shown = f"\x1b[{COLOURS.get(name, '0')}m{name}\x1b[0m" if self.colour else name
        fields = getattr(record, "fields", None) or {}
        line = " ".join(
            [timestamp(record.created), shown, record.getMessage(), *(f"{k}={v}" for k, v in fields.items())]
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object per line: timestamp, level, target, fields with the message, and the span when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": timestamp(record.created),
            "level": level_name(record),
            "target": record.name,
            "fields": {"message": record.getMessage(), **(getattr(record, "fields", None) or {})},
        }
        if record.exc_info:
            line["fields"]["exception"] = self.formatException(record.exc_info)
        if (span := getattr(record, "span", None)) is not None:
            line["span"] = span
        return json.dumps(line, ensure_ascii=False, default=str)


class QueuedSink(logging.Handler):
    """Hands lines to `write` on a thread of its own; a line that does not fit in the queue is dropped and counted."""

    def __init__(self, write: Callable[[str], None], formatter: logging.Formatter, lines: int = QUEUE_LINES) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0
        self.on_drop: Callable[[], None] = lambda: None
        self._write = write
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(lines)
        self._broken = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1
            self.on_drop()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged so far is written, at most `FLUSH_SECONDS`."""
        written = threading.Event()
        try:
            self._lines.put(written, timeout=FLUSH_SECONDS)
        except queue.Full:
            return
        written.wait(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write(item)
                self._broken = False
            except (OSError, ValueError) as error:
                if not self._broken:  # said once; the other sinks go on
                    self._broken = True
                    sys.__stderr__ and sys.__stderr__.write(f"superfluid: a log sink failed: {error}\n")


class RingSink(logging.Handler):
    """Keeps the last lines for the monitor."""

    def __init__(self, lines: int = RING_LINES) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self.lines: deque[str] = deque(maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class RotatingFiles:
    """`superfluid.<n>.jsonl` in a directory: a new one at every start and before one would pass its bound."""

    NAME = re.compile(r"superfluid\.(\d+)\.jsonl")

    def __init__(self, directory: Path, most_bytes: int = FILE_BYTES, kept: int = FILES_KEPT) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._kept = kept
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._size = 0
        self._descriptor = self._next()

    def write(self, line: str) -> None:
        data = line.encode() + b"\n"
        if self._size and self._size + len(data) > self._most_bytes:
            os.close(self._descriptor)
            self._descriptor = self._next()
        os.write(self._descriptor, data)
        self._size += len(data)

    def _numbers(self) -> list[int]:
        found = (self.NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _next(self) -> int:
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 0
        descriptor = os.open(
            self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        for old in [*numbers, number][: -self._kept]:
            self._path(old).unlink(missing_ok=True)
        self._size = 0
        return descriptor

    def _path(self, number: int) -> Path:
        return self._directory / f"superfluid.{number}.jsonl"


class _Gate(logging.Filter):
    """Lets a record through by the filter in force."""

    def __init__(self, rules: LogFilter) -> None:
        super().__init__()
        self.rules = rules

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.rules.level(record.name)


_gate = _Gate(LogFilter())
_sinks: list[logging.Handler] = []


def configure_logging(
    directive: str = "info",
    *,
    stream: TextIO | None = None,
    directory: Path | None = None,
    ring: RingSink | None = None,
    on_drop: Callable[[], None] | None = None,
) -> None:
    """Send the package's logs to standard error, or to JSON files in `directory`, or also to `ring`.

    Replaces what was configured before. Raises ValueError for a directive that does not parse, OSError when the
    directory cannot be used.
    """
    rules = LogFilter.parse(directive)
    root = logging.getLogger()
    for old in _sinks:
        root.removeHandler(old)
        old.flush()
    _sinks.clear()
    if directory is not None:
        _sinks.append(QueuedSink(RotatingFiles(directory).write, JsonFormatter()))
    if stream is not None or (directory is None and ring is None):
        out = stream or sys.stderr

        def write(line: str) -> None:
            out.write(line + "\n")
            out.flush()

        _sinks.append(QueuedSink(write, LineFormatter(colour=out.isatty())))
    if ring is not None:
        _sinks.append(ring)
    for sink in _sinks:
        sink.addFilter(_gate)
        if isinstance(sink, QueuedSink) and on_drop is not None:
            sink.on_drop = on_drop
        root.addHandler(sink)
    logging.addLevelName(TRACE, "TRACE")
    _apply(rules)


def set_log_filter(directive: str) -> None:
    """Change the filter of a running process. Raises ValueError, changing nothing, when it does not parse."""
    _apply(LogFilter.parse(directive))


def flush_logs() -> None:
    """Write out what was logged so far, waiting a moment at most."""
    for sink in _sinks:
        sink.flush()


def _apply(rules: LogFilter) -> None:
    _gate.rules = rules
    logging.getLogger().setLevel(rules.lowest)


atexit.register(flush_logs)


def access_line(
    status: int,
    route: str,
    model: str,
    *,
    prompt: int,
    cached: int,
    completion: int,
    ttft: float | None,
    decode_rate: float | None,
    total: float,
    finish: str,
) -> str:
    """The access log's line for a request that generated. Tokens are counts, times seconds, rates tokens a second.

    `route` is method and path, with ` (stream)` or ` (fim)` behind it where that holds.
    """
    uncached = prompt - cached
    prefill = f"{uncached / ttft:.0f}" if uncached > 0 and ttft is not None and ttft >= 0.001 else "-"
    decode = f"{decode_rate:.1f}" if decode_rate is not None else "-"
    return (
        f"<-- {status} {route} model={model} prompt={prompt} cached={cached} completion={completion} "
        f"ttft={(ttft or 0) * 1000:.0f}ms prefill={prefill} tok/s decode={decode} tok/s "
        f"total={total * 1000:.0f}ms finish={finish}"
    )
