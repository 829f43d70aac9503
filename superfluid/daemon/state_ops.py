"""State operations on a worker, the daemon's side: buffers are lent by descriptor, ends come unsolicited."""

import itertools
from collections.abc import Callable
from functools import partial

import attrs
import trio

from superfluid.link import linkw
from superfluid.link.channel import AsyncChannel
from superfluid.scheduler.link import WorkerGone
from superfluid.shm.descriptors import send_descriptor_async
from superfluid.shm.segment import Segment


@attrs.define(eq=False)
class StateOps:
    """Buffers and open operations of one link. A segment is lent once, as one buffer, until it is closed: `forget` has
    the message sent that takes it back. Buffer ids count up and are never reused."""

    channel: AsyncChannel
    descriptors: trio.socket.SocketType
    forget: Callable[[linkw.BufRelease], None]
    _ids: "itertools.count[int]" = attrs.Factory(lambda: itertools.count(1))
    _buffers: dict[Segment, int] = attrs.Factory(dict)
    _lent: set[Segment] = attrs.Factory(set)
    _ended: dict[int, linkw.StateOpDone] = attrs.Factory(dict)  # not yet asked for
    _awaited: dict[int, trio.Event] = attrs.Factory(dict)
    _gone: str | None = None

    def buffer(self, segment: Segment) -> int:
        """The id of the buffer that a segment is, or will be once it is lent."""
        buf_id = self._buffers.get(segment)
        if buf_id is None:
            buf_id = self._buffers[segment] = next(self._ids)
            segment.when_closed(partial(self._closed, segment))
        return buf_id

    async def lend(self, segment: Segment) -> None:
        """Lend a segment, if it is not lent. Sent whole, cancelled or not: an announced descriptor must follow."""
        if segment in self._lent:
            return
        buf_id = self.buffer(segment)
        with trio.CancelScope(shield=True):
            await self.channel.send(linkw.BufAlloc(buf_id, segment.size))
            await self.channel.send(linkw.BufAttach(buf_id, segment.size))
            await send_descriptor_async(self.descriptors, buf_id, segment.fd)
        self._lent.add(segment)

    def _closed(self, segment: Segment) -> None:
        buf_id = self._buffers.pop(segment)
        if segment in self._lent:
            self._lent.remove(segment)
            self.forget(linkw.BufRelease(buf_id))

    def ended(self, done: linkw.StateOpDone) -> None:
        """The worker reports an operation's end."""
        self._ended[done.op_handle] = done
        if (awaited := self._awaited.get(done.op_handle)) is not None:
            awaited.set()

    def worker_gone(self, why: str) -> None:
        """Nothing ends any more."""
        self._gone = why
        for awaited in self._awaited.values():
            awaited.set()

    async def wait(self, handle: int) -> linkw.StateOpDone:
        """The end of an accepted operation; each can be waited for once. Raises WorkerGone."""
        if handle not in self._ended and self._gone is None:
            awaited = self._awaited[handle] = trio.Event()
            try:
                await awaited.wait()
            finally:
                del self._awaited[handle]
        done = self._ended.pop(handle, None)
        if done is None:
            raise WorkerGone(self._gone or "the link was closed")
        return done
