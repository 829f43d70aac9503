"""A worker as a process of its own: its exit codes, and that it never outlives its daemon."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from superfluid.link import linkw
from superfluid.link.codes import PlanFlag
from tests.worker.link import Daemon

LIMIT = 30  # seconds; nothing here takes one


@contextmanager
def process(*flags: str) -> Iterator[tuple[Daemon, subprocess.Popen[str]]]:
    ours, theirs = socket.socketpair()
    our_fds, their_fds = socket.socketpair()
    fds = (theirs.fileno(), their_fds.fileno())
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "superfluid.worker.worker_main",
            *("--engine", "mock", *flags),
            *("--frames-fd", str(fds[0]), "--fd-channel-fd", str(fds[1])),
        ],
        pass_fds=fds,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    their_fds.close()
    daemon = Daemon(ours, our_fds)
    try:
        yield daemon, child
    finally:
        daemon.close()
        child.kill()
        child.communicate()


def test_a_closed_link_is_a_clean_exit() -> None:
    with process() as (daemon, child):
        daemon.attach()
        assert len(daemon.tokens(daemon.start(1, [1, 2, 3], decode=4), 1)) == 4
        daemon.close()
        out, err = child.communicate(timeout=LIMIT)
        assert (child.returncode, out, err) == (0, "", "")


def test_a_broken_runtime_exits_70() -> None:
    with process("--mock-die-after", "1") as (daemon, child):
        daemon.attach()
        daemon.tick()
        daemon.channel.send(linkw.TickSubmit(daemon.plan()))
        out, err = child.communicate(timeout=LIMIT)
        assert (child.returncode, out) == (70, "")
        assert err.count("\n") == 1
        assert "the worker exits so that the daemon starts a clean one" in err


def test_a_protocol_error_exits_1() -> None:
    with process() as (daemon, child):
        daemon.shake_hands()
        daemon.channel.send(linkw.Drained())
        _, err = child.communicate(timeout=LIMIT)
        assert child.returncode == 1
        assert ": exited with error: " in err


def test_a_load_that_fails_exits_3() -> None:
    with process("--mock-delay", "soon") as (_, child):
        _, err = child.communicate(timeout=LIMIT)
        assert child.returncode == 3
        assert ": model load failed: --mock-delay soon: " in err


@pytest.mark.parametrize("inside", ["a tick", "its own loop"])
def test_a_worker_ends_with_its_daemon(inside: str) -> None:
    """Also inside a tick that would last for minutes: the sockets close as they do when a daemon is killed."""
    with process("--mock-round-delay", "5") as (daemon, child):
        daemon.attach()
        if inside == "a tick":
            plan = daemon.plan(
                flags=PlanFlag.PARTIAL_EMITS,
                admits=[linkw.LaneAdmit(1, daemon.stage([1, 2]))],
                prefills=[linkw.LanePrefill(1, 0, 2)],
                decodes=[linkw.LaneDecode(1, 1000)],
            )
            daemon.channel.send(linkw.TickSubmit(plan))
        daemon.close()
        child.communicate(timeout=LIMIT)
        assert child.returncode in (0, 1)


def test_it_inherits_two_descriptors_and_ignores_stop_signals() -> None:
    with process() as (daemon, child):
        daemon.attach()
        if os.path.isdir(f"/proc/{child.pid}/fd"):
            links = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
            assert sum(link.startswith("socket:") for link in links) == 2
        child.terminate()
        assert isinstance(daemon.ask(linkw.Ping()), linkw.Pong)


def test_two_processes_answer_alike() -> None:
    answers = []
    for _ in range(2):
        with process("--mock-script", "11,12,13") as (daemon, _):
            daemon.attach()
            answers.append(daemon.start(1, [1, 2, 3], decode=9))
            assert daemon.tokens(answers[-1], 1) == [11, 12, 13, 2]
    assert answers[0] == answers[1]
