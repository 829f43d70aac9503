"""The mock keeps the tick contract."""

import pytest

from superfluid.engines.contract import CASES, Case, NotApplicable
from tests.engines.mock_subject import make_mock


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case) -> None:
    try:
        case.run(make_mock)
    except NotApplicable as reason:
        pytest.skip(str(reason))
