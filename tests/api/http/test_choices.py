"""Reading several generations in one task: batches, pace, silences, ends. Time is a mock clock's."""

import socket

import pytest
import trio
import trio.testing

from superfluid.api.http import sse
from superfluid.api.http.choices import PACE, SILENCE, Batch, Running, Writable
from superfluid.api.http.context import Api
from superfluid.codec.channels import TEXT, TOOL_CALL, Pair, PairSplitter, Plain, Router
from superfluid.codec.tokenizer import TokenBytes
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Started
from superfluid.link.events import Finish
from superfluid.link.relay import TextOut
from superfluid.scheduler.generation import Ended, Generation, Item, Job, Provisional


def router() -> Router:
    return Router(lambda: PairSplitter(TokenBytes([b"a", b"<", "\u00e9".encode()[:1]]), [Pair(1, 1, TOOL_CALL)]))


class Lanes:
    """Generations without a scheduler, and which of them were cancelled."""

    def __init__(self, count: int, outlet: Writable | None = None) -> None:
        self.cancelled: list[Generation] = []
        self.generations = [Generation(Job(None, [1], 9, router()), self.cancelled.append) for _ in range(count)]
        self.running = Running(outlet)
        self.running.add([Started(generation, None, 1, 9) for generation in self.generations])

    def say(self, index: int, text: str) -> None:
        self.generations[index].put_provisional(0, text, 1)

    def end(self, index: int) -> None:
        self.generations[index].put_end(Ended(Finish.EOS))


def texts(batch: list[tuple[int, Item]] | None) -> list[tuple[int, str]]:
    return [(index, item.text if isinstance(item, Provisional) else "end") for index, item in batch or []]


async def test_batches_and_ends(autojump_clock: trio.testing.MockClock) -> None:
    lanes = Lanes(2)
    lanes.say(1, "x")
    lanes.say(0, "y")
    lanes.say(0, "z")
    await trio.sleep(PACE)
    assert texts(await anext(lanes.running)) == [(0, "yz"), (1, "x")]
    lanes.end(1)
    assert texts(await anext(lanes.running)) == [(1, "end")]
    lanes.say(0, "w")
    lanes.end(0)
    assert texts(await anext(lanes.running)) == [(0, "w"), (0, "end")]
    with pytest.raises(StopAsyncIteration):
        await anext(lanes.running)
    lanes.running.close()
    assert lanes.cancelled == []  # they had ended


async def test_what_comes_faster_than_the_pace_comes_together(autojump_clock: trio.testing.MockClock) -> None:
    lanes = Lanes(1)
    await trio.sleep(1)
    lanes.say(0, "a")
    began = trio.current_time()
    assert texts(await anext(lanes.running)) == [(0, "a")]
    assert trio.current_time() == began  # the first is not kept waiting

    async def speak() -> None:
        for letter in "bcde":
            await trio.sleep(PACE / 8)
            lanes.say(0, letter)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        assert texts(await anext(lanes.running)) == [(0, "bcde")]
    assert trio.current_time() == pytest.approx(began + PACE)
    await trio.sleep(PACE)
    lanes.say(0, "f")
    began = trio.current_time()
    assert texts(await anext(lanes.running)) == [(0, "f")]
    lanes.end(0)
    assert texts(await anext(lanes.running)) == [(0, "end")]
    assert trio.current_time() == began  # nor is the end


async def test_silences(autojump_clock: trio.testing.MockClock) -> None:
    lanes = Lanes(1)
    api = Api(Daemon.__new__(Daemon))
    api.running.add(lanes.running)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.beat)
        began = trio.current_time()
        for quiet in (1, 2):
            assert await anext(lanes.running) is None
            assert trio.current_time() - began == pytest.approx(quiet * SILENCE, abs=0.1)
        lanes.say(0, "a")
        assert texts(await anext(lanes.running)) == [(0, "a")]
        spoke = trio.current_time()
        assert await anext(lanes.running) is None
        assert trio.current_time() - spoke == pytest.approx(SILENCE, abs=0.1)
        nursery.cancel_scope.cancel()


async def test_a_cut_ends_all(autojump_clock: trio.testing.MockClock) -> None:
    lanes = Lanes(3)
    lanes.end(1)
    lanes.running.cut("over")
    batch = await anext(lanes.running)
    assert batch is not None
    assert [(index, item.reason) for index, item in batch if isinstance(item, Ended)] == [
        (1, None), (0, "over"), (2, "over")
    ]  # fmt: skip
    lanes.running.close()
    assert lanes.cancelled == [lanes.generations[0], lanes.generations[2]]


async def test_a_generation_that_ended_at_once_is_read() -> None:
    generation = Generation(Job(None, [1], 0, router()), lambda _: None)
    generation.put_end(Ended(Finish.NONE))
    running = Running()
    running.add([Started(generation, None, 1, 0)])
    assert texts(await anext(running)) == [(0, "end")]


# ---- written where it is made


class Sink:
    """An outlet that takes `room` bytes until it is flushed."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.writable = True
        self.sent = b""
        self.kept = b""
        self.made: list[TextOut] = []
        self.end, self.other = socket.socketpair()

    def write(self, body: bytes) -> bool:
        assert self.writable
        assert not self.kept
        self.sent, self.kept = self.sent + body[: self.room], body[self.room :]
        return not self.kept

    def text_out(self, plain: Plain, lead: bytes, tail: bytes, pace: float) -> TextOut | None:
        self.made.append(
            text := TextOut(self.end.fileno(), plain.table.data, plain.table.offsets, plain.special, lead, tail)
        )
        return text

    def lend(self, text: TextOut) -> bool:
        if self.writable:
            text.open()
        return self.writable

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.sent, self.kept = self.sent + self.kept, b""


def encode(batch: Batch) -> bytes:
    return "".join(f"{index}{text}" for index, text in texts(batch)).encode()


class Reader:
    """Reads in a task of its own what is left for it."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.got: list[list[tuple[int, str]] | None] = []

    async def read(self) -> None:
        async for batch in self.lanes.running:
            self.got.append(None if batch is None else texts(batch))


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_items_are_written_while_the_reader_waits(autojump_clock: trio.testing.MockClock) -> None:
    sink = Sink()
    lanes = Lanes(2, sink)
    reader = Reader(lanes)
    lanes.running.write_ahead(encode)
    lanes.say(0, "early ")  # nobody waits yet: it is for the reader, who is first
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await settled()
        assert reader.got == []  # the pace holds for the first too
        await trio.sleep(1.5 * PACE)
        await settled()
        assert reader.got == [[(0, "early ")]]
        await trio.sleep(1.5 * PACE)
        lanes.say(1, "a")
        assert sink.sent == b"1a"  # before any other task ran
        lanes.say(0, "b")  # within the pace
        lanes.say(1, "c")
        assert sink.sent == b"1a"
        await trio.sleep(2.5 * PACE)
        await settled()
        assert reader.got[1:] == [[(0, "b"), (1, "c")]]
        await trio.sleep(1.5 * PACE)
        sink.writable = False  # the layers above are sending
        lanes.say(0, "d")
        await settled()
        assert reader.got[2:] == [[(0, "d")]]
        sink.writable = True
        await trio.sleep(1.5 * PACE)
        lanes.say(0, "e")
        assert sink.sent == b"1a0e"
        lanes.end(0)  # an end is the reader's, and so is all that comes after it
        await settled()
        await trio.sleep(1.5 * PACE)
        lanes.say(1, "f")
        lanes.end(1)
    assert reader.got[3:] == [[(0, "end")], [(1, "f"), (1, "end")]]
    assert sink.sent == b"1a0e"


async def test_what_the_outlet_does_not_take_is_flushed_before_more(autojump_clock: trio.testing.MockClock) -> None:
    sink = Sink(room=3)
    lanes = Lanes(1, sink)
    reader = Reader(lanes)
    lanes.running.write_ahead(encode)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await trio.sleep(1.5 * PACE)
        lanes.say(0, "long text")
        assert sink.sent == b"0lo"
        lanes.say(0, "more")  # while the rest waits
        await trio.sleep(2.5 * PACE)
        await settled()
        assert sink.sent == b"0long text"
        assert reader.got == [[(0, "more")]]
        lanes.end(0)


async def test_an_error_in_writing_is_the_readers(autojump_clock: trio.testing.MockClock) -> None:
    lanes = Lanes(1, Sink())

    def fail(_: Batch) -> bytes:
        raise KeyError("a bug")

    async def read() -> None:
        with pytest.raises(KeyError, match="a bug"):
            await anext(lanes.running)

    lanes.running.write_ahead(fail)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(1.5 * PACE)
        lanes.say(0, "a")  # the one who made the item is none the wiser


async def test_silences_are_told_of_written_streams_too(autojump_clock: trio.testing.MockClock) -> None:
    sink = Sink()
    lanes = Lanes(1, sink)
    api = Api(Daemon.__new__(Daemon))
    api.running.add(lanes.running)
    reader = Reader(lanes)
    lanes.running.write_ahead(encode)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.beat)
        nursery.start_soon(reader.read)
        await trio.sleep(SILENCE / 2)
        lanes.say(0, "a")
        assert sink.sent == b"0a"
        await trio.sleep(SILENCE * 0.9)
        assert reader.got == []
        await trio.sleep(SILENCE * 0.2)
        await settled()
        assert reader.got == [None]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["a model", "\0", r"a\u0000b", '"'])
def test_the_text_of_a_chunk_is_found_whatever_the_model_is_called(name: str) -> None:
    chunks = sse.Chunks({"id": "1", "model": name})
    before, behind = sse.around(chunks.delta(0, "content", sse.MARK))
    assert before + b"text" + behind == chunks.delta(0, "content", "text")


def framed(plain: Plain) -> tuple[bytes, bytes] | None:
    return (b"[", b"]") if plain.channel == TEXT else None


async def test_a_text_out_is_lent_while_nothing_else_is_to_be_written(autojump_clock: trio.testing.MockClock) -> None:
    sink = Sink()
    lanes = Lanes(1, sink)
    generation = lanes.generations[0]
    routed = generation.job.router
    reader = Reader(lanes)
    lanes.running.write_ahead(encode)
    assert generation.text_out is None
    lanes.running.write_straight(framed)
    assert generation.text_out is not None
    assert generation.text_out() is None  # the reader has not come yet
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await settled()
        text = generation.text_out()
        assert text is not None
        assert text.put([0, 0])
        assert sink.other.recv(99) == b"4\r\n[aa]\r\n"
        assert generation.text_out() is text  # one for all of a channel
        routed.provisional([2])
        assert generation.text_out() is None  # half a character is open
        routed.provisional([0])
        assert generation.text_out() is text
        routed.provisional([1])
        assert generation.text_out() is None  # in a call
        routed.provisional([1])
        sink.writable = False
        assert generation.text_out() is None
        sink.writable = True
        lanes.say(0, "for the reader")  # within the pace
        assert generation.text_out() is None
        await trio.sleep(2.5 * PACE)
        await settled()
        assert generation.text_out() is text
        assert len(sink.made) == 1
        lanes.end(0)
    lanes.running.close()
    assert generation.text_out is None


async def test_of_several_choices_none_is_written_straight() -> None:
    lanes = Lanes(2, Sink())
    lanes.running.write_straight(framed)
    assert [generation.text_out for generation in lanes.generations] == [None, None]


async def test_what_was_written_does_not_join_what_was_not() -> None:
    lanes = Lanes(1)
    generation = lanes.generations[0]
    for text, written in (("a", False), ("b", True), ("c", True), ("d", False)):
        generation.put_provisional(0, text, 1, written=written)
    assert [(item.text, item.written) for item in generation.take() if isinstance(item, Provisional)] == [
        ("a", False), ("bc", True), ("d", False)
    ]  # fmt: skip
