"""Reading several generations in one task: batches, pace, silences, ends. Time is a mock clock's."""

import pytest
import trio
import trio.testing

from superfluid.api.http.choices import PACE, SILENCE, Running
from superfluid.api.http.context import Api
from superfluid.codec.channels import PairSplitter, Router
from superfluid.codec.tokenizer import TokenBytes
from superfluid.daemon.daemon import Daemon
from superfluid.daemon.model import Started
from superfluid.link.events import Finish
from superfluid.scheduler.generation import Ended, Generation, Item, Job, Provisional


def router() -> Router:
    return Router(lambda: PairSplitter(TokenBytes([b"a"]), ()))


class Lanes:
    """Generations without a scheduler, and which of them were cancelled."""

    def __init__(self, count: int) -> None:
        self.cancelled: list[Generation] = []
        self.generations = [Generation(Job(None, [1], 9, router()), self.cancelled.append) for _ in range(count)]
        self.running = Running()
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
