"""What ``kvsan shrink`` does once its options are known."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ..ci.cases import Case, FoundRule, add_case, case_allocator, load_case, require_folder, spec_of
from ..ci.reducer import reduce_spec
from ..ci.simplicity import size
from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec
from ..sim.cache.trace import Trace
from ..sim.finding import Finding
from ..sim.limits import excused_by, faults_outside_limits, limits_of
from ..sim.registry import resolve
from ..sim.rules import RULES
from ..sim.spec_words import describe_spec
from ..sim.transfer.pair import Pair
from ..sim.verdict import judge
from .allocator_choice import import_from_here
from .output import print_report, stdout_kept, terminal, write_json
from .status import CLEAN, INTERRUPTED, WRONG
from .wording import counted, printable_line, printable_path


def shrink_case(path: str, allocator: str | None, rule: str | None, output: str | None, json: bool) -> int:
    """Reduce the case at ``path``; return 1 when it still fails (and was reduced), 0 when nothing fails any more."""
    if rule is not None and rule not in [known.name for known in RULES]:
        raise SpecError("--rule", f"found {shown(rule)}, needs the name of a rule (see kvsan rules)")
    case = load_case(Path(path))
    name = case_allocator(case, allocator)
    folder = Path(path).parent if output is None else Path(output)
    require_folder(folder, "--output")
    import_from_here()
    if isinstance(case.input, Trace):
        from .shrink_trace import shrink_trace_case

        return shrink_trace_case(path, case, case.input, name, rule, folder, json)
    if isinstance(case.input, Pair):
        from .shrink_pair import shrink_pair_case

        return shrink_pair_case(path, case, case.input, name, rule, folder, json)
    with stdout_kept():
        shrinking = _Shrinking(case, name, rule)
        if shrinking.rule is not None:
            interrupted = shrinking.run()
            found = FoundRule(rule=shrinking.rule, message=shrinking.message)
            saved = add_case(Case(allocator=name, input=shrinking.spec, found=(found,)), folder)
    if shrinking.rule is None:
        return _report_clean(path, name, json)
    _report(shrinking, case, name, saved, interrupted, json)
    return INTERRUPTED if interrupted else WRONG


class _Shrinking:
    """A case on its way to the simplest spec that breaks ``rule``; ``rule`` is None when it breaks none any more.

    A fault outside of the allocator's known limits is kept there, and one inside stays inside those that explain it: it
    does not turn into another of the same rule.
    """

    def __init__(self, case: Case, name: str, rule: str | None) -> None:
        try:
            self._allocator = resolve(name)
            faults = judge(spec_of(case), self._allocator).faults
            self._limits = [limit for limit in limits_of(name) if limit.matches(spec_of(case))]
        except SpecError as error:
            problem = error.problem if error.field == "allocator" else str(error)
            raise SpecError("--allocator", f"{shown(name)}: {problem}") from None
        inside = excused_by(self._limits, faults)
        outside = [fault for fault in faults if fault not in inside]
        messages = {fault.rule: fault.message for fault in reversed([*outside, *inside])}
        if rule is not None and messages and rule not in messages:
            broken = ", ".join(messages)
            raise SpecError("--rule", f"{name} does not break {rule!r} on this case, it breaks {broken}")
        self.spec, self.checks = spec_of(case), 0
        wanted = rule or next((entry.rule for entry in case.found if entry.rule in messages), None)
        self.rule = next(iter(messages), None) if wanted not in messages else wanted
        self.message = messages.get(self.rule or "", "")
        self._all_limits = limits_of(name)
        self._inside = self.rule not in [fault.rule for fault in outside]

    def _faults(self, spec: CacheSpec) -> Sequence[Finding]:
        """Return the faults of ``spec`` that lie where the one to keep does: outside of limits, or inside the same."""
        if not self._inside:
            return faults_outside_limits(spec, self._allocator, self._all_limits)[0]
        same = [limit for limit in self._limits if limit.matches(spec)]
        return excused_by(same, judge(spec, self._allocator).faults)

    def run(self) -> bool:
        """Reduce as far as it goes; say whether Ctrl-C ended it. ``spec`` is the simplest so far."""
        try:
            with contextlib.suppress(ValueError):  # an allocator that changes its mind: the case stays as it is
                reduce_spec(self.spec, self._fails)
        except KeyboardInterrupt:
            return True
        return False

    def _fails(self, candidate: CacheSpec) -> bool:
        """Say whether ``candidate`` breaks the rule; the reducer asks for simpler specs only, so keep it if it does."""
        self.checks += 1
        try:
            faults = self._faults(candidate)
        except Exception:  # no layout: not this rule
            return False
        message = next((fault.message for fault in faults if fault.rule == self.rule), None)
        if message is None:
            return False
        self.spec, self.message = candidate, message
        return True


def _report(shrinking: _Shrinking, case: Case, allocator: str, saved: Path, interrupted: bool, json: bool) -> None:
    before, after = size(spec_of(case)), size(shrinking.spec)
    if json:
        write_json(
            {
                "case": str(saved),
                "allocator": allocator,
                "rule": shrinking.rule,
                "message": shrinking.message,
                "size": after,
                "size_before": before,
                "checks": shrinking.checks,
                "spec": shrinking.spec,
                "interrupted": interrupted,
            }
        )
        return
    console = terminal()
    smaller = f"size {before} -> {after}"
    if shrinking.spec == case.input and not interrupted:
        smaller = f"already minimal, size {after}"
    checks = counted(shrinking.checks, "check")
    console.print(f"{shrinking.rule}: {smaller} in {checks} (size: layers + buffers)", markup=False)
    console.print(f"  {printable_line(shrinking.message)}", markup=False)
    for line in describe_spec(shrinking.spec):
        console.print(f"    {line}", markup=False)
    console.print(f"  saved as {printable_path(saved)}", markup=False, soft_wrap=True)
    print_report(console)


def _report_clean(path: str, allocator: str, json: bool) -> int:
    if json:
        document = dict.fromkeys(("case", "allocator", "rule", "message", "size", "size_before", "checks", "spec"))
        write_json(document | {"case": path, "allocator": allocator, "interrupted": False})
        return CLEAN
    console = terminal()
    console.print(f"✓ {allocator} breaks no rule on {printable_path(path)} any more: nothing to shrink", markup=False)
    print_report(console)
    return CLEAN
