"""File operations from a thread that gives way: the same bytes and the same errors, and only that thread gives way."""

import errno
import os
import sys
from pathlib import Path

import pytest

from superfluid.sessions.files import Files

DATA = os.urandom(3 << 20)


def test_what_is_written_behind_is_what_was_given(tmp_path: Path) -> None:
    files = Files()
    files.create(tmp_path / "whole", b"head", memoryview(DATA), b"", b"tail", synced=True, behind=True)
    assert (tmp_path / "whole").read_bytes() == b"head" + DATA + b"tail"
    files.create(tmp_path / "unsynced", DATA, synced=False, behind=True)
    assert (tmp_path / "unsynced").read_bytes() == DATA


def test_it_is_written_where_it_was_asked(tmp_path: Path) -> None:
    files = Files()
    descriptor = files.open(tmp_path / "file")
    try:
        assert files.write_behind(descriptor, memoryview(DATA)[10:20], 5) == 10
        assert files.write_behind(descriptor, b"begin", 0) == 5
        files.sync_behind(descriptor)
    finally:
        files.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"begin" + DATA[10:20]


def test_what_the_system_refuses_is_an_error(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "file").write_bytes(b"there")
    descriptor = files.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError) as refused:
        files.write_behind(descriptor, b"x", 0)
    assert refused.value.errno == errno.EBADF
    files.close(descriptor)
    with pytest.raises(OSError) as closed:
        files.sync_behind(descriptor)
    assert closed.value.errno == errno.EBADF
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "file", b"new", synced=True, behind=True)
    assert (tmp_path / "file").read_bytes() == b"there"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_an_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as full:
            Files().write_behind(descriptor, DATA, 0)
        assert full.value.errno == errno.ENOSPC
    finally:
        os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_who_asks_does_not_give_way_afterwards(tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    Files().create(tmp_path / "file", DATA, synced=True, behind=True)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
