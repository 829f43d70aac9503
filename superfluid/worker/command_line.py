"""The command line of a worker: its command, its own flags, and those its runtime reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from superfluid.engines.kit.options import Option, OptionError, PullOption, Value
from superfluid.engines.kit.runtime import (
    DEFAULT_MAX_BATCH,
    DEFAULT_MAX_CONTEXT,
    Arguments,
    PlanRequest,
    Runtime,
)

COMMANDS = ("version", "check", "plan", "install", "versions", "compat", "pull")
SERVE = "serve"

_COUNTS = {
    "--max-context": Option("max-context", "int", str(DEFAULT_MAX_CONTEXT), "tokens of context a lane", least=1),
    "--max-batch": Option("max-batch", "int", str(DEFAULT_MAX_BATCH), "lanes decoded together", least=1),
    "--kv-bits": Option("kv-bits", "int", "0", "bits of a cached value; 0 is the runtime's own", least=0, most=32),
}
_STREAMS = {
    "--frames-fd": Option("frames-fd", "int", "", "descriptor of the frames socket", least=0),
    "--fd-channel-fd": Option("fd-channel-fd", "int", "", "descriptor of the descriptor channel", least=0),
}


class UsageError(Exception):
    """A command line that is wrong; the message says what (exit 2, with the usage)."""


@attrs.frozen
class CommandLine:
    """A parsed command line. `given` holds the flags of plan, install and pull as they were written."""

    command: str
    args: Arguments
    frames_fd: int | None = None
    fd_channel_fd: int | None = None
    name: str | None = None
    given: dict[str, str | None] = attrs.Factory(dict)

    @property
    def plan_request(self) -> PlanRequest:
        given = self.given
        backend, sha256 = given.get("--backend"), given.get("--sha256")
        return PlanRequest(
            given.get("--version"),
            backend.lower() if backend else None,
            given.get("--from"),
            sha256.lower() if sha256 else None,
            "--untested" in given,
        )


def usage(name: str, runtime: Runtime) -> str:
    """How the worker is called, with the flags its runtime reads."""
    own = [flag.name for flag in runtime.flags()] + [f"--{option.name}" for option in runtime.options()]
    lines = [
        f"usage: {name} version | check [--model PATH] | versions | compat [--json]",
        f"       {name} plan [--version V] [--backend B] [--from URL|PATH] [--sha256 H] [--untested]",
        f"       {name} install --into DIR --plan JSON | pull ORG/MODEL[:TAG] [--offline]",
        f"       {name} --frames-fd N --fd-channel-fd M --model PATH [--max-context N] [--max-batch N] [--kv-bits N]",
    ]
    if own:
        lines.append("flags of this runtime, each with a value: " + " ".join(own))
    return "\n".join(lines)


def parse(runtime: Runtime, argv: Sequence[str]) -> CommandLine:
    """Every flag takes a value in the next argument and a later one wins. Raises UsageError."""
    command = next((word for word in _words(runtime, argv) if word in COMMANDS), SERVE)
    return _Parser(runtime, command).read(argv)


def _words(runtime: Runtime, argv: Sequence[str]) -> Iterator[str]:
    """Arguments that are neither flags nor, as far as can be told before the command is known, values."""
    bare = {"--json", "--untested", "--offline"} | {
        f"--{option.name}" for option in runtime.pull_options() or () if not option.value
    }
    values = False
    for word in argv:
        if values:
            values = False
        elif word.startswith("--"):
            values = word not in bare
        else:
            yield word


class _Parser:
    def __init__(self, runtime: Runtime, command: str) -> None:
        self.runtime = runtime
        self.command = command
        self.flags = {flag.name for flag in runtime.flags()}
        self.options = {f"--{option.name}": option for option in runtime.options()}
        self.bare, self.valued = self._of_command()

    def _of_command(self) -> tuple[set[str], set[str]]:
        """Flags of the command alone: those without a value, and those with one."""
        match self.command:
            case "plan":
                return {"--untested"}, {"--version", "--backend", "--from", "--sha256"}
            case "install":
                return set(), {"--into", "--plan"}
            case "compat":
                return {"--json"}, set()
            case "pull":
                options: Sequence[PullOption] = self.runtime.pull_options() or ()
                bare = {f"--{option.name}" for option in options if not option.value}
                return {"--offline"} | bare, {f"--{option.name}" for option in options if option.value}
        return set(), set()

    def read(self, argv: Sequence[str]) -> CommandLine:
        words = iter(argv)
        given: dict[str, str | None] = {}
        flags: dict[str, str] = {}
        options: dict[str, Value] = {}
        numbers: dict[str, int] = {}
        model: Path | None = None
        name: str | None = None
        commanded = self.command == SERVE
        for word in words:
            if not word.startswith("--"):
                if not commanded and word == self.command:
                    commanded = True
                elif self.command == "pull" and name is None:
                    name = word
                else:
                    raise UsageError(f"unexpected argument {word}")
                continue
            if word in self.bare:
                given[word] = None
                continue
            self._check_known(word)
            value = next(words, None)
            if value is None:
                raise UsageError(f"{word} needs a value")
            if word in self.valued:
                given[word] = value
            elif word == "--model":
                model = Path(value)
            elif word in self.flags:
                flags[word] = value
            elif word in self.options:
                options[word[2:]] = _parse(self.options[word], value)
            else:
                numbers[word] = int(_parse((_COUNTS | _STREAMS)[word], value))
        self._check_kv_bits(numbers.get("--kv-bits", 0))
        args = Arguments(
            model,
            numbers.get("--max-context", DEFAULT_MAX_CONTEXT),
            numbers.get("--max-batch", DEFAULT_MAX_BATCH),
            numbers.get("--kv-bits", 0),
            flags,
            options,
        )
        found = CommandLine(self.command, args, numbers.get("--frames-fd"), numbers.get("--fd-channel-fd"), name, given)
        self._check_complete(found)
        return found

    def _check_known(self, flag: str) -> None:
        streams = _STREAMS if self.command == SERVE else ()
        if not any(flag in known for known in (self.valued, self.flags, self.options, _COUNTS, streams, ("--model",))):
            raise UsageError(f"unknown flag {flag}")

    def _check_kv_bits(self, bits: int) -> None:
        if bits and not self.runtime.reads_kv_bits():
            reason = self.runtime.static_capabilities().get("load", {}).get("kv_bits")
            if not isinstance(reason, str):
                reason = f"{self.runtime.info().id} has no such setting"
            raise UsageError(f"--kv-bits {bits}: {reason}")

    def _check_complete(self, line: CommandLine) -> None:
        wanted: list[tuple[str, object]] = []
        if self.command == SERVE:
            wanted = [("--frames-fd", line.frames_fd), ("--fd-channel-fd", line.fd_channel_fd)]
            if self.runtime.needs_model():
                wanted.append(("--model", line.args.model))
        elif self.command == "install":
            wanted = [(flag, line.given.get(flag)) for flag in ("--into", "--plan")]
        elif self.command == "pull":
            wanted = [("a model id (org/model[:tag])", line.name)]
        missing = [what for what, value in wanted if value is None]
        if missing:
            doing = "serving" if self.command == SERVE else self.command
            raise UsageError(f"{doing} needs {' and '.join(missing)}")


def _parse(option: Option, text: str) -> Value:
    try:
        return option.parse(text)
    except OptionError as error:
        raise UsageError(f"--{option.name}: {error}") from None
