"""The conformance suite passes what keeps the rules and names what does not."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from superfluid.engines.kit import conformance
from superfluid.engines.kit.formats import FileRule, Format
from superfluid.engines.kit.options import Option, PullOption
from superfluid.engines.kit.runtime import Flag, Info
from tests.kit.toy_runtime import Toy

PROGRAM = [sys.executable, "-c", "import sys; from superfluid.worker.worker_main import main; "
           "from tests.kit.toy_runtime import Toy; sys.exit(main(Toy()))"]  # fmt: skip


def test_a_sound_runtime_passes() -> None:
    conformance.runtime(Toy())
    conformance.runtime(Toy(unavailable="not here"))


def test_a_sound_worker_passes() -> None:
    conformance.worker(PROGRAM, "toy")


def test_a_worker_of_another_runtime_is_told() -> None:
    with pytest.raises(AssertionError, match="the report is of 'toy'"):
        conformance.worker(PROGRAM, "other")


def changed(**info: Any) -> Toy:
    class Changed(Toy):
        def info(self) -> Info:
            return attrs.evolve(Toy.info(self), **info)

    return Changed()


def with_options(*options: Option) -> Toy:
    class Changed(Toy):
        def options(self) -> Sequence[Option]:
            return options

    return Changed()


class OddFlag(Toy):
    def flags(self) -> Sequence[Flag]:
        return (Flag("toy-lib", "the library"),)


class OddPull(Toy):
    def pull_options(self) -> Sequence[PullOption]:
        return (PullOption("offline", False, "taken"),)


class OddRecord(Toy):
    def static_capabilities(self) -> dict[str, Any]:
        return {"load": {"kv_bits": True}}


class ReadsAnything(Toy):
    def reads(self, path: Path) -> str | None:
        return None


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (changed(id="Toy"), "no runtime id"),
        (changed(id=".toy"), "no runtime id"),
        (changed(aliases=("toy",)), "is the id"),
        (changed(aliases=("a b",)), "no alias"),
        (changed(formats=(Format("x", "an x"),)), "needs one rule"),
        (changed(formats=(Format("x", "an x", FileRule()),)), "can match nothing"),
        (changed(formats=(Format("x", "an x", FileRule(("x",))),) * 2), "repeat"),
        (with_options(Option("model", "text", "", "taken")), "is taken"),
        (with_options(Option("-x", "text", "", "odd")), "no option name"),
        (with_options(Option("x", "choice", "a", "no choices")), "choices"),
        (with_options(Option("x", "int", "7", "out of its range", least=8)), "refuses its own default"),
        (with_options(Option("x", "text", "", "bounded", least=8)), "bounds"),
        (OddFlag(), "does not start with --"),
        (OddPull(), "no pull option is called offline"),
        (OddRecord(), "descriptor_version"),
        (ReadsAnything(), "a text file is read as a model"),
    ],
)
def test_what_breaks_a_rule_is_named(adapter: Toy, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        conformance.runtime(adapter)
