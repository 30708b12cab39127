"""Profiles: one budget each, and the names that the command line and the documents use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsan.ci.profiles import PROFILES, profile_named
from kvsan.model.errors import SpecError


def test_each_profile_has_one_budget() -> None:
    for profile in PROFILES:
        assert (profile.examples is None) != (profile.seconds is None)
        assert profile_named(profile.name) is profile
    assert [profile.name for profile in PROFILES] == ["dev", "ci", "nightly"]


def test_ci_takes_a_minute_on_two_cores() -> None:
    assert (profile_named("ci").seconds, profile_named("ci").workers) == (60, 2)


def test_summaries_say_what_the_budget_is(root: Path) -> None:
    for profile in PROFILES:
        budget = profile.examples if profile.seconds is None else profile.seconds
        assert f"{budget:,}" in profile.summary
        workers = {1: "this process", 2: "two workers"}[profile.workers]
        assert workers in profile.summary
    help_text = (root / "cli" / "fuzz.py").read_text(encoding="utf-8")
    assert "dev (2,000 examples, the default), ci (60 s) or nightly (100,000)" in help_text


@pytest.mark.parametrize("name", ["", "CI", "weekly", "dev ", "x" * 5000])
def test_other_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SpecError, match="needs one of dev, ci, nightly") as caught:
        profile_named(name)
    assert len(str(caught.value)) < 200
