"""CPU time of the scheduler per tick and per token, the engine's own taken off.

    python -m bench.scheduler_tick [--lanes 8] [--tokens 1500] [--grant 1 4 32 256]

Lanes stream over a MockEngine in process, with a log in memory and a router that does next to nothing. `grant` is
the tokens each lane gets in a tick, handed on one by one as a worker's emits would be.
"""

import argparse
import time

import trio

from superfluid.engines.mock.config import MockConfig
from superfluid.link import linkw
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.link import OnEmit
from superfluid.scheduler.loop import Scheduler, SchedulerConfig
from superfluid.scheduler.planner import Settings
from tests.scheduler.doubles import MemoryStore, MockLink, WordCodec, WordRouter, WordRun, job


class BareRouter(WordRouter):
    """One run and one piece of text, whatever the tokens."""

    def provisional(self, tokens: list[int]) -> list[tuple[int, str, bool]]:
        return [(0, "word ", False)]

    def commit(self, tokens: list[int], last: bool) -> list[WordRun]:
        return [WordRun(tokens, "word ", 0, False)]


class TimedLink(MockLink):
    """Counts the seconds spent in the engine."""

    engine_s = 0.0
    ticks = 0

    async def tick(self, plan: linkw.TickPlan, on_emit: OnEmit) -> linkw.TickEvents:
        started = time.process_time()
        rounds: list[list[tuple[int, list[int]]]] = []
        events = self.engine.tick(plan, rounds.append)
        self.engine_s += time.process_time() - started
        self.ticks += 1
        await trio.lowlevel.checkpoint()
        for emits in rounds:
            for tag, tokens in emits:
                on_emit(tag, tokens)
        await trio.lowlevel.checkpoint()
        return events


async def measure(lanes: int, tokens: int, grant: int) -> str:
    link = TimedLink(MockConfig(max_batch=lanes, pool_bytes=1 << 28))
    settings = Settings(decode_budget=lanes * grant)
    scheduler = Scheduler(MemoryStore(), WordCodec(), SchedulerConfig(lanes, settings=settings), ModelMetrics())

    async def consume(session: int) -> None:
        asked = job(session, max_tokens=tokens, start=100 * session, want_provisional=True)
        asked.router = BareRouter()
        async for _ in scheduler.submit(asked):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run, link)
        started = time.process_time()
        async with trio.open_nursery() as consumers:
            for session in range(lanes):
                consumers.start_soon(consume, session)
        spent = time.process_time() - started - link.engine_s
        nursery.cancel_scope.cancel()
    link.close()
    made = lanes * tokens
    return (
        f"grant {grant:4}: {link.ticks:5} ticks, {spent / link.ticks * 1e6:7.0f} us a tick, "
        f"{spent / made * 1e6:6.2f} us a token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--grant", type=int, nargs="+", default=[1, 4, 32, 256])
    options = parser.parse_args()
    for grant in options.grant:
        print(trio.run(measure, options.lanes, options.tokens, grant))


if __name__ == "__main__":
    main()
