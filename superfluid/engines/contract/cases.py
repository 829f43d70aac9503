"""The list of cases: each a function that gets engines made to its wishes."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs

from superfluid.engines.contract.driver import Driver
from superfluid.engines.contract.subject import EngineUnderTest, Factory, Wish


class New(Protocol):
    """Makes a new engine to the wishes given by name (see `Wish`)."""

    def __call__(self, **wishes: Any) -> Driver: ...


@attrs.frozen
class Case:
    name: str
    body: Callable[[New], None]

    def run(self, factory: Factory) -> None:
        """Raises ContractViolation, or NotApplicable when the engine lacks what the case is about."""
        made: list[EngineUnderTest] = []

        def new(**wishes: Any) -> Driver:
            subject = factory(Wish(**wishes))
            made.append(subject)
            return Driver(subject)

        try:
            self.body(new)
        finally:
            for subject in made:
                subject.close()


CASES: list[Case] = []


def case(body: Callable[[New], None]) -> Callable[[New], None]:
    """Register a case under its function's name."""
    CASES.append(Case(body.__name__, body))
    return body
