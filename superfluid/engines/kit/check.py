"""The check report: what a runtime says of itself and of one model, without loading weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from superfluid.engines.kit.runtime import (
    Arguments,
    Device,
    ModelRefused,
    Probe,
    Runtime,
    RuntimeUnavailable,
    TokenizerLibrary,
    TokenizerSource,
)
from superfluid.link.linkw import VERSION as LINK_W


def check_report(runtime: Runtime, args: Arguments) -> dict[str, Any]:
    """The report of `check`; `args.model` is looked at when given. Whatever fails is told in it, never raised."""
    info = runtime.info()
    probe, available = _probe(runtime, args)
    report: dict[str, Any] = {
        "runtime": {"id": info.id, "version": probe.version if probe else None, "aliases": list(info.aliases)},
        "link_w": [LINK_W],
        "available": available,
        "formats": [form.report() for form in info.formats],
        "tokenizer": tokenizer_report(info.tokenizer),
        "devices": [device_report(device) for device in probe.devices] if probe else [],
        "capabilities": runtime.static_capabilities() or None,
    }
    if probe is not None and probe.abi is not None:
        report["runtime"]["abi"] = probe.abi
    if (pull := runtime.pull_options()) is not None:
        report["pull"] = {"options": [option.report() for option in pull]}
    if options := runtime.options():
        report["options"] = [option.report() for option in options]
    if (named := runtime.named(args)) is not None:
        report["named"] = named
    if args.model is not None:
        report["model"] = _model(runtime, args.model, args)
    return report


def passed(report: dict[str, Any]) -> bool:
    """Whether the runtime runs here and reads the model, if one was given."""
    return report["available"] is True and report.get("model", {"reads": True})["reads"] is True


def tokenizer_report(source: TokenizerSource) -> dict[str, str]:
    if isinstance(source, TokenizerLibrary):
        return {"from": "library", "name": source.name}
    return {"from": source}


def tokenizer_from_report(entry: dict[str, str]) -> TokenizerSource:
    """Read the tokenizer of a report back. Raises ValueError for a source there is not."""
    match entry:
        case {"from": "library", "name": name}:
            return TokenizerLibrary(name)
        case {"from": "huggingface"}:
            return "huggingface"
        case {"from": "engine"}:
            return "engine"
    raise ValueError(f"no tokenizer source: {entry!r}")


def device_report(device: Device) -> dict[str, Any]:
    return {"backend": device.backend, "name": device.name, "memory": device.memory, "budget": device.budget}


def _probe(runtime: Runtime, args: Arguments) -> tuple[Probe | None, bool | str]:
    try:
        runtime.prepare(args)
        return runtime.probe(args), True
    except RuntimeUnavailable as error:
        return None, str(error)
    except Exception as error:  # a broken library may raise anything: the report is printed all the same
        return None, f"{type(error).__name__}: {error}"


def _model(runtime: Runtime, path: Path, args: Arguments) -> dict[str, Any]:
    refused = _reads(runtime, path)
    entry: dict[str, Any] = {"path": str(path), "reads": True if refused is None else refused}
    if refused is None:
        facts = _told(lambda: runtime.model_facts(path))
        sizing = _told(lambda: runtime.sizing(path, args))
        entry |= {key: value for key, value in (("facts", facts), ("sizing", sizing)) if value is not None}
    return entry


def _reads(runtime: Runtime, path: Path) -> str | None:
    try:
        return runtime.reads(path)
    except Exception as error:
        return f"{path}: {error}"


def _told(ask: Callable[[], Any]) -> Any:
    """What `ask` gives, or the reason why it gives nothing."""
    try:
        return ask()
    except ModelRefused as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
