"""``ReplayVerdict``: what a replay and the static check together say of one layout."""

from __future__ import annotations

from typing import Final

from ...sim.finding import Finding
from .messages import Answer

STATIC_ONLY: Final = frozenset({"int32", "sentinel", "bounds", "freshness"})
"""Rules that the static check may break where memory shows nothing: page indices that overflow before memory runs out,
sentinels outside of every pool, pools too small for slots that nobody uses, and stale bytes that were never read."""


def disagreements(answer: Answer) -> tuple[Finding, ...]:
    """Return a finding for each rule that just one of memory and the static check breaks."""
    if answer.refusal is not None:
        return ()
    seen = {finding.rule for finding in answer.findings} - {"replay-mismatch"}
    static = set(answer.static_rules) - {"replay-mismatch"}
    remedy = "report this case: the simulator's rules and the memory it was replayed on disagree"
    found = []
    for rule in sorted(seen - static):
        message = f"memory breaks the rule {rule}, and the static check does not"
        found.append(Finding(rule="replay-mismatch", message=message, remedy=remedy))
    for rule in sorted(static - seen - STATIC_ONLY):
        message = f"the static check breaks the rule {rule}, and memory does not"
        found.append(Finding(rule="replay-mismatch", message=message, remedy=remedy))
    return tuple(found)
