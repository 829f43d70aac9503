"""Trace and span ids of sessions: the same in an export, in a live trace, and whatever process computes them."""

from struct import pack

import attrs
import xxhash

ROOT_EVENT = (1 << 64) - 1  # the event id that stands for the session's own span


@attrs.frozen
class TraceIds:
    """Ids within one store; `store_id` none: a server that does not say which store it has."""

    namespace: int

    @classmethod
    def of_store(cls, store_id: bytes | None) -> "TraceIds":
        return cls(0 if store_id is None else max(1, xxhash.xxh3_64_intdigest(store_id, 0x5354) >> 1))

    def trace(self, session: int) -> str:
        """32 hex digits."""
        data = self._input(session)
        return f"{xxhash.xxh3_64_intdigest(data):016x}{xxhash.xxh3_64_intdigest(data, 0x5E55):016x}"

    def span(self, session: int, event_id: int = ROOT_EVENT) -> str:
        """16 hex digits, of the span that began with an event, or of the session's."""
        return f"{xxhash.xxh3_64_intdigest(self._input(session, event_id)):016x}"

    def _input(self, *values: int) -> bytes:
        known = (self.namespace, *values) if self.namespace else values
        return pack(f"<{len(known)}Q", *known)
