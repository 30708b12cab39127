"""What the tests of strategies share: examples that are the same in every run and in every checkout."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers


@pytest.fixture(autouse=True)
def _no_constants_of_local_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Hypothesis from mixing numbers found in the code around into its draws: they differ between checkouts."""
    constants = type(providers._get_local_constants())()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: constants)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))


Examples = Callable[..., list[Any]]
Minimum = Callable[..., Any]


@pytest.fixture
def examples() -> Examples:
    """Return a function that lists ``count`` examples of a strategy."""

    def draw_examples(strategy: st.SearchStrategy[Any], count: int = 200, number: int = 0) -> list[Any]:
        found: list[Any] = []

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def keep(example: Any) -> None:
            found.append(example)

        keep()
        return found

    return draw_examples


@pytest.fixture
def minimum() -> Minimum:
    """Return a function that finds and shrinks an example with a property."""

    def find_minimum(strategy: st.SearchStrategy[Any], predicate: Callable[[Any], bool], number: int = 0) -> Any:
        quiet = settings(max_examples=4000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        return find(strategy, predicate, settings=quiet, random=random.Random(number))

    return find_minimum
