"""The running server that a command talks to: its address and key, from flags, else variables, else defaults."""

import json
import os
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import Any

import click

from superfluid.cli.command import CommandError, Option, reason

UNAUTHORIZED = 401
DEFAULT_ADDRESS = "127.0.0.1:8453"
ANSWER_SECONDS = 10.0


def server_options(function: Any) -> Any:
    """`--http` and `--api-key` of a command that asks a running server."""
    function = click.option(
        "--api-key", cls=Option, group="Server", metavar="KEY", show_default="$SUPERFLUID_API_KEY", help="Its key."
    )(function)
    return click.option(
        "--http", cls=Option, group="Server", metavar="ADDR:PORT",
        show_default=f"$SUPERFLUID_HTTP, else {DEFAULT_ADDRESS}", help="Where the server listens.",
    )(function)  # fmt: skip


def get(path: str, http: str | None, api_key: str | None, accept: str = "*/*") -> bytes:
    """GET a route of the server. Raises CommandError 1 when it does not answer, or answers with an error."""
    address = http or os.environ.get("SUPERFLUID_HTTP") or DEFAULT_ADDRESS
    key = api_key or os.environ.get("SUPERFLUID_API_KEY")
    base = address if "://" in address else f"http://{address}"
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(base.rstrip("/") + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        response: HTTPResponse
        with opener.open(request, timeout=ANSWER_SECONDS) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        said = refusal(error.read())
        key_wanted = "; give its key with --api-key or SUPERFLUID_API_KEY" if error.code == UNAUTHORIZED else ""
        raise CommandError(f"the server at {base} answered {error.code}: {said}{key_wanted}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        why = cause(error)
        raise CommandError(f"no server answers at {base}: {reason(why)}{start_one(why)}") from None


def cause(error: Exception) -> Exception:
    """What is behind the error of a request that was not answered."""
    why = error.reason if isinstance(error, urllib.error.URLError) else error
    return why if isinstance(why, Exception) else error


def start_one(why: object) -> str:
    """What helps when a server does not answer because there is none."""
    none_there = isinstance(why, FileNotFoundError | ConnectionRefusedError)
    return "; start one with `superfluid serve`" if none_there else ""


def refusal(body: bytes) -> str:
    """What an error reply says: the message of its envelope, else all of it."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()
