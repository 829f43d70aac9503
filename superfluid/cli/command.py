"""What all commands share: grouped help, errors in the program's words, hints for what was meant, exit codes."""

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

PROGRAM = "superfluid"
TRACEBACKS = {"-v", "--verbose"}  # with one of these an error that nobody expected shows where it came from
HELP_WIDTH = 100
HELP_FLAGS = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH, "show_default": True}
WHOLE = 1 << 16  # characters of a help text that is not cut
PREFIX_HINT = 4  # a known name of which more than this many characters were typed is a hint


class CommandError(Exception):
    """A command that fails: a message for the operator and an exit code (1 run time, 2 usage, 4 no runtime)."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Option(click.Option):
    """A flag of a command; `group` is the heading it stands under in the help."""

    def __init__(self, *arguments: Any, group: str = "Options", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """A default as it is typed (60, not 60.0), or in words, given as `show_default`."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        elif isinstance(self.default, float):
            extra["default"] = f"{self.default:g}"
        return extra


class Number(click.ParamType[float]):
    """An integer or a float within bounds, with errors that say what is expected and what was given."""

    name = "n"

    def __init__(self, low: float | None = None, high: float | None = None, *, whole: bool = True) -> None:
        self.low, self.high, self.whole = low, high, whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = int(value) if self.whole else float(value)
        except (TypeError, ValueError):
            self.fail(f'a number, got "{value}"', param, ctx)
        below = self.low is not None and number < self.low
        above = self.high is not None and number > self.high
        if below or above or not math.isfinite(number):
            self.fail(f"{self._range()}, got {value}", param, ctx)
        return number

    def _range(self) -> str:
        if self.low is None and self.high is None:
            return "a finite number"
        if self.high is None:
            return f"at least {self._bound(self.low)}"
        if self.low is None:
            return f"at most {self._bound(self.high)}"
        return f"{self._bound(self.low)} to {self._bound(self.high)}"

    def _bound(self, bound: float | None) -> str:
        """A bound as it is typed: a whole number whole."""
        return str(bound) if isinstance(bound, int) else f"{bound:g}"


class Choice(click.ParamType[str]):
    """One of a few words."""

    name = "choice"

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.words:
            self.fail(f'one of {", ".join(self.words)}, got "{value}"', param, ctx)
        return value


class Command(click.Command):
    """A command whose flags are shown in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        switches = {flag for param in self.params if getattr(param, "is_flag", False) for flag in _spellings(param)}
        for argument in args:
            if argument == "--":
                break
            flag, equals, _ = argument.partition("=")
            if equals and flag in switches:
                raise CommandError(f"{ctx.info_name} has no option {argument} ({flag} takes no value)", 2)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):  # the usage line shows arguments
                groups.setdefault(getattr(param, "group", "Options"), []).append(row)
        for name, rows in groups.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def _spellings(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts]


class Program(click.Group):
    """A program of commands, or a command of actions."""

    command_class = Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None:
            return name, command, args[1:]
        what = "command" if ctx.parent is None else "action"
        who = "" if ctx.parent is None else f"{ctx.info_name} has "
        raise CommandError(f'{who}no {what} "{name}"{did_you_mean(name, self.list_commands(ctx))}', 2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command's first sentence, whole: click would cut it off to keep it on one line."""
        rows = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Actions"):
            formatter.write_dl([(name, row.get_short_help_str(WHOLE).rstrip(".")) for name, row in rows if row])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help", "-V", "--version"):
            raise CommandError(f"{args[0]}: a command must come first ({', '.join(self.list_commands(ctx))})", 2)
        if not args:
            click.echo(ctx.get_help(), err=True)
            raise click.exceptions.Exit(2)
        return super().parse_args(ctx, args)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: within an edit distance of max(2, a third of it), or a long prefix."""
    best: tuple[int, str] | None = None
    for candidate in known:
        distance = edit_distance(name, candidate)
        near = distance <= max(2, len(candidate) // 3)
        prefix = len(name) > PREFIX_HINT and candidate.startswith(name)
        if (near or prefix) and (best is None or distance < best[0]):
            best = distance, candidate
    return best[1] if best else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint in parentheses, or nothing."""
    found = nearest(name, known)
    return f" (did you mean {found}?)" if found else ""


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def run(program: click.Command, arguments: Sequence[str], name: str = PROGRAM) -> int:
    """Run a program and return its exit code; every error is one message on stderr."""
    try:
        result = program.main(args=list(arguments), prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except CommandError as error:
        fail(str(error), name)
        return error.code
    except click.UsageError as error:
        say(usage_message(error), name)
        if error.ctx is not None and getattr(error.ctx.command, "help_on_error", True):
            click.echo(error.ctx.get_help(), err=True)
        return 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more is flushed into it
        return 1
    except Exception as error:
        cause = _cause(error)
        fail(f"internal error: {type(cause).__name__}: {cause} ({_place(cause)})", name)
        if TRACEBACKS.intersection(arguments):
            traceback.print_exception(error)
        return 1


def _cause(error: BaseException) -> BaseException:
    """The first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _place(error: BaseException) -> str:
    """Where an error that nobody expected comes from: the innermost line of this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/superfluid/" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside this package"


def say(message: str, name: str = PROGRAM) -> None:
    """One line on stderr, in the program's name."""
    click.echo(f"{name}: {message}", err=True)


def aside(message: str) -> None:
    """What helps to go on, dim on a terminal."""
    click.echo(click.style(message, dim=True), err=True)


class FirstStderr:
    """Where stderr went before `--log-file` took it: a start that fails tells why there too."""

    def __init__(self) -> None:
        self._descriptor = -1

    def keep(self) -> None:
        self._descriptor = os.dup(2)

    def write(self, line: str) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, f"{line}\n".encode(errors="replace"))

    def let_go(self) -> None:
        """The start is over: whoever reads it to its end is not kept waiting."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


first_stderr = FirstStderr()


def fail(message: str, name: str = PROGRAM) -> None:
    """Say why a command ends."""
    say(message, name)
    first_stderr.write(f"{name}: {message}")


def reason(error: BaseException) -> str:
    """What an error says, in words: of the system's, the file and what is wrong with it, without a number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"


def usage_message(error: click.UsageError) -> str:
    """What a parse error says, in the words all commands share."""
    where = error.ctx.info_name if error.ctx is not None else PROGRAM
    if isinstance(error, click.NoSuchOption):
        command = error.ctx.command if error.ctx is not None else None
        known = [flag for param in command.params for flag in _spellings(param)] if command is not None else []
        typed = error.option_name
        return f"{where} has no option {typed}{did_you_mean(typed, [flag for flag in known if flag.startswith('--')])}"
    if isinstance(error, click.BadOptionUsage):
        return f"{error.option_name} needs a value"
    if isinstance(error, click.BadParameter) and error.param is not None and isinstance(error.param, click.Option):
        return f"{error.param.opts[0]} expects {error.message}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{where}: {error.format_message()}{getattr(error.param.type, 'when_missing', '')}"
    return f"{where}: {error.format_message()}"
