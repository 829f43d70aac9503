"""Decode rounds: every lane's last token in one step, a token per row, the yield word looked at in between."""

from collections.abc import Callable

from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Lane
from superfluid.engines.executor.outcome import Outcome
from superfluid.engines.executor.picks import Emits, Picker, check_count, checked_rows
from superfluid.engines.primitives import FatalError, Feed, PrimitiveError, SampleSpec
from superfluid.link.events import Finish


class Decode:
    """The decode rounds of one tick."""

    def __init__(self, core: Core, outcome: Outcome, picker: Picker, emit: Callable[[Emits], None]) -> None:
        self._core = core
        self._outcome = outcome
        self._picker = picker
        self._emit = emit

    def run(self, lanes: list[Lane]) -> None:
        """Rounds until every grant is used up, every lane has ended, or the daemon asks to yield."""
        outcome, left = self._outcome, self._outcome.left
        batch = self._core.max_batch
        active = sorted((lane for lane in lanes if lane.tag not in outcome.cut), key=lambda lane: lane.tag)
        while active := [lane for lane in active if left[lane.tag] > 0 and not lane.finish and lane.alive]:
            emits: Emits = []
            for start in range(0, len(active), batch):
                emits += self._round(active[start : start + batch])
            if emits:
                self._emit(emits)
            if self._core.yield_wanted:
                break

    def _round(self, group: list[Lane]) -> Emits:
        """One step of a group."""
        feeds: list[Feed] = []
        fed: list[Lane] = []
        rowed: list[Lane] = []
        for lane in group:
            if not lane.ready and not self._replay(lane, feeds, fed):
                continue
            if lane.length >= self._core.max_seq_len:
                lane.finish = Finish.LENGTH
                continue
            feeds.append(lane.next_feed(True))
            lane.ingested += 1
            fed.append(lane)
            rowed.append(lane)
        return self._step(feeds, fed, rowed) if feeds else []

    def _replay(self, lane: Lane, feeds: list[Feed], fed: list[Lane]) -> bool:
        """Feed one token of a resumed tail, which uses one of the grant and gives nothing; true when the lane goes on
        to decode in this very round, its last replayed token being the input."""
        left = self._outcome.left
        left[lane.tag] -= 1
        lane.prefilled += 1
        if lane.ready:
            return left[lane.tag] > 0
        feeds.append(lane.next_feed(False))
        lane.ingested += 1
        fed.append(lane)
        return False

    def _step(self, feeds: list[Feed], fed: list[Lane], rowed: list[Lane]) -> Emits:
        core = self._core
        try:
            if rowed and core.description.engine_sampling and all(self._on_device(lane) for lane in rowed):
                tokens = core.primitives.step_sampled(feeds, [_spec(lane) for lane in rowed])
                if tokens is not None:
                    check_count(len(tokens), len(rowed))
                    for lane, token in zip(rowed, tokens, strict=True):
                        lane.draws.commit(token)
                    return self._picker.take_tokens(rowed, tokens)
            rows = checked_rows(core.primitives.step(feeds), len(rowed))
        except FatalError:
            raise
        except PrimitiveError as error:
            self._outcome.fail(fed, error)
            return []
        return self._picker.take_rows(rowed, rows) if rowed else []

    def _on_device(self, lane: Lane) -> bool:
        """Whether the runtime may pick this lane's token itself."""
        return (
            lane.draws.plain
            and lane.matcher is None
            and not lane.host
            and (lane.greedy or self._core.description.engine_draws)
        )


def _spec(lane: Lane) -> SampleSpec:
    params = lane.admit.params
    temperature = 0.0 if lane.greedy else params.temperature
    return SampleSpec(temperature, params.top_p, params.min_p, params.top_k, lane.draws.position)
