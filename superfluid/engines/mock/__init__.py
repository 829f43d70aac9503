"""The mock engine: deterministic tokens with no model (spec: the mock engine of the tick)."""

from superfluid.engines.mock.config import RECORD, RINGS, Knobs, MockConfig
from superfluid.engines.mock.engine import MockEngine

__all__ = ["RECORD", "RINGS", "Knobs", "MockConfig", "MockEngine"]
