"""The mock as a runtime adapter: the smallest one, and a template for others."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from superfluid.engines.kit.options import Option
from superfluid.engines.kit.runtime import Arguments, Flag, Info, Loaded, ModelRefused, Probe, Runtime
from superfluid.engines.mock.config import RINGS, Knobs, MockConfig
from superfluid.engines.mock.engine import MockEngine
from superfluid.link import linkw

RECORD_FLAG = "--mock-record"
_PAIR = re.compile(r"(\d+)=(-?\d+)")


class Mock(Runtime):
    """No formats, no model, the engine's own tokenizer. Its switches turn the engine's knobs for tests."""

    def info(self) -> Info:
        return Info("mock")

    def probe(self, args: Arguments) -> Probe:
        return Probe("mock")

    def needs_model(self) -> bool:
        return False

    def flags(self) -> Sequence[Flag]:
        return (
            Flag(RECORD_FLAG, "JSON object: the capability record it reports"),
            Flag("--mock-script", "tokens every lane answers with, separated by commas"),
            Flag("--mock-delay", "seconds every tick takes"),
            Flag("--mock-round-delay", "seconds every step takes"),
            Flag("--mock-finish", "lane=finish, separated by commas: the lane's next token ends it so"),
            Flag("--mock-fault", "lane=code, separated by commas: the lane's next decode faults"),
            Flag("--mock-refuse", "lane=status, separated by commas: the lane's admit is refused"),
            Flag("--mock-die-after", "ticks after which the runtime breaks"),
            Flag("--mock-vocab", "size of the vocabulary"),
        )

    def options(self) -> Sequence[Option]:
        return ()

    def open(self, args: Arguments) -> Loaded:
        return Loaded.engine(build(args.flags, args.max_batch), RINGS)


def build(flags: Mapping[str, str], max_batch: int) -> MockEngine:
    """The engine that the switches ask for. Raises ModelRefused for a value that means nothing."""
    config = MockConfig(max_batch=max_batch)
    knobs = Knobs()
    for flag, value in flags.items():
        try:
            _SWITCHES[flag](config, knobs, value)
        except ValueError as error:
            raise ModelRefused(f"{flag} {value}: {error}") from error
    return MockEngine(config, knobs)


def _record(config: MockConfig, knobs: Knobs, value: str) -> None:
    json.loads(value)
    config.record = value


def _script(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.script = [int(token) for token in value.split(",") if token]


def _delay(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.delay = float(value)


def _round_delay(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.round_delay = float(value)


def _finish(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.finishes.update(_pairs(value))


def _fault(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.faults.update(_pairs(value))


def _refuse(config: MockConfig, knobs: Knobs, value: str) -> None:
    codes = _pairs(value)

    def refuse(admit: linkw.LaneAdmit) -> int | None:
        return codes.get(admit.lane_tag)

    knobs.refuse_admit = refuse


def _die_after(config: MockConfig, knobs: Knobs, value: str) -> None:
    knobs.die_after = int(value)


def _vocab(config: MockConfig, knobs: Knobs, value: str) -> None:
    config.vocab_size = int(value)


_SWITCHES: dict[str, Callable[[MockConfig, Knobs, str], None]] = {
    RECORD_FLAG: _record,
    "--mock-script": _script,
    "--mock-delay": _delay,
    "--mock-round-delay": _round_delay,
    "--mock-finish": _finish,
    "--mock-fault": _fault,
    "--mock-refuse": _refuse,
    "--mock-die-after": _die_after,
    "--mock-vocab": _vocab,
}


def _pairs(value: str) -> dict[int, int]:
    pairs = {}
    for part in value.split(","):
        found = _PAIR.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} is no <lane>=<number>")
        pairs[int(found[1])] = int(found[2])
    return pairs
