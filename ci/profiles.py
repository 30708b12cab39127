"""Campaign profiles: how much to run where. One place, one switch (``--profile``)."""

from __future__ import annotations

from typing import Final

import msgspec

from ..model.errors import SpecError, shown


class Profile(msgspec.Struct, frozen=True):
    """A budget: ``seconds`` or ``examples`` (the other is None), and the worker processes."""

    name: str
    summary: str
    examples: int | None
    seconds: int | None
    workers: int


PROFILES: Final = (
    Profile("dev", "2,000 examples in this process: a quick look while editing", 2_000, None, 1),
    Profile("ci", "60 seconds on two workers: every change", None, 60, 2),
    Profile("nightly", "100,000 examples on two workers: every night", 100_000, None, 2),
)


def profile_named(name: str) -> Profile:
    """Return the profile called ``name``; raise ``SpecError`` listing them all for any other name."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise SpecError("profile", f"found {shown(name)}, needs one of {', '.join(p.name for p in PROFILES)}")
