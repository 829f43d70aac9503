"""From rows to tokens: what each lane of a step takes from its row, and whether it ends there."""

from superfluid.engines.engine import EngineFatal, FaultCode
from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Lane
from superfluid.engines.executor.outcome import Outcome
from superfluid.engines.primitives import Row
from superfluid.link.events import Finish
from superfluid.shm.ring import RingError

Emits = list[tuple[int, list[int]]]


class Picker:
    """Takes the rows of steps. A round of engine lanes is one native call, whatever its lanes ask for."""

    def __init__(self, core: Core, outcome: Outcome) -> None:
        self._core = core
        self._outcome = outcome

    def take_rows(self, lanes: list[Lane], rows: Row) -> Emits:
        """A token for each lane from its row; host lanes get the row itself. What the engine's lanes produced."""
        whole = True
        for lane in lanes:
            if lane.host or lane.matcher is not None:
                whole &= self._prepare(lane)
        if whole:
            tokens = self._core.sampler.pick_rows(rows, [lane.draws for lane in lanes]).tolist()
            return self.take_tokens(lanes, tokens)
        emits: Emits = []
        for lane, row in zip(lanes, rows, strict=True):
            if not lane.alive:
                continue
            if lane.host:
                self._hand_over(lane, row)
            else:
                emits += self.take_tokens([lane], [self._core.sampler.pick(row, lane.draws)])
        return emits

    def take_tokens(self, lanes: list[Lane], tokens: list[int]) -> Emits:
        """Tokens picked for lanes join their streams."""
        outcome, produced = self._outcome, self._outcome.produced
        emits: Emits = []
        for lane, token in zip(lanes, tokens, strict=True):
            tag = lane.tag
            if lane.want_logprobs:
                record = lane.draws.record()
                assert record is not None
                outcome.records.setdefault(tag, []).append(record)
            if lane.matcher is not None and not self._consume(lane, token):
                outcome.fault(lane, FaultCode.GRAMMAR)
                continue
            lane.append(token)
            produced[tag].append(token)
            outcome.left[tag] -= 1
            emits.append((tag, [token]))
            if not lane.finish:
                if self._core.is_eos(token) and not lane.ignores_eos:
                    lane.finish = Finish.EOS
                elif lane.length >= self._core.max_seq_len:
                    lane.finish = Finish.LENGTH
        return emits

    def _prepare(self, lane: Lane) -> bool:
        """Set a lane's mask; false when its row cannot be picked with the others'."""
        if lane.host:
            return False
        assert lane.matcher is not None
        mask = lane.matcher.mask()
        if not mask.any():
            self._outcome.fault(lane, FaultCode.GRAMMAR)
            return False
        lane.draws.mask = mask
        return True

    def _consume(self, lane: Lane, token: int) -> bool:
        """Move a lane's grammar on; its end is a finish. False when it refuses the token."""
        matcher = lane.matcher
        assert matcher is not None
        if self._core.is_eos(token) and matcher.accepting:
            lane.finish = Finish.GRAMMAR if lane.ignores_eos else Finish.EOS
            return True
        if not matcher.consume(token):
            return False
        if matcher.finished:
            lane.finish = Finish.GRAMMAR
        return True

    def _hand_over(self, lane: Lane, row: Row) -> None:
        ring = self._core.logits
        try:
            if ring is None:
                raise RingError("no logits ring attached")
            lane.row = ring.push_row(row)
        except RingError:
            self._outcome.fault(lane, FaultCode.BOUNDS)
            return
        lane.nonce = lane.row.generation
        self._outcome.left[lane.tag] -= 1


def checked_rows(rows: Row, wanted: int) -> Row:
    """The rows of a step. Raises EngineFatal when they are not as many as were asked for."""
    check_count(len(rows), wanted)
    return rows


def check_count(found: int, wanted: int) -> None:
    if found != wanted:
        raise EngineFatal(f"a step gave {found} rows where {wanted} were asked for")
