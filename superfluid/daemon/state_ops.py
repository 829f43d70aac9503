"""State operations on a worker, the daemon's side: buffers are lent by descriptor, ends come unsolicited."""

import itertools

import attrs
import trio

from superfluid.link import linkw
from superfluid.link.channel import AsyncChannel
from superfluid.scheduler.link import WorkerGone
from superfluid.shm.descriptors import send_descriptor_async
from superfluid.shm.segment import Segment


@attrs.define(eq=False)
class StateOps:
    """Buffers and open operations of one link. Buffer ids count up and are never reused."""

    channel: AsyncChannel
    descriptors: trio.socket.SocketType
    _buffers: "itertools.count[int]" = attrs.Factory(lambda: itertools.count(1))
    _ended: dict[int, linkw.StateOpDone] = attrs.Factory(dict)  # not yet asked for
    _awaited: dict[int, trio.Event] = attrs.Factory(dict)
    _gone: str | None = None

    def new_buffer(self) -> int:
        return next(self._buffers)

    async def attach(self, buf_id: int, segment: Segment) -> None:
        """Lend a segment. Sent whole, cancelled or not: an announced descriptor must follow."""
        with trio.CancelScope(shield=True):
            await self.channel.send(linkw.BufAlloc(buf_id, segment.size))
            await self.channel.send(linkw.BufAttach(buf_id, segment.size))
            await send_descriptor_async(self.descriptors, buf_id, segment.fd)

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
