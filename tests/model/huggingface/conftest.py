"""The published configs that the tests of the loader share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def configs() -> Path:
    """Return the folder of configs written as published with their models (the fields that matter, by hand)."""
    return Path(__file__).parent / "configs"
