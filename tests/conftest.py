"""Fixtures that several rooms' tests share."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test data that lies beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared test data at {SHARED}")
    return SHARED
