"""The access log: one line per request that generated."""

import logging
from collections.abc import Sequence

import attrs
import trio
from quart import request

from superfluid.api.http.reply import Usage
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
        timed = [end for end in ends if end.ttft is not None]
        first = min((end.ttft or 0.0 for end in timed), default=0.0)
        fresh = usage.prompt - min(usage.cached, usage.prompt)
        prefill = f"{fresh / first:.0f}" if fresh and first else "-"
        rates = [end.decode_rate for end in ends if end.decode_rate is not None]
        decode = f"{sum(rates):.1f}" if rates else "-"
        log.info(
            "<-- %d %s model=%s prompt=%d cached=%d completion=%d ttft=%dms prefill=%s tok/s decode=%s tok/s "
            "total=%dms finish=%s",
            status,
            self.route,
            self.model,
            usage.prompt,
            min(usage.cached, usage.prompt),
            usage.completion,
            round(first * 1000),
            prefill,
            decode,
            round((trio.current_time() - self.began) * 1000),
            finish,
        )
