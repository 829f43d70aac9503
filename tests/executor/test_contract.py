"""The executor keeps the tick contract over every kind of primitive runtime."""

from collections.abc import Mapping
from typing import Any

import pytest

from superfluid.engines.contract import CASES, Abilities, Case, EngineUnderTest, GrammarSample, NotApplicable, Wish
from superfluid.engines.executor import Executor
from superfluid.link.codes import Encoding
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring, ring_specs
from tests.engines.fake_primitives import EOS, FakePrimitives

SAMPLE = GrammarSample('{"type":"array","minItems":40,"items":{"type":"integer"}}', list(b"[1,"), list(b"x"))
VARIANTS: Mapping[str, dict[str, Any]] = {
    "private cells": {},
    "private cells, entries followed": {"takeover_preferred": True},
    "shared cells": {"copy_shares_cells": True},
    "head only": {"head_only": True, "page_size_tokens": 1},
    "exports made to be sized": {"sizes_exports": False},
    "every entry exported": {"cache_resident_cells": 1, "cache_exported_cells": 1 << 20},
    "device sampling": {"engine_sampling": True, "engine_draws": True},
    "verified rows": {"verify_rows": True},
}


def make(options: dict[str, Any], wish: Wish) -> EngineUnderTest:
    if wish.unserved_space or wish.certificates is not None:
        raise NotApplicable("the executor has one space and one strategy")
    ending: set[int] = set()
    fake = FakePrimitives(
        **{
            "export_encodings": (0, 1),
            "cells_total": wish.pool_tokens or 0,
            "prefill_step_tokens": wish.prefill_step_tokens or 0,
            **options,
        }
    )
    engine = Executor(fake)
    of = fake.describe()
    rings = {spec.ring_id: Ring.create(spec) for spec in ring_specs(of.max_seq_len, of.vocab_size, of.max_batch)}
    for ring in rings.values():
        engine.attach_ring(ring)
    control = Control.create()
    engine.attach_control(control)

    def end_next(tag: int) -> None:
        ending.add(tag)
        fake.script = lambda tokens: EOS if any(tokens == engine.lane_tokens(lane) for lane in ending) else None

    abilities = Abilities(
        max_batch=of.max_batch,
        head_only=bool(options.get("head_only")),
        exports_entries="cache_exported_cells" in options,
        seeds_copy=False,  # a lone seed takes its entry over when nothing else fits
        promotes=False,
        lossy=Encoding.Q8,
        grammar=SAMPLE,
    )
    return EngineUnderTest(
        engine, rings, of.vocab_size, engine.lane_tokens, engine.inject_fault, abilities, control, end_next
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case, variant: str) -> None:
    try:
        case.run(lambda wish: make(VARIANTS[variant], wish))
    except NotApplicable as reason:
        pytest.skip(str(reason))
