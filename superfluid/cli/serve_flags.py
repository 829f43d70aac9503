"""The flags of `superfluid serve`."""

from typing import Any

import click

from superfluid.cli.command import Choice, Number, Option
from superfluid.cli.origin import Origin
from superfluid.scheduler.classes import parse_class

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8453
FIM_LANES = 2  # of --fim-model
KV_BITS = ("0", "4", "8", "16", "84")

_AUTOMATIC = "the runtime and the scheduler do this by themselves"
_OF_THE_STORE = "it is kept below --sessions"
IGNORED: dict[str, tuple[bool, str]] = {
    "--paged-kv": (False, _AUTOMATIC),
    "--prefix-cache": (False, "it is always on"),
    "--continuous-batching": (False, "it is always on; --max-batch sets its lanes"),
    "--paged-weights": (False, _AUTOMATIC),
    "--no-paged-weights-retry": (False, _AUTOMATIC),
    "--no-baked-decode": (False, _AUTOMATIC),
    "--prefix-cache-file": (True, _OF_THE_STORE),
    "--prefix-cache-save-interval": (True, _OF_THE_STORE),
    "--files-dir": (True, _OF_THE_STORE),
    "--media-dir": (True, _OF_THE_STORE),
    "--prefill-chunk": (True, "--prefill-budget bounds a tick's prefill"),
    "--metallib": (True, "the runtime finds its own"),
    "--gpu-wait-timeout-ms": (True, _AUTOMATIC),
    "--decode-replay": (True, _AUTOMATIC),
}
"""Accepted and ignored: whether a value follows, and what replaced the flag."""


class ClassName(click.ParamType[str]):
    """A scheduling class, by any of its names."""

    name = "class"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_class(value)
        except ValueError:
            self.fail(f'one of interactive, completion, agent, background, got "{value}"', param, ctx)
        return str(value)


FLAGS: list[click.Parameter] = [
    click.Argument(["bare"], nargs=-1, metavar="[MODEL]..."),
    # Model
    Option(
        ["--model", "models"],
        group="Model",
        multiple=True,
        metavar="PATH",
        help="A model file; repeatable. The first is the default, a bare MODEL before these; none: the demo model.",
    ),
    Option(
        ["--runtime"],
        group="Model",
        multiple=True,
        metavar="ID",
        help="The runtime for all models, or <model>=<id> for one; auto takes it back.",
    ),
    Option(["--offline"], group="Model", is_flag=True, help="Fetch and install nothing."),
    # Server
    Option(
        ["--http"],
        group="Server",
        metavar="ADDR:PORT",
        show_default=f"{DEFAULT_HOST}:{DEFAULT_PORT}",
        help="Where HTTP listens.",
    ),
    Option(["--host"], group="Server", metavar="ADDR", help="Its address alone."),
    Option(["--port"], group="Server", type=Number(0, 65535), metavar="N", help="Its port alone; 0 takes a free one."),
    Option(["--no-http"], group="Server", is_flag=True, help="Only the session socket."),
    Option(
        ["--web"],
        group="Server",
        metavar="ADDR:PORT",
        show_default="off",
        help="The session API over the web, on loopback only.",
    ),
    Option(
        ["--web-origin"],
        group="Server",
        type=Origin(),
        multiple=True,
        metavar="ORIGIN",
        help="Whose pages may use it, like http://localhost:3000; repeatable.",
    ),
    Option(
        ["--socket"],
        group="Server",
        metavar="PATH",
        show_default="<home>/superfluid.sock",
        help="The session socket.",
    ),
    Option(
        ["--sessions"],
        group="Server",
        metavar="DIR",
        show_default="<home>/sessions",
        help="Where sessions are kept.",
    ),
    Option(
        ["--api-key"],
        group="Server",
        metavar="KEY",
        show_default="none",
        help="The key that every request but /health must present. As api-key in a --config file no process list "
        "shows it.",
    ),
    Option(
        ["--drain-timeout"],
        group="Server",
        type=Number(0, whole=False),
        default=60.0,
        metavar="SEC",
        help="How long a stop waits for what is in flight.",
    ),
    # Generation
    Option(
        ["--max-context"],
        group="Generation",
        metavar="N|auto",
        show_default="auto",
        help="Tokens per lane; auto is what memory affords.",
    ),
    Option(
        ["--max-batch", "--max-batch-size"],
        group="Generation",
        type=Number(1, 256),
        default=8,
        metavar="N",
        help="Decode lanes.",
    ),
    Option(
        ["--max-tokens"],
        group="Generation",
        type=Number(1),
        metavar="N",
        show_default="fill the context",
        help="For requests that set none.",
    ),
    Option(
        ["--kv-bits"],
        group="Generation",
        type=Choice(*KV_BITS),
        default="0",
        metavar="0|4|8|16|84",
        help="Bits of the KV cache; 0 is the runtime's choice.",
    ),
    Option(
        ["--dialect"],
        group="Generation",
        default="auto",
        metavar="NAME",
        help="auto, chatml, atem, template or raw.",
    ),
    Option(
        ["--tool-call-parser"],
        group="Generation",
        default="auto",
        metavar="NAME",
        help="auto, json, atem, gemma, harmony or glm.",
    ),
    Option(
        ["--temperature"],
        group="Generation",
        type=Number(0, 2, whole=False),
        metavar="T",
        show_default="the model's",
        help="For requests that set none.",
    ),
    Option(
        ["--top-p"],
        group="Generation",
        type=Number(0, 1, whole=False),
        metavar="P",
        show_default="the model's",
        help="For requests that set none.",
    ),
    Option(
        ["--top-k"],
        group="Generation",
        type=Number(0),
        metavar="K",
        show_default="the model's",
        help="For requests that set none.",
    ),
    Option(
        ["--min-p"],
        group="Generation",
        type=Number(0, 1, whole=False),
        metavar="P",
        show_default="the model's",
        help="For requests that set none.",
    ),
    Option(
        ["--repeat-penalty"],
        group="Generation",
        type=Number(0, 2, whole=False),
        metavar="R",
        show_default="the model's",
        help="For requests that set none.",
    ),
    # Sessions
    Option(
        ["--sessions-ttl"],
        group="Sessions",
        type=Number(0, whole=False),
        default=0.0,
        metavar="SEC",
        help="Purge sessions of HTTP requests that nothing touched for so long; 0 keeps them.",
    ),
    Option(
        ["--tool-lease-ms"],
        group="Sessions",
        type=Number(0),
        default=0,
        metavar="N",
        help="Expire a tool call that nobody answered for so long; 0 keeps calls open.",
    ),
    Option(
        ["--pin-budget-pct"],
        group="Sessions",
        type=Number(0, 100),
        default=50,
        metavar="N",
        help="Part of the engine's cache that pinned sessions may hold; 0: pins are recorded only.",
    ),
    Option(
        ["--sessions-cache"],
        group="Sessions",
        is_flag=True,
        help="Start with fresh logs; those of the last run are renamed to wal.log.prev.",
    ),
    Option(
        ["--park/--no-park"],
        group="Sessions",
        default=None,
        help="Always keep the state of finished sessions on disk; never; by default as far as it costs little.",
    ),
    Option(["--park-lossy"], group="Sessions", is_flag=True, help="Always keep that state, in 8 bits."),
    Option(
        ["--park-budget-gb"],
        group="Sessions",
        type=Number(0, whole=False),
        default=20.0,
        metavar="N",
        help="Disk that parked sessions may take; 0 is no bound.",
    ),
    Option(
        ["--cache-disk-gb"],
        group="Sessions",
        type=Number(0, whole=False),
        default=4.0,
        metavar="N",
        help="Disk that the prefix cache may take; 0 is none.",
    ),
    # Scheduling
    Option(
        ["--tick-decode-budget"],
        group="Scheduling",
        type=Number(0),
        default=0,
        metavar="N",
        help="Decode tokens per tick, all lanes; 0 is lanes x rounds.",
    ),
    Option(
        ["--tick-target-ms"],
        group="Scheduling",
        type=Number(0),
        default=2000,
        metavar="MS",
        help="Longest tick aimed at.",
    ),
    Option(
        ["--prefill-budget"],
        group="Scheduling",
        type=Number(0, 4096),
        default=4096,
        metavar="N",
        help="Prompt tokens per tick, 64 to 4096; 0 adapts.",
    ),
    Option(
        ["--starvation-ticks"],
        group="Scheduling",
        type=Number(1),
        default=8,
        metavar="N",
        help="Ticks after which a waiting job moves up a class.",
    ),
    Option(
        ["--class-lanes"],
        group="Scheduling",
        default="",
        show_default="uncapped",
        metavar="CLASS=N,...",
        help="Lane caps per class.",
    ),
    Option(
        ["--http-default-qos"],
        group="Scheduling",
        type=ClassName(),
        default="agent",
        metavar="CLASS",
        help="Class of HTTP requests that name none.",
    ),
    Option(["--no-http-qos-header"], group="Scheduling", is_flag=True, help="Ignore the QoS headers."),
    Option(
        ["--http-allow-batch-invariant"],
        group="Scheduling",
        is_flag=True,
        help="Let requests ask for batch invariance.",
    ),
    Option(
        ["--worker-process/--no-worker-process"],
        group="Scheduling",
        default=True,
        help="Run models in processes of their own.",
    ),
    # Fill-in-the-middle
    Option(
        ["--fim-model"],
        group="Fill-in-the-middle",
        metavar="PATH",
        help="A model that fills in middles for all the others, on a worker of its own.",
    ),
    Option(
        ["--fim-max-context"],
        group="Fill-in-the-middle",
        type=Number(512),
        metavar="N",
        help="Its tokens per lane (its window, 8192 at most).",
    ),
    Option(
        ["--fim-max-batch"],
        group="Fill-in-the-middle",
        type=Number(1, 256),
        default=FIM_LANES,
        metavar="N",
        help="Its decode lanes.",
    ),
    Option(
        ["--completion-deadline-ms", "--request-timeout"],
        group="Fill-in-the-middle",
        type=Number(0),
        default=0,
        metavar="MS",
        help="How long a completion may take, its wait included; 0 is any time.",
    ),
    Option(
        ["--completion-rate"],
        group="Fill-in-the-middle",
        type=Number(0, whole=False),
        default=10.0,
        metavar="N",
        help="Middles that a client may ask for per second; 0 is no limit.",
    ),
    Option(
        ["--completion-burst"],
        group="Fill-in-the-middle",
        type=Number(0, whole=False),
        default=20.0,
        metavar="N",
        help="And at once, after a pause.",
    ),
    # Logging
    Option(
        ["--log-filter"], group="Logging", default="info", metavar="DIRECTIVE", help="Levels, overall and by target."
    ),
    Option(["-v", "--verbose"], group="Logging", is_flag=True, help="The same as --log-filter debug."),
    Option(["--log-dir"], group="Logging", metavar="DIR", help="JSON logs in files of this directory."),
    Option(["--log-file"], group="Logging", metavar="PATH", help="Append stderr to a file."),
    Option(
        ["--config"],
        group="Configuration",
        metavar="FILE",
        expose_value=False,
        help="A TOML file of flags, without their dashes; the command line wins.",
    ),
]
