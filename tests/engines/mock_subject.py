"""A mock engine with its rings, made to the wishes of a contract case."""

from superfluid.engines.contract import Abilities, EngineUnderTest, GrammarSample, Wish
from superfluid.engines.mock import RINGS, MockConfig, MockEngine
from superfluid.engines.mock.config import default_spaces
from superfluid.link.codes import SPACE_NO_OPERATIONS, Encoding
from superfluid.shm.control import Control
from superfluid.shm.ring import Ring

IMAGE_TOKEN = 31999


def make_mock(wish: Wish) -> EngineUnderTest:
    config = MockConfig(image_token=IMAGE_TOKEN)
    if wish.pool_tokens is not None:
        config.pool_bytes = 64 * wish.pool_tokens
    if wish.prefill_step_tokens is not None:
        config.prefill_step_tokens = wish.prefill_step_tokens
    if wish.certificates is not None:
        config.certificates = wish.certificates
    if wish.unserved_space:
        config.spaces = default_spaces()
        config.spaces[1].flags |= SPACE_NO_OPERATIONS
    engine = MockEngine(config)
    rings = {spec.ring_id: Ring.create(spec) for spec in RINGS}
    for ring in rings.values():
        engine.attach_ring(ring)
    control = Control.create()
    engine.attach_control(control)

    def end_next(lane_tag: int) -> None:
        engine.knobs.finishes[lane_tag] = 1

    abilities = Abilities(
        alternatives=False,
        lossy=Encoding.Q8,
        grammar=GrammarSample('{"type":"object"}', [5, 6, 7]),
        image_token=IMAGE_TOKEN,
    )
    return EngineUnderTest(
        engine, rings, config.vocab_size, engine.lane_tokens, engine.inject_fault, abilities, control, end_next
    )
