"""A trace in words: the spec, then one line for each operation."""

from __future__ import annotations

from collections.abc import Mapping

from ..sim.cache.trace import Trace, words
from ..sim.spec_words import describe_spec

MAX_LINES = 60
"""Operations that are spelled out."""


def describe_trace(trace: Trace, refused: Mapping[int, str] | None = None) -> list[str]:
    """Return the lines that describe ``trace``; ``refused`` says why operations were refused, by number."""
    lines = describe_spec(trace.spec)
    for number, operation in enumerate(trace.operations[:MAX_LINES]):
        why = (refused or {}).get(number)
        lines.append(f"{number + 1}. {words(operation)}" + (f" (refused: {why})" if why else ""))
    left = len(trace.operations) - MAX_LINES
    return [*lines, f"and {left:,} more operations"] if left > 0 else lines
