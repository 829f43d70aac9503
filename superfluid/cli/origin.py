"""Origins of pages, as browsers send them: the server compares them as they stand."""

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

import click

DEFAULT_PORTS = {"http": 80, "https": 443}  # which a browser leaves out
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
OPAQUE = "null"  # of a page that a file holds, or a sandbox


def browser_origin(address: str) -> str | None:
    """The Origin that a browser sends for a page at `address`; None where that is no address of a page."""
    if address == OPAQUE:
        return OPAQUE
    try:
        parts = urlsplit(address if SCHEME.match(address) else f"http://{address}")
        host, port = parts.hostname or "", parts.port
        if parts.scheme not in DEFAULT_PORTS:  # an application's own: chrome-extension://..., app://...
            return f"{parts.scheme}://{parts.netloc}"
        if ":" in host:
            host = f"[{ipaddress.IPv6Address(host)}]"
        elif not host.isascii():
            host = host.encode("idna").decode()
    except ValueError:
        return None
    if not re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", host):
        return None
    return f"{parts.scheme}://{host}" + ("" if port in (None, DEFAULT_PORTS[parts.scheme]) else f":{port}")


class Origin(click.ParamType[str]):
    """The origin of pages, as a browser sends it."""

    name = "origin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        meant = browser_origin(text)
        if meant != text:
            hint = "; there are no wildcards" if "*" in text else f"; did you mean {meant}?" if meant else ""
            expected = "a page's origin as its browser sends it, like http://localhost:3000"
            self.fail(f'{expected}, got "{text}"{hint}', param, ctx)
        return text
