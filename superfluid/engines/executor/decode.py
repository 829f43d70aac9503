"""Decode rounds: every lane's last token in one step, a token per row, the yield word looked at in between."""

from collections.abc import Callable
from time import perf_counter_ns

from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Lane
from superfluid.engines.executor.outcome import Outcome
from superfluid.engines.executor.picks import Emits, Picker, check_count, checked_rows
from superfluid.engines.executor.room import Room
from superfluid.engines.executor.speculate import CERT_ID, propose
from superfluid.engines.primitives import FatalError, Feed, PrimitiveError, Row, SampleSpec, TokenArray
from superfluid.link.events import Finish
from superfluid.link.linkw import SpecStats


class Decode:
    """The decode rounds of one tick."""

    def __init__(self, core: Core, outcome: Outcome, picker: Picker, emit: Callable[[Emits], None], room: Room) -> None:
        self._core = core
        self._outcome = outcome
        self._picker = picker
        self._emit = emit
        self._spare = room.spare_cells
        self._drafting = False

    def run(self, lanes: list[Lane]) -> None:
        """Rounds until every grant is used up, every lane has ended, or the daemon asks to yield."""
        outcome, left = self._outcome, self._outcome.left
        batch = self._core.max_batch
        active = sorted((lane for lane in lanes if lane.tag not in outcome.cut), key=lambda lane: lane.tag)
        decoding = sum(1 for lane in active if left[lane.tag] > 0 and not lane.host)
        speculation = self._core.speculation
        gate = speculation.gate(decoding) if speculation is not None and decoding else None
        self._drafting = gate is not None and gate.drafting and any(lane.drafter is not None for lane in active)
        tokens = 0
        began = perf_counter_ns()
        while active := [lane for lane in active if left[lane.tag] > 0 and not lane.finish and lane.alive]:
            emits: Emits = []
            for start in range(0, len(active), batch):
                emits += self._round(active[start : start + batch])
            if emits:
                tokens += sum(len(said) for _, said in emits)
                self._emit(emits)
            if self._core.yield_wanted:
                break
        if gate is not None and tokens >= decoding and any(lane.drafter is not None for lane in lanes):
            proposed = sum(stats.proposed for stats in outcome.spec.values())
            gate.measured(tokens, (perf_counter_ns() - began) / 1e9, proposed)

    def _round(self, group: list[Lane]) -> Emits:
        """One step of a group."""
        feeds: list[Feed] = []
        fed: list[Lane] = []
        rowed: list[Lane] = []
        drafts: dict[int, TokenArray] = {}
        spare = self._spare
        for lane in group:
            if not lane.ready and not self._replay(lane, feeds, fed):
                continue
            if lane.length >= self._core.max_seq_len:
                lane.finish = Finish.LENGTH
                continue
            draft = self._draft(lane, spare, len(group)) if self._drafting else None
            if draft is None:
                feeds.append(lane.next_feed(True))
                lane.ingested += 1
            else:
                feeds.append(lane.draft_feed(draft))
                lane.ingested += 1 + len(draft)
                drafts[lane.tag] = draft
                spare = None if spare is None else spare - len(draft)
            fed.append(lane)
            rowed.append(lane)
        if drafts:
            return self._verify(feeds, fed, rowed, drafts)
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

    # ---- speculation

    def _draft(self, lane: Lane, spare: int | None, decoding: int) -> TokenArray | None:
        """What the lane's stream says comes next, as far as grant, window and pool reach; none for nothing."""
        drafter, speculation, tag = lane.drafter, self._core.speculation, lane.tag
        if drafter is None or speculation is None or not speculation.serves(decoding) or drafter.rests():
            return None
        granted = self._outcome.left[tag] + self._outcome.overshoot[tag] - 1
        k = min(drafter.depth, granted, self._core.max_seq_len - lane.length - 1)
        draft = propose(lane.stream, lane.length, k if spare is None else min(k, spare))
        return draft if len(draft) else None

    def _verify(self, feeds: list[Feed], fed: list[Lane], rowed: list[Lane], drafts: dict[int, TokenArray]) -> Emits:
        """One pass over the group's tokens and drafts; each lane takes what its rows say."""
        core = self._core
        try:
            rows = core.primitives.step_rows(feeds)
            check_count(len(rows), len(feeds))
        except FatalError:
            raise
        except PrimitiveError as error:
            self._outcome.fail(fed, error)
            return []
        emits: Emits = []
        for lane, feed, its_rows in zip(fed, feeds, rows, strict=True):
            draft = drafts.get(lane.tag)
            check_count(len(its_rows), len(feed.tokens))
            if draft is not None:
                emits.append((lane.tag, self._take_draft(lane, draft.tolist(), list(its_rows))))
            elif feed.wants_row:
                emits += self._picker.take_rows([lane], its_rows)
        for lane in rowed:
            if lane.alive and lane.tag in drafts:
                self._cut_back(lane)
        return emits

    def _take_draft(self, lane: Lane, draft: list[int], rows: list[Row]) -> list[int]:
        """Take tokens while they are what was drafted, and the first that is not."""
        taken: list[int] = []
        accepted = 0
        for row, drafted in zip(rows, [*draft, None], strict=True):
            token = self._core.sampler.pick(row, lane.draws)
            self._picker.take_tokens([lane], [token])
            taken.append(token)
            if token != drafted:
                break
            accepted += 1
            if lane.finish:
                break
        assert lane.drafter is not None
        lane.drafter.drafted(accepted)
        stats = self._outcome.spec.setdefault(lane.tag, SpecStats(0, 0, CERT_ID))
        stats.proposed += len(draft)
        stats.accepted += accepted
        beyond = -self._outcome.left[lane.tag]
        if self._spare is not None and beyond > 0:
            self._spare -= beyond
        return taken

    def _cut_back(self, lane: Lane) -> None:
        """Leave the state at all but the lane's last token."""
        length = lane.length - 1
        if lane.ingested > length:
            try:
                self._core.primitives.seq_truncate(lane.sequence.seq, length)
            except FatalError:
                raise
            except PrimitiveError as error:
                self._outcome.fail([lane], error)
                return
            lane.ingested = length


def _spec(lane: Lane) -> SampleSpec:
    params = lane.admit.params
    temperature = 0.0 if lane.greedy else params.temperature
    return SampleSpec(temperature, params.top_p, params.min_p, params.top_k, lane.draws.position)
