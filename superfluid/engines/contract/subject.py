"""What the harness needs of an engine under test: its rings, two hooks, and what it can do."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

from superfluid.engines.engine import Engine
from superfluid.link import linkw
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring


class ContractViolation(AssertionError):
    """The engine broke the contract; the message says where."""


class NotApplicable(Exception):
    """The case asks for something this engine does not have."""


@attrs.frozen
class GrammarSample:
    """A grammar text, tokens it accepts from its start, and tokens it refuses there (none: it refuses nothing).

    It must not be complete before `accepted` and eight more tokens are consumed.
    """

    text: str
    accepted: list[int]
    refused: list[int] | None = None


@attrs.frozen
class Abilities:
    """Selects cases. The defaults are those of a full engine that can do everything."""

    max_batch: int = 8
    exact: bool = True  # the same tokens whatever is in the batch; a real model may round otherwise
    head_only: bool = False  # state is cut nowhere; only a whole cache entry seeds
    exports_entries: bool = False  # cache entries leave the pool as soon as nothing uses them
    seeds_copy: bool = True  # a seed costs its length in the pool
    host_logits: bool = True
    alternatives: bool = True  # logprobs carry the alternatives asked for
    sequences: bool = True
    promotes: bool = True
    lossy: int | None = None  # an encoding of the first space that loses precision
    grammar: GrammarSample | None = None
    yields: bool = True
    image_token: int | None = None


@attrs.frozen
class Wish:
    """How a case wants its engine; a factory that cannot raises NotApplicable."""

    pool_tokens: int | None = None  # the pool holds exactly so many
    prefill_step_tokens: int | None = None  # prompt tokens between two step boundaries
    unserved_space: bool = False  # a state space flagged bit 0
    certificates: Mapping[str, list[linkw.ExactnessCert]] | None = None  # strategies and what they are certified for


@attrs.define
class EngineUnderTest:
    """An engine with its rings attached. `end_next` makes a lane's next token end its sequence (finish 1)."""

    engine: Engine
    rings: Mapping[int, Ring]
    vocab_size: int
    lane_tokens: Callable[[int], list[int]]
    inject_fault: Callable[[int], None]
    abilities: Abilities = attrs.Factory(Abilities)
    control: Control | None = None
    end_next: Callable[[int], None] | None = None

    def close(self) -> None:
        self.engine.close()
        for ring in self.rings.values():
            ring.close()
        if self.control is not None:
            self.control.close()


Factory: TypeAlias = Callable[[Wish], EngineUnderTest]
