"""Leases on the tool calls a model makes: until when the client that runs one may answer it."""

import attrs

from superfluid.link import events as ev


@attrs.frozen
class Leasing(ev.Body):
    """What is planned right behind a ToolUse, whose id nobody knows before it is in line. Never in an event."""

    lease_ms: int

    def on(self, call: int, now_ms: int) -> ev.ToolLease:
        """The record for the call with that event id."""
        return ev.ToolLease(call, now_ms + self.lease_ms)
