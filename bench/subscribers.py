"""What a thousand followers cost: the CPU of a delivery, and what the lane that they follow keeps of its rate.

    python -m bench.subscribers [MODEL] [--followers 1000] [--reply 128] [--rounds 5] [--deliveries 16]
                               [--threads N]

First deliveries without a lane: text is appended to a session, one event at a time, each when all have the last one;
by the CPU time of the server's process and of the followers', less that of the same appends with nobody following. Then
a lane: a session generates alone, followed by committed events, followed with provisional text, and followed with
provisional text that nobody reads before the reply is over (what the others lose more is the readers'). The cases take
turns, the first round is dropped, ratios are of one round. Beside what a case keeps of the rate stands what it costs:
CPU seconds of the server's process a second, less those of the lane alone, as a share of one core. `--threads` are
those that the worker decodes with: with one less than there are cores, deliveries and the lane do not share any.

The followers are one process with a socket each, which yields to all others (nice 19): in life they are on other
machines. It keeps what it reads, and checks it at the end: every follower must have every event once and in order, and
previews that make up the text. Lateness is from an event's time in the log (before its sync) to its arrival at
followers that are read at once, what these wait for a core included.
"""

import argparse
import multiprocessing
import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import psutil

from bench.systems import System, start_superfluid
from superfluid.api.fanout import LONGEST
from superfluid.client import Client, Sampling, Session
from superfluid.client.frames import LENGTH, frame
from superfluid.link import postcard, session_api as api
from superfluid.link.events import Channel, Generated
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory

READ_BYTES = 16 * 1024
TIMED = 8  # followers of a case whose lateness is taken
APART = 1.5 * LONGEST  # seconds between appends: no two go out together
NICEST = 19
CONTINUED = bytes(range(0x80, 0x100))  # all of a varint but its last byte
APPENDED, ALONE, UNREAD = "appended", "alone", "unread"
FOLLOWED = {APPENDED: False, "committed": False, "provisional": True, UNREAD: True}  # whether with provisional text
CPUCLOCK_SCHED = 2  # of the kernel: the clock of a whole process, all its threads, by its id
LANES = (ALONE, *[case for case in FOLLOWED if case != APPENDED])


@attrs.define
class Heard:
    """What the followers of one case got. `deliveries` counts reads that brought something, per follower."""

    deliveries: float
    megabytes: float
    complete: int
    late: list[float]  # seconds, of the events of those that are read at once


@attrs.define(eq=False)
class Follower:
    """One socket and what came over it, with times when it is one whose lateness is taken."""

    case: str
    socket: socket.socket
    timed: bool
    pieces: list[bytes] = attrs.Factory(list)
    times: list[float] = attrs.Factory(list)

    def read(self, now: float) -> None:
        """Raises BlockingIOError when there is nothing, ConnectionError when there will be nothing."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the server has closed a follower's connection")
        self.pieces.append(data)
        if self.timed:
            self.times.append(now)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Each frame's payload, and the index of the read that ended it."""
        buffer, at = bytearray(), 0
        for index, piece in enumerate(self.pieces):
            buffer += piece
            while len(buffer) - at >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer, at)
                if len(buffer) - at - LENGTH.size < length:
                    break
                at += LENGTH.size + length
                yield index, bytes(buffer[at - length : at])


def crowd(path: str, sessions: dict[str, int], each: int, told: Connection) -> None:
    """Subscribe `each` times to the session of every case, and read; told a case, read what its followers did not."""
    os.nice(NICEST)
    poll = select.epoll()
    followers: dict[int, Follower] = {}
    for case, session in sessions.items():
        for index in range(each):
            follower = Follower(case, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), index < TIMED)
            follower.socket.connect(path)
            follower.socket.sendall(frame(api.SubscribeRequest(session, 0, FOLLOWED[case])))
            follower.read(time.time())
            follower.socket.setblocking(False)
            followers[follower.socket.fileno()] = follower
            if case != UNREAD:
                poll.register(follower.socket, select.EPOLLIN)
    control = told.fileno()
    poll.register(control, select.EPOLLIN)
    told.send(None)
    while True:
        ready = poll.poll(None, len(followers) + 1)
        now = time.time()
        for descriptor, _ in ready:
            if descriptor != control:
                followers[descriptor].read(now)
            elif (asked := told.recv()) is None:
                for follower in followers.values():
                    drain(follower)
                told.send({case: heard(path, case, sessions[case], followers.values()) for case in sessions})
            else:
                for follower in followers.values():
                    if follower.case == asked:
                        drain(follower)
                told.send(None)


def drain(follower: Follower) -> None:
    try:
        while True:
            follower.read(time.time())
    except BlockingIOError:
        pass


def heard(path: str, case: str, session: int, followers: Iterable[Follower]) -> Heard:
    """Check what the followers of a case got against the session's log."""
    with Client(path) as client:
        events = client.get(session).events()
    said = "".join(e.body.text for e in events if isinstance(e.body, Generated) and e.body.channel != Channel.TOOL_CALL)
    known: dict[bytes, api.Response] = {}
    reads = size = complete = count = 0
    late: list[float] = []
    for follower in followers:
        if follower.case != case:
            continue
        count += 1
        ids: list[int] = []
        previewed: list[str] = []
        for index, payload in follower.frames():
            rest = payload[1:].lstrip(CONTINUED)[1:]  # without the number
            message = known.get(payload[:1] + rest)
            if message is None:
                message = known[payload[:1] + rest] = postcard.decode(api.Response, payload[:1] + b"\0" + rest)
            if isinstance(message, api.SubEventResponse):
                ids.append(message.event.event_id)
                made = message.event.ts_unix_ms / 1000
                if follower.timed and case != UNREAD and made > follower.times[0]:
                    late.append(follower.times[index] - made)
            elif isinstance(message, api.SubProvisionalResponse):
                previewed.append(message.text)
        complete += ids == [event.event_id for event in events] and "".join(previewed) == (
            said if FOLLOWED[case] else ""
        )
        reads += len(follower.pieces)
        size += sum(map(len, follower.pieces))
    return Heard(reads / count, size / 1e6, complete, late)


def cpu_seconds(process: int) -> float:
    """CPU time so far of a process, its ended threads included: to the nanosecond where its clock can be named."""
    if sys.platform == "linux":
        return time.clock_gettime((~process << 3) | CPUCLOCK_SCHED)
    spent = psutil.Process(process).cpu_times()
    return spent.user + spent.system


@attrs.define
class Spent:
    """What something took: seconds, and CPU seconds of the server's process (not its worker) and of the followers'."""

    seconds: float
    server: float
    readers: float

    @classmethod
    def so_far(cls, server: int, readers: int) -> "Spent":
        return cls(time.perf_counter(), cpu_seconds(server), cpu_seconds(readers))

    def since(self, before: "Spent") -> "Spent":
        return Spent(self.seconds - before.seconds, self.server - before.server, self.readers - before.readers)


def appends(session: Session, count: int, server: int, readers: int) -> Spent:
    """Commit `count` events to a session, one at a time."""
    before = Spent.so_far(server, readers)
    for _ in range(count):
        session.append("again")
        time.sleep(APART)
    return Spent.so_far(server, readers).since(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--reply", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="0: deliveries alone")
    parser.add_argument("--deliveries", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="of the worker's decoding; 0: one for every core")
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        path = Path(folder) / "s.sock"
        extra = ["--socket", str(path), "--sessions", str(Path(folder) / "sessions")]
        if arguments.threads:
            extra += ["--llamacpp-threads", str(arguments.threads)]
        system = start_superfluid(model, 4, 8192, *extra)
        try:
            measure(system, path, arguments)
        finally:
            system.stop()


def measure(system: System, path: Path, arguments: argparse.Namespace) -> None:
    followers, server = arguments.followers, system.process.pid
    with Client(path) as client:
        sessions = {case: client.session(Sampling(temperature=0.0)) for case in (ALONE, *FOLLOWED)}
        for case, session in sessions.items():
            session.user(f"Tell a story without an end, the {case} one.")
        resident = psutil.Process(server).memory_info().rss
        ours, theirs = multiprocessing.Pipe()
        followed = {case: sessions[case].id for case in FOLLOWED}
        readers = multiprocessing.get_context("spawn").Process(
            target=crowd, args=(str(path), followed, followers, theirs), daemon=True
        )
        readers.start()
        assert readers.pid is not None
        ours.recv()
        held = (psutil.Process(server).memory_info().rss - resident) / followers / len(FOLLOWED)
        spent: dict[str, list[Spent]] = {case: [] for case in (*LANES, APPENDED)}
        quiet = appends(client.session(), arguments.deliveries, server, readers.pid)
        spent[APPENDED].append(appends(sessions[APPENDED], arguments.deliveries, server, readers.pid))
        for turn in range(arguments.rounds + 1 if arguments.rounds else 0):
            for case in LANES:
                before = Spent.so_far(server, readers.pid)
                made = sessions[case].generate(arguments.reply).tokens_generated
                took = Spent.so_far(server, readers.pid).since(before)
                assert made == arguments.reply, f"{case}: the model ended its reply after {made} tokens"
                if turn:
                    spent[case].append(took)
                if case == UNREAD:
                    ours.send(UNREAD)
                    ours.recv()
        time.sleep(APART)  # the last deliveries may be held for a while
        ours.send(None)
        found: dict[str, Heard] = ours.recv()
        readers.kill()
    print(f"{followers} followers a session on a socket each; {held / 1024:.1f} kB of the server's memory a follower")
    heard, took = found[APPENDED], spent[APPENDED][0]
    for who, cpu in (("server", took.server - quiet.server), ("readers", took.readers - quiet.readers)):
        each = cpu / arguments.deliveries
        print(f"delivery: {each * 1e3:6.2f} ms of CPU of the {who}, {each / followers * 1e6:5.1f} us a follower")
    tell(APPENDED, heard, followers)
    for case in LANES if arguments.rounds else ():
        pairs = list(zip(spent[case], spent[ALONE], strict=True))
        ratio = statistics.median(alone.seconds / one.seconds for one, alone in pairs)
        rate = statistics.median(arguments.reply / one.seconds for one in spent[case])
        if case == ALONE:
            print(f"{case:12} {rate:6.1f} tokens/s; of a core: server {share(spent[case], 'server'):.1f} %")
            continue
        more, readers_share = (share(spent[case], who) - share(spent[ALONE], who) for who in ("server", "readers"))
        print(
            f"{case:12} {rate:6.1f} tokens/s ({ratio:.3f}); of a core, over {ALONE}: server {more:.1f} %, "
            f"readers {readers_share:.1f} %"
        )
        tell(case, found[case], followers)


def share(rounds: list[Spent], who: str) -> float:
    """Of one core, in percent: what the server's or the readers' process took in those rounds."""
    cpu: float = sum(getattr(one, who) for one in rounds)
    return cpu / sum(one.seconds for one in rounds) * 100


def tell(case: str, heard: Heard, followers: int) -> None:
    late = sorted(heard.late)
    lateness = f"; late {late[len(late) // 2] * 1e3:.0f} ms, at most {late[-1] * 1e3:.0f} ms" if late else ""
    print(
        f"{case:12} {heard.complete} of {followers} followers have every event and preview: {heard.megabytes:.1f} MB, "
        f"{heard.deliveries:.1f} reads each{lateness}"
    )


if __name__ == "__main__":
    main()
