"""Descriptor passing: one descriptor a message, under a tag, over the unix socket beside the frames."""

import os
import socket
import struct
from array import array
from typing import TYPE_CHECKING

from superfluid.shm.segment import ShmError

if TYPE_CHECKING:
    import trio

_TAG = struct.Struct("<Q")
_ROOM = socket.CMSG_SPACE(16 * 4)  # for more than the one that is right, so that the others can be closed
_CLOEXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class DescriptorError(ShmError):
    """A message that does not carry exactly one descriptor under the expected tag."""


def send_descriptor(sock: socket.socket, tag: int, fd: int) -> None:
    """Send a copy of `fd` under `tag` (u64)."""
    sock.sendmsg([_TAG.pack(tag)], [_rights(fd)])


async def send_descriptor_async(sock: "trio.socket.SocketType", tag: int, fd: int) -> None:
    """`send_descriptor` for trio."""
    await sock.sendmsg([_TAG.pack(tag)], [_rights(fd)])


def recv_descriptor(sock: socket.socket, expected_tag: int) -> int:
    """Receive the next descriptor, close on exec; the caller owns it.

    Raises DescriptorError for none or several descriptors, a truncated control message, a payload that is not 8
    bytes, another tag, or the end of the stream; every descriptor received is closed then.
    """
    payload, ancillary, flags, _ = sock.recvmsg(_TAG.size + 1, _ROOM, _CLOEXEC)
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    wrong = _refusal(payload, fds, flags, expected_tag)
    if wrong:
        for fd in fds:
            os.close(fd)
        raise DescriptorError(wrong)
    fd = fds[0]
    os.set_inheritable(fd, False)
    return fd


def _rights(fd: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]).tobytes()


def _refusal(payload: bytes, fds: "array[int]", flags: int, expected_tag: int) -> str | None:
    if not payload and not fds:
        return f"the descriptor channel ended before descriptor {expected_tag:#x}"
    if flags & socket.MSG_CTRUNC:
        return f"descriptor {expected_tag:#x}: the control message was truncated"
    if len(fds) != 1:
        return f"descriptor {expected_tag:#x}: {len(fds)} descriptors in one message"
    if len(payload) != _TAG.size:
        return f"descriptor {expected_tag:#x}: its tag has {len(payload)}{'+' * (len(payload) > 8)} bytes, not 8"
    (tag,) = _TAG.unpack(payload)
    if tag != expected_tag:
        return f"a descriptor tagged {tag:#x} where {expected_tag:#x} was announced"
    return None
