"""The access log: one line per request that generated."""

import logging
from collections.abc import Sequence

import attrs
import trio
from quart import request

from superfluid.api.http.reply import Usage
from superfluid.observe.log import access_line
from superfluid.scheduler.generation import Ended

log = logging.getLogger(__name__)

LEFT = 499  # the status of a request whose client left before its answer began


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

    def write(self, status: int, usage: Usage, ends: Sequence[Ended], finish: str) -> None:
        if self.written:
            return
        self.written = True
        firsts = [end.ttft for end in ends if end.ttft is not None]
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
