"""The check report."""

import json
from pathlib import Path
from typing import Any

from superfluid.engines.kit.check import check_report, passed
from superfluid.engines.kit.runtime import Arguments, Probe
from tests.kit.toy_runtime import Toy


def test_the_whole_report(tmp_path: Path) -> None:
    model = tmp_path / "a.toy"
    model.write_bytes(b"TOYS")
    report = check_report(Toy(), Arguments(model=model, flags={"--toy-lib": "/opt/libtoy.so"}))
    assert passed(report)
    assert json.loads(json.dumps(report)) == report
    options = report.pop("options")
    assert options[0] == {
        "name": "threads", "kind": "int", "default": "0", "about": "threads", "least": 0, "most": 512
    }  # fmt: skip
    assert options[3]["choices"] == ["none", "layer"]
    assert report == {
        "runtime": {"id": "toy", "version": "toy 1.0", "aliases": ["toys", "toy.lib"], "abi": 3},
        "link_w": [8],
        "available": True,
        "formats": [
            {"id": "toy", "describe": "a toy file", "file": {"extensions": ["toy"], "magic": "TOYS"}},
            {
                "id": "toybox",
                "describe": "a toy directory",
                "directory": {"files": ["config.json"], "extensions": ["bin"]},
            },
        ],
        "tokenizer": {"from": "library", "name": "libtoy"},
        "devices": [{"backend": "CPU", "name": "a processor", "memory": 8 << 30, "budget": 0}],
        "capabilities": {"descriptor_version": 1, "load": {"kv_bits": "toys have no cache"}},
        "pull": {
            "options": [
                {"name": "file", "value": True, "about": "which file"},
                {"name": "no-extras", "value": False, "about": "without extras"},
            ]
        },
        "named": "/opt/libtoy.so",
        "model": {"path": str(model), "reads": True, "facts": {"architecture": "toy"}, "sizing": "no GPU"},
    }


def test_a_runtime_that_does_not_run_here() -> None:
    report = check_report(Toy(unavailable="no libtoy.so found"), Arguments())
    assert not passed(report)
    assert report["available"] == "no libtoy.so found"
    assert report["runtime"] == {"id": "toy", "version": None, "aliases": ["toys", "toy.lib"]}
    assert report["devices"] == []
    assert "model" not in report and "named" not in report


def test_a_model_it_does_not_read(tmp_path: Path) -> None:
    report = check_report(Toy(), Arguments(model=tmp_path / "missing"))
    assert not passed(report)
    assert report["model"] == {
        "path": str(tmp_path / "missing"),
        "reads": f"{tmp_path / 'missing'}: no such file or directory",
    }


def test_whatever_a_broken_library_raises_is_reported(tmp_path: Path) -> None:
    class Broken(Toy):
        def probe(self, args: Arguments) -> Probe:
            raise OSError("undefined symbol: toy_init")

        def model_facts(self, path: Path) -> dict[str, Any]:
            raise KeyError("architecture")

    model = tmp_path / "a.toy"
    model.write_bytes(b"TOYS")
    report = check_report(Broken(), Arguments(model=model))
    assert report["available"] == "OSError: undefined symbol: toy_init"
    assert report["model"]["facts"] == "KeyError: 'architecture'"
