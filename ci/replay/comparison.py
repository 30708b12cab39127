"""Two verdicts on one layout: what the static rules say of its bytes, and what memory showed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ...sim.arena.findings import MEMORY_RULES
from ...sim.arena.missing import missing_pages
from ...sim.cache.run import run_trace
from ...sim.cache.trace import Trace
from ...sim.checking import FINDINGS_PER_RULE, check
from ...sim.finding import Finding, Where
from ...sim.layout import Layout
from ...sim.rules import RULES

_BOTH: Final = tuple([rule for rule in RULES if rule.name in MEMORY_RULES])
"""Rules that both sides judge."""
_REMEDY: Final = "report this case: the static check and the memory it was replayed on disagree"


def disagreements(layout: Layout, replayed: Iterable[Finding]) -> Iterator[Finding]:
    """Yield a ``replay-mismatch`` for each rule that one of the two reports of ``layout`` and the other does not.

    Left out is what memory cannot show: page indices that overflow (memory has byte offsets alone), entries for missing
    pages that lead out of every pool, pools too small for slots in which nobody has a cell, and what a cell that leaves
    its pool would do (such a cell is never touched; that it leaves is reported by both).
    """
    seen: dict[str, Finding] = {}
    leaving: list[Finding] = []
    for finding in replayed:
        seen.setdefault(finding.rule, finding)
        if finding.rule == "bounds":
            leaving.append(finding)
    static: dict[str, Finding] = {}
    for finding in check(layout, rules=_BOTH, allocated=True):
        if finding.rule in seen or _shows(layout, finding, leaving):
            static.setdefault(finding.rule, finding)
    for rule in _BOTH:
        one, other = static.get(rule.name), seen.get(rule.name)
        if one is not None and other is None:
            message = f"the static check reports {rule.name} and memory does not show it: {one.message}"
            yield Finding(rule="replay-mismatch", message=message, remedy=_REMEDY, where=one.where)
        elif other is not None and one is None:
            message = f"memory shows {rule.name} and the static check does not report it: {other.message}"
            yield Finding(rule="replay-mismatch", message=message, remedy=_REMEDY, where=other.where)


def trace_disagreements(trace: Trace, allocator: str, replayed: Iterable[Finding]) -> Iterator[Finding]:
    """Yield a ``replay-mismatch`` for each rule that memory shows broken by a trace and the simulated cache does not.

    The reverse is none: memory shows stale bytes that are read (``freshness``), the cache keeps its books beside.
    """
    simulated = run_trace(trace, allocator, to_end=True).rules
    told: set[str] = set()
    for finding in replayed:
        if finding.rule not in (*simulated, *told, "replay-mismatch"):
            told.add(finding.rule)
            message = f"memory shows {finding.rule} and the simulated cache does not report it: {finding.message}"
            yield Finding(rule="replay-mismatch", message=message, remedy=_REMEDY, where=finding.where)


def _shows(layout: Layout, finding: Finding, leaving: list[Finding]) -> bool:
    """Say whether memory can show what a static finding says; ``leaving`` are the cells that leave their pools."""
    if finding.rule == "int32":
        narrow = layout.spec is not None and layout.spec.consumer.offset_bits == 32
        return narrow and any(place.consumer is not None for place in finding.where)
    if finding.rule == "sentinel":
        return next(missing_pages(layout), None) is not None
    if finding.rule == "bounds":
        return any(place.layer is not None for place in finding.where)
    if not leaving:
        return True
    if len(leaving) >= FINDINGS_PER_RULE:
        return False  # there may be more than are listed
    untouched = {_who(place) for found in leaving for place in found.where}
    return untouched.isdisjoint(map(_who, finding.where))


def _who(place: Where) -> tuple[str | None, int | None, str | None]:
    return place.manager, place.layer, place.role
