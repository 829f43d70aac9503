"""What lanes make while their tick runs: to the event loop, or straight to where their text goes."""

import trio

from superfluid.link.relay import TextOut
from superfluid.scheduler.roster import Roster
from superfluid.scheduler.watchers import Watchers


class Streaming:
    """Hands on a tick's tokens ahead of its result. `tick` is the number of the one that runs."""

    def __init__(self, roster: Roster, watchers: Watchers) -> None:
        self.tick = 0
        self._roster = roster
        self._watchers = watchers

    @property
    def wanted(self) -> bool:
        """Whether anybody is shown tokens before the tick ends."""
        jobs = (lane.ticket.job for lane in self._roster if not lane.finishing)
        return any(job.want_provisional or job.fim or job.session in self._watchers for job in jobs)

    def texts(self) -> dict[int, TextOut]:
        """Where tokens of this tick go without a pass through the event loop, by lane."""
        texts: dict[int, TextOut] = {}
        for lane in self._roster:
            if lane.new or lane.finishing or lane.ticket.job.session in self._watchers:
                continue
            if (text := lane.ticket.text_out()) is not None:
                texts[lane.tag] = text
        return texts

    def emit(self, tag: int, tokens: list[int], written: bool) -> None:
        """Tokens of a lane; `written` by its text out."""
        lane = self._roster.by_tag.get(tag)
        if lane is None or lane.finishing or not tokens:
            return
        ticket = lane.ticket
        lane.streamed += tokens
        if ticket.first_token_at is None:
            ticket.first_token_at = trio.current_time()
            ticket.generation.ttft = max(ticket.first_token_at - ticket.admitted_at, 0.0)
        sinks = self._watchers.sinks(ticket.job.session, self.tick)
        if ticket.job.want_provisional or sinks:
            pieces = ticket.stream_out(tokens, written)
            for sink in sinks:
                for channel, text in pieces:
                    sink(channel, text)
