"""``judge_trace``: a trace's findings, with those inside the known limits of its layout told apart."""

from __future__ import annotations

import msgspec

from ...sim.cache.cache import RunningCache
from ...sim.cache.names import layout_allocator
from ...sim.cache.run import TraceVerdict, run_trace
from ...sim.cache.trace import Trace
from ...sim.finding import Finding
from ...sim.limits import limits_of


class Judged(msgspec.Struct, frozen=True):
    """A verdict, and the rules that the allocator's known limits excuse on this spec.

    ``faults`` are the findings, or the refusal of a spec that the allocator claims to support.
    """

    verdict: TraceVerdict
    faults: tuple[Finding, ...]
    excused: frozenset[str]

    @property
    def outside(self) -> tuple[Finding, ...]:
        """The faults outside of known limits."""
        return tuple([fault for fault in self.faults if fault.rule not in self.excused])


def judge_trace(trace: Trace, allocator: str, cache: RunningCache | None = None) -> Judged:
    """Return the verdict on ``trace``, run on ``cache`` where a fresh one is at hand.

    Raises ``SpecError`` for an unknown allocator, and for a layout that no trace runs on.
    """
    verdict = run_trace(trace, allocator, cache=cache)
    refusal, faults = verdict.rejection, verdict.findings
    if refusal is not None and (refusal.supported or refusal.rule != "rejected"):
        faults = (Finding(rule=refusal.rule, message=refusal.message, remedy=refusal.remedy, where=refusal.where),)
    if not faults:
        return Judged(verdict, (), frozenset())
    limits = limits_of(layout_allocator(allocator))
    return Judged(
        verdict, faults, frozenset(rule for limit in limits if limit.matches(trace.spec) for rule in limit.rules)
    )
