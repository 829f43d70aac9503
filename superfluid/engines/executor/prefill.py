"""Prefill: prompt chunks packed over lanes into steps, with the yield word looked at between them."""

from collections.abc import Callable
from time import perf_counter_ns

import attrs

from superfluid.engines.executor.core import Core
from superfluid.engines.executor.lanes import Chunk, Lane
from superfluid.engines.executor.outcome import Outcome
from superfluid.engines.executor.picks import Emits, Picker, checked_rows
from superfluid.engines.executor.room import Room
from superfluid.engines.primitives import FatalError, Feed, PrimitiveError

CHECKPOINT_TOKENS = 128  # a shorter prompt is prefilled as fast as its state is copied


@attrs.define(eq=False)
class Piece:
    """What one lane feeds in this prefill: from where it stands up to `target`, at which its prompt stands at `end`
    (one more when the last token is held back). With `row` its first token comes from the last of it."""

    lane: Lane
    target: int
    end: int
    row: bool

    @property
    def left(self) -> int:
        return self.target - self.lane.ingested


class Prefill:
    """The prefill of one tick."""

    def __init__(self, core: Core, outcome: Outcome, picker: Picker, emit: Callable[[Emits], None]) -> None:
        self._core = core
        self._outcome = outcome
        self._picker = picker
        self._emit = emit

    def run(self, chunks: list[Chunk], decodes: list[tuple[Lane, int]], room: Room) -> None:
        """Feed the chunks; lanes that decode in this tick take their first token from the last row."""
        core, rate = self._core, self._core.rate
        pieces = self._pieces(chunks, decodes)
        latency = core.latency_wanted
        step_tokens = rate.step_tokens(core.description.prefill_step_tokens, latency)
        waiting = [piece for piece in pieces if piece.left > 0]
        total = sum(piece.left for piece in waiting)
        if waiting:
            synchronous = rate.synchronous(step_tokens or total, latency)
            if synchronous != core.steps_synchronous:
                core.primitives.sync_steps(synchronous)
                core.steps_synchronous = synchronous
            began = perf_counter_ns()
            waited = self._steps(waiting, step_tokens or total)
            if synchronous or waited:
                rate.measured(total - sum(piece.left for piece in waiting), (perf_counter_ns() - began) / 1e9)
        dropped = {chunk.lane.tag: chunk.dropped for chunk in chunks if chunk.dropped}
        for piece in pieces:
            lane = piece.lane
            if lane.alive and piece.left > 0:
                self._outcome.cut.add(lane.tag)
                if piece.end > lane.prefilled:
                    dropped[lane.tag] = dropped.get(lane.tag, 0) + piece.end - lane.prefilled
            elif lane.alive and core.head_only and lane.ready and not piece.row:
                self._checkpoint(lane, room)
        for chunk in chunks:
            if chunk.lane.alive and chunk.lane.tag in dropped:
                self._outcome.dropped(chunk.lane, dropped[chunk.lane.tag])

    def _pieces(self, chunks: list[Chunk], decodes: list[tuple[Lane, int]]) -> list[Piece]:
        """In plan order; lanes that owe a lost seed's tokens feed those too."""
        granted = {lane.tag for lane, grant in decodes if grant}
        counts = {chunk.lane: chunk.count for chunk in chunks} | {
            lane: 0 for lane, _ in decodes if lane.owed and all(chunk.lane is not lane for chunk in chunks)
        }
        pieces = []
        for lane, count in counts.items():
            if not lane.alive or not (count or lane.owed):
                continue
            end = lane.prefilled + count
            row = False
            target = end
            if end == lane.prompt_len:
                row = (
                    lane.tag in granted
                    and count > 0
                    and end < self._core.max_seq_len
                    and not (self._core.head_only and lane.prompt_len >= 2)
                )
                target = end if row else end - 1
            if target <= lane.ingested:  # only the token to be held back
                lane.prefilled = end
            else:
                pieces.append(Piece(lane, target, end, row))
        return pieces

    def _steps(self, pieces: list[Piece], step_tokens: int) -> bool:
        """Run the steps; whether the last one was waited for by reading a row."""
        first, waited = True, False
        while pieces := [piece for piece in pieces if piece.lane.alive and piece.left > 0]:
            if not first and self._core.yield_wanted:
                break
            first = False
            feeds: list[Feed] = []
            fed: list[tuple[Piece, int]] = []
            room = step_tokens
            for piece in pieces:
                if not room:
                    break
                lane = piece.lane
                n = min(room, piece.left)
                room -= n
                to = lane.ingested + n
                feeds.append(Feed(lane.sequence.seq, lane.stream[lane.ingested : to], piece.row and to == piece.target))
                fed.append((piece, to))
            waited = self._step(feeds, fed)
        return waited

    def _step(self, feeds: list[Feed], fed: list[tuple[Piece, int]]) -> bool:
        lanes = [piece.lane for piece, to in fed if piece.row and to == piece.target]
        try:
            rows = checked_rows(self._core.primitives.step(feeds), len(lanes))
        except FatalError:
            raise
        except PrimitiveError as error:
            self._outcome.fail([piece.lane for piece, _ in fed], error)
            return False
        for piece, to in fed:
            lane = piece.lane
            lane.ingested = to
            lane.prefilled = max(lane.prefilled, piece.end if to == piece.target else to)
        if lanes:
            self._emit(self._picker.take_rows(lanes, rows))
        return bool(lanes)

    def _checkpoint(self, lane: Lane, room: Room) -> None:
        """Cache a copy of a prompt's state where it cannot be cut back to later, if nobody's room is taken."""
        core = self._core
        length = lane.ingested
        tokens = lane.stream[:length]
        if length < CHECKPOINT_TOKENS or length != lane.prompt_len - 1 or core.cache.holds(tokens):
            return
        if not room.take(0 if core.description.copy_shares_cells else length):
            return
        try:
            copy = core.sequences.create_raw()
        except FatalError:
            raise
        except PrimitiveError:
            return
        try:
            core.primitives.seq_copy(lane.sequence.seq, copy, length)
        except FatalError:
            raise
        except PrimitiveError:
            core.sequences.free_raw(copy)
            return
        core.cache.publish(copy, tokens, length, lane.sequence.taint, shared_fork=False)
