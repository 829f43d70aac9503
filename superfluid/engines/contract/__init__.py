"""The tick contract as a harness: cases that run against any engine.

A test gives each `Case` of `CASES` a factory that makes a fresh `EngineUnderTest` to the case's `Wish`; a case raises
`ContractViolation` with what went wrong, or `NotApplicable` when the engine lacks what it is about.
"""

from superfluid.engines.contract import cache_cases, state_cases, strategy_cases, tick_cases
from superfluid.engines.contract.cases import CASES, Case
from superfluid.engines.contract.driver import Driver
from superfluid.engines.contract.subject import (
    Abilities,
    ContractViolation,
    EngineUnderTest,
    Factory,
    GrammarSample,
    NotApplicable,
    Wish,
)

__all__ = [
    "CASES",
    "Abilities",
    "Case",
    "ContractViolation",
    "Driver",
    "EngineUnderTest",
    "Factory",
    "GrammarSample",
    "NotApplicable",
    "Wish",
    "cache_cases",
    "state_cases",
    "strategy_cases",
    "tick_cases",
]
