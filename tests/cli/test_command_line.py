"""What all commands share: help, hints, values, exit codes, words."""

from pathlib import Path

import pytest

from superfluid import __version__
from superfluid.cli.command import did_you_mean, edit_distance, nearest
from superfluid.cli.main import COMMANDS
from tests.cli.conftest import RunCommand


@pytest.mark.parametrize("words", [(name, flag) for name in COMMANDS for flag in ("-h", "--help")])
def test_every_command_has_help(superfluid: RunCommand, words: tuple[str, ...]) -> None:
    done = superfluid(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: superfluid {words[0]}")
    assert max(map(len, done.out.splitlines())) <= 100


def test_help_of_a_command_and_of_an_action(superfluid: RunCommand) -> None:
    assert superfluid("help", "serve").out == superfluid("serve", "--help").out
    assert superfluid("help", "session", "inspect").out.startswith("Usage: superfluid session inspect")
    assert superfluid("help").out.startswith("Usage: superfluid ")
    for words in (("session",), ("bench",), ("serve",)):
        shown = superfluid("help", *words).out
        assert "..." not in shown.replace("[OPTIONS] COMMAND [ARGS]...", "").replace("[MODEL]...", "").replace(
            "N,...", ""
        )
    assert "--drain-timeout SEC" in shown
    assert "[default: 60]" in " ".join(shown.split())
    assert "Where HTTP listens. [default: 127.0.0.1:8453]" in " ".join(shown.split())
    assert (superfluid("help", "servee").code, superfluid("help", "session", "inspct").code) == (2, 2)


def test_the_flags_of_serve_are_grouped_with_their_defaults(superfluid: RunCommand) -> None:
    shown = superfluid("serve", "-h").out
    for group in ("Model:", "Server:", "Generation:", "Scheduling:", "Logging:"):
        assert f"\n{group}\n" in shown
    assert "--max-batch" in shown
    assert "[default: 8]" in shown


def test_no_command_shows_the_overview_on_stderr(superfluid: RunCommand) -> None:
    done = superfluid()
    assert (done.code, done.out) == (2, "")
    assert all(name in done.err for name in COMMANDS)


@pytest.mark.parametrize("words", [("-V",), ("--version",), ("version",)])
def test_version(superfluid: RunCommand, words: tuple[str, ...]) -> None:
    done = superfluid(*words)
    assert (done.code, done.out) == (0, f"superfluid {__version__}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serv",), 'superfluid: no command "serv" (did you mean serve?)'),
        (("complet", "bash"), 'superfluid: no command "complet" (did you mean completion?)'),
        (("xyzzy",), 'superfluid: no command "xyzzy"'),
        (("serve", "--max-ctx", "9"), "superfluid: serve has no option --max-ctx (did you mean --max-context?)"),
        (("serve", "--max-ctx=9"), "superfluid: serve has no option --max-ctx (did you mean --max-context?)"),
        (("serve", "--zzzzzzzz"), "superfluid: serve has no option --zzzzzzzz"),
        (("serve", "--offline=yes"), "superfluid: serve has no option --offline=yes (--offline takes no value)"),
        (("serve", "--port"), "superfluid: --port needs a value"),
        (("serve", "--port", "nope"), 'superfluid: --port expects a number, got "nope"'),
        (("serve", "--port", "70000"), "superfluid: --port expects 0 to 65535, got 70000"),
        (("serve", "--port", "1", "--port", "-1"), "superfluid: --port expects 0 to 65535, got -1"),
        (("serve", "--temperature", "nan"), "superfluid: --temperature expects 0 to 2, got nan"),
        (("serve", "--temperature", "2.1"), "superfluid: --temperature expects 0 to 2, got 2.1"),
        (("serve", "--kv-bits", "5"), 'superfluid: --kv-bits expects one of 0, 4, 8, 16, 84, got "5"'),
        (("serve", "--http", "nowhere"), 'superfluid: --http expects <address>:<port>, got "nowhere"'),
        (("serve", "--http", "a=b"), 'superfluid: --http expects <address>:<port>, got "a=b"'),
        (("serve", "--http=a=b"), 'superfluid: --http expects <address>:<port>, got "a=b"'),
        (("serve", "--dialect", "x"), "superfluid: unknown dialect 'x' (chatml|atem|raw|template|auto)"),
        (("serve", "--no-http", "--port", "1"), "superfluid: --no-http contradicts --http, --host and --port"),
        (("serve", "--prefill-budget", "63"), "superfluid: --prefill-budget expects 0, or 64 to 4096, got 63"),
        (("serve", "--port", "9", "--web", "127.0.0.1:9"), "superfluid: --web 127.0.0.1:9: HTTP listens at 127.0.0."),
        (("serve", "--http", "0.0.0.0:9", "--web=localhost:9"), "superfluid: --web localhost:9: HTTP listens at 0.0.0"),
        (("serve", "--web", "127.0.0.1:8453"), "superfluid: --web 127.0.0.1:8453: HTTP listens at 127.0.0.1:8453"),
        (("chat", "--max-tokens", "0"), "superfluid: --max-tokens expects 1 to 4294967295, got 0\n"),
        (("serve", "--pull-branch", "x"), "superfluid: --pull-branch is an option of fetching a model by its id"),
        (("tasks", "--jsn"), "superfluid: tasks has no option --jsn (did you mean --json?)"),
        (("completion", "tcsh"), "superfluid: completion: Invalid value"),
        (("pull",), "superfluid: pull: Missing argument"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_was_meant(
    superfluid: RunCommand, words: tuple[str, ...], message: str
) -> None:
    done = superfluid(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)
    told_how = f"Usage: superfluid {words[0]}" in done.err
    assert told_how == (words[0] in COMMANDS and words[0] != "serve")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--web-origin", "http://a"), "--web-origin is ignored: the session API is on the web with --web only"),
        (("--http", "127.0.0.1:0", "--port", "7"), "--port is ignored: --http says where HTTP listens"),
        (("--no-http", "--api-key", "k"), "--api-key is ignored: there is no HTTP listener with --no-http"),
        (("--fim-max-batch", "3"), "--fim-max-batch is ignored: no model is given by --fim-model"),
        (("--fim-max-context", "600"), "--fim-max-context is ignored: no model is given by --fim-model"),
    ],
)
def test_a_flag_that_does_nothing_because_of_another_is_told(
    superfluid: RunCommand, flags: tuple[str, ...], said: str
) -> None:
    port = () if {"--http", "--no-http"} & set(flags) else ("--port", "0")
    done = superfluid("serve", "/not/there", *port, *flags)
    assert done.code == 2
    assert done.err == f"superfluid: {said}\nsuperfluid: /not/there: no such file or directory\n"


def test_a_flag_before_any_command(superfluid: RunCommand) -> None:
    done = superfluid("--port", "1", "serve")
    assert done.code == 2
    assert "a command must come first" in done.err


def test_after_a_lone_dash_pair_everything_is_a_model(superfluid: RunCommand) -> None:
    done = superfluid("serve", "--port", "0", "--", "--help")
    assert (done.code, done.err) == (2, "superfluid: --help: no such file or directory\n")


def test_actions_stand_in_the_order_of_their_use(superfluid: RunCommand) -> None:
    shown = superfluid("bench", "--help").out
    assert 0 < shown.index("  throughput ") < shown.index("  overhead ")
    for words in (("bench",), ("bench", "throughput"), ("bench", "overhead")):
        assert "pip install -e '.[bench,llamacpp]'" in " ".join(superfluid(*words, "--help").out.split())


def test_nearest() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert nearest("--max-conte", ["--max-batch", "--max-context"]) == "--max-context"
    assert nearest("--http-default", ["--http-default-qos", "--http"]) == "--http-default-qos"  # a long prefix
    assert nearest("--htt", ["--host", "--http"]) == "--http"
    assert nearest("abcd", ["abcdefgh"]) is None  # four characters are no long prefix
    assert did_you_mean("frobnicate", ["serve", "chat"]) == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(superfluid: RunCommand, shell: str) -> None:
    done = superfluid("completion", shell)
    assert done.code == 0
    assert "_SUPERFLUID_COMPLETE" in done.out


def test_a_server_that_cannot_be_reached(superfluid: RunCommand) -> None:
    done = superfluid("tasks", "--http", "127.0.0.1:1")
    assert done.code == 1
    assert done.err == (
        "superfluid: no server answers at http://127.0.0.1:1: Connection refused; start one with `superfluid serve`\n"
    )


@pytest.mark.parametrize("line", [("session", "list"), ("media", "gc")])
def test_a_socket_that_nobody_made(superfluid: RunCommand, tmp_path: Path, line: tuple[str, ...]) -> None:
    done = superfluid(*line, "--socket", tmp_path / "none.sock")
    assert done.code == 1
    assert done.err == (
        f"superfluid: no server answers at {tmp_path}/none.sock: No such file or directory; "
        "start one with `superfluid serve`\n"
    )


def test_a_socket_that_is_none(superfluid: RunCommand, tmp_path: Path) -> None:
    """There a new server would not help."""
    (tmp_path / "file").touch()
    done = superfluid("session", "list", "--socket", tmp_path / "file" / "none.sock")
    assert done.code == 1
    assert done.err == f"superfluid: no server answers at {tmp_path}/file/none.sock: Not a directory\n"


# ---- the configuration file


def config(folder: Path, text: str) -> Path:
    path = folder / "superfluid.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-ctx = 5", "there is no key 'max-ctx' (did you mean max-context?)"),
        ("port = true", "port expects a number, got True"),
        ('offline = "yes"', "offline expects true or false, got 'yes'"),
        ("model = [1]\nhost = false", "host expects a string, got False"),
        ("[lamacpp]\nthreads = 1", "there is no runtime 'lamacpp' here (did you mean llamacpp?)"),
        ("[llamacpp]\nthreads = [1]", "llamacpp.threads takes one value, got [1]"),
        ("port = ", "Invalid value"),
    ],
)
def test_what_is_wrong_in_a_configuration_file(superfluid: RunCommand, tmp_path: Path, text: str, said: str) -> None:
    path = config(tmp_path, text)
    done = superfluid("serve", "--config", path)
    assert done.code == 2
    assert done.err.startswith(f"superfluid: --config {path}: {said}")


def test_a_configuration_file_that_is_not_there(superfluid: RunCommand, tmp_path: Path) -> None:
    done = superfluid("serve", f"--config={tmp_path / 'none.toml'}")
    assert (done.code, done.err) == (2, f"superfluid: --config {tmp_path / 'none.toml'}: No such file or directory\n")


def test_flags_win_over_the_file(superfluid: RunCommand, tmp_path: Path) -> None:
    path = config(tmp_path, 'model = ["/of/the/file"]\nport = 99999\nworker-process = false\nno-http = false')
    assert "--port expects 0 to 65535, got 99999" in superfluid("serve", "--config", path).err
    done = superfluid("serve", "--config", path, "--port", "0")
    assert done.err == "superfluid: /of/the/file: no such file or directory\n"
    done = superfluid("serve", "--config", path, "--port", "0", "/of/the/line")
    assert done.err == "superfluid: /of/the/line: no such file or directory\n"


def test_what_is_accepted_and_ignored_is_said(superfluid: RunCommand) -> None:
    done = superfluid("serve", "--paged-kv", "--continuous-batching", "4", "--prefill-chunk=9", "--port", "0", "/none")
    assert done.code == 2
    assert [line.partition(" is ignored")[0] for line in done.err.splitlines()[:-1]] == [
        "superfluid: --paged-kv",
        "superfluid: --continuous-batching",
        "superfluid: --prefill-chunk",
    ]
    assert done.err.endswith("superfluid: /none: no such file or directory\n")
