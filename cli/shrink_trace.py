"""``kvsan shrink CASE`` for the case of a trace: fewer operations, a simpler spec, smaller arguments."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..ci.cases import Case, FoundRule, add_case
from ..ci.traces.judging import judge_trace
from ..ci.traces.reducer import reduce_trace
from ..ci.traces.simplicity import size
from ..model.errors import SpecError
from ..sim.cache.trace import Trace
from .output import print_report, stdout_kept, terminal, write_json
from .status import CLEAN, INTERRUPTED, WRONG
from .trace_case import judge_saved_trace
from .trace_words import describe_trace


def shrink_trace_case(
    path: str, case: Case, trace: Trace, allocator: str, rule: str | None, folder: Path, json: bool
) -> int:
    """Reduce ``trace``; return 1 when it still fails (and was reduced), 0 when nothing fails any more."""
    with stdout_kept():
        shrinking = _Shrinking(case, trace, allocator, rule)
        if shrinking.rule is None:
            interrupted, saved = False, None
        else:
            interrupted = shrinking.run()
            found = FoundRule(rule=shrinking.rule, message=shrinking.message)
            saved = add_case(Case(allocator=allocator, input=shrinking.trace, found=(found,)), folder)
    status = CLEAN if saved is None else INTERRUPTED if interrupted else WRONG
    if json:
        document = {
            "case": path if saved is None else str(saved),
            "allocator": allocator,
            "rule": shrinking.rule,
            "message": shrinking.message or None,
            "size": None if saved is None else size(shrinking.trace),
            "size_before": None if saved is None else size(trace),
            "checks": None if saved is None else shrinking.checks,
            "trace": None if saved is None else shrinking.trace,
            "interrupted": interrupted,
        }
        write_json(document)
        return status
    console = terminal()
    if saved is None:
        console.print(f"✓ {allocator} breaks no rule on {path} any more: nothing to shrink", markup=False)
    else:
        steps = f"size {size(trace)} -> {size(shrinking.trace)} in {shrinking.checks:,} checks"
        console.print(f"{shrinking.rule}: {steps}", markup=False)
        console.print(f"  {shrinking.message}", markup=False)
        for line in describe_trace(shrinking.trace):
            console.print(f"    {line}", markup=False)
        console.print(f"  saved as {saved}", markup=False, soft_wrap=True)
    print_report(console)
    return status


class _Shrinking:
    """A trace on its way to the simplest one that breaks ``rule``; ``rule`` is None when it breaks none any more."""

    def __init__(self, case: Case, trace: Trace, allocator: str, rule: str | None) -> None:
        self._allocator = allocator
        judged = judge_saved_trace(trace, allocator)
        # of two faults of one rule, the one that no known limit explains
        messages = {fault.rule: fault.message for fault in reversed([*judged.outside, *judged.excused])}
        if rule is not None and messages and rule not in messages:
            raise SpecError(
                "--rule", f"{allocator} does not break {rule!r} on this case, it breaks {', '.join(messages)}"
            )
        wanted = rule or next((entry.rule for entry in case.found if entry.rule in messages), None)
        self.rule = wanted if wanted in messages else next(iter(messages), None)
        self.message = messages.get(self.rule or "", "")
        self.trace, self.checks = trace, 0
        self._excused = self.rule not in [fault.rule for fault in judged.outside]

    def run(self) -> bool:
        """Reduce as far as it goes; say whether Ctrl-C ended it. ``trace`` is the simplest so far."""
        try:
            with contextlib.suppress(ValueError):  # a cache that changes its mind: the trace stays as it is
                reduce_trace(self.trace, self._fails)
        except KeyboardInterrupt:
            return True
        return False

    def _fails(self, candidate: Trace) -> bool:
        """Say whether ``candidate`` breaks the rule; the reducer asks for simpler ones only, so keep it if it does."""
        self.checks += 1
        judged = judge_trace(candidate, self._allocator)
        faults = judged.excused if self._excused else judged.outside
        message = next((fault.message for fault in faults if fault.rule == self.rule), None)
        if message is None:
            return False
        self.trace, self.message = candidate, message
        return True
