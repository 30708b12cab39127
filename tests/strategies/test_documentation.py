"""The examples of ``docs/strategies.md`` run and print what it says, and the page names every class."""

from __future__ import annotations

import doctest
import random
from pathlib import Path

import pytest

from kvsan.strategies import CLASSES, FAMILIES, cache_specs, raw_layouts
from kvsan.strategies import __all__ as public


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs" / "strategies.md").read_text(encoding="utf-8")


def test_examples_are_true(page):
    parsed = doctest.DocTestParser().get_doctest(page.replace("```", ""), {}, "strategies.md", "strategies.md", 0)
    assert len(parsed.examples) > 15
    random.seed(0)  # what ``find`` starts from, when it is given nothing
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(parsed)
    assert result.failed == 0


def test_everything_public_is_named(page):
    missing = [name for name in [*CLASSES, *FAMILIES, *public] if name not in page]
    assert missing == []


def test_the_docstrings_of_the_two_main_strategies_name_their_options():
    assert cache_specs.__doc__ is not None
    assert raw_layouts.__doc__ is not None
    assert all(option in cache_specs.__doc__ for option in ("kinds", "draft_modes", "sparse", "rare", "plain"))
