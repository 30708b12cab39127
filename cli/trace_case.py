"""``kvsan check CASE`` for the case of a trace: the operations run again on a cache."""

from __future__ import annotations

from typing import Any

import msgspec

from ..ci.cases import encode_input
from ..ci.traces.judging import Judged, judge_trace
from ..model.errors import SpecError, shown
from ..sim.cache.trace import Trace
from ..sim.rejection import Rejected
from .output import print_report, stdout_kept, terminal, write_json
from .saved_case import SavedCase
from .status import CLEAN, WRONG
from .trace_words import describe_trace


def check_trace_case(saved: SavedCase, trace: Trace, json: bool) -> int:
    """Run a saved trace again and report it; return the exit status."""
    with stdout_kept():  # an allocator of somebody's own may print
        judged = judge_saved_trace(trace, saved.allocator)
    rules = list(dict.fromkeys(fault.rule for fault in judged.faults))
    outcome = saved.outcome_of(rules)
    if json:
        write_json(_document(saved, trace, judged) | {"case": outcome})
    else:
        _report(saved, trace, judged, outcome)
    return CLEAN if not judged.verdict.findings and judged.verdict.rejection is None else WRONG


def judge_saved_trace(trace: Trace, allocator: str) -> Judged:
    """Return the verdict on a saved trace; raise ``SpecError`` naming ``--allocator`` where it cannot be run."""
    try:
        return judge_trace(trace, allocator)
    except SpecError as error:
        problem = error.problem if error.field == "allocator" else str(error)
        raise SpecError("--allocator", f"{shown(allocator)}: {problem}") from None


def _status(judged: Judged) -> str:
    if judged.verdict.rejection is not None:
        return "rejected"
    return "findings" if judged.verdict.findings else "clean"


def _document(saved: SavedCase, trace: Trace, judged: Judged) -> dict[str, Any]:
    """Return the JSON document of a trace that was run."""
    verdict = judged.verdict
    return {
        "allocator": saved.allocator,
        "status": _status(judged),
        "trace": msgspec.Raw(encode_input(trace)),
        "operations": verdict.done,
        "refused": [{"operation": number, "reason": reason} for number, reason in verdict.refused.items()],
        "findings": [
            {"rule": entry.rule, "message": entry.message, "remedy": entry.remedy, "where": entry.where}
            for entry in verdict.findings
        ],
        "rejection": _rejection(verdict.rejection),
    }


def _rejection(refusal: Rejected | None) -> dict[str, Any] | None:
    if refusal is None:
        return None
    return {
        "rule": refusal.rule,
        "message": refusal.message,
        "remedy": refusal.remedy,
        "where": refusal.where,
        "supported": refusal.supported,
    }


def _report(saved: SavedCase, trace: Trace, judged: Judged, outcome: dict[str, Any]) -> None:
    console = terminal()
    verdict = judged.verdict
    console.print(f"{saved.allocator}: {verdict.done} of {len(trace.operations)} operations run", markup=False)
    for line in describe_trace(trace, verdict.refused):
        console.print(f"  {line}", markup=False)
    if verdict.rejection is not None:
        console.print(f"✗ refused: {verdict.rejection.message}", markup=False, style="bold red")
    for finding in verdict.findings:
        console.print(f"\n✗ {finding.rule}: {finding.message}", markup=False)
        console.print(f"  remedy: {finding.remedy}", markup=False)
    if not verdict.findings and verdict.rejection is None:
        console.print("✓ no rule is broken", style="green")
    verb = "still breaks" if outcome["still_fails"] else "no longer breaks"
    console.print(f"\nThe case {verb} {', '.join(outcome['rules']) or 'any rule'}.", markup=False)
    print_report(console)
