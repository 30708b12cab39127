"""What a campaign of traces exercised: operations done and refused, pairs of operations, and situations.

A *situation* is something that only happens when several operations meet: a hit in the middle of a block, a rewind
under a step, beams of divergent parents.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from ...sim.cache.managers import kinds_of
from ...sim.cache.run import TraceVerdict
from ...sim.cache.trace import Trace
from ...sim.registry import is_installed, resolve
from ..ledger import SavedCases

SITUATIONS: Final = (
    "full-block hit",
    "hit in the middle of a block",
    "rebase onto a published block",
    "eviction",
    "wait for a step",
    "two steps in flight",
    "prompt in chunks",
    "free under a step",
    "rewind across a block boundary",
    "rewind under a step",
    "fork in the middle of a block",
    "beams of divergent parents",
    "window passed",
    "window passed behind sinks",
    "state snapshot",
    "state hit",
    "state of a padding row",
    "cached page to the host",
    "page from the host",
    "suspended page to the host",
    "resume in other slots",
    "preempted for room",
)
_OF_ENGINES: Final = (
    "full-block hit",
    "eviction",
    "two steps in flight",
    "prompt in chunks",
    "free under a step",
    "window passed",
    "resume in other slots",
    "preempted for room",
)
"""What the manager of an installed engine can meet."""
_OF_REUSE: Final = ("full-block hit", "eviction")
_OF_V2: Final = ("window passed behind sinks", "suspended page to the host", "resume in other slots")


class TraceCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of operations done and refused by kind, refusals by reason, pairs of kinds done one after the other.

    ``classes`` counts the traces in which each situation came about; ``classes_never`` are those that the allocator's
    traces can meet and never did. ``never`` are kinds that were never done.
    """

    done: dict[str, int]
    refused: dict[str, int]
    reasons: dict[str, int]
    never: list[str]
    pairs_seen: int
    pairs_total: int
    classes: dict[str, int]
    classes_never: list[str]
    cases_run: list[str] = []
    cases_failing: list[str] = []
    cases_not_run: list[str] = []


class TraceCounts(msgspec.Struct):
    """Counts as they grow; those of several chunks can be added up."""

    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    classes: Counter[str] = Counter()

    def count(self, trace: Trace, verdict: TraceVerdict, seen: frozenset[str]) -> None:
        """Add one trace that was run."""
        before = ""
        for number, operation in enumerate(trace.operations[: verdict.done]):
            kind = operation.kind
            if number in verdict.refused:
                self.refused[kind] += 1
                continue
            self.done[kind] += 1
            if before:
                self.pairs[before, kind] += 1
            before = kind
        self.reasons.update(verdict.refused.values())
        self.classes.update(seen)

    def add(self, other: TraceCounts) -> None:
        """Add the counts of another chunk."""
        self.done.update(other.done)
        self.refused.update(other.refused)
        self.reasons.update(other.reasons)
        self.pairs.update(other.pairs)
        self.classes.update(other.classes)


def new_counts() -> TraceCounts:
    """Return counts of nothing."""
    return TraceCounts(Counter(), Counter(), Counter(), Counter(), Counter())


def coverage_of_traces(counts: TraceCounts, allocator: str, cases: SavedCases) -> TraceCoverage:
    """Return the coverage that ``counts`` amount to."""
    kinds = kinds_of(allocator)
    suspends = "suspend" in kinds
    wanted = [name for name in SITUATIONS if suspends or name not in _OF_V2]
    wanted = [name for name in wanted if name != "preempted for room"]
    if is_installed(allocator):
        reuses = getattr(resolve(allocator), "reuses", True)
        wanted = [name for name in _OF_ENGINES if reuses or name not in _OF_REUSE]
    return TraceCoverage(
        done={kind: counts.done[kind] for kind in kinds},
        refused={kind: counts.refused[kind] for kind in kinds},
        reasons=dict(sorted(counts.reasons.items())),
        never=[kind for kind in kinds if not counts.done[kind]],
        pairs_seen=len(counts.pairs),
        pairs_total=len(kinds) ** 2,
        classes={name: counts.classes[name] for name in SITUATIONS},
        classes_never=[name for name in wanted if not counts.classes[name]],
        cases_run=sorted(cases.run),
        cases_failing=sorted(cases.failing),
        cases_not_run=sorted(cases.not_run),
    )
