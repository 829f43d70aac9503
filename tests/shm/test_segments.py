"""Segments and control words."""

import os
import struct
import sys

import pytest

from superfluid.shm import segment as segment_module
from superfluid.shm.control import BYTES, MAGIC, Control, ControlError
from superfluid.shm.segment import Segment, SegmentError


def closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def test_two_mappings_are_one_memory() -> None:
    with Segment.create("one", 100) as ours, Segment.attach(os.dup(ours.fd), 100) as theirs:
        assert len(ours.buf) == len(theirs.buf) == 100
        assert bytes(ours.buf) == bytes(100)
        theirs.buf[99] = 7
        assert ours.buf[99] == 7


def test_populating_changes_nothing() -> None:
    with Segment.create("full", 1 << 20) as ours, Segment.attach(os.dup(ours.fd), 1 << 20) as theirs:
        ours.buf[5000] = 7
        theirs.populate()
        assert theirs.buf[5000] == 7
        theirs.buf[9000] = 8
        assert ours.buf[9000] == 8


@pytest.mark.skipif(sys.platform != "linux", reason="only memfds can be sealed")
def test_a_segment_cannot_be_resized_and_can_be_written() -> None:
    with Segment.create("sealed", 100) as ours:
        for size in (0, 99, 101):
            with pytest.raises(PermissionError):
                os.ftruncate(ours.fd, size)
        assert os.pwrite(ours.fd, b"x", 0) == 1
        assert ours.buf[0] == ord("x")
        assert not os.get_inheritable(ours.fd)


def test_a_short_segment_is_refused_and_a_long_one_mapped_in_part() -> None:
    with Segment.create("short", 100) as ours:
        fd = os.dup(ours.fd)
        with pytest.raises(SegmentError, match="100 bytes where 101"):
            Segment.attach(fd, 101)
        assert closed(fd)
        with Segment.attach(os.dup(ours.fd), 10) as part:
            assert len(part.buf) == 10


def test_what_is_no_segment_is_refused_and_closed() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(SegmentError):
        Segment.attach(reading, 64)
    assert closed(reading)
    with pytest.raises(SegmentError, match="cannot be mapped"):
        Segment.attach(reading, 64)  # no descriptor any more
    with pytest.raises(SegmentError, match="positive"):
        Segment.create("none", 0)


def test_closing_twice_closes_once() -> None:
    ours = Segment.create("twice", 8)
    fd = ours.fd
    ours.close()
    assert closed(fd)
    ours.close()


def test_segments_without_memfd() -> None:
    pytest.importorskip("_posixshmem", reason="this Python has no POSIX shared memory")
    fd = segment_module._unlinked_shm(100)
    other = segment_module._unlinked_shm(100)
    assert not os.get_inheritable(fd)
    with Segment.attach(fd, 100) as ours, Segment.attach(other, 100) as theirs:
        ours.buf[0] = 1
        assert theirs.buf[0] == 0


def test_control_words() -> None:
    daemon = Control.create()
    worker = Control.attach(os.dup(daemon.fd))
    assert not worker.yield_requested
    assert not worker.latency
    daemon.yield_requested = True
    assert (worker.yield_requested, worker.latency) == (True, False)
    daemon.latency = True
    daemon.yield_requested = False
    assert (worker.yield_requested, worker.latency) == (False, True)
    assert bytes(daemon.segment.buf) == struct.pack("<QQQ40x", MAGIC, 0, 1)
    struct.pack_into("<Q", daemon.segment.buf, 8, 1 << 63)  # any value but 0 counts as raised
    assert worker.yield_requested
    daemon.close()
    daemon.close()
    assert worker.latency
    worker.close()


def test_other_control_segments_are_refused() -> None:
    with Segment.create("short", BYTES - 1) as short, Segment.create("blank", BYTES) as blank:
        for segment, error in ((short, SegmentError), (blank, ControlError)):
            fd = os.dup(segment.fd)
            with pytest.raises(error):
                Control.attach(fd)
            assert closed(fd)
