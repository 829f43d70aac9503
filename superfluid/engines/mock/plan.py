"""Judging a plan whole, before anything moves; what is left is a list of things to do."""

from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

import attrs

from superfluid.engines.engine import EngineError, TokenArray
from superfluid.engines.mock.cache import Entry, PrefixCache, Seed
from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.constraints import Constraints
from superfluid.engines.mock.lanes import Lane
from superfluid.engines.mock.state import Sequence
from superfluid.engines.mock.strategies import Strategies
from superfluid.link import linkw
from superfluid.link.codes import PlanFlag, Sampling, Status

REPEAT_NONE = (0.0, 1.0)


class Tagged(Protocol):
    lane_tag: int


@attrs.define
class Admission:
    """An admit that will be carried out, or refused alone with `reject_code`."""

    admit: linkw.LaneAdmit
    prompt: TokenArray
    seed: Seed | None
    cert: linkw.ExactnessCert | None
    reject_code: int = 0

    @property
    def seeded(self) -> int:
        return self.seed.length if self.seed else 0

    @property
    def prefill_end(self) -> int:
        return max(len(self.prompt) - self.admit.decode_replay, self.seeded)


@attrs.define
class Chunk:
    """A prefill as the budget leaves it."""

    lane_tag: int
    count: int
    asked: int


@attrs.define
class Accepted:
    """What a valid plan will do."""

    admissions: list[Admission]
    chunks: list[Chunk]
    decodes: list[linkw.LaneDecode]
    victims: list[Entry]


@attrs.define
class Standing:
    """Where a lane of this plan stands in its prompt."""

    host: bool
    position: int
    prefill_end: int
    finished: bool = False
    refused: bool = False  # its admit is answered alone


class Judge:
    """The checks of a plan, in their order; the first failure is the answer."""

    def __init__(
        self,
        config: MockConfig,
        lanes: dict[int, Lane],
        faulted: set[int],
        cache: PrefixCache,
        constraints: Constraints,
        strategies: Strategies,
        read_prompt: Callable[[linkw.TokenRef], TokenArray],
        free_bytes: Callable[[], int],
        bytes_of: Callable[[Sequence], int],
    ) -> None:
        self._config = config
        self._lanes = lanes
        self._faulted = faulted
        self._cache = cache
        self._constraints = constraints
        self._strategies = strategies
        self._read_prompt = read_prompt
        self._free_bytes = free_bytes
        self._bytes_of = bytes_of
        self._bytes_per_token = sum(space.bytes_per_token for space in config.spaces)

    def judge(
        self, plan: linkw.TickPlan, last_seq: int, refuse_admit: Callable[[linkw.LaneAdmit], int | None] | None
    ) -> Accepted:
        """Raises EngineError -102 to -113."""
        self._check_lists(plan)
        if plan.plan_seq <= last_seq:
            _refuse(Status.RejectIllegalCombination, f"plan_seq {plan.plan_seq} after {last_seq}")
        if plan.max_decode_lanes > self._config.max_batch:
            _refuse(Status.RejectBudget, f"{plan.max_decode_lanes} decode lanes; the batch is {self._config.max_batch}")
        if plan.flags & PlanFlag.DRAIN and plan.admits:
            _refuse(Status.RejectIllegalCombination, "admits while draining")
        admissions = self._check_admits(plan.admits)
        for admission in admissions:
            code = refuse_admit(admission.admit) if refuse_admit else None
            admission.reject_code = code or admission.reject_code
        self._check_commits(plan.commits)
        standing = {
            tag: Standing(lane.host, lane.fed, lane.prefill_end, bool(lane.finish)) for tag, lane in self._lanes.items()
        }
        for a in admissions:
            host = a.admit.sampling == Sampling.HOST
            standing[a.admit.lane_tag] = Standing(host, a.seeded, a.prefill_end, refused=bool(a.reject_code))
        chunks = self._check_prefills(plan, standing)
        self._check_decodes(plan, standing)
        for retire in plan.retires:
            if retire.lane_tag not in self._lanes and retire.lane_tag not in self._faulted:
                _refuse(Status.RejectUnknownLane, f"retire of lane {retire.lane_tag}")
        self._check_locks(plan)
        victims = self._make_room(plan, admissions, chunks, standing)
        decodes = [decode for decode in plan.decodes if not standing[decode.lane_tag].refused]
        return Accepted(admissions, chunks, decodes, victims)

    def _check_lists(self, plan: linkw.TickPlan) -> None:
        admits = _tags(plan.admits, "admits")
        commits = _tags(plan.commits, "commits")
        prefills = _tags(plan.prefills, "prefills")
        decodes = _tags(plan.decodes, "decodes")
        retires = _tags(plan.retires, "retires")
        for one, other, words in (
            (admits, retires, "admits and retires"),
            (admits, commits, "admits and commits"),
            (commits, retires, "commits and retires"),
            (decodes, retires, "decodes and retires"),
            (prefills, retires, "prefills and retires"),
        ):
            if both := one & other:
                _refuse(Status.RejectIllegalCombination, f"lane {min(both)} is in {words}")
        hosts = {admit.lane_tag for admit in plan.admits if admit.sampling == Sampling.HOST}
        for decode in plan.decodes:
            if decode.lane_tag in hosts and decode.max_new_tokens != 1:
                _refuse(Status.RejectHostRules, f"host lane {decode.lane_tag} asks {decode.max_new_tokens} tokens")
        if len(plan.decodes) > plan.max_decode_lanes:
            _refuse(Status.RejectBudget, f"{len(plan.decodes)} decodes in a plan of {plan.max_decode_lanes}")

    def _check_admits(self, admits: list[linkw.LaneAdmit]) -> list[Admission]:
        seeds: set[int] = set()
        grammars: set[int] = set()
        return [self._check_admit(admit, seeds, grammars) for admit in admits]

    def _check_admit(self, admit: linkw.LaneAdmit, seeds: set[int], grammars: set[int]) -> Admission:
        tag = admit.lane_tag
        if tag in self._lanes:
            _refuse(Status.RejectIllegalCombination, f"lane {tag} is live")
        prompt = self._read_prompt(admit.prompt)
        if not len(prompt):
            _refuse(Status.RejectIllegalCombination, f"lane {tag} has an empty prompt")
        if prompt.max() >= self._config.vocab_size:
            _refuse(Status.RejectBounds, f"lane {tag}: token {prompt.max()} of a vocabulary of this size")
        if admit.sampling > Sampling.HOST:
            _refuse(Status.RejectIllegalCombination, f"lane {tag}: sampling {admit.sampling}")
        if admit.decode_replay >= len(prompt):
            _refuse(Status.RejectBounds, f"lane {tag} replays {admit.decode_replay} of {len(prompt)} tokens")
        host = admit.sampling == Sampling.HOST
        self._strategies.check_slot(admit.strategy_slot, host)
        if admit.grammar_handle:
            if (
                host
                or admit.grammar_handle in grammars
                or not self._constraints.grammar_free_for_use(admit.grammar_handle)
            ):
                _refuse(Status.RejectIllegalCombination, f"lane {tag} cannot take grammar {admit.grammar_handle}")
            grammars.add(admit.grammar_handle)
        if admit.grammar_replay > (len(prompt) if admit.grammar_handle else 0):
            _refuse(Status.RejectIllegalCombination, f"lane {tag} replays {admit.grammar_replay} tokens of its grammar")
        if admit.logit_bias_handle and not self._constraints.has_bias(admit.logit_bias_handle):
            _refuse(Status.RejectIllegalCombination, f"no logit bias {admit.logit_bias_handle}")
        seed = self._check_seed(admit, prompt, seeds) if admit.seed_handle else None
        cert, reject_code = self._strategies.certificate(admit)
        return Admission(admit, prompt, seed, cert, reject_code)

    def _check_seed(self, admit: linkw.LaneAdmit, prompt: TokenArray, taken: set[int]) -> Seed:
        handle = admit.seed_handle
        seed = self._cache.seed(handle)
        if seed is None or handle in taken:
            raise EngineError(Status.RejectStaleSeed, f"seed {handle} is gone")
        if seed.determinism != admit.determinism_class:
            _refuse(Status.RejectStaleSeed, f"seed {handle} was taken with determinism {seed.determinism}")
        if len(prompt) < seed.length or (prompt[: seed.length] != seed.tokens).any():
            _refuse(Status.RejectStaleSeed, f"seed {handle} is no prefix of the prompt of lane {admit.lane_tag}")
        taken.add(handle)
        return seed

    def _check_commits(self, commits: list[linkw.LaneCommit]) -> None:
        for commit in commits:
            lane = self._lanes.get(commit.lane_tag)
            if lane is None:
                raise EngineError(Status.RejectUnknownLane, f"commit to lane {commit.lane_tag}")
            if not lane.host or lane.finish:
                _refuse(Status.RejectIllegalCombination, f"lane {lane.tag} takes no commits")
            if not lane.nonce:
                _refuse(Status.RejectHostRules, f"lane {lane.tag} has no row pending")
            if commit.logits_nonce != lane.nonce:
                _refuse(Status.RejectStaleNonce, f"lane {lane.tag}: nonce {commit.logits_nonce}, not {lane.nonce}")
            if commit.token_id >= self._config.vocab_size:
                _refuse(Status.RejectBounds, f"lane {lane.tag}: token {commit.token_id}")

    def _check_prefills(self, plan: linkw.TickPlan, standing: dict[int, Standing]) -> list[Chunk]:
        budget = plan.prefill_token_budget
        chunks = []
        for prefill in plan.prefills:
            lane = standing.get(prefill.lane_tag)
            if lane is None:
                raise EngineError(Status.RejectUnknownLane, f"prefill of lane {prefill.lane_tag}")
            if prefill.token_offset != lane.position:
                _refuse(
                    Status.RejectIllegalCombination,
                    f"lane {prefill.lane_tag} stands at {lane.position}, not {prefill.token_offset}",
                )
            if prefill.token_offset + prefill.token_count > lane.prefill_end:
                _refuse(Status.RejectBounds, f"lane {prefill.lane_tag} prefills up to {lane.prefill_end}")
            if lane.refused:
                lane.position = lane.prefill_end
                continue
            count = min(budget, prefill.token_count)
            budget -= count
            lane.position += count
            chunks.append(Chunk(prefill.lane_tag, count, prefill.token_count))
        return chunks

    def _check_decodes(self, plan: linkw.TickPlan, standing: dict[int, Standing]) -> None:
        committed = {commit.lane_tag for commit in plan.commits}
        for decode in plan.decodes:
            tag = decode.lane_tag
            lane = standing.get(tag)
            if lane is None:
                raise EngineError(Status.RejectUnknownLane, f"decode of lane {tag}")
            if lane.finished:
                _refuse(Status.RejectIllegalCombination, f"lane {tag} is finished")
            if lane.host:
                if decode.max_new_tokens != 1:
                    _refuse(Status.RejectHostRules, f"host lane {tag} asks {decode.max_new_tokens} tokens")
                if tag in self._lanes and self._lanes[tag].nonce and tag not in committed:
                    _refuse(Status.RejectHostRules, f"host lane {tag} has a row without its commit")
            if lane.position < lane.prefill_end and not lane.refused:
                _refuse(
                    Status.RejectIllegalCombination,
                    f"lane {tag} is prefilled to {lane.position} of {lane.prefill_end} tokens",
                )

    def _check_locks(self, plan: linkw.TickPlan) -> None:
        touched: list[list[Tagged]] = [
            list(plan.commits), list(plan.prefills), list(plan.decodes), list(plan.retires)
        ]  # fmt: skip
        for records in touched:
            for record in records:
                lane = self._lanes.get(record.lane_tag)
                if lane is not None and lane.sequence.locks:
                    _refuse(Status.RejectTransferLocked, f"a state operation runs on lane {record.lane_tag}")

    def _make_room(
        self, plan: linkw.TickPlan, admissions: list[Admission], chunks: list[Chunk], standing: dict[int, Standing]
    ) -> list[Entry]:
        """Entries that must go for everything the plan feeds. Raises EngineError -113."""
        tokens = len(plan.commits) + sum(chunk.count for chunk in chunks)
        tokens += sum(
            decode.max_new_tokens
            for decode in plan.decodes
            if not standing[decode.lane_tag].refused
            and (not standing[decode.lane_tag].host or self._replays(decode.lane_tag, admissions))
        )
        tokens += sum(a.seeded for a in admissions if not a.reject_code and a.seed and isinstance(a.seed.source, Entry))
        needed = tokens * self._bytes_per_token
        free = self._free_bytes() + sum(
            self._bytes_of(self._lanes[retire.lane_tag].sequence)
            for retire in plan.retires
            if not retire.publish_to_cache and retire.lane_tag in self._lanes
        )
        if needed <= free:
            return []
        victims = self._cache.victims(needed - free, plan.shed_policy)
        short = needed - free - sum(map(self._cache.bytes_of, victims))
        if short > 0:
            _refuse(Status.NeedsReplan, f"{needed} bytes needed, {short} short after every eviction allowed")
        return victims

    def _replays(self, tag: int, admissions: list[Admission]) -> bool:
        lane = self._lanes.get(tag)
        if lane is not None:
            return lane.replaying
        return any(a.admit.lane_tag == tag and a.prefill_end < len(a.prompt) for a in admissions)


def _tags(records: Iterable[Tagged], name: str) -> set[int]:
    seen: set[int] = set()
    for record in records:
        if record.lane_tag in seen:
            _refuse(Status.RejectDuplicateLane, f"lane {record.lane_tag} is twice in {name}")
        seen.add(record.lane_tag)
    return seen


def _refuse(status: Status, reason: str) -> NoReturn:
    raise EngineError(status, reason)
