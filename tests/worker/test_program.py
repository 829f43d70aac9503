"""A worker's program as a process: conformance, bad beginnings, loads that fail or never end."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from superfluid.engines.kit import conformance
from superfluid.engines.mock.config import RECORD
from superfluid.engines.mock.runtime import Mock
from superfluid.link import linkw
from superfluid.link.channel import BlockingChannel

SECONDS = 30  # for a process that is ending; never reached by one that does
MOCK = conformance.module("mock")
TOY = [
    sys.executable, "-c",
    "import sys, time; from superfluid.worker.worker_main import main; from tests.kit.toy_runtime import Toy\n"
    "class Slow(Toy):\n"
    "    def open(self, args):\n"
    "        time.sleep(3600) if args.options.get('label') == 'slow' else None\n"
    "        return super().open(args)\n"
    "sys.exit(main(Slow()))",
]  # fmt: skip


@attrs.define
class Daemon:
    """The daemon's ends of one worker's link."""

    process: subprocess.Popen[str]
    frames: socket.socket
    descriptors: socket.socket
    channel: BlockingChannel = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.channel = BlockingChannel(self.frames, linkw.VERSION)

    def ask(self, message: object) -> Any:
        self.channel.send(message)
        received = self.channel.recv()
        assert received is not None, self.process.stderr and self.process.stderr.read()
        return received[2]

    def greet(self) -> linkw.HelloAckW:
        return self.ask(linkw.Hello((8, 8), linkw.LinkRole.NodeAgent))  # type: ignore[no-any-return]

    def leave(self) -> None:
        self.frames.close()
        self.descriptors.close()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts workers, and ends what a failed test left behind."""
    daemons: list[Daemon] = []

    def starting(*argv: str, program: Sequence[str] = MOCK) -> Daemon:
        frames, theirs = socket.socketpair()
        descriptors, their_descriptors = socket.socketpair()
        with theirs, their_descriptors:
            fds = (theirs.fileno(), their_descriptors.fileno())
            process = subprocess.Popen(
                [*program, *argv, "--frames-fd", str(fds[0]), "--fd-channel-fd", str(fds[1])],
                pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        daemons.append(Daemon(process, frames, descriptors))
        return daemons[-1]

    yield starting
    for daemon in daemons:
        daemon.leave()
        daemon.process.kill()
        daemon.process.communicate()


def test_the_mock_conforms() -> None:
    conformance.runtime(Mock())
    conformance.worker(MOCK, "mock")


def test_it_serves_until_its_daemon_leaves(start: Any) -> None:
    daemon = start()
    ack = daemon.greet()
    assert ack.chosen_version == 8
    assert ack.capabilities == RECORD
    assert [(spec.ring_id, spec.slot_bytes, spec.slots) for spec in ack.limits.ring_specs] == [
        (1, 16400, 64),
        (2, 4112, 256),
        (3, 272, 32),
    ]
    daemon.leave()
    assert daemon.end() == (0, "", "")


def test_serving_without_an_engine_is_the_mock(start: Any) -> None:
    daemon = start("--mock-record", '{"descriptor_version":1}', program=conformance.module("mock")[:-2])
    assert daemon.greet().capabilities == '{"descriptor_version":1}'


def test_a_daemon_that_dies_inside_a_frame(start: Any) -> None:
    daemon = start()
    daemon.greet()
    daemon.frames.sendall(b"\x40\x00\x00\x00\x08\x00")
    daemon.leave()
    code, out, err = daemon.end()
    assert code in (0, 1)
    assert out == "" and "Traceback" not in err


def test_garbage_ends_it(start: Any) -> None:
    daemon = start()
    daemon.greet()
    daemon.frames.sendall(b"GET / HTTP/1.1\r\n\r\n")
    code, out, err = daemon.end()
    assert (code, out) == (1, "")
    assert err.startswith("superfluid-workerd: exited with error: ")
    assert len(err.splitlines()) == 1


def test_another_frame_before_hello(start: Any) -> None:
    daemon = start()
    daemon.channel.send(linkw.Ping(0, linkw.MemCounters()))
    assert daemon.end()[0] == 1


def test_a_model_that_does_not_load(start: Any) -> None:
    code, out, err = start("--model", "x.toy", program=TOY).end()
    assert (code, out, err) == (3, "", "superfluid-worker-toy: model load failed: toys hold no weights\n")
    code, _, err = start("--mock-finish", "soon").end()
    assert code == 3
    assert err.startswith("superfluid-workerd: model load failed: --mock-finish soon: ")


def test_descriptors_that_are_no_sockets() -> None:
    with Path("/dev/null").open() as null:
        done = subprocess.run(
            [*MOCK, "--frames-fd", str(null.fileno()), "--fd-channel-fd", "998"],
            pass_fds=[null.fileno()], capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "--frames-fd" in done.stderr


def test_no_orphan_inside_a_model_load(start: Any) -> None:
    daemon = start("--model", "x.toy", "--label", "slow", program=TOY)
    daemon.leave()
    assert daemon.end()[0] == 1
