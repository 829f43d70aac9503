"""The executor over llama.cpp keeps the tick contract, on a real, a tiny random and a scripted model."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from superfluid.engines.contract import CASES, Abilities, Case, EngineUnderTest, GrammarSample, NotApplicable, Wish
from superfluid.engines.executor import Executor
from superfluid.engines.llamacpp.model import open_model
from superfluid.engines.llamacpp.options import Settings
from superfluid.engines.llamacpp.primitives import LlamaPrimitives
from superfluid.engines.primitives import Description
from superfluid.llama.search import open_library
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring, ring_specs

WINDOW = 1024
LANES = 8
SCHEMA = '{"type":"array","minItems":40,"items":{"type":"integer"}}'
EVICTED = {"cache_exported_cells": 0}  # what leaves the pool is gone, as the cases of eviction expect
EXPORTED = {"cache_resident_cells": 1, "cache_exported_cells": 1 << 20}


class Borrowed:
    """Primitives that outlive the engines that use them, described otherwise than they are."""

    def __init__(self, primitives: LlamaPrimitives, changes: dict[str, Any]) -> None:
        self._primitives = primitives
        self._changes = changes
        for handle in list(primitives.sequences.table):
            primitives.seq_free(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._primitives, name)

    def describe(self) -> Description:
        return attrs.evolve(self._primitives.describe(), **self._changes)

    def close(self) -> None:
        return


@attrs.frozen
class Variant:
    model: str
    shared_pool: bool = False
    changes: Mapping[str, Any] = attrs.field(factory=EVICTED.copy)


VARIANTS = {
    "scripted, streams": Variant("scripted"),
    "scripted, pool": Variant("scripted", shared_pool=True),
    "tiny, streams": Variant("tiny"),
    "tiny, pool": Variant("tiny", shared_pool=True),
    "tiny, every entry exported": Variant("tiny", changes=EXPORTED),
    "SmolLM2, streams": Variant("smollm2"),
}

Lend = Callable[[Variant], LlamaPrimitives]


@pytest.fixture(scope="module")
def lend(request: pytest.FixtureRequest) -> Iterator[Lend]:
    """Opens each model once."""
    opened: dict[tuple[str, bool], LlamaPrimitives] = {}

    def path(model: str) -> Path:
        if model == "scripted":
            found: Path = request.getfixturevalue("scripted_gguf")("loop")
            return found
        return Path(request.getfixturevalue("tiny_gguf" if model == "tiny" else "smollm2"))

    def give(variant: Variant) -> LlamaPrimitives:
        key = (variant.model, variant.shared_pool)
        if key not in opened:
            opened[key] = open_model(
                open_library(),
                path(variant.model),
                Settings.of({"threads": 1}),
                window=WINDOW,
                lanes=LANES,
                shared_pool=variant.shared_pool,
            )
        return opened[key]

    yield give
    for primitives in opened.values():
        primitives.close()


def make(primitives: LlamaPrimitives, variant: Variant, wish: Wish) -> EngineUnderTest:
    if wish.unserved_space or wish.certificates is not None:
        raise NotApplicable("the executor has one space and one strategy")
    changes = dict(variant.changes)
    if wish.pool_tokens is not None:
        changes["cells_total"] = wish.pool_tokens
    if wish.prefill_step_tokens is not None:
        changes["prefill_step_tokens"] = wish.prefill_step_tokens
    engine = Executor(Borrowed(primitives, changes))  # type: ignore[arg-type]
    of = primitives.describe()
    rings = {spec.ring_id: Ring.create(spec) for spec in ring_specs(of.max_seq_len, of.vocab_size, of.max_batch)}
    for ring in rings.values():
        engine.attach_ring(ring)
    control = Control.create()
    engine.attach_control(control)
    encode = primitives._vocab.encode
    sample = GrammarSample(SCHEMA, [*encode("[", False), *encode("1", False), *encode(",", False)], encode("x", False))
    abilities = Abilities(
        max_batch=LANES,
        exact=variant.model == "scripted",
        exports_entries=variant.changes == EXPORTED,
        seeds_copy=False,
        promotes=False,
        grammar=sample,
    )
    return EngineUnderTest(
        engine, rings, of.vocab_size, engine.lane_tokens, engine.inject_fault, abilities, control, None
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case, name: str, lend: Lend) -> None:
    variant = VARIANTS[name]
    primitives = lend(variant)
    try:
        case.run(lambda wish: make(primitives, variant, wish))
    except NotApplicable as reason:
        pytest.skip(str(reason))
