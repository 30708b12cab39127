"""``judge_trace``: a trace's findings, with those inside the known limits of its layout told apart."""

from __future__ import annotations

import msgspec

from ...sim.cache.cache import RunningCache
from ...sim.cache.names import layout_allocator
from ...sim.cache.run import TraceVerdict, run_trace
from ...sim.cache.trace import Trace
from ...sim.finding import Finding
from ...sim.limits import excused_by, limits_of


class Judged(msgspec.Struct, frozen=True):
    """A verdict, and what the allocator's known limits excuse of it.

    ``faults`` are the findings, or the refusal of a spec that the allocator claims to support; ``excused`` are those of
    them that a limit explains, by its rule and by its words.
    """

    verdict: TraceVerdict
    faults: tuple[Finding, ...]
    excused: tuple[Finding, ...]

    @property
    def outside(self) -> tuple[Finding, ...]:
        """The faults outside of known limits."""
        return tuple([fault for fault in self.faults if fault not in self.excused])


def judge_trace(trace: Trace, allocator: str, cache: RunningCache | None = None) -> Judged:
    """Return the verdict on ``trace``, run on ``cache`` where a fresh one is at hand.

    Raises ``SpecError`` for an unknown allocator, and for a layout that no trace runs on.
    """
    verdict = run_trace(trace, allocator, cache=cache)
    refusal, faults = verdict.rejection, verdict.findings
    if refusal is not None and (refusal.supported or refusal.rule != "rejected"):
        faults = (Finding(rule=refusal.rule, message=refusal.message, remedy=refusal.remedy, where=refusal.where),)
    if not faults:
        return Judged(verdict, (), ())
    limits = [limit for limit in limits_of(layout_allocator(allocator)) if limit.matches(trace.spec)]
    return Judged(verdict, faults, excused_by(limits, faults))
