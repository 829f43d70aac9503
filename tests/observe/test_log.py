"""Logs: filters, line forms, rotation, lossy sinks, the access line."""

import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluid.observe.log import (
    TRACE,
    JsonFormatter,
    LineFormatter,
    LogFilter,
    QueuedSink,
    RingSink,
    RotatingFiles,
    access_line,
    configure_logging,
    flush_logs,
    set_log_filter,
)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A configured sink; the root logger is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    configure_logging("info", stream=out)
    yield out
    flush_logs()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_longest_matching_target_wins() -> None:
    rules = LogFilter.parse("warn, superfluid.scheduler=debug ,superfluid=info,superfluid.scheduler.loop=off")
    assert rules.level("superfluid.scheduler.planner") == logging.DEBUG
    assert rules.level("superfluid.scheduler") == logging.DEBUG
    assert rules.level("superfluid.scheduler.loop") > logging.CRITICAL
    assert rules.level("superfluid.schedulers") == logging.INFO
    assert rules.level("superfluidity") == logging.WARNING
    assert rules.lowest == logging.DEBUG
    assert LogFilter.parse("").level("x") == logging.INFO
    assert LogFilter.parse("TRACE").level("x") == TRACE


@pytest.mark.parametrize("directive", ["loud", "superfluid=", "a b=info", "=info", "info,superfluid=verbose"])
def test_directives_that_do_not_parse(directive: str) -> None:
    with pytest.raises(ValueError, match="no log directive"):
        LogFilter.parse(directive)


def test_lines(stream: io.StringIO) -> None:
    log = logging.getLogger("superfluid.scheduler")
    log.info("tick %d", 7, extra={"fields": {"lanes": 3, "session": 9}})
    log.debug("not shown")
    flush_logs()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z INFO tick 7 lanes=3 session=9\n", stream.getvalue())


def test_the_filter_changes_while_running(stream: io.StringIO) -> None:
    log = logging.getLogger("superfluid.scheduler")
    set_log_filter("error,superfluid.scheduler=debug")
    log.debug("shown")
    logging.getLogger("superfluid.daemon").warning("not shown")
    with pytest.raises(ValueError, match="no log directive"):
        set_log_filter("nonsense")
    log.debug("still shown")
    flush_logs()
    assert [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()] == ["shown", "still shown"]


def test_colour_only_where_asked() -> None:
    record = logging.LogRecord("superfluid", logging.WARNING, "", 0, "careful", (), None)
    assert " WARN careful" in LineFormatter().format(record)
    assert "\x1b[33mWARN\x1b[0m careful" in LineFormatter(colour=True).format(record)


def test_json_lines() -> None:
    record = logging.LogRecord("superfluid.api", logging.ERROR, "", 0, "no %s", ("luck",), None)
    record.fields = {"model": "m"}
    record.span = {"name": "generate", "session": 4}
    line = json.loads(JsonFormatter().format(record))
    assert line["fields"] == {"message": "no luck", "model": "m"}
    assert (line["level"], line["target"], line["span"]) == (
        "ERROR",
        "superfluid.api",
        {"name": "generate", "session": 4},
    )
    assert list(line) == ["timestamp", "level", "target", "fields", "span"]


def test_files_rotate_and_the_newest_are_kept(tmp_path: Path) -> None:
    (tmp_path / "superfluid.41.jsonl").write_text("old\n")
    files = RotatingFiles(tmp_path, most_bytes=100, kept=3)
    for number in range(10):
        files.write(f"{number} " + "x" * 40)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["superfluid.44.jsonl", "superfluid.45.jsonl", "superfluid.46.jsonl"]
    assert all((tmp_path / name).stat().st_size <= 100 for name in names)
    assert (tmp_path / names[-1]).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / names[-1]).read_text().startswith("8 ")


def test_a_sink_that_hangs_drops_lines_and_delays_nobody() -> None:
    gate, entered = threading.Event(), threading.Event()
    written: list[str] = []

    def write(line: str) -> None:
        entered.set()
        gate.wait()
        written.append(line)

    sink = QueuedSink(write, logging.Formatter("%(message)s"), lines=4)
    drops = 0

    def dropped() -> None:
        nonlocal drops
        drops += 1

    sink.on_drop = dropped
    record = logging.LogRecord("x", logging.INFO, "", 0, "line", (), None)
    sink.emit(record)
    entered.wait()
    for _ in range(10):
        sink.emit(record)
    assert (sink.dropped, drops) == (6, 6)
    gate.set()
    sink.flush()
    assert len(written) == 5


def test_the_ring_keeps_the_last_lines() -> None:
    ring = RingSink(3)
    for number in range(5):
        ring.emit(logging.LogRecord("x", logging.INFO, "", 0, str(number), (), None))
    assert [line.split()[-1] for line in ring.lines] == ["2", "3", "4"]


def test_access_line() -> None:
    line = access_line(
        200,
        "POST /v1/chat/completions (stream)",
        "m",
        prompt=120,
        cached=20,
        completion=8,
        ttft=0.25,
        decode_rate=12.345,
        total=1.5,
        finish="stop",
    )
    assert line == (
        "<-- 200 POST /v1/chat/completions (stream) model=m prompt=120 cached=20 completion=8 ttft=250ms "
        "prefill=400 tok/s decode=12.3 tok/s total=1500ms finish=stop"
    )
    line = access_line(
        200, "POST /x", "m", prompt=5, cached=5, completion=0, ttft=None, decode_rate=None, total=0, finish="length"
    )
    assert "ttft=0ms prefill=- tok/s decode=- tok/s total=0ms finish=length" in line
