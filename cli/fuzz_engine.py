"""The installed engine that a campaign has asked, for its report."""

from __future__ import annotations

from typing import Any, cast

from ..sim.registry import is_installed, resolve


def engine_of(allocator: str, *, start: bool) -> str | None:
    """Return the name and version of the engine that ``allocator`` asks, None where it asks none.

    Worker processes have engines of their own: this one is started for its name where it was not, if ``start`` says so.
    """
    if not is_installed(allocator):
        return None
    asked = cast(Any, resolve(allocator))
    return str(asked.engine()) if start or asked.process.greeting else None
