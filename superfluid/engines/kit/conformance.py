"""What every adapter must keep, run by its tests: `runtime` on the object, `worker` on the program.

Both raise AssertionError that says what does not hold.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superfluid.engines.kit.check import check_report, passed, tokenizer_from_report
from superfluid.engines.kit.formats import DirectoryRule, FileRule, Format
from superfluid.engines.kit.options import NAME, RESERVED, Option, OptionError
from superfluid.engines.kit.runtime import RUNTIME_ID, Arguments, Device, Runtime
from superfluid.link.linkw import VERSION as LINK_W

SECONDS = 60  # a worker's command has this long to answer
DESCRIPTOR_VERSION = 1


def runtime(adapter: Runtime) -> None:
    """Check an adapter's declarations, its report, and how it takes and refuses model paths. Loads no model."""
    _names(adapter)
    _options(adapter)
    _record(adapter)
    for form in _formats(adapter):
        _artifact(adapter, form)
    _report(adapter)
    _refusals(adapter)


def worker(program: Path | Sequence[str], runtime_id: str) -> None:
    """Check a worker's program: a path, or the words that start it."""
    words = [str(program)] if isinstance(program, Path) else list(program)
    checked = _run(words, "check")
    assert checked.returncode in (0, 1), f"check exited {checked.returncode}: {checked.stderr}"
    report = json.loads(checked.stdout)
    available = report["available"]
    assert available is True or (isinstance(available, str) and available), f"available is {available!r}"
    assert (checked.returncode == 0) == (available is True), f"check exited {checked.returncode}, {available=}"
    assert report["runtime"]["id"] == runtime_id, f"the report is of {report['runtime']['id']!r}"
    assert LINK_W in report["link_w"], f"link_w is {report['link_w']}"

    version = _run(words, "version")
    if available is True:
        assert version.returncode == 0, f"version exited {version.returncode}: {version.stderr}"
        assert version.stdout.strip() == report["runtime"]["version"], f"version says {version.stdout.strip()!r}"
    else:
        assert version.returncode == 1, f"version exited {version.returncode}"
        assert version.stderr.strip(), "version fails without a word on stderr"

    missing = _run(words, "check", "--model", "/nonexistent/model")
    assert missing.returncode == 1, f"check of a missing model exited {missing.returncode}"
    reads = json.loads(missing.stdout)["model"]["reads"]
    assert isinstance(reads, str) and reads, f"model.reads of a missing model is {reads!r}"

    unknown = _run(words, "check", "--no-such-flag", "x")
    assert unknown.returncode == 2, f"an unknown flag exited {unknown.returncode}"
    assert "unknown flag --no-such-flag" in unknown.stderr, unknown.stderr

    streamless = _run(words, "--model", "/nonexistent/model")
    assert streamless.returncode == 2, f"serving without streams exited {streamless.returncode}"
    assert "--frames-fd" in streamless.stderr, streamless.stderr


def _names(adapter: Runtime) -> None:
    info = adapter.info()
    assert RUNTIME_ID.fullmatch(info.id), f"{info.id!r} is no runtime id"
    assert len(set(info.aliases)) == len(info.aliases), f"aliases repeat: {info.aliases}"
    for alias in info.aliases:
        assert alias and not re.search(r"[\s=]", alias), f"{alias!r} is no alias"
        assert alias != info.id, f"the alias {alias!r} is the id"
    for flag in adapter.flags():
        assert flag.name.startswith("--"), f"the flag {flag.name!r} does not start with --"
    for option in adapter.pull_options() or ():
        assert re.fullmatch(r"[a-z0-9-]+", option.name), f"{option.name!r} is no option name"
        assert option.name != "offline", "no pull option is called offline"


def _options(adapter: Runtime) -> None:
    names = [option.name for option in adapter.options()]
    assert len(set(names)) == len(names), f"options repeat: {names}"
    for option in adapter.options():
        assert NAME.fullmatch(option.name), f"{option.name!r} is no option name"
        assert option.name not in RESERVED, f"the option name {option.name!r} is taken"
        assert option.about, f"--{option.name} says nothing about itself"
        assert option.kind in ("int", "float", "on-off", "choice", "text"), f"--{option.name}: kind {option.kind!r}"
        assert (option.kind == "choice") == bool(option.choices), f"--{option.name}: choices {option.choices}"
        bounded = option.least is not None or option.most is not None
        assert not bounded or option.kind in ("int", "float"), f"--{option.name}: bounds on {option.kind}"
        assert option.most is None or option.kind == "int", f"--{option.name}: most on {option.kind}"
        assert Option.from_report(option.report()) == option, f"--{option.name} does not read back"
        if _is_value(option):
            _passes(option)


def _is_value(option: Option) -> bool:
    """Whether the default is a value, not words for one."""
    match option.kind:
        case "int":
            return re.fullmatch(r"-?\d+", option.default) is not None
        case "float":
            return re.fullmatch(r"-?\d+(\.\d+)?", option.default) is not None
        case "on-off":
            return option.default in ("on", "off")
        case "choice":
            return option.default in option.choices
        case "text":
            return False


def _passes(option: Option) -> None:
    try:
        option.parse(option.default)
    except OptionError as error:
        raise AssertionError(f"--{option.name} refuses its own default: {error}") from None


def _record(adapter: Runtime) -> None:
    record = adapter.static_capabilities()
    assert json.loads(json.dumps(record)) == record, "the static record is not JSON"
    if record:
        assert record.get("descriptor_version") == DESCRIPTOR_VERSION, "the static record has no descriptor_version 1"


def _formats(adapter: Runtime) -> Sequence[Format]:
    formats = adapter.info().formats
    assert len({form.id for form in formats}) == len(formats), "format ids repeat"
    for form in formats:
        assert form.id and form.describe, f"a format without id or words: {form}"
        assert (form.file is None) != (form.directory is None), f"{form.id} needs one rule, a file's or a directory's"
        if form.file is not None:
            assert form.file.extensions or form.file.magic, f"{form.id} can match nothing"
        if form.directory is not None:
            assert form.directory.extensions, f"{form.id} can match nothing"
    return formats


def _artifact(adapter: Runtime, form: Format) -> None:
    """A path made to the format's own rule matches it, and the runtime reads it."""
    with tempfile.TemporaryDirectory() as made:
        path = _make(Path(made), form)
        assert form.matches(path), f"{form.id} does not match {path.name}, which was made to its rule"
        refused = adapter.reads(path)
        assert refused is None, f"{form.id} matches {path.name}, but it is not read: {refused}"


def _make(directory: Path, form: Format) -> Path:
    match form.file, form.directory:
        case FileRule(extensions, magic), _:
            path = directory / (f"model.{extensions[0]}" if extensions else "model")
            path.write_bytes((magic or "").encode() + bytes(64))
            return path
        case _, DirectoryRule(files, extensions):
            path = directory / "model"
            path.mkdir()
            for name in (*files, f"model.{extensions[0]}"):
                (path / name).write_text("{}")
            return path
    raise AssertionError(f"{form.id} has no rule")


def _report(adapter: Runtime) -> None:
    info = adapter.info()
    report: dict[str, Any] = json.loads(json.dumps(check_report(adapter, Arguments())))
    found = [Format.from_report(entry) for entry in report["formats"]]
    assert found == list(info.formats), f"formats read back as {found}"
    assert tokenizer_from_report(report["tokenizer"]) == info.tokenizer, f"tokenizer {report['tokenizer']}"
    assert report["runtime"]["id"] == info.id
    assert report["runtime"]["aliases"] == list(info.aliases)
    devices = [Device(**entry) for entry in report["devices"]]
    assert report["available"] is True or not devices, "devices of a runtime that does not run here"
    if report["available"] is True:
        assert devices == list(adapter.probe(Arguments()).devices), f"devices read back as {devices}"
        assert report["runtime"]["version"], "it runs here and has no version"


def _refusals(adapter: Runtime) -> None:
    with tempfile.TemporaryDirectory() as made:
        text = Path(made) / "notes.txt"
        text.write_text("not a model\n")
        assert adapter.reads(text), "a text file is read as a model"
        missing = Path(made) / "missing"
        assert adapter.reads(missing), "a missing path is read as a model"
        assert not passed(check_report(adapter, Arguments(model=missing))), "check passes with a missing model"


def _run(words: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*words, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def module(runtime_id: str) -> list[str]:
    """The words that start the worker of a runtime in this environment."""
    return [sys.executable, "-m", "superfluid.worker.worker_main", "--engine", runtime_id]
