"""The access log: one line per request that generated, and one per request that was refused."""

import logging
import re
from collections.abc import Sequence

import attrs
import trio
from quart import g, has_request_context, request

from superfluid.api.http.reply import Usage
from superfluid.daemon.model import Started
from superfluid.observe.log import access_line
from superfluid.scheduler.generation import Ended

log = logging.getLogger(__name__)

LEFT = 499  # the status of a request whose client left before its answer began
LOGGED = "access_logged"  # of the current request's `g`
CONTROLS = re.compile(r"[\x00-\x20\x7f]")
LONGEST_PATH = 200  # characters of a refused request's path that are shown


def log_refusal(status: int, code: str | None) -> None:
    """The line of the current request, which was refused; none when it has its line."""
    if LOGGED in g:
        return
    path = request.scope["raw_path"].decode("ascii", "replace")  # as it was sent: escapes stay, the query is no part
    shown = path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}..."
    log.info("refused %d %s %s code=%s", status, request.method, CONTROLS.sub("?", shown), code or "-")


@attrs.define
class AccessLine:
    """The line of one request; `write` it once, when the answer is over."""

    route: str
    model: str
    began: float = attrs.Factory(trio.current_time)
    written: bool = False

    @classmethod
    def of_request(cls, model: str, stream: bool, kind: str = "") -> "AccessLine":
        """The line of the current request; `kind` is as ` (fim)`."""
        return cls(f"{request.method} {request.path}{kind}{' (stream)' if stream else ''}", model)

    def write(self, status: int, usage: Usage, started: Sequence[Started], ends: Sequence[Ended], finish: str) -> None:
        """`ends` of those that were `started` and have ended; of the others, what came until now counts."""
        if self.written:
            return
        self.written = True
        if has_request_context():
            setattr(g, LOGGED, True)
        timed = [*(end.ttft for end in ends), *(one.generation.ttft for one in started)]
        firsts = [ttft for ttft in timed if ttft is not None]
        rates = [end.decode_rate for end in ends if end.decode_rate is not None]
        log.info(
            access_line(
                status,
                self.route,
                self.model,
                prompt=usage.prompt,
                cached=min(usage.cached, usage.prompt),
                completion=usage.completion,
                ttft=min(firsts, default=None),
                decode_rate=sum(rates) if rates else None,
                total=trio.current_time() - self.began,
                finish=finish,
            )
        )
