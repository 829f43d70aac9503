"""The flags of `superfluid serve`."""

import click

from superfluid.cli.command import Choice, Number, Option

DEFAULT_PORT = 8453
KV_BITS = ("0", "4", "8", "16", "84")

FLAGS: list[click.Parameter] = [
    click.Argument(["bare"], nargs=-1, metavar="[MODEL]..."),
    # Model
    Option(
        ["--model", "models"],
        group="Model",
        multiple=True,
        metavar="PATH",
        help="A model file; repeatable. The first is the default; none: the demo model.",
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
    Option(["--http"], group="Server", metavar="ADDR:PORT", help=f"Where HTTP listens (127.0.0.1:{DEFAULT_PORT})."),
    Option(["--host"], group="Server", metavar="ADDR", help="Its address alone."),
    Option(["--port"], group="Server", type=Number(0, 65535), metavar="N", help="Its port alone; 0 takes a free one."),
    Option(["--no-http"], group="Server", is_flag=True, help="Only the session socket."),
    Option(["--socket"], group="Server", metavar="PATH", help="The session socket (<home>/superfluid.sock)."),
    Option(["--sessions"], group="Server", metavar="DIR", help="Where sessions are kept (<home>/sessions)."),
    Option(["--api-key"], group="Server", metavar="KEY", help="The key that every request but /health must present."),
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
        default="auto",
        metavar="N|auto",
        help="Tokens per lane; auto takes what memory affords.",
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
        help="For requests that set none (fill the context).",
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
        type=Choice("auto", "chatml", "template", "raw"),
        default="auto",
        metavar="NAME",
        help="auto, chatml, template or raw.",
    ),
    Option(
        ["--temperature"],
        group="Generation",
        type=Number(0, 2, whole=False),
        metavar="T",
        help="For requests that set none (the model's).",
    ),
    Option(
        ["--top-p"], group="Generation", type=Number(0, 1, whole=False), metavar="P", help="For requests that set none."
    ),
    Option(["--top-k"], group="Generation", type=Number(0), metavar="K", help="For requests that set none."),
    Option(
        ["--min-p"], group="Generation", type=Number(0, 1, whole=False), metavar="P", help="For requests that set none."
    ),
    Option(
        ["--repeat-penalty"],
        group="Generation",
        type=Number(0, 2, whole=False),
        metavar="R",
        help="For requests that set none.",
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
        type=Number(0),
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
    Option(["--class-lanes"], group="Scheduling", default="", metavar="CLASS=N,...", help="Lane caps per class."),
    Option(
        ["--http-default-qos"],
        group="Scheduling",
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
    # Logging
    Option(
        ["--log-filter"], group="Logging", default="info", metavar="DIRECTIVE", help="Levels, overall and by target."
    ),
    Option(["-v", "--verbose"], group="Logging", is_flag=True, help="The same as --log-filter debug."),
    Option(["--log-file"], group="Logging", metavar="PATH", help="Append stderr to a file."),
]
